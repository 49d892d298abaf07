#pragma once

// Keys that are kept apart from their pages, and how positions are shifted in them: what the tests of keys and of
// recall share.

#include "attention-fixture.h"

// all keys count against its budget
static inline kvt_store * some_store() {
    static kvt_store * store = [] {
        kvt_store_params params;
        kvt_store_params_default(&params);
        kvt_store * s = nullptr;
        char err[256] = "";
        CHECK_MSG(kvt_store_open(&params, &s, err, sizeof(err)) == 0, "%s", err);
        return s;
    }();
    return store;
}

// What a shift of positions does: the first channels of every head are turned against each other, c and c +
// n_channels/2, and stretched.
struct turning {
    int n_channels;
    float stretch = 1.0f;
    double angle = NAN; // NAN: each cell and channel has its own
};

static inline void turn(float * row, int n_head, int d, size_t cell, const turning& how) {
    for (int h = 0; h < n_head; h++)
        for (int c = 0; c < how.n_channels / 2; c++) {
            float *a = row + h * d + c, *b = a + how.n_channels / 2;
            const double own = (double) (cell % 5 + 1) * std::pow(10000.0, -2.0 * c / how.n_channels),
                         angle = std::isnan(how.angle) ? own : how.angle, x = *a, y = *b;
            *a = (float) (how.stretch * (x * std::cos(angle) - y * std::sin(angle)));
            *b = (float) (how.stretch * (x * std::sin(angle) + y * std::cos(angle)));
        }
}

// Turns the cells from `first` on where they are, as rows of `fmt`, and what they were before they were ever rounded,
// [n][n_head_kv*d]. is_told: the numbers that the turn made are handed in beside what `fmt` made of them.
static inline void shift_keys(
    kvt_keys * keys, kvt_format fmt, size_t first, std::vector<float>& exact, const turning& how, bool is_told) {
    const kvt_geometry& geo = keys->layout.geo;
    const int n_row = geo.n_head_kv * geo.d_k;
    const std::vector<float> noted(kvt_keys_errors(keys, 0, 0), kvt_keys_errors(keys, geo.n_head_kv, 0));
    std::vector<uint8_t> before(kvt_row_bytes(fmt, n_row)), after(before.size());
    std::vector<float> row(n_row);
    for (size_t i = 0; i * n_row < exact.size(); i++) {
        kvt_page_get_row(&keys->layout, keys->data, KVT_PART_K, (int32_t) (first + i), fmt, before.data());
        kvt_row_to_f32(fmt, before.data(), row.data(), n_row);
        turn(row.data(), geo.n_head_kv, geo.d_k, i, how);
        kvt_row_from_f32(fmt, row.data(), after.data(), n_row);
        kvt_keys_change(
            keys, first + i, fmt, before.data(), after.data(), is_told ? row.data() : nullptr, noted.data());
        turn(&exact[i * n_row], geo.n_head_kv, geo.d_k, i, how);
    }
}
