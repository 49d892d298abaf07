// Page layout: offsets as the header draws them, and rows through pages of all formats and shapes.

#include "check.h"

#include "../include/kvtier-errors.h"
#include "../store/format.h"

#include <cstring>
#include <random>
#include <vector>

static const enum kvt_format ALL[] = { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0,
    KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 };

static const struct kvt_geometry SHAPES[] = {
    { 1, 32, 32, 32 },
    { 3, 64, 64, 32 },
    { 2, 64, 64, 64 },
    { 2, 80, 80, 32 },
    { 4, 80, 40, 32 },
    { 2, 96, 64, 64 },
    { 1, 128, 128, 32 },
    { 2, 256, 256, 32 },
    { 1, 576, 0, 32 },
    { 1, 576, 512, 32 },
    { 8, 64, 0, 64 },
    { 5, 7, 3, 32 },
};

static std::vector<float> random_row(std::mt19937& rng, size_t n) {
    std::normal_distribution<float> gauss;
    std::vector<float> x(n);
    for (float& v : x) { v = gauss(rng); }
    return x;
}

static int32_t row_elems(const struct kvt_geometry& g, enum kvt_part part) {
    return g.n_head_kv * (part == KVT_PART_K ? g.d_k : g.d_v);
}

static bool fits(const struct kvt_geometry& g, enum kvt_format k, enum kvt_format v) {
    return kvt_format_supports(k, g.d_k) && (g.d_v == 0 || kvt_format_supports(v, g.d_v));
}

static void test_offsets() {
    const struct kvt_geometry g = { 2, 64, 40, 64 };
    struct kvt_page_layout l;
    CHECK_EQ(kvt_page_layout_init(&l, &g, KVT_FORMAT_Q8_0, KVT_FORMAT_F16), KVT_ERR_OK);
    CHECK_EQ(l.d_v_pad, 48);
    CHECK_EQ(l.k_sub_bytes, 2 * (32 * 2 + 32 * 32));
    CHECK_EQ(l.v_sub_bytes, 32 * 48 * 2);
    CHECK_EQ(l.head_bytes % 64, 0);
    CHECK_EQ(l.head_bytes, 2 * (l.k_sub_bytes + l.v_sub_bytes));
    CHECK_EQ(l.page_bytes, 2 * l.head_bytes);
    CHECK_EQ(kvt_k_sub_off(&l, 1, 1), l.head_bytes + l.k_sub_bytes + l.v_sub_bytes);
    CHECK_EQ(kvt_v_sub_off(&l, 0, 0), l.k_sub_bytes);

    const struct kvt_geometry bad[] = { { 0, 64, 64, 32 }, { 1, -1, 64, 32 }, { 1, 0, 0, 32 }, { 1, 64, -1, 32 },
        { 1, 64, 64, 0 }, { 1, 64, 64, 40 }, { 1 << 20, 64, 64, 32 }, { 4096, 65536, 65536, 65536 } };
    for (const struct kvt_geometry& b : bad) {
        CHECK_EQ(kvt_page_layout_init(&l, &b, KVT_FORMAT_F16, KVT_FORMAT_F16), KVT_ERR_INVALID);
    }
    CHECK_EQ(kvt_page_layout_init(&l, &g, KVT_FORMAT_Q8_0, KVT_FORMAT_Q8_0), KVT_ERR_UNSUPPORTED);
    CHECK_EQ(l.page_bytes, 2 * l.head_bytes); // unchanged
}

