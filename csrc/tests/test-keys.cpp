// How far stored keys lie from what they were, as it is noted, against F64: whatever format they came and are kept in,
// copied, turned (shifts of positions) once and several times.

#include <algorithm>
#include <string>

#include "keys-fixture.h"

// What is assumed of cells whose rounding is not known covers what it really was, by little, and a cleared cache knows
// nothing of it.
static void errors_of_keys() {
    for (kvt_format fmt :
        { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 })
        for (int d : { 64, 96, 80 }) {
            if (!kvt_format_supports(fmt, d)) continue;
            const int n_head = 2, n_cells = 320, n_blocks = (d + 31) / 32;
            kvt_keys *known = nullptr, *unknown = nullptr;
            CHECK(kvt_keys_create(some_store(), n_head, d, n_cells, fmt, &known) == 0 &&
                kvt_keys_create(some_store(), n_head, d, n_cells, fmt, &unknown) == 0);
            std::mt19937 rng(7);
            std::normal_distribution<float> normal;
            std::vector<float> row((size_t) n_head * d);
            std::vector<uint8_t> bytes(kvt_row_bytes(fmt, n_head * d));
            for (size_t cell = 0; cell < (size_t) n_cells; cell++) {
                for (float& x : row) x = normal(rng) * (1.0f + cell / 32);
                kvt_keys_put(known, cell, row.data());
                kvt_row_from_f32(fmt, row.data(), bytes.data(), (int64_t) row.size());
                kvt_keys_put_row(unknown, cell, fmt, bytes.data());
            }
            for (int h = 0; h < n_head; h++)
                for (int b = 0; b < n_blocks; b++)
                    for (int s = 0; s < n_cells / KVT_SUB; s++) {
                        const float real = kvt_keys_errors(known, h, b)[s], most = kvt_keys_errors(unknown, h, b)[s];
                        CHECK_MSG(real > 0.0f && real <= most && most < 5 * real,
                            "%s, %d channels: sub %d rounds by %g, %g is assumed", kvt_format_name(fmt), d, s, real,
                            most);
                        CHECK(s == 0 || fmt == KVT_FORMAT_F32 ||
                            kvt_keys_errors(known, h, b)[s] < 2.5f * (float) (s + 1) * kvt_keys_errors(known, h, b)[0]);
                    }
            kvt_keys_clear(known);
            CHECK(std::all_of(known->error, known->error + (size_t) n_head * (n_blocks + 1) * known->ld_error,
                [](float x) { return x == 0.0f; }));
            std::fill(row.begin(), row.end(), NAN);
            kvt_keys_put(known, 40, row.data());
            CHECK(kvt_keys_errors(known, 0, 0)[0] == 0.0f && std::isinf(kvt_keys_errors(known, 0, 0)[1]));
            kvt_keys_free(known);
            kvt_keys_free(unknown);
        }
}

// some keys, and what they were before they were rounded
struct some_keys {
    kvt_keys * keys = nullptr;
    std::vector<float> exact; // [n_cells][n_head*d]
    static constexpr int N_HEAD = 2, N_CELLS = 96;

    some_keys(kvt_format fmt, int d, uint32_t seed, float scale = 2.0f) {
        CHECK(kvt_keys_create(some_store(), N_HEAD, d, N_CELLS, fmt, &keys) == 0);
        std::mt19937 rng(seed);
        std::normal_distribution<float> normal;
        exact.resize((size_t) N_CELLS * N_HEAD * d);
        for (float& x : exact) x = normal(rng) * scale;
    }
    ~some_keys() { kvt_keys_free(keys); }
    float * row(int cell) { return &exact[(size_t) cell * N_HEAD * keys->layout.geo.d_k]; }
    void put() {
        for (int t = 0; t < N_CELLS; t++) kvt_keys_put(keys, t, row(t));
    }

