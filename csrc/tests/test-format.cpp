// Row codecs: every half value, rounding at every midpoint, and the quantized blocks against their definitions.

#include "check.h"

#include "../include/kvtier-errors.h"
#include "../store/format.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

static uint16_t to_f16(float f) {
    uint16_t h;
    kvt_row_from_f32(KVT_FORMAT_F16, &f, &h, 1);
    return h;
}

static uint16_t to_bf16(float f) {
    uint16_t h;
    kvt_row_from_f32(KVT_FORMAT_BF16, &f, &h, 1);
    return h;
}

static double f16_value(uint16_t h) { // by the definition of the format, finite values only
    const int exp = (h >> 10) & 31, man = h & 1023;
    const double v = exp == 0 ? ldexp(man, -24) : ldexp(1024 + man, exp - 25);
    return h & 0x8000 ? -v : v;
}

static void test_names() {
    static const char * const names[] = { "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1" };
    for (int f = 0; f < KVT_FORMAT_COUNT; f++) {
        enum kvt_format got = KVT_FORMAT_COUNT;
        CHECK(strcmp(kvt_format_name((enum kvt_format) f), names[f]) == 0);
        CHECK_EQ(kvt_format_parse(names[f], &got), KVT_ERR_OK);
        CHECK_EQ(got, f);
    }
    enum kvt_format got = KVT_FORMAT_BF16;
    CHECK_EQ(kvt_format_parse("Q8_0", &got), KVT_ERR_OK);
    CHECK_EQ(got, KVT_FORMAT_Q8_0);
    for (const char * bad : { "", "q8", "q8_00", "f", "q5_0" }) {
        CHECK_EQ(kvt_format_parse(bad, &got), KVT_ERR_INVALID);
        CHECK_EQ(got, KVT_FORMAT_Q8_0);
    }
    CHECK_EQ(kvt_format_parse(nullptr, &got), KVT_ERR_INVALID);
    CHECK(kvt_format_name((enum kvt_format) 6) == nullptr);
    CHECK(kvt_format_name((enum kvt_format) - 1) == nullptr);
    CHECK(kvt_format_supports(KVT_FORMAT_Q4_0, 64) && !kvt_format_supports(KVT_FORMAT_Q4_0, 80));
    CHECK(kvt_format_supports(KVT_FORMAT_F16, 80) && !kvt_format_supports(KVT_FORMAT_F16, 0));
    CHECK_EQ(kvt_row_bytes(KVT_FORMAT_F32, 64), 256);
    CHECK_EQ(kvt_row_bytes(KVT_FORMAT_BF16, 64), 128);
    CHECK_EQ(kvt_row_bytes(KVT_FORMAT_Q8_0, 64), 68);
    CHECK_EQ(kvt_row_bytes(KVT_FORMAT_Q4_0, 64), 36);
    CHECK_EQ(kvt_row_bytes(KVT_FORMAT_Q4_1, 64), 40);
}

static void test_f16_exact_values() {
    std::vector<uint16_t> h(65536), back(65536);
    std::vector<float> f(65536);
    for (int i = 0; i < 65536; i++) { h[i] = (uint16_t) i; }
    kvt_row_to_f32(KVT_FORMAT_F16, h.data(), f.data(), 65536);
    kvt_row_from_f32(KVT_FORMAT_F16, f.data(), back.data(), 65536);
    for (int i = 0; i < 65536; i++) {
        const bool special = (i & 0x7c00) == 0x7c00;
        if (!special) {
            CHECK((double) f[i] == f16_value((uint16_t) i));
            CHECK(std::signbit(f[i]) == ((i & 0x8000) != 0));
            CHECK_EQ(back[i], i);
        } else if (i & 0x3ff) {
            CHECK(std::isnan(f[i]));
            CHECK_EQ(back[i], (i & 0x8000) | 0x7e00);
        } else {
            CHECK(std::isinf(f[i]) && std::signbit(f[i]) == ((i & 0x8000) != 0));
            CHECK_EQ(back[i], i);
        }
        float one; // one element takes the scalar path
        kvt_row_to_f32(KVT_FORMAT_F16, &h[i], &one, 1);
        CHECK(memcmp(&one, &f[i], 4) == 0);
        CHECK_EQ(to_f16(f[i]), back[i]);
    }
}

