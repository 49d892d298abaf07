// Row codecs: the numbers of ggml's published block formats, as its reference quantizers produce them.

#include "format.h"

#include "../include/kvtier-errors.h"

#include <cfloat>
#include <cmath>
#include <cstring>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#    include <immintrin.h>
#    define KVT_HAVE_F16C 1
#endif

// The quantizers round x*id + 8.5f after the product: a fused multiply-add would give other numbers.
#if defined(__clang__)
#    pragma clang fp contract(off)
#elif defined(__GNUC__)
#    pragma GCC optimize("fp-contract=off")
#endif

struct format_traits {
    const char * name;
    int32_t block_elems;
    int32_t block_bytes;
};

static const format_traits k_formats[KVT_FORMAT_COUNT] = {
    /* F32  */ { "f32", 1, 4 },
    /* F16  */ { "f16", 1, 2 },
    /* BF16 */ { "bf16", 1, 2 },
    /* Q8_0 */ { "q8_0", 32, 34 },
    /* Q4_0 */ { "q4_0", 32, 18 },
    /* Q4_1 */ { "q4_1", 32, 20 },
};

static bool format_ok(int fmt) { return fmt >= 0 && fmt < KVT_FORMAT_COUNT; }

const char * kvt_format_name(enum kvt_format fmt) { return format_ok(fmt) ? k_formats[fmt].name : nullptr; }

static char ascii_lower(char c) { return c >= 'A' && c <= 'Z' ? (char) (c + ('a' - 'A')) : c; }

int kvt_format_parse(const char * name, enum kvt_format * out) {
    if (!name || !out) { return KVT_ERR_INVALID; }
    for (int f = 0; f < KVT_FORMAT_COUNT; f++) {
        const char * want = k_formats[f].name;
        size_t i = 0;
        while (want[i] && ascii_lower(name[i]) == want[i]) { i++; }
        if (!want[i] && !name[i]) {
            *out = (enum kvt_format) f;
            return KVT_ERR_OK;
        }
    }
    return KVT_ERR_INVALID;
}

int kvt_format_supports(enum kvt_format fmt, int32_t d) {
    return format_ok(fmt) && d > 0 && d % k_formats[fmt].block_elems == 0;
}

size_t kvt_row_bytes(enum kvt_format fmt, int64_t n) {
    if (!format_ok(fmt) || n <= 0) { return 0; }
    return (size_t) (n / k_formats[fmt].block_elems) * (size_t) k_formats[fmt].block_bytes;
}

// --- half and bfloat16 -------------------------------------------------------------------------------------------

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}

static float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

// Round to nearest, ties to even; what overflows becomes infinity; every NaN becomes the quiet one of its sign.
static uint16_t f16_from_f32(float f) {
    const uint32_t u = bits_of(f);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) { return (uint16_t) (sign | 0x7e00u); }
    if (mag >= 0x477ff000u) { // 65520 and up rounds to infinity
        return (uint16_t) (sign | 0x7c00u);
    }
    if (mag < 0x38800000u) { // below 2^-14: a multiple of 2^-24, which adding 0.5 rounds for us
        const float shifted = float_of(mag) + 0.5f;
        return (uint16_t) (sign | (bits_of(shifted) - bits_of(0.5f)));
    }
    const uint32_t rounded = mag + 0x0fffu + ((mag >> 13) & 1u);
    return (uint16_t) (sign | ((rounded - 0x38000000u) >> 13));
}

static float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000u) << 16;
    const uint32_t exp = (h >> 10) & 0x1fu;
    const uint32_t man = h & 0x3ffu;
    if (exp == 0x1f) { return float_of(sign | 0x7f800000u | (man << 13) | (man ? 0x400000u : 0u)); }
    if (exp == 0) { return float_of(sign | bits_of((float) man * 0x1p-24f)); }
    return float_of(sign | ((exp + 112u) << 23) | (man << 13));
}

