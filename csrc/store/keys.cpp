#include "keys.h"

#include "../include/kvtier-errors.h"

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

int kvt_keys_create(struct kvt_store * s, int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, struct kvt_keys ** out) {
    kvt_page_layout layout;
    int r = make_layout(n_head_kv, d_k, n_cells, fmt, &layout);
    if (r != KVT_ERR_OK) {
        return r;
    }
    const size_t n_bytes = layout.page_bytes + SLACK_BYTES;
    r = kvt_store_reserve(s, (int64_t) n_bytes);
    if (r != KVT_ERR_OK) {
        return r;
    }
    kvt_keys * k = (kvt_keys *) calloc(1, sizeof(kvt_keys));
    float * steps = (float *) calloc((size_t) n_head_kv*(size_t) ((d_k + 31)/32), sizeof(float));
    void * data = k && steps ? mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (data == MAP_FAILED) {
        free(k);
        free(steps);
        kvt_store_reserve(s, -(int64_t) n_bytes);
        return KVT_ERR_NOMEM;
    }
    madvise(data, n_bytes, MADV_HUGEPAGE); // one stream over megabytes; a kernel that refuses only makes it slower
    *k = { s, layout, (uint8_t *) data, n_bytes, steps };
    *out = k;
    return KVT_ERR_OK;
}

void kvt_keys_free(struct kvt_keys * k) {
    if (!k) {
        return;
    }
    munmap(k->data, k->n_bytes);
    kvt_store_reserve(k->store, -(int64_t) k->n_bytes);
    free(k->error_max);
    free(k);
}

void kvt_keys_clear(struct kvt_keys * k) {
    if (madvise(k->data, k->n_bytes, MADV_DONTNEED) != 0) { // of anonymous memory: zeros at the next touch
        memset(k->data, 0, k->n_bytes);
    }
    memset(k->error_max, 0, (size_t) k->layout.geo.n_head_kv*(size_t) ((k->layout.geo.d_k + 31)/32)*sizeof(float));
}

static float f16_at(const uint8_t * p) {
    float x;
    kvt_row_to_f32(KVT_FORMAT_F16, p, &x, 1);
    return x < 0 ? -x : x;
}

// Of one token's numbers of a quantized block: half a step, or a whole one where the largest is clipped (Q4_0), and what
// rounding step and minimum to 11 bits does. `at`: the token's step, the minimum 64 bytes behind.
static float quantized_error(enum kvt_format fmt, const uint8_t * at) {
    const float step = f16_at(at), eps = 1.0f/2048;
    switch (fmt) {
        case KVT_FORMAT_Q8_0: return step*(0.5f + 127*eps);
        case KVT_FORMAT_Q4_0: return step*(1.0f + 8*eps);
        default:              return step*(0.5f + 15*eps) + f16_at(at + 2*KVT_SUB)*eps;
    }
}

static void raise(float * most, float x) {
    *most = x > *most ? x : *most;
}

static void note_quantized(kvt_keys * k, int32_t head, size_t cell) {
    const kvt_page_layout & l = k->layout;
    const int32_t n_blocks = l.geo.d_k/32;
    const size_t  block    = l.k_sub_bytes/(size_t) n_blocks;
    const uint8_t * at = kvt_keys_sub(k, head, cell/KVT_SUB) + 2*(cell % KVT_SUB); // a block begins with the steps of its tokens
    for (int32_t b = 0; b < n_blocks; b++) {
        raise(&k->error_max[head*n_blocks + b], quantized_error(l.fmt_k, at + (size_t) b*block));
    }
}

static void note_rounded(kvt_keys * k, int32_t head, size_t cell) {
    const kvt_page_layout & l = k->layout;
    const int32_t n_blocks = (l.geo.d_k + 31)/32;
    const float   eps      = l.fmt_k == KVT_FORMAT_F16 ? 1.0f/2048 : 1.0f/256;
    const uint8_t * at = kvt_keys_sub(k, head, cell/KVT_SUB) + 2*(cell % KVT_SUB);
    for (int32_t c = 0; c < l.geo.d_k; c++) {
        float x;
        kvt_row_to_f32(l.fmt_k, at + (size_t) c*2*KVT_SUB, &x, 1);
        raise(&k->error_max[head*n_blocks + c/32], (x < 0 ? -x : x)*eps + 6e-8f); // the last: below F16's normal numbers
    }
}

void kvt_keys_note_write(struct kvt_keys * k, size_t cell, size_t n) {
    if (k->layout.fmt_k == KVT_FORMAT_F32) {
        return;
    }
    for (int32_t h = 0; h < k->layout.geo.n_head_kv; h++) {
        for (size_t c = cell; c < cell + n; c++) {
            k->layout.fmt_k >= KVT_FORMAT_Q8_0 ? note_quantized(k, h, c) : note_rounded(k, h, c);
        }
    }
}