// Between any two neighbouring halves: the midpoint goes to the even one, the floats beside it to the nearer one.
static void test_f16_rounding() {
    for (int sign = 0; sign < 2; sign++) {
        const uint16_t s = (uint16_t) (sign << 15);
        for (uint16_t h = 0; h < 0x7c00; h++) {
            const double lo = f16_value(h);
            const double hi = h + 1 == 0x7c00 ? 65536.0 : f16_value((uint16_t) (h + 1));
            const float mid = (float) ((lo + hi) / 2); // exact
            const uint16_t even = h % 2 == 0 ? h : (uint16_t) (h + 1);
            const float m = sign ? -1.0f : 1.0f;
            float x[24];
            uint16_t y[24];
            for (int i = 0; i < 24; i += 3) {
                x[i] = m * mid;
                x[i + 1] = m * nextafterf(mid, 0.0f);
                x[i + 2] = m * nextafterf(mid, INFINITY);
            }
            kvt_row_from_f32(KVT_FORMAT_F16, x, y, 24); // whole vectors
            for (int i = 0; i < 3; i++) {
                const uint16_t want = (uint16_t) (s | (i == 0 ? even : i == 1 ? h : h + 1));
                CHECK_EQ(y[i], want);
                CHECK_EQ(y[i + 21], want);
                CHECK_EQ(to_f16(x[i]), want);
            }
        }
        CHECK_EQ(to_f16(sign ? -1e30f : 1e30f), s | 0x7c00);
        CHECK_EQ(to_f16(sign ? -1e-45f : 1e-45f), s);
    }
    float x[16] = { 1.0f };
    uint16_t y[16];
    x[9] = NAN;
    kvt_row_from_f32(KVT_FORMAT_F16, x, y, 16);
    CHECK_EQ(y[0], 0x3c00);
    CHECK_EQ(y[9] & 0x7fff, 0x7e00);
    CHECK_EQ(y[10], 0);
}

static void test_bf16() {
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t h = (uint16_t) i;
        const uint32_t bits = i << 16;
        float f, want;
        memcpy(&want, &bits, 4);
        kvt_row_to_f32(KVT_FORMAT_BF16, &h, &f, 1);
        CHECK(memcmp(&f, &want, 4) == 0);
        if ((i & 0x7f80) == 0x7f80) {
            if (i & 0x7f) {
                CHECK(((to_bf16(f) & 0x7f80) == 0x7f80) && (to_bf16(f) & 0x7f) != 0);
            } else {
                CHECK_EQ(to_bf16(f), i);
            }
            continue;
        }
        CHECK_EQ(to_bf16(f), i);
        for (const uint32_t low : { 0x7fffu, 0x8000u, 0x8001u }) {
            const uint32_t b = bits | low;
            memcpy(&f, &b, 4);
            const uint32_t up = low > 0x8000u || (low == 0x8000u && (i & 1)) ? 1 : 0;
            CHECK_EQ(to_bf16(f), (i + up) & 0xffff);
        }
    }
    // a NaN whose payload lies in the low bits only stays a NaN
    const uint32_t b = 0x7f800001u;
    float f;
    memcpy(&f, &b, 4);
    CHECK((to_bf16(f) & 0x7f) != 0);
}

// One row with the blocks that ggml makes of it.
static void test_published_blocks() {
    static const uint8_t q8[] = { 0x68, 0x29, 0xae, 0x46, 0xd7, 0x6f, 0x00, 0x91, 0x29, 0xba, 0x52, 0xe3, 0x7b, 0x0c,
        0x9e, 0x35, 0xc7, 0x5e, 0xf0, 0x81, 0x19, 0xaa, 0x42, 0xd3, 0x6b, 0xfc, 0x8d, 0x25, 0xb6, 0x4e, 0xdf, 0x77,
        0x08, 0x9a };
    static const uint8_t q40[] = { 0x5d, 0x39, 0x73, 0x0c, 0xa5, 0x3f, 0xc8, 0x51, 0xfb, 0x84, 0x1d, 0xa6, 0x3f, 0xd9,
        0x62, 0xfb, 0x94, 0x2e };
    static const uint8_t q41[] = { 0xa1, 0x39, 0x5d, 0xc5, 0x73, 0x0c, 0x95, 0x2e, 0xc8, 0x51, 0xea, 0x73, 0x1d, 0xa6,
        0x3f, 0xc8, 0x62, 0xfb, 0x84, 0x1d };
    float x[32];
    uint8_t got[64];
    for (int j = 0; j < 32; j++) { x[j] = ((float) ((j * 37 + 11) % 64) - 31.0f) * 0.173f; }
    kvt_row_from_f32(KVT_FORMAT_Q8_0, x, got, 32);
    CHECK(memcmp(got, q8, sizeof(q8)) == 0);
    kvt_row_from_f32(KVT_FORMAT_Q4_0, x, got, 32);
    CHECK(memcmp(got, q40, sizeof(q40)) == 0);
    kvt_row_from_f32(KVT_FORMAT_Q4_1, x, got, 32);
    CHECK(memcmp(got, q41, sizeof(q41)) == 0);
}