static uint16_t bf16_from_f32(float f) {
    const uint32_t u = bits_of(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) { return (uint16_t) ((u >> 16) | 64u); }
    return (uint16_t) ((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#ifdef KVT_HAVE_F16C
__attribute__((target("avx,f16c"))) static int64_t f16_from_f32_f16c(const float * src, uint16_t * dst, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps(src + i);
        if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))) {
            break; // the instruction keeps NaN payloads, the reference does not
        }
        _mm_storeu_si128((__m128i *) (dst + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

__attribute__((target("avx,f16c"))) static int64_t f16_to_f32_f16c(const uint16_t * src, float * dst, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (src + i))));
    }
    return i;
}

static bool have_f16c() {
    static const bool have = [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
    }();
    return have;
}
#endif

static void f16_row_from_f32(const float * src, uint8_t * dst, int64_t n) {
    int64_t i = 0;
#ifdef KVT_HAVE_F16C
    if (n >= 8 && have_f16c()) { i = f16_from_f32_f16c(src, (uint16_t *) (void *) dst, n); }
#endif
    for (; i < n; i++) {
        const uint16_t h = f16_from_f32(src[i]);
        memcpy(dst + 2 * i, &h, 2);
    }
}

static void f16_row_to_f32(const uint8_t * src, float * dst, int64_t n) {
    int64_t i = 0;
#ifdef KVT_HAVE_F16C
    if (n >= 8 && have_f16c()) { i = f16_to_f32_f16c((const uint16_t *) (const void *) src, dst, n); }
#endif
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, 2);
        dst[i] = f16_to_f32(h);
    }
}

static void store_f16(uint8_t * dst, float f) {
    const uint16_t h = f16_from_f32(f);
    memcpy(dst, &h, 2);
}

static float load_f16(const uint8_t * src) {
    uint16_t h;
    memcpy(&h, src, 2);
    return f16_to_f32(h);
}

// --- blocks of 32 ------------------------------------------------------------------------------------------------

// Nearest, halves away from zero, for |v| < 2^23: there v - (float) i is exact. Not roundf, which is a call.
static int32_t round_away(float v) {
    const int32_t i = (int32_t) v;
    const float f = v - (float) i;
    return i + (f >= 0.5f ? 1 : 0) - (f <= -0.5f ? 1 : 0);
}

// { f16 d; int8 qs[32] }, d = amax/127
static void q8_0_block_from_f32(const float * x, uint8_t * b) {
    float amax = 0.0f;
    for (int j = 0; j < 32; j++) {
        const float a = fabsf(x[j]);
        amax = amax > a ? amax : a;
    }
    const float d = amax / 127.0f;
    const float id = d != 0.0f ? 1.0f / d : 0.0f;
    store_f16(b, d);
    for (int j = 0; j < 32; j++) {
        const float v = x[j] * id;
        b[2 + j] = (uint8_t) (int8_t) round_away(
            fabsf(v) < 128.0f ? v : 0.0f); // not so: NaN, or a scale whose inverse is inf
    }
}

// the reference truncates to int8 and clamps from above only; out-of-range and NaN inputs stay defined here
static uint8_t q4_of(float v) {
    if (!(v > 0.0f)) { return 0; }
    return v >= 15.0f ? 15 : (uint8_t) v;
}

// { f16 d; uint8 qs[16] }, d = (the value of largest magnitude)/-8
static void q4_0_block_from_f32(const float * x, uint8_t * b) {
    float amax = 0.0f;
    float max = 0.0f;
    for (int j = 0; j < 32; j++) {
        const float a = fabsf(x[j]);
        if (amax < a) {
            amax = a;
            max = x[j];
        }
    }
    const float d = max / -8.0f;
    const float id = d != 0.0f ? 1.0f / d : 0.0f;
    store_f16(b, d);
    for (int j = 0; j < 16; j++) {
        const float lo = x[j] * id + 8.5f;
        const float hi = x[16 + j] * id + 8.5f;
        b[2 + j] = (uint8_t) (q4_of(lo) | (q4_of(hi) << 4));
    }
}

