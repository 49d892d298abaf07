#pragma once

// The keys of one array, kept apart from its pages: one copy, always in memory, whatever tier the pages' values are on.
// The layout is that of a single large page without values (format.h), head by head over all cells, so that scoring
// every key of a head is one stream through memory.
//
// The bytes count against the store's host budget from the start. Memory is touched as cells are written.
// Threads: cells are written by one thread at a time, while nobody reads them.

#include "store.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_keys {
    struct kvt_store * store;
    struct kvt_page_layout layout; // geo.d_v == 0, geo.page_tokens == all cells
    uint8_t * data;                // [n_head_kv][n_cells/32] subs
    size_t data_bytes;
    size_t n_bytes; // reserved, with what follows
    float * error;  // [n_head_kv][ceil(d_k/32) + 1][ld_error]: see kvt_keys_errors
    size_t ld_error;
    float * row; // a cell's [n_head_kv*d_k], as it is stored
};

// what keys take of the budget; 0: the format cannot hold d_k channels
size_t kvt_keys_bytes(int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt);
// n_cells is rounded up to whole subs. Errors: BUDGET, NOMEM, UNSUPPORTED (the format cannot hold d_k channels).
int kvt_keys_create(
    struct kvt_store * s, int32_t n_head_kv, int32_t d_k, size_t n_cells, enum kvt_format fmt, struct kvt_keys ** out);
void kvt_keys_free(struct kvt_keys * k);
void kvt_keys_clear(struct kvt_keys * k); // all zeros again; the memory goes back to the system

static inline const uint8_t * kvt_keys_sub(const struct kvt_keys * k, int32_t head, size_t sub) {
    return k->data + (size_t) head * k->layout.head_bytes + sub * k->layout.k_sub_bytes;
}

// Writes a cell, [n_head_kv*d_k].
void kvt_keys_put(struct kvt_keys * k, size_t cell, const float * row);
// The same from a row of ggml's that was rounded to fmt before it came, and to the keys' own format before that for all
// that is known: the most that both can have done is noted.
void kvt_keys_put_row(struct kvt_keys * k, size_t cell, enum kvt_format fmt, const void * row);
// The same from a cell of other keys, or of these, with as many channels in all: with what was noted there.
void kvt_keys_copy(struct kvt_keys * k, size_t cell, const struct kvt_keys * from, size_t from_cell);
// The same from what an operation in place, such as a shift of positions, has made of the cell: of `before`, the row of
// fmt that it was read as, `after`, in which every head is turned and perhaps stretched. What is added to the error is
// measured where `turned` is given, [n_head_kv*d_k]: `after` as it was before it was rounded to fmt. NULL: not known,
// the most that rounding can have done is assumed. `noted`: a copy of k->error from before the first change.
void kvt_keys_change(struct kvt_keys * k, size_t cell, enum kvt_format fmt, const void * before, const void * after,
    const float * turned, const float * noted);
// after a cell was written: nothing is known of how it had been rounded
void kvt_keys_doubt(struct kvt_keys * k, size_t cell);

// By sub: how far, at most, a stored key lies from what it was, in 32 channels (Euclidean), with what rounding a query
// to 16 bits and single precision amount to on top. The product of a query with a key of the sub, over these channels,
// is off by at most this much times the query's norm. Block ceil(d_k/32) has the same of all channels together: a turn
// takes errors from block to block, but makes none longer. It grows as cells are written (INFINITY: nothing is known),
// and starts again when the keys are cleared. Groups of 32 subs can be read, to the end of the last one.
static inline const float * kvt_keys_errors(const struct kvt_keys * k, int32_t head, int32_t block) {
    return k->error + (size_t) (head * ((k->layout.geo.d_k + 31) / 32 + 1) + block) * k->ld_error;
}

#ifdef __cplusplus
}
#endif