// The bytes at the places that the header names, for one cell of head 1 in sub-page 1.
static void test_places() {
    const struct kvt_geometry g = { 2, 64, 64, 64 };
    const int32_t cell = 37, t = 5;
    std::mt19937 rng(3);
    const std::vector<float> row = random_row(rng, 128);
    for (const enum kvt_format fmt : ALL) {
        struct kvt_page_layout l;
        CHECK_EQ(kvt_page_layout_init(&l, &g, fmt, fmt), KVT_ERR_OK);
        std::vector<uint8_t> page(l.page_bytes, 0), want(kvt_row_bytes(fmt, 128));
        kvt_page_put_f32(&l, page.data(), KVT_PART_K, cell, row.data());
        kvt_page_put_f32(&l, page.data(), KVT_PART_V, cell, row.data());
        kvt_row_from_f32(fmt, row.data(), want.data(), 128);
        const uint8_t * k = &page[kvt_k_sub_off(&l, 1, 1)];
        const uint8_t * v = &page[kvt_v_sub_off(&l, 1, 1)];
        const uint8_t * w = &want[kvt_row_bytes(fmt, 64)]; // head 1
        const size_t e = kvt_row_bytes(fmt, 1);
        for (int32_t c = 0; e && c < 64; c++) {
            CHECK(memcmp(k + (c * 32 + t) * e, w + c * e, e) == 0);
            CHECK(memcmp(v + (t * 64 + c) * e, w + c * e, e) == 0);
        }
        for (int32_t b = 0; !e && b < 2; b++) {
            const size_t n_scales = fmt == KVT_FORMAT_Q4_1 ? 2 : 1;
            const size_t qs = fmt == KVT_FORMAT_Q8_0 ? 32 : 16;
            const uint8_t * kb = k + b * 32 * (2 * n_scales + qs);
            const uint8_t * vb = v + b * 32 * (2 * n_scales + qs);
            const uint8_t * wb = w + b * (2 * n_scales + qs);
            for (size_t i = 0; i < n_scales; i++) {
                CHECK(memcmp(kb + 64 * i + 2 * t, wb + 2 * i, 2) == 0);
                CHECK(memcmp(vb + 64 * i + 2 * t, wb + 2 * i, 2) == 0);
            }
            for (size_t j = 0; j < qs; j++) {
                CHECK_EQ(kb[64 * n_scales + (j / 4 * 32 + t) * 4 + j % 4], wb[2 * n_scales + j]);
                CHECK_EQ(vb[64 * n_scales + t * qs + j], wb[2 * n_scales + j]);
            }
        }
    }
}

// Rows of the page's own type come back bit for bit, every cell where it was put, nothing outside the page touched.
static void test_own_rows(const struct kvt_geometry& g, enum kvt_format fk, enum kvt_format fv, std::mt19937& rng) {
    struct kvt_page_layout l;
    CHECK_EQ(kvt_page_layout_init(&l, &g, fk, fv), KVT_ERR_OK);
    std::vector<uint8_t> page(l.page_bytes + 64, 0xee);
    memset(page.data(), 0, l.page_bytes);
    for (int part = 0; part < (g.d_v ? 2 : 1); part++) {
        const enum kvt_format fmt = part == 0 ? fk : fv;
        const int32_t n = row_elems(g, (enum kvt_part) part);
        const size_t nb = kvt_row_bytes(fmt, n);
        std::vector<std::vector<uint8_t>> rows(g.page_tokens);
        for (int32_t c = 0; c < g.page_tokens; c++) {
            const std::vector<float> x = random_row(rng, n);
            rows[c].resize(nb);
            kvt_row_from_f32(fmt, x.data(), rows[c].data(), n);
            if (c % 2) {
                kvt_page_put_row(&l, page.data(), (enum kvt_part) part, c, fmt, rows[c].data());
            } else {
                kvt_page_put_f32(&l, page.data(), (enum kvt_part) part, c, x.data());
            }
        }
        std::vector<uint8_t> got(nb + 1, 0x55);
        std::vector<float> f(n), want(n);
        for (int32_t c = 0; c < g.page_tokens; c++) {
            kvt_page_get_row(&l, page.data(), (enum kvt_part) part, c, fmt, got.data());
            CHECK(memcmp(got.data(), rows[c].data(), nb) == 0);
            CHECK_EQ(got[nb], 0x55);
            kvt_page_get_f32(&l, page.data(), (enum kvt_part) part, c, f.data());
            kvt_row_to_f32(fmt, rows[c].data(), want.data(), n);
            CHECK(memcmp(f.data(), want.data(), n * sizeof(float)) == 0);
        }
    }
    for (size_t i = l.page_bytes; i < page.size(); i++) { CHECK_EQ(page[i], 0xee); }
}

