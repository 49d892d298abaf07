#pragma once

// F32 vectors of 4 lanes on AArch64 NEON. Included inside the unnamed namespace of an ISA file only.

enum { VW = 4, V_MAX_ACC = 24 };
typedef float32x4_t vf;
typedef int32x4_t vi;

static inline vf vf_zero(void) { return vdupq_n_f32(0.0f); }
static inline vf vf_set1(float x) { return vdupq_n_f32(x); }
static inline vf vf_load(const float * p) { return vld1q_f32(p); }
static inline void vf_store(float * p, vf v) { vst1q_f32(p, v); }
static inline vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline bool vf_any_gt(vf a, vf b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
static inline float vf_hmax(vf v) { return vmaxvq_f32(v); }
static inline float vf_hsum(vf v) { return vaddvq_f32(v); }

// x where it is below t, else 0
static inline vf vf_keep_lt(vf x, vf t) {
    return vreinterpretq_f32_u32(vandq_u32(vcltq_f32(x, t), vreinterpretq_u32_f32(x)));
}
// bit i: lane i of x is at least t's
static inline uint32_t vf_bits_ge(vf x, vf t) {
    static const uint32_t weights[4] = { 1, 2, 4, 8 };
    return vaddvq_u32(vandq_u32(vcgeq_f32(x, t), vld1q_u32(weights)));
}

static inline vf vf_load_f16(const uint16_t * p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline vf vf_load_bf16(const uint16_t * p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline int32x4_t load4_i8(const void * p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(word)))));
}
static inline vf vf_load_i8(const int8_t * p) { return vcvtq_f32_s32(load4_i8(p)); }
// VW bytes: low nibbles to lo, high nibbles to hi, as 0..15
static inline void vf_load_nibbles(const uint8_t * p, vf * lo, vf * hi) {
    const int32x4_t x = load4_i8(p);
    *lo = vcvtq_f32_s32(vandq_s32(x, vdupq_n_s32(15)));
    *hi = vcvtq_f32_s32(vandq_s32(vshrq_n_s32(x, 4), vdupq_n_s32(15)));
}
// 2^x for x <= 127; 0 below the normal range
static inline vf vf_exp2(vf x) {
    const uint32x4_t live = vcgeq_f32(x, vdupq_n_f32(-126.0f));
    const vf n = vrndnq_f32(x);
    const vf f = vsubq_f32(x, n);
    vf p = vf_set1(KVT_EXP2_C5);
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C4));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C3));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C2));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C1));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C0));
    const int32x4_t e = vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(n), 23));
    return vreinterpretq_f32_u32(vandq_u32(live, vreinterpretq_u32_s32(e)));
}
// s + slope*m, and -inf wherever m is -inf (whatever s holds)
static inline vf vf_mask_add(vf s, vf slope, vf m) {
    return vbslq_f32(vcltq_f32(m, vdupq_n_f32(-FLT_MAX)), vdupq_n_f32(-INFINITY), vf_fma(slope, m, s));
}

static inline vi vi_load(const void * p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *) p)); }
static inline void vi_store(void * p, vi v) { vst1q_s32((int32_t *) p, v); }
static inline vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
static inline vf vi_to_vf(vi v) { return vcvtq_f32_s32(v); }
static inline int16x8_t as16(vi x) { return vreinterpretq_s16_s32(x); }
static inline vi from16(int16x8_t x) { return vreinterpretq_s32_s16(x); }
static inline vi vi_even16(vi x) {
    return from16(vshrq_n_s16(vshlq_n_s16(as16(x), 8), 8));
} // bytes 0 and 2 of each lane
static inline vi vi_odd16(vi x) { return from16(vshrq_n_s16(as16(x), 8)); } // bytes 1 and 3
template <int SHIFT> static inline vi vi_nibble16(vi x) {
    return vandq_s32(vshlq_s32(x, vdupq_n_s32(-SHIFT)), vdupq_n_s32(0x000f000f));
}
// byte J of each lane, sign-extended
template <int J> static inline vi vi_byte(vi x) { return vshrq_n_s32(vshlq_s32(x, vdupq_n_s32(24 - 8 * J)), 24); }
// a nibble of each lane
template <int SHIFT> static inline vi vi_nibble32(vi x) {
    return vandq_s32(vshlq_s32(x, vdupq_n_s32(-SHIFT)), vdupq_n_s32(15));
}
static inline vi vi_dot16(vi acc, vi a, vi b) {
    const int32x4_t lo = vmull_s16(vget_low_s16(as16(a)), vget_low_s16(as16(b)));
    const int32x4_t hi = vmull_high_s16(as16(a), as16(b));
    return vaddq_s32(acc, vpaddq_s32(lo, hi));
}