// The block definitions once more, written down for this test.
static void expect_block(enum kvt_format fmt, const float * x, uint8_t * b) {
    float lo = x[0], hi = x[0], big = 0.0f;
    for (int j = 0; j < 32; j++) {
        lo = x[j] < lo ? x[j] : lo;
        hi = x[j] > hi ? x[j] : hi;
        big = fabsf(x[j]) > fabsf(big) ? x[j] : big;
    }
    volatile float d = fmt == KVT_FORMAT_Q8_0 ? fabsf(big) / 127 : fmt == KVT_FORMAT_Q4_0 ? big / -8 : (hi - lo) / 15;
    volatile float inv = d != 0 ? 1 / d : 0;
    uint16_t h = to_f16(d);
    memcpy(b, &h, 2);
    int at = 2;
    if (fmt == KVT_FORMAT_Q4_1) {
        h = to_f16(lo);
        memcpy(b + 2, &h, 2);
        at = 4;
    }
    int q[32];
    for (int j = 0; j < 32; j++) {
        volatile float v = fmt == KVT_FORMAT_Q4_1 ? x[j] - lo : x[j];
        v = v * inv;
        if (fmt == KVT_FORMAT_Q8_0) {
            q[j] = (int) (v < 0 ? -floor(0.5 - (double) v) : floor((double) v + 0.5)); // halves away from zero
        } else {
            v = v + (fmt == KVT_FORMAT_Q4_0 ? 8.5f : 0.5f);
            q[j] = v > 15 ? 15 : (int) v;
        }
    }
    for (int j = 0; j < (fmt == KVT_FORMAT_Q8_0 ? 32 : 16); j++) {
        b[at + j] = fmt == KVT_FORMAT_Q8_0 ? (uint8_t) (int8_t) q[j] : (uint8_t) (q[j] | q[j + 16] << 4);
    }
}

static void fill_row(std::mt19937& rng, int kind, std::vector<float>& x) {
    std::normal_distribution<float> gauss;
    for (float& v : x) {
        switch (kind) {
            case 0: v = 0.0f; break;
            case 1: v = gauss(rng); break;
            case 2: v = gauss(rng) * 1e-20f; break;
            case 3: v = gauss(rng) * 1e30f; break;
            case 4: v = (float) ((int) (rng() % 255) - 127) / 2.0f; break; // ties
            case 5: v = rng() % 16 == 0 ? gauss(rng) * 1000 : gauss(rng) * 0.01f; break;
            case 6: v = 3.25f; break; // constant
            default: v = rng() % 2 ? 0.0f : -0.0f; break;
        }
    }
}

static void test_quantized_rows() {
    std::mt19937 rng(7);
    const int n = 256;
    std::vector<float> x(n), y(n);
    std::vector<uint8_t> got(4 * n), want(4 * n);
    for (const enum kvt_format fmt : { KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 }) {
        const size_t b = kvt_row_bytes(fmt, 32);
        for (int round = 0; round < 800; round++) {
            fill_row(rng, round % 8, x);
            kvt_row_from_f32(fmt, x.data(), got.data(), n);
            for (int i = 0; i < n / 32; i++) { expect_block(fmt, &x[32 * i], &want[b * i]); }
            CHECK(memcmp(got.data(), want.data(), b * n / 32) == 0);
            if (round % 8 == 3 || round % 8 == 2) {
                continue; // the scale is not representable in f16
            }
            kvt_row_to_f32(fmt, got.data(), y.data(), n);
            for (int i = 0; i < n; i++) {
                uint16_t hd;
                memcpy(&hd, &got[b * (i / 32)], 2);
                const double step = fabs(f16_value(hd));
                // half a step of the quantizer, one for the clamp of Q4_0, and the f16 rounding of scale and minimum
                double room = (fmt == KVT_FORMAT_Q4_0 ? 1.01 : 0.51) * step + 130 * step / 1024;
                if (fmt == KVT_FORMAT_Q4_1) {
                    uint16_t hm;
                    memcpy(&hm, &got[b * (i / 32) + 2], 2);
                    room += fabs(f16_value(hm)) / 1024;
                }
                CHECK(fabs((double) x[i] - y[i]) <= room + 1e-7);
            }
        }
        float zeros[32];
        const std::vector<uint8_t> z(b, 0);
        kvt_row_to_f32(fmt, z.data(), zeros, 32);
        for (const float f : zeros) { CHECK(f == 0.0f); }
        // what no block can hold still ends in some bytes, not in undefined behaviour
        for (const float odd : { NAN, INFINITY, -INFINITY, 1e-45f, 1e-40f, 3.4e38f }) {
            fill_row(rng, 1, x);
            x[5] = odd;
            kvt_row_from_f32(fmt, x.data(), got.data(), 32);
            std::vector<float> all(32, odd);
            kvt_row_from_f32(fmt, all.data(), got.data(), 32);
        }
    }
}

int main() {
    test_names();
    test_f16_exact_values();
    test_f16_rounding();
    test_bf16();
    test_published_blocks();
    test_quantized_rows();
    return 0;
}
