#include "keys.h"

#include "../include/kvtier-errors.h"

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <sys/mman.h>

static int make_layout(int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, kvt_page_layout * out) {
    const kvt_geometry one_sub = { n_head_kv, d_k, 0, KVT_SUB };
    const int r = kvt_page_layout_init(out, &one_sub, fmt, fmt);
    if (r != KVT_ERR_OK) { return r; }
    const size_t n_subs = (n_cells + KVT_SUB - 1) / KVT_SUB;
    if (n_cells == 0 || n_subs > INT32_MAX / KVT_SUB) { return KVT_ERR_INVALID; }
    out->geo.page_tokens = (int32_t) (n_subs * KVT_SUB);
    out->head_bytes = (n_subs * out->k_sub_bytes + 4095) / 4096 * 4096;
    out->page_bytes = (size_t) n_head_kv * out->head_bytes;
    return KVT_ERR_OK;
}

// room behind the last key, for prefetches of what would follow
static const size_t SLACK_BYTES = 16384;

static int32_t n_blocks_of(const kvt_page_layout& l) { return (l.geo.d_k + 31) / 32; }

static size_t ld_error_of(const kvt_page_layout& l) {
    return ((size_t) l.geo.page_tokens / KVT_SUB / KVT_SUB + 2) * KVT_SUB;
}

static size_t n_error_of(const kvt_page_layout& l) {
    return (size_t) (l.geo.n_head_kv * (n_blocks_of(l) + 1)) * ld_error_of(l);
}

static size_t n_row_of(const kvt_page_layout& l) { return (size_t) l.geo.n_head_kv * (size_t) l.geo.d_k; }

static size_t bytes_of(const kvt_page_layout& l) {
    return l.page_bytes + SLACK_BYTES + (n_error_of(l) + n_row_of(l)) * sizeof(float);
}

size_t kvt_keys_bytes(int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt) {
    kvt_page_layout layout;
    return make_layout(n_head_kv, d_k, n_cells, fmt, &layout) == KVT_ERR_OK ? bytes_of(layout) : 0;
}