    // what is noted covers the distance of every cell from what it was, and is not more than `most` times it; 0:
    // whatever it is
    void check(const std::string& what, double most) {
        const int d = keys->layout.geo.d_k, n_blocks = (d + 31) / 32;
        std::vector<float> stored((size_t) N_HEAD * d);
        std::vector<double> off(
            (size_t) N_HEAD * (n_blocks + 1) * (N_CELLS / KVT_SUB), 0.0); // of the worst cell of each sub
        for (int t = 0; t < N_CELLS; t++) {
            kvt_page_get_f32(&keys->layout, keys->data, KVT_PART_K, t, stored.data());
            for (int h = 0; h < N_HEAD; h++)
                for (int b = 0; b <= n_blocks; b++) { // the last: all channels
                    double sum = 0;
                    for (int i = h * d + 32 * (b % n_blocks); i < h * d + (b < n_blocks ? std::min(32 * b + 32, d) : d);
                        i++)
                        sum += ((double) stored[i] - row(t)[i]) * ((double) stored[i] - row(t)[i]);
                    double& worst = off[(size_t) (h * (n_blocks + 1) + b) * (N_CELLS / KVT_SUB) + t / KVT_SUB];
                    worst = std::max(worst, std::sqrt(sum));
                }
        }
        for (int h = 0; h < N_HEAD; h++)
            for (int b = 0; b <= n_blocks; b++)
                for (int s = 0; s < N_CELLS / KVT_SUB; s++) {
                    const double noted = kvt_keys_errors(keys, h, b)[s],
                                 worst = off[(size_t) (h * (n_blocks + 1) + b) * (N_CELLS / KVT_SUB) + s];
                    CHECK_MSG(worst <= noted && (most == 0 || noted <= most * worst),
                        "%s: head %d block %d sub %d: off by %g, noted %g", what.c_str(), h, b, s, worst, noted);
                }
    }
};

static const kvt_format ALL_FORMATS[] = { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0,
    KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 };

// Rows that come in another format than they are kept in, at once or by way of keys that are kept in it, have been
// rounded twice.
static void errors_of_keys_in_other_formats() {
    for (kvt_format own : ALL_FORMATS)
        for (kvt_format fmt : ALL_FORMATS)
            for (int d : { 64, 80 })
                for (float scale : { 2.0f, 1e-4f }) { // 1e-4: steps below F16's normal numbers
                    if (!kvt_format_supports(own, d)) continue;
                    const int n_row = some_keys::N_HEAD * d; // with 80 channels a row has blocks across heads
                    const std::string what = std::string(kvt_format_name(fmt)) + " in " + kvt_format_name(own) + ", " +
                        std::to_string(d) + " channels of about " + std::to_string(scale);
                    some_keys x(own, d, 3, scale);
                    std::vector<uint8_t> bytes(kvt_row_bytes(fmt, n_row)), again(kvt_row_bytes(own, n_row));
                    std::vector<float> row(n_row);
                    for (int pass = 0; pass < 2; pass++) {
                        kvt_keys_clear(x.keys);
                        for (int t = 0; t < some_keys::N_CELLS; t++) {
                            std::copy_n(x.row(t), n_row, row.data());
                            if (pass == 1) { // saved by a cache like this one
                                kvt_row_from_f32(own, row.data(), again.data(), n_row);
                                kvt_row_to_f32(own, again.data(), row.data(), n_row);
                            }
                            kvt_row_from_f32(fmt, row.data(), bytes.data(), n_row);
                            kvt_keys_put_row(x.keys, t, fmt, bytes.data());
                        }
                        x.check(what, 0);
                    }
                    if (!kvt_format_supports(fmt, d)) continue;
                    some_keys from(fmt, d, 3, scale);
                    from.put();
                    kvt_keys_clear(x.keys);
                    for (int t = 0; t < some_keys::N_CELLS; t++)
                        kvt_keys_copy(x.keys, some_keys::N_CELLS - 1 - t, from.keys, t);
                    for (int t = 0; t < some_keys::N_CELLS; t++)
                        std::copy_n(from.row(t), n_row, x.row(some_keys::N_CELLS - 1 - t));
                    x.check("copied " + what, own == KVT_FORMAT_F32 ? 0 : 4);
                }
}

// Each time that keys are turned they are rounded again, and what rounding had done before is turned with them.
static void errors_of_shifted_keys() {
    for (kvt_format own : ALL_FORMATS)
        for (kvt_format fmt : ALL_FORMATS)
            for (int d : { 64, 96, 80 })
                for (float stretch : { 1.0f, 1.2f }) {
                    if (!kvt_format_supports(own, d)) continue;
                    for (bool is_told : { true, false }) {
                        some_keys x(own, d, 5);
                        x.put();
                        for (int i = 0; i < 9; i++) {
                            shift_keys(x.keys, fmt, 0, x.exact, { stretch == 1.0f ? d : d * 3 / 4, stretch }, is_told);
                            x.check(std::string(kvt_format_name(own)) + " turned as " + kvt_format_name(fmt) +
                                    (is_told ? "" : " untold") + ", time " + std::to_string(i),
                                0);
                        }
                        some_keys copy(own, d, 5);
                        copy.exact = x.exact;
                        for (int t = 0; t < some_keys::N_CELLS; t++) kvt_keys_copy(copy.keys, t, x.keys, t);
                        copy.check(std::string("copy of turned ") + kvt_format_name(own), 0);
                    }
                }
}