// { f16 d; f16 m; uint8 qs[16] }, m = min, d = (max - min)/15
static void q4_1_block_from_f32(const float * x, uint8_t * b) {
    float min = FLT_MAX;
    float max = -FLT_MAX;
    for (int j = 0; j < 32; j++) {
        min = x[j] < min ? x[j] : min;
        max = x[j] > max ? x[j] : max;
    }
    const float d = (max - min) / 15.0f;
    const float id = d != 0.0f ? 1.0f / d : 0.0f;
    store_f16(b, d);
    store_f16(b + 2, min);
    for (int j = 0; j < 16; j++) {
        const float lo = (x[j] - min) * id + 0.5f;
        const float hi = (x[16 + j] - min) * id + 0.5f;
        b[4 + j] = (uint8_t) (q4_of(lo) | (q4_of(hi) << 4));
    }
}

static void q8_0_block_to_f32(const uint8_t * b, float * x) {
    const float d = load_f16(b);
    for (int j = 0; j < 32; j++) { x[j] = (float) (int8_t) b[2 + j] * d; }
}

static void q4_0_block_to_f32(const uint8_t * b, float * x) {
    const float d = load_f16(b);
    for (int j = 0; j < 16; j++) {
        x[j] = (float) ((int) (b[2 + j] & 0x0f) - 8) * d;
        x[16 + j] = (float) ((int) (b[2 + j] >> 4) - 8) * d;
    }
}

static void q4_1_block_to_f32(const uint8_t * b, float * x) {
    const float d = load_f16(b);
    const float m = load_f16(b + 2);
    for (int j = 0; j < 16; j++) {
        x[j] = (float) (b[4 + j] & 0x0f) * d + m;
        x[16 + j] = (float) (b[4 + j] >> 4) * d + m;
    }
}

// --- rows --------------------------------------------------------------------------------------------------------

void kvt_row_from_f32(enum kvt_format fmt, const float * src, void * dst, int64_t n) {
    uint8_t * out = (uint8_t *) dst;
    const int64_t n_blocks = n / 32;
    switch (fmt) {
        case KVT_FORMAT_F32: memcpy(dst, src, (size_t) n * sizeof(float)); break;
        case KVT_FORMAT_F16: f16_row_from_f32(src, out, n); break;
        case KVT_FORMAT_BF16:
            for (int64_t i = 0; i < n; i++) {
                const uint16_t h = bf16_from_f32(src[i]);
                memcpy(out + 2 * i, &h, 2);
            }
            break;
        case KVT_FORMAT_Q8_0:
            for (int64_t i = 0; i < n_blocks; i++) { q8_0_block_from_f32(src + 32 * i, out + 34 * i); }
            break;
        case KVT_FORMAT_Q4_0:
            for (int64_t i = 0; i < n_blocks; i++) { q4_0_block_from_f32(src + 32 * i, out + 18 * i); }
            break;
        case KVT_FORMAT_Q4_1:
            for (int64_t i = 0; i < n_blocks; i++) { q4_1_block_from_f32(src + 32 * i, out + 20 * i); }
            break;
        case KVT_FORMAT_COUNT: break;
    }
}

void kvt_row_to_f32(enum kvt_format fmt, const void * src, float * dst, int64_t n) {
    const uint8_t * in = (const uint8_t *) src;
    const int64_t n_blocks = n / 32;
    switch (fmt) {
        case KVT_FORMAT_F32: memcpy(dst, src, (size_t) n * sizeof(float)); break;
        case KVT_FORMAT_F16: f16_row_to_f32(in, dst, n); break;
        case KVT_FORMAT_BF16:
            for (int64_t i = 0; i < n; i++) {
                uint16_t h;
                memcpy(&h, in + 2 * i, 2);
                dst[i] = float_of((uint32_t) h << 16);
            }
            break;
        case KVT_FORMAT_Q8_0:
            for (int64_t i = 0; i < n_blocks; i++) { q8_0_block_to_f32(in + 34 * i, dst + 32 * i); }
            break;
        case KVT_FORMAT_Q4_0:
            for (int64_t i = 0; i < n_blocks; i++) { q4_0_block_to_f32(in + 18 * i, dst + 32 * i); }
            break;
        case KVT_FORMAT_Q4_1:
            for (int64_t i = 0; i < n_blocks; i++) { q4_1_block_to_f32(in + 20 * i, dst + 32 * i); }
            break;
        case KVT_FORMAT_COUNT: break;
    }
}