int kvt_keys_create(
    struct kvt_store * s, int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, struct kvt_keys ** out) {
    kvt_page_layout layout;
    int r = make_layout(n_head_kv, d_k, n_cells, fmt, &layout);
    if (r != KVT_ERR_OK) { return r; }
    const size_t n_error = n_error_of(layout);
    const size_t data_bytes = layout.page_bytes + SLACK_BYTES;
    const size_t n_bytes = bytes_of(layout);
    r = kvt_store_reserve(s, (int64_t) n_bytes);
    if (r != KVT_ERR_OK) { return r; }
    kvt_keys * k = (kvt_keys *) calloc(1, sizeof(kvt_keys));
    float * numbers = (float *) calloc(n_error + n_row_of(layout), sizeof(float));
    void * data = k && numbers ? mmap(NULL, data_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                               : MAP_FAILED;
    if (data == MAP_FAILED) {
        free(k);
        free(numbers);
        kvt_store_reserve(s, -(int64_t) n_bytes);
        return KVT_ERR_NOMEM;
    }
    madvise(data, data_bytes, MADV_HUGEPAGE); // one stream over megabytes; a kernel that refuses only makes it slower
    *k = { s, layout, (uint8_t *) data, data_bytes, n_bytes, numbers, ld_error_of(layout), numbers + n_error };
    *out = k;
    return KVT_ERR_OK;
}

void kvt_keys_free(struct kvt_keys * k) {
    if (!k) { return; }
    munmap(k->data, k->data_bytes);
    kvt_store_reserve(k->store, -(int64_t) k->n_bytes);
    free(k->error);
    free(k);
}

void kvt_keys_clear(struct kvt_keys * k) {
    if (madvise(k->data, k->data_bytes, MADV_DONTNEED) != 0) { // of anonymous memory: zeros at the next touch
        memset(k->data, 0, k->data_bytes);
    }
    memset(k->error, 0, n_error_of(k->layout) * sizeof(float));
}

static float f16_at(const uint8_t * p) {
    float x;
    kvt_row_to_f32(KVT_FORMAT_F16, p, &x, 1);
    return x < 0 ? -x : x;
}

// How far a number of a quantized block can lie from what it was: half a step, or a whole one where the largest is
// clipped (Q4_0), and what rounding step and minimum to 11 bits does. A block of ggml's begins with its step, the
// minimum behind it.
static float quantized_error(enum kvt_format fmt, const uint8_t * block) {
    const float eps = 1.0f / 2048, tiny = 3e-8f; // the latter below F16's normal numbers
    const float step = f16_at(block), off = fmaxf(step * eps, tiny);
    switch (fmt) {
        case KVT_FORMAT_Q8_0: return step * 0.5f + 127 * off;
        case KVT_FORMAT_Q4_0: return step + 8 * off;
        default: return step * 0.5f + 15 * off + fmaxf(f16_at(block + 2) * eps, tiny);
    }
}

// The same for a stored number x of a format that rounds each on its own.
static float rounded_error(enum kvt_format fmt, float x) {
    if (fmt == KVT_FORMAT_F32) { return 0.0f; }
    return fabsf(x) * (fmt == KVT_FORMAT_F16 ? 1.0f / 2048 : 1.0f / 256) +
        6e-8f; // the last: below F16's normal numbers
}

// What a query that is rounded to 16 bits, of its largest number in 32 channels, misses of its own norm:
// sqrt(32)/65534. Queries stay as they are beside keys that are not quantized; there it is only the order of additions.
static float query_error(enum kvt_format fmt) { return fmt >= KVT_FORMAT_Q8_0 ? 8.8e-5f : 2e-5f; }

// Adds to `more` how far each number of a row of ggml's, which is x, can lie from what it was before it was rounded to
// fmt.
static void add_rounding(enum kvt_format fmt, const uint8_t * row, const float * x, size_t n, float * more) {
    float most = 0.0f;
    for (size_t i = 0; i < n; i++) {
        if (fmt >= KVT_FORMAT_Q8_0 && i % 32 == 0) {
            most = quantized_error(fmt, row + kvt_row_bytes(fmt, (int64_t) i));
        }
        more[i] += fmt >= KVT_FORMAT_Q8_0 ? most : rounded_error(fmt, x[i]);
    }
}

// What is known of a cell beside its stored numbers.
struct origin {
    const float * was;     // the row that was stored
    const float * more;    // how far each of its numbers can lie from what it was before; NULL: nowhere
    const float * carried; // the same for each block of each head, and for the head, as a whole; NULL: nothing
};

// Notes the error of a cell's 32 channels (or fewer), or of all of a head's: the block behind the last.
static void note_block(kvt_keys * k, int32_t head, int32_t block, size_t cell, const origin& from) {
    const kvt_page_layout& l = k->layout;
    const bool whole = block == n_blocks_of(l);
    const int32_t c0 = whole ? 0 : block * 32, n = whole || l.geo.d_k - c0 < 32 ? l.geo.d_k - c0 : 32;
    const int32_t at = head * l.geo.d_k + c0;
    const float *x = k->row + at, *was = from.was + at;
    float off = 0.0f, all = 0.0f;
    for (int32_t c = 0; c < n; c++) {
        const float e = from.more ? fabsf(x[c] - was[c]) + from.more[at + c] : x[c] - was[c];
        off += e * e;
        all += x[c] * x[c];
    }
    const float carried = from.carried ? from.carried[head * (n_blocks_of(l) + 1) + block] : 0.0f;
    const float error = (sqrtf(off) + query_error(l.fmt_k) * sqrtf(all) + carried) * 1.00001f;
    float * noted = (float *) kvt_keys_errors(k, head, block) + cell / KVT_SUB;
    if (!(error <= *noted)) {
        *noted = error <= FLT_MAX ? error : INFINITY; // not a number: as bad as can be
    }
}

static void note_cell(kvt_keys * k, size_t cell, const origin& from) {
    const kvt_geometry& geo = k->layout.geo;
    kvt_page_get_f32(&k->layout, k->data, KVT_PART_K, (int32_t) cell, k->row);
    for (int32_t h = 0; h < geo.n_head_kv; h++) {
        for (int32_t b = 0; b <= n_blocks_of(k->layout); b++) { note_block(k, h, b, cell, from); }
    }
}

void kvt_keys_put(struct kvt_keys * k, size_t cell, const float * row) {
    kvt_page_put_f32(&k->layout, k->data, KVT_PART_K, (int32_t) cell, row);
    note_cell(k, cell, { row, NULL, NULL });
}

static std::vector<float> numbers_of(const kvt_keys * k, enum kvt_format fmt, const void * row) {
    std::vector<float> x(n_row_of(k->layout));
    kvt_row_to_f32(fmt, row, x.data(), (int64_t) x.size());
    return x;
}

// a cell as a row of ggml's in the keys' own format
static std::vector<uint8_t> stored_row(const kvt_keys * k, size_t cell) {
    std::vector<uint8_t> row(kvt_row_bytes(k->layout.fmt_k, (int64_t) n_row_of(k->layout)));
    kvt_page_get_row(&k->layout, k->data, KVT_PART_K, (int32_t) cell, k->layout.fmt_k, row.data());
    return row;
}

void kvt_keys_put_row(struct kvt_keys * k, size_t cell, enum kvt_format fmt, const void * row) {
    const enum kvt_format own = k->layout.fmt_k;
    const std::vector<float> x = numbers_of(k, fmt, row);
    std::vector<float> more(x.size());
    add_rounding(fmt, (const uint8_t *) row, x.data(), x.size(), more.data());
    kvt_page_put_row(&k->layout, k->data, KVT_PART_K, (int32_t) cell, fmt, row);
    if (fmt != own) {
        const std::vector<uint8_t> stored = stored_row(k, cell);
        add_rounding(own, stored.data(), numbers_of(k, own, stored.data()).data(), x.size(), more.data());
    }
    note_cell(k, cell, { x.data(), more.data(), NULL });
}

void kvt_keys_copy(struct kvt_keys * k, size_t cell, const struct kvt_keys * from, size_t from_cell) {
    const kvt_geometry &geo = k->layout.geo, &other = from->layout.geo;
    const bool same_heads = geo.n_head_kv == other.n_head_kv && geo.d_k == other.d_k;
    const std::vector<uint8_t> row = stored_row(from, from_cell);
    const std::vector<float> x = numbers_of(from, from->layout.fmt_k, row.data());
    std::vector<float> carried;
    for (int32_t h = 0; h < geo.n_head_kv; h++) {
        for (int32_t b = 0; b <= n_blocks_of(k->layout); b++) {
            carried.push_back(same_heads ? kvt_keys_errors(from, h, b)[from_cell / KVT_SUB] : INFINITY);
        }
    }
    kvt_page_put_row(&k->layout, k->data, KVT_PART_K, (int32_t) cell, from->layout.fmt_k, row.data());
    note_cell(k, cell, { x.data(), NULL, carried.data() });
}

static float norm_of(const float * x, int32_t n) {
    float sum = 0.0f;
    for (int32_t c = 0; c < n; c++) { sum += x[c] * x[c]; }
    return sqrtf(sum);
}

// How much longer errors may have become with a head. It is known by its length as a whole, of which the part that was
// stretched (YaRN scales what it turns) may be half: the square is no less than what that part was stretched by.
static float stretch_of(float before, float after) {
    return before > 0.0f && after > before ? (after / before) * (after / before) : 1.0f;
}

// The turn takes errors from block to block, so that any may hold all of what its head had; of the head they stay what
// they were, and what rounding does to it now comes on top. The turn's own arithmetic (F32) lies within what is counted
// for the query each time.
void kvt_keys_change(struct kvt_keys * k, size_t cell, enum kvt_format fmt, const void * before, const void * after,
    const float * turned, const float * noted) {
    const kvt_geometry& geo = k->layout.geo;
    const int32_t n_blocks = n_blocks_of(k->layout);
    const std::vector<float> read = numbers_of(k, fmt, before), x = numbers_of(k, fmt, after);
    const float * made = turned ? turned : x.data();
    std::vector<float> off(x.size()), more(x.size()), carried;
    kvt_page_get_f32(&k->layout, k->data, KVT_PART_K, (int32_t) cell, off.data());
    for (size_t i = 0; i < x.size(); i++) { off[i] -= read[i]; }
    for (int32_t h = 0; h < geo.n_head_kv; h++) {
        const size_t at = (size_t) h * (size_t) geo.d_k;
        const float stretch = stretch_of(norm_of(read.data() + at, geo.d_k), norm_of(made + at, geo.d_k));
        const float error = noted[kvt_keys_errors(k, h, n_blocks) - k->error + cell / KVT_SUB] +
            norm_of(off.data() + at, geo.d_k);
        carried.insert(carried.end(), (size_t) n_blocks + 1, error * stretch);
    }
    if (!turned) { add_rounding(fmt, (const uint8_t *) after, x.data(), x.size(), more.data()); }
    kvt_page_put_row(&k->layout, k->data, KVT_PART_K, (int32_t) cell, fmt, after);
    note_cell(k, cell, { made, turned ? NULL : more.data(), carried.data() });
}

void kvt_keys_doubt(struct kvt_keys * k, size_t cell) {
    for (int32_t h = 0; h < k->layout.geo.n_head_kv; h++) {
        for (int32_t b = 0; b <= n_blocks_of(k->layout); b++) {
            ((float *) kvt_keys_errors(k, h, b))[cell / KVT_SUB] = INFINITY;
        }
    }
}
