#pragma once

// The keys of one array, kept apart from its pages: one copy, always in memory, whatever tier the pages' values are on.
// The layout is that of a single large page without values (format.h), head by head over all cells, so that scoring every
// key of a head is one stream through memory.
//
// The bytes count against the store's host budget from the start. Memory is touched as cells are written.
// Threads: cells are written by one thread at a time, while nobody reads them.

#include "store.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_keys {
    struct kvt_store *     store;
    struct kvt_page_layout layout;    // geo.d_v == 0, geo.page_tokens == all cells
    uint8_t *              data;      // [n_head_kv][n_cells/32] subs
    size_t                 n_bytes;   // reserved
    float *                error_max; // [n_head_kv][ceil(d_k/32)]: by how much storing can have changed a number, at most, so far
};

// n_cells is rounded up to whole subs. Errors: BUDGET, NOMEM, UNSUPPORTED (the format cannot hold d_k channels).
int  kvt_keys_create(struct kvt_store * s, int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, struct kvt_keys ** out);
void kvt_keys_free  (struct kvt_keys * k);
void kvt_keys_clear (struct kvt_keys * k);   // all zeros again; the memory goes back to the system

static inline const uint8_t * kvt_keys_sub(const struct kvt_keys * k, int32_t head, size_t sub) {
    return k->data + (size_t) head*k->layout.head_bytes + sub*k->layout.k_sub_bytes;
}
// after cells [cell, cell + n) were written: brings error_max up to date
void kvt_keys_note_write(struct kvt_keys * k, size_t cell, size_t n);

#ifdef __cplusplus
}
#endif