// Rows of another type go through F32, also where heads are no multiple of a block.
static void test_foreign_rows(
    const struct kvt_geometry& g, enum kvt_format fmt, enum kvt_format row_fmt, std::mt19937& rng) {
    struct kvt_page_layout l;
    CHECK_EQ(kvt_page_layout_init(&l, &g, fmt, fmt), KVT_ERR_OK);
    for (int part = 0; part < (g.d_v ? 2 : 1); part++) {
        const int32_t n = row_elems(g, (enum kvt_part) part);
        if (!kvt_format_supports(row_fmt, n)) { continue; }
        std::vector<uint8_t> page(l.page_bytes, 0), page2(l.page_bytes, 0), row(kvt_row_bytes(row_fmt, n)),
            got(row.size()), want(row.size());
        std::vector<float> f(n), back(n);
        kvt_row_from_f32(row_fmt, random_row(rng, n).data(), row.data(), n);
        kvt_row_to_f32(row_fmt, row.data(), f.data(), n);
        const int32_t cell = (int32_t) (rng() % g.page_tokens);
        kvt_page_put_row(&l, page.data(), (enum kvt_part) part, cell, row_fmt, row.data());
        kvt_page_put_f32(&l, page2.data(), (enum kvt_part) part, cell, f.data());
        CHECK(page == page2);
        kvt_page_get_f32(&l, page.data(), (enum kvt_part) part, cell, back.data());
        kvt_row_from_f32(row_fmt, back.data(), want.data(), n);
        kvt_page_get_row(&l, page.data(), (enum kvt_part) part, cell, row_fmt, got.data());
        CHECK(got == want);
    }
}

static void test_transcode(const struct kvt_geometry& g, enum kvt_format ak, enum kvt_format av, enum kvt_format bk,
    enum kvt_format bv, std::mt19937& rng) {
    struct kvt_page_layout a, b;
    CHECK_EQ(kvt_page_layout_init(&a, &g, ak, av), KVT_ERR_OK);
    CHECK_EQ(kvt_page_layout_init(&b, &g, bk, bv), KVT_ERR_OK);
    std::vector<uint8_t> src(a.page_bytes, 0), dst(b.page_bytes, 0xcc), want(b.page_bytes, 0);
    for (int part = 0; part < (g.d_v ? 2 : 1); part++) {
        const int32_t n = row_elems(g, (enum kvt_part) part);
        std::vector<float> f(n);
        for (int32_t c = 0; c < g.page_tokens; c++) {
            kvt_page_put_f32(&a, src.data(), (enum kvt_part) part, c, random_row(rng, n).data());
            kvt_page_get_f32(&a, src.data(), (enum kvt_part) part, c, f.data());
            const bool same = part == 0 ? ak == bk : av == bv;
            if (same) {
                const enum kvt_format fmt = part == 0 ? ak : av;
                std::vector<uint8_t> raw(kvt_row_bytes(fmt, n));
                kvt_page_get_row(&a, src.data(), (enum kvt_part) part, c, fmt, raw.data());
                kvt_page_put_row(&b, want.data(), (enum kvt_part) part, c, fmt, raw.data());
            } else {
                kvt_page_put_f32(&b, want.data(), (enum kvt_part) part, c, f.data());
            }
        }
    }
    kvt_page_transcode(&a, src.data(), &b, dst.data());
    CHECK(dst == want);
}

int main() {
    test_offsets();
    test_places();
    std::mt19937 rng(11);
    for (const struct kvt_geometry& g : SHAPES) {
        for (const enum kvt_format k : ALL) {
            for (const enum kvt_format v : ALL) {
                if (!fits(g, k, v)) { continue; }
                test_own_rows(g, k, v, rng);
                const enum kvt_format k2 = ALL[rng() % 6], v2 = ALL[rng() % 6];
                if (fits(g, k2, v2)) { test_transcode(g, k, v, k2, v2, rng); }
                if (k == v) {
                    for (const enum kvt_format r : ALL) { test_foreign_rows(g, k, r, rng); }
                }
            }
        }
        for (const enum kvt_format a : ALL) {
            for (const enum kvt_format b : ALL) {
                if (fits(g, a, a) && fits(g, b, b)) { test_transcode(g, a, a, b, b, rng); }
            }
        }
    }
    return 0;
}