// Turns that leave nothing to chance: errors grow with the keys, and those of two blocks meet in one.
static void errors_that_add_up(bool are_told) {
    some_keys x(KVT_FORMAT_Q4_0, 32, 7);
    x.put();
    shift_keys(x.keys, KVT_FORMAT_F32, 0, x.exact, { 32, 2.0f, 0.0 }, are_told); // every stored number is doubled
    x.check("doubled", 0);
    some_keys y(KVT_FORMAT_F32, 64, 7);
    const float step = 1.0f / 128; // of every block, while it is read as Q8_0: nearly all numbers are half of it off
    for (size_t i = 0; i < y.exact.size(); i++)
        y.exact[i] = step * (i % 64 == 0 || i % 64 == 33 ? 127.0f : (float) (i % 32) + 10.49f);
    y.put();
    shift_keys(y.keys, KVT_FORMAT_Q8_0, 0, y.exact, { 64, 1.0f, std::acos(0.0) / 2 }, are_told);
    y.check("met", 0);
}

// one shift costs what one rounding more does, not one for each cell, and cells beside those that change keep what they
// had
static void errors_of_few_shifted_keys() {
    some_keys x(KVT_FORMAT_Q8_0, 64, 9);
    x.put();
    const float before = kvt_keys_errors(x.keys, 0, 0)[0], beside = kvt_keys_errors(x.keys, 0, 0)[1];
    x.exact.resize((size_t) KVT_SUB * some_keys::N_HEAD * 64); // the first sub
    shift_keys(x.keys, KVT_FORMAT_Q8_0, 0, x.exact, { 64 }, false);
    CHECK(kvt_keys_errors(x.keys, 0, 0)[0] > before && kvt_keys_errors(x.keys, 0, 0)[0] < 8 * before &&
        kvt_keys_errors(x.keys, 0, 0)[1] == beside);
    kvt_keys_doubt(x.keys, 40);
    CHECK(std::isinf(kvt_keys_errors(x.keys, 1, 1)[1]) && std::isfinite(kvt_keys_errors(x.keys, 1, 1)[0]));
    kvt_keys * other = nullptr; // the same channels in other heads
    CHECK(kvt_keys_create(some_store(), 1, 128, 96, KVT_FORMAT_Q8_0, &other) == 0);
    kvt_keys_copy(other, 0, x.keys, 70);
    CHECK(std::isinf(kvt_keys_errors(other, 0, 3)[0]));
    kvt_keys_free(other);
}

// What a turn adds is what it really rounds away: n shifts leave n + 1 times the error of one rounding, of all channels
// together, and no more than that in any block.
static void errors_of_repeated_shifts() {
    for (kvt_format fmt : { KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_F16 })
        for (int d : { 64, 128, 256 }) {
            some_keys x(fmt, d, 11);
            x.put();
            const float first = kvt_keys_errors(x.keys, 0, d / 32)[0];
            CHECK(first < 1.1f * std::sqrt((float) d / 32) * kvt_keys_errors(x.keys, 0, 0)[0]);
            for (int n = 1; n <= 3; n++) {
                shift_keys(x.keys, fmt, 0, x.exact, { d }, true);
                for (int b = 0; b <= d / 32; b++)
                    CHECK_MSG(kvt_keys_errors(x.keys, 0, b)[0] < 1.15f * (float) (n + 1) * first,
                        "%s, %d channels, block %d: %g after %d shifts, %g before", kvt_format_name(fmt), d, b,
                        kvt_keys_errors(x.keys, 0, b)[0], n, first);
                x.check(std::string(kvt_format_name(fmt)) + " shifted " + std::to_string(n) + " times", 0);
            }
        }
}

// Keys that llama.cpp takes along in a shift without turning them come out as they were: next to nothing is added.
static void errors_of_keys_that_stay() {
    for (kvt_format fmt : { KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1, KVT_FORMAT_F16 }) {
        some_keys x(fmt, 64, 13);
        x.put();
        const float first = kvt_keys_errors(x.keys, 1, 2)[1];
        for (int n = 1; n <= 3; n++) shift_keys(x.keys, fmt, 0, x.exact, { 64, 1.0f, 0.0 }, true);
        CHECK_MSG(kvt_keys_errors(x.keys, 1, 2)[1] < 1.3f * first, "%s: %g after %g", kvt_format_name(fmt),
            kvt_keys_errors(x.keys, 1, 2)[1], first);
        x.check(std::string(kvt_format_name(fmt)) + " that stay", 0);
    }
}

int main() {
    errors_of_keys();
    errors_of_keys_in_other_formats();
    errors_of_shifted_keys();
    errors_that_add_up(true);
    errors_that_add_up(false);
    errors_of_few_shifted_keys();
    errors_of_repeated_shifts();
    errors_of_keys_that_stay();
    return check_summary();
}
