#include "keys.h"

#include "../include/kvtier-errors.h"

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>

static int make_layout(int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, kvt_page_layout * out) {
    const kvt_geometry one_sub = { n_head_kv, d_k, 0, KVT_SUB };
    const int r = kvt_page_layout_init(out, &one_sub, fmt, fmt);
    if (r != KVT_ERR_OK) {
        return r;
    }
    const size_t n_subs = (n_cells + KVT_SUB - 1)/KVT_SUB;
    if (n_cells == 0 || n_subs > INT32_MAX/KVT_SUB) {
        return KVT_ERR_INVALID;
    }
    out->geo.page_tokens = (int32_t) (n_subs*KVT_SUB);
    out->head_bytes      = (n_subs*out->k_sub_bytes + 4095)/4096*4096;
    out->page_bytes      = (size_t) n_head_kv*out->head_bytes;
    return KVT_ERR_OK;
}

// room behind the last key, for prefetches of what would follow
static const size_t SLACK_BYTES = 16384;

static int32_t n_blocks_of(const kvt_page_layout & l) {
    return (l.geo.d_k + 31)/32;
}

static size_t ld_error_of(const kvt_page_layout & l) {
    return ((size_t) l.geo.page_tokens/KVT_SUB/KVT_SUB + 2)*KVT_SUB;
}

static size_t n_error_of(const kvt_page_layout & l) {
    return (size_t) (l.geo.n_head_kv*n_blocks_of(l))*ld_error_of(l);
}

static size_t n_row_of(const kvt_page_layout & l) {
    return (size_t) l.geo.n_head_kv*(size_t) l.geo.d_k;
}

static size_t bytes_of(const kvt_page_layout & l) {
    return l.page_bytes + SLACK_BYTES + (n_error_of(l) + n_row_of(l))*sizeof(float);
}

size_t kvt_keys_bytes(int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt) {
    kvt_page_layout layout;
    return make_layout(n_head_kv, d_k, n_cells, fmt, &layout) == KVT_ERR_OK ? bytes_of(layout) : 0;
}

int kvt_keys_create(struct kvt_store * s, int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, struct kvt_keys ** out) {
    kvt_page_layout layout;
    int r = make_layout(n_head_kv, d_k, n_cells, fmt, &layout);
    if (r != KVT_ERR_OK) {
        return r;
    }
    const size_t n_error    = n_error_of(layout);
    const size_t data_bytes = layout.page_bytes + SLACK_BYTES;
    const size_t n_bytes    = bytes_of(layout);
    r = kvt_store_reserve(s, (int64_t) n_bytes);
    if (r != KVT_ERR_OK) {
        return r;
    }
    kvt_keys * k = (kvt_keys *) calloc(1, sizeof(kvt_keys));
    float * numbers = (float *) calloc(n_error + n_row_of(layout), sizeof(float));
    void * data = k && numbers ? mmap(NULL, data_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
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
    if (!k) {
        return;
    }
    munmap(k->data, k->data_bytes);
    kvt_store_reserve(k->store, -(int64_t) k->n_bytes);
    free(k->error);
    free(k);
}

void kvt_keys_clear(struct kvt_keys * k) {
    if (madvise(k->data, k->data_bytes, MADV_DONTNEED) != 0) { // of anonymous memory: zeros at the next touch
        memset(k->data, 0, k->data_bytes);
    }
    memset(k->error, 0, n_error_of(k->layout)*sizeof(float));
}

static float f16_at(const uint8_t * p) {
    float x;
    kvt_row_to_f32(KVT_FORMAT_F16, p, &x, 1);
    return x < 0 ? -x : x;
}

// How far a number of a token's quantized block can lie from what it was: half a step, or a whole one where the largest is
// clipped (Q4_0), and what rounding step and minimum to 11 bits does. `at`: the token's step, the minimum 64 bytes behind.
static float quantized_error(enum kvt_format fmt, const uint8_t * at) {
    const float step = f16_at(at), eps = 1.0f/2048;
    switch (fmt) {
        case KVT_FORMAT_Q8_0: return step*(0.5f + 127*eps);
        case KVT_FORMAT_Q4_0: return step*(1.0f + 8*eps);
        default:              return step*(0.5f + 15*eps) + f16_at(at + 2*KVT_SUB)*eps;
    }
}

// The same for a stored number x of a format that rounds each on its own.
static float rounded_error(enum kvt_format fmt, float x) {
    if (fmt == KVT_FORMAT_F32) {
        return 0.0f;
    }
    return fabsf(x)*(fmt == KVT_FORMAT_F16 ? 1.0f/2048 : 1.0f/256) + 6e-8f; // the last: below F16's normal numbers
}

// What a query that is rounded to 16 bits, of its largest number in 32 channels, misses of its own norm: sqrt(32)/65534. Queries
// stay as they are beside keys that are not quantized; there it is only the order of additions.
static float query_error(enum kvt_format fmt) {
    return fmt >= KVT_FORMAT_Q8_0 ? 8.8e-5f : 2e-5f;
}

// Notes the error of a cell's 32 channels (or fewer); `was` NULL: not known.
static void note_block(kvt_keys * k, int32_t head, int32_t block, size_t cell, const float * was) {
    const kvt_page_layout & l = k->layout;
    const int32_t c0 = block*32, n = l.geo.d_k - c0 < 32 ? l.geo.d_k - c0 : 32;
    const float * x = k->row + head*l.geo.d_k + c0;
    const bool    quantized = l.fmt_k >= KVT_FORMAT_Q8_0;
    const uint8_t * at = kvt_keys_sub(k, head, cell/KVT_SUB) + (size_t) block*(l.k_sub_bytes/(size_t) n_blocks_of(l)) + 2*(cell % KVT_SUB);
    const float most = quantized && !was ? quantized_error(l.fmt_k, at) : 0.0f; // a block begins with the steps of its tokens
    float off = 0.0f, all = 0.0f;
    for (int32_t c = 0; c < n; c++) {
        const float e = was ? x[c] - was[c] : quantized ? most : rounded_error(l.fmt_k, x[c]);
        off += e*e;
        all += x[c]*x[c];
    }
    const float error = (sqrtf(off) + query_error(l.fmt_k)*sqrtf(all))*1.00001f;
    float * noted = (float *) kvt_keys_errors(k, head, block) + cell/KVT_SUB;
    if (!(error <= *noted)) {
        *noted = error <= FLT_MAX ? error : INFINITY; // not a number: as bad as can be
    }
}

static void note_cell(kvt_keys * k, size_t cell, const float * was) {
    const kvt_geometry & geo = k->layout.geo;
    kvt_page_get_f32(&k->layout, k->data, KVT_PART_K, (int32_t) cell, k->row);
    for (int32_t h = 0; h < geo.n_head_kv; h++) {
        for (int32_t b = 0; b < n_blocks_of(k->layout); b++) {
            note_block(k, h, b, cell, was ? was + h*geo.d_k + b*32 : NULL);
        }
    }
}

void kvt_keys_put(struct kvt_keys * k, size_t cell, const float * row) {
    kvt_page_put_f32(&k->layout, k->data, KVT_PART_K, (int32_t) cell, row);
    note_cell(k, cell, row);
}

void kvt_keys_note_write(struct kvt_keys * k, size_t cell, size_t n) {
    for (size_t c = cell; c < cell + n; c++) {
        note_cell(k, c, NULL);
    }
}
