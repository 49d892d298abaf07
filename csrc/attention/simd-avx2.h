#pragma once

// F32 vectors of 8 lanes on AVX2, FMA and F16C. Included inside the unnamed namespace of an ISA file only.

enum { VW = 8, V_MAX_ACC = 12 };
typedef __m256 vf;
typedef __m256i vi;

static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_load(const float * p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float * p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline bool vf_any_gt(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
static inline float vf_hmax(vf v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static inline float vf_hsum(vf v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// x where it is below t, else 0
static inline vf vf_keep_lt(vf x, vf t) { return _mm256_and_ps(_mm256_cmp_ps(x, t, _CMP_LT_OQ), x); }
// bit i: lane i of x is at least t's
static inline uint32_t vf_bits_ge(vf x, vf t) { return (uint32_t) _mm256_movemask_ps(_mm256_cmp_ps(x, t, _CMP_GE_OQ)); }

static inline vf vf_load_f16(const uint16_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
static inline vf vf_load_bf16(const uint16_t * p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)), 16));
}
static inline vf vf_load_i8(const int8_t * p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)));
}
// VW bytes: low nibbles to lo, high nibbles to hi, as 0..15
static inline void vf_load_nibbles(const uint8_t * p, vf * lo, vf * hi) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p));
    *lo = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
    *hi = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4));
}
// 2^x for x <= 127; 0 below the normal range
static inline vf vf_exp2(vf x) {
    const vf live = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
    const vf n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf f = _mm256_sub_ps(x, n);
    vf p = vf_set1(KVT_EXP2_C5);
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C4));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C3));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C2));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C1));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C0));
    const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_and_ps(live, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e)));
}
// s + slope*m, and -inf wherever m is -inf (whatever s holds)
static inline vf vf_mask_add(vf s, vf slope, vf m) {
    const vf dead = _mm256_cmp_ps(m, _mm256_set1_ps(-FLT_MAX), _CMP_LT_OQ);
    return _mm256_blendv_ps(vf_fma(slope, m, s), _mm256_set1_ps(-INFINITY), dead);
}

static inline vi vi_load(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
static inline void vi_store(void * p, vi v) { _mm256_storeu_si256((__m256i *) p, v); }
static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline vf vi_to_vf(vi v) { return _mm256_cvtepi32_ps(v); }
static inline vi vi_even16(vi x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); } // bytes 0 and 2 of each lane
static inline vi vi_odd16(vi x) { return _mm256_srai_epi16(x, 8); }                        // bytes 1 and 3
template <int SHIFT> static inline vi vi_nibble16(vi x) {
    return _mm256_and_si256(_mm256_srli_epi16(x, SHIFT), _mm256_set1_epi16(15));
}
// byte J of each lane, sign-extended
template <int J> static inline vi vi_byte(vi x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * J), 24); }
// a nibble of each lane
template <int SHIFT> static inline vi vi_nibble32(vi x) {
    return _mm256_and_si256(_mm256_srli_epi32(x, SHIFT), _mm256_set1_epi32(15));
}
static inline vi vi_dot16(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
