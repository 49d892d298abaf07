#pragma once

// F32 vectors of 4 lanes in plain C++: the reference, and the fallback of every processor.
// Included inside the unnamed namespace of an ISA file only.

enum { VW = 4, V_MAX_ACC = 8 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

static inline vf vf_set1(float x) { return vf{ x, x, x, x }; }
static inline vf vf_zero(void) { return vf_set1(0.0f); }
static inline vf vf_load(const float * p) {
    vf v;
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline void vf_store(float * p, vf v) { memcpy(p, &v, sizeof(v)); }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_max(vf a, vf b) { return a > b ? a : b; }
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
static inline bool vf_any_gt(vf a, vf b) {
    const vi c = a > b;
    return (c[0] | c[1] | c[2] | c[3]) != 0;
}
static inline float f_max(float a, float b) { return a > b ? a : b; }
static inline float vf_hmax(vf v) { return f_max(f_max(v[0], v[1]), f_max(v[2], v[3])); }
static inline float vf_hsum(vf v) { return (v[0] + v[1]) + (v[2] + v[3]); }

// x where it is below t, else 0
static inline vf vf_keep_lt(vf x, vf t) { return (vf) ((vi) x & (x < t)); }
// bit i: lane i of x is at least t's
static inline uint32_t vf_bits_ge(vf x, vf t) {
    const vi c = x >= t;
    return (uint32_t) ((c[0] & 1) | (c[1] & 2) | (c[2] & 4) | (c[3] & 8));
}

// exact for every F16, subnormals, infinities and NaN included
static inline float f_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16;
    const uint32_t mag = (uint32_t) (h & 0x7fff) << 13;
    float f;
    uint32_t bits = mag;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f; // moves the exponent's bias; subnormals come out normal
    memcpy(&bits, &f, 4);
    if ((h & 0x7c00) == 0x7c00) { bits = mag | 0x7f800000; }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
static inline float f_from_bf16(uint16_t h) {
    const uint32_t bits = (uint32_t) h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline vf vf_load_f16(const uint16_t * p) {
    return vf{ f_from_f16(p[0]), f_from_f16(p[1]), f_from_f16(p[2]), f_from_f16(p[3]) };
}
static inline vf vf_load_bf16(const uint16_t * p) {
    return vf{ f_from_bf16(p[0]), f_from_bf16(p[1]), f_from_bf16(p[2]), f_from_bf16(p[3]) };
}
static inline vf vf_load_i8(const int8_t * p) { return vf{ (float) p[0], (float) p[1], (float) p[2], (float) p[3] }; }
// VW bytes: low nibbles to lo, high nibbles to hi, as 0..15
static inline void vf_load_nibbles(const uint8_t * p, vf * lo, vf * hi) {
    *lo = vf{ (float) (p[0] & 15), (float) (p[1] & 15), (float) (p[2] & 15), (float) (p[3] & 15) };
    *hi = vf{ (float) (p[0] >> 4), (float) (p[1] >> 4), (float) (p[2] >> 4), (float) (p[3] >> 4) };
}
// 2^x for x <= 127; 0 below the normal range
static inline vf vf_exp2(vf x) {
    const vi live = x >= vf_set1(-126.0f);
    x = live ? x : vf_zero();
    const vi n = __builtin_convertvector(x + (x < vf_zero() ? vf_set1(-0.5f) : vf_set1(0.5f)), vi);
    const vf f = x - __builtin_convertvector(n, vf);
    vf p = vf_set1(KVT_EXP2_C5);
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C4));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C3));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C2));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C1));
    p = vf_fma(p, f, vf_set1(KVT_EXP2_C0));
    return (vf) (((vi) p + (n << 23)) & live);
}
// s + slope*m, and -inf wherever m is -inf (whatever s holds)
static inline vf vf_mask_add(vf s, vf slope, vf m) {
    return m < vf_set1(-FLT_MAX) ? vf_set1(-INFINITY) : vf_fma(slope, m, s);
}

static inline vi vi_load(const void * p) {
    vi v;
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline void vi_store(void * p, vi v) { memcpy(p, &v, sizeof(v)); }
static inline vi vi_set1(int32_t x) { return vi{ x, x, x, x }; }
static inline vf vi_to_vf(vi v) { return __builtin_convertvector(v, vf); }
typedef int16_t v8s __attribute__((vector_size(16)));
static inline vi vi_even16(vi x) { return (vi) (((v8s) x << 8) >> 8); } // bytes 0 and 2 of each lane
static inline vi vi_odd16(vi x) { return (vi) ((v8s) x >> 8); }         // bytes 1 and 3
template <int SHIFT> static inline vi vi_nibble16(vi x) { return (x >> SHIFT) & vi_set1(0x000f000f); }
// byte J of each lane, sign-extended
template <int J> static inline vi vi_byte(vi x) { return (x << (24 - 8 * J)) >> 24; }
// a nibble of each lane
template <int SHIFT> static inline vi vi_nibble32(vi x) { return (x >> SHIFT) & vi_set1(15); }
static inline vi vi_dot16(vi acc, vi a, vi b) {
    return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
}
