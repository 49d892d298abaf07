#pragma once

// F32 vectors of 16 lanes on AVX-512 (F, BW, VL, DQ). Included inside the unnamed namespace of an ISA file only.
// With KVT_SIMD_VNNI the 16-bit dot product is one instruction.

enum { VW = 16, V_MAX_ACC = 24 };
typedef __m512 vf;
typedef __m512i vi;

static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float * p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float * p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline bool vf_any_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
static inline float vf_hmax(vf v) { return _mm512_reduce_max_ps(v); }
static inline float vf_hsum(vf v) { return _mm512_reduce_add_ps(v); }

// x where it is below t, else 0
static inline vf vf_keep_lt(vf x, vf t) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, t, _CMP_LT_OQ), x); }
// bit i: lane i of x is at least t's
static inline uint32_t vf_bits_ge(vf x, vf t) { return (uint32_t) _mm512_cmp_ps_mask(x, t, _CMP_GE_OQ); }

static inline vf vf_load_f16(const uint16_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
static inline vf vf_load_bf16(const uint16_t * p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
}
static inline vf vf_load_i8(const int8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)));
}
// VW bytes: low nibbles to lo, high nibbles to hi, as 0..15
static inline void vf_load_nibbles(const uint8_t * p, vf * lo, vf * hi) {
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p));
    *lo = _mm512_permutexvar_ps(x, table); // only the low four bits of an index count
    *hi = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
}
// 2^x for x <= 127; 0 below the normal range
static inline vf vf_exp2(vf x) {
    const __mmask16 live = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf f = _mm512_sub_ps(x, n);
    vf p = vf_set1(KVT_EXP2_C5);
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C4));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C3));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C2));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C1));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C0));
    return _mm512_maskz_scalef_ps(live, p, n);
}
// s + slope*m, and -inf wherever m is -inf (whatever s holds)
static inline vf vf_mask_add(vf s, vf slope, vf m) {
    const __mmask16 dead = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-FLT_MAX), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(vf_fma(slope, m, s), dead, _mm512_set1_ps(-INFINITY));
}

static inline vi vi_load(const void * p) { return _mm512_loadu_si512(p); }
static inline void vi_store(void * p, vi v) { _mm512_storeu_si512(p, v); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vf vi_to_vf(vi v) { return _mm512_cvtepi32_ps(v); }
static inline vi vi_even16(vi x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); } // bytes 0 and 2 of each lane
static inline vi vi_odd16(vi x) { return _mm512_srai_epi16(x, 8); }                        // bytes 1 and 3
template <int SHIFT> static inline vi vi_nibble16(vi x) {
    return _mm512_and_si512(_mm512_srli_epi16(x, SHIFT), _mm512_set1_epi16(15));
}
// byte J of each lane, sign-extended
template <int J> static inline vi vi_byte(vi x) { return _mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * J), 24); }
// a nibble of each lane
template <int SHIFT> static inline vi vi_nibble32(vi x) {
    return _mm512_and_si512(_mm512_srli_epi32(x, SHIFT), _mm512_set1_epi32(15));
}
static inline vi vi_dot16(vi acc, vi a, vi b) {
#ifdef KVT_SIMD_VNNI
    return _mm512_dpwssd_epi32(acc, a, b);
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
