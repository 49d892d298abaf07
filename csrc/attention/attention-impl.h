#pragma once

// What the files of this folder share: scratch memory, the state of one operation, and the steps of both drivers.

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "../include/kvtier-errors.h"
#include "kernels.h"
#include "segments.h"
#include "team.h"

#define KVT_LOG2E 1.44269504088896341f

// Memory that grows and is kept from op to op. Contents are lost when it grows.
struct kvt_buf {
    void * p;
    size_t n_bytes;
};
void * kvt_buf_need(struct kvt_buf * b, size_t n_bytes); // 64-byte aligned; NULL: out of memory
void kvt_buf_free(struct kvt_buf * b);

// What a mask shows of each 32-token sub-page to each block of queries. Classes: NONE every entry is -inf; FULL every
// entry is 0; MIXED anything else (the mask is added element by element).
enum { KVT_VIS_NONE = 0, KVT_VIS_FULL = 1, KVT_VIS_MIXED = 2 };
#define KVT_VIS_BLOCK 16 // queries per class entry when n_queries > 1
struct kvt_visibility {
    int64_t n_kv, n_queries;
    size_t n_sub, n_blocks; // n_sub = ceil(n_kv/32), n_blocks = ceil(n_queries/KVT_VIS_BLOCK)
    struct kvt_buf cls;     // uint8_t [n_blocks][n_sub]
    struct kvt_buf any;     // uint8_t [n_sub]: 1 if some query sees some of the sub
};
static inline const uint8_t * kvt_vis_row(const struct kvt_visibility * v, size_t block) {
    return (const uint8_t *) v->cls.p + block * v->n_sub;
}
static inline const uint8_t * kvt_vis_any(const struct kvt_visibility * v) { return (const uint8_t *) v->any.p; }
// mask: F16 bits, rows of n_kv entries, `nb_query` bytes from query to query; NULL: everything is visible. A class
// holds for all of n_head masks, `nb_head` bytes apart.
int kvt_visibility_compute(struct kvt_visibility * vis, const void * mask, size_t nb_query, size_t nb_head,
    int64_t n_head, int64_t n_kv, int64_t n_queries, int n_threads);

struct kvt_attention {
    int n_threads;
    struct kvt_attention_stats stats;
    struct kvt_visibility vis;
    struct kvt_buf pages, pieces, q, state, tiles, slots, probs, mass, recall, bounds, lost, summary;
    const uint32_t * pages_read; // of the last op, in `pages`
    size_t n_pages_read;
};

// One operation while it runs.
struct kvt_job {
    struct kvt_attention * a;
    const struct kvt_attention_op * op;
    const struct kvt_kernels * k;
    const struct kvt_visibility * vis;
    int n_threads;
    int n_group;    // query heads per KV head
    int64_t n_rows; // rows per KV head: row = query*n_group + g
    int32_t d_v_pad;
    int32_t subs_per_page;
    size_t n_sub;

    // the visible pages, in order; a missing page's ref has data == NULL
    size_t n_pages, n_missing;
    uint32_t * pages; // page numbers in the array
    struct kvt_page_ref * refs;
    uint32_t * missing;     // positions in pages
    uint8_t * is_missing;   // [n_pages]
    const uint32_t ** lost; // by page of the stream: bits of lost cells, all ones if it is gone (and not in pages);
                            // NULL: none has any

    // the summary's part of every row (see summary-impl.h); sum_m is NULL without one
    float *sum_m, *sum_l, *sum_o; // [n_head_kv][n_rows] ([KVT_SUM_LANES], [d_v_pad])
    float * sum_parts;            // [n_head_kv][n_rows][parts][2]: each part's exponent and sum

    // attention mass (op->mass): weights of n_mass_queries queries, relative to the reference exponent they were
    // computed with
    int64_t n_mass_queries;
    float * probs; // [n_head_kv][n_mass_queries*n_group][ld_probs]
    size_t ld_probs;
    float * probs_m; // [n_head_kv][n_mass_queries*n_group][ld_probs_m], of the subs that were visited
    size_t ld_probs_m;
    float * final_m; // [n_head_kv][n_mass_queries*n_group]: the rows' last exponent and 1/sum
    float * final_f;

    std::atomic<int> error;
    std::atomic<size_t> next;
};

static inline float kvt_job_q_scale(const struct kvt_attention_op * op) {
    return op->softcap != 0.0f ? op->scale / op->softcap : op->scale * KVT_LOG2E;
}
static inline const float * kvt_job_q(const struct kvt_attention_op * op, int64_t query, int head) {
    return (const float *) (op->q + (size_t) query * op->q_nb_query + (size_t) head * op->q_nb_head);
}
static inline const uint16_t * kvt_job_mask(const struct kvt_attention_op * op, int64_t query, int head) {
    return op->mask
        ? (const uint16_t *) (op->mask + (size_t) query * op->mask_nb_query + (size_t) head * op->mask_nb_head)
        : NULL;
}
static inline float kvt_job_slope(const struct kvt_attention_op * op, int head) {
    return (op->slopes ? op->slopes[head] : 1.0f) * KVT_LOG2E;
}
static inline int kvt_job_n_valid(const struct kvt_attention_op * op, size_t sub) {
    const int64_t left = op->n_kv - (int64_t) sub * KVT_SUB;
    return left < KVT_SUB ? (int) left : KVT_SUB;
}
// bits of the sub's cells that are lost
static inline uint32_t kvt_job_lost(const struct kvt_job * j, size_t sub) {
    const uint32_t * words = j->lost ? j->lost[sub / j->subs_per_page] : NULL;
    return words ? words[sub % j->subs_per_page] : 0;
}
static inline void kvt_job_fail(struct kvt_job * j, int code) {
    int none = 0;
    j->error.compare_exchange_strong(none, code);
}
static inline size_t kvt_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static inline const uint8_t * kvt_job_keys(const struct kvt_job * j, int h, size_t sub) {
    return kvt_keys_sub(j->op->keys, h, (size_t) j->op->page_first * j->subs_per_page + sub);
}

// ---- queries.cpp ----

// Rows of all KV heads [n_head_kv], scaled; with the 16-bit form where the operation meets quantized keys
int kvt_queries_prepare(struct kvt_job * j, struct kvt_q_rows ** out);
int kvt_recall_run(struct kvt_job * j); // pins its pages itself
// one row of d values (a multiple of 32) in its 16-bit form: see kvt_q_rows
void kvt_quantize_row(const float * row, int n_blocks, int32_t * pair, float * step, int32_t * sum);

int kvt_decode_run(struct kvt_job * j);
int kvt_prefill_run(struct kvt_job * j);

// ---- pieces.cpp ----

// Visible pages that share no segment (segments.h) with others: what one thread reads in one go, a segment after the
// other. Pages larger than a segment make pieces of several.
struct kvt_piece {
    size_t first, end; // positions in j->pages
    size_t state0;     // number of its first segment's state, of all that the operation has
    size_t n_states;   // segments from its first sub to its last
    size_t sub0;       // first sub of its first page
    size_t n_missing;  // pages that have to be read
};
int kvt_pieces_cut(struct kvt_job * j, struct kvt_piece ** out, size_t * out_n, size_t * out_n_states);
// number of the state of a sub of the piece
static inline size_t kvt_piece_state(const struct kvt_piece * p, size_t sub) {
    size_t state = p->state0;
    for (size_t end = kvt_segment_end(p->sub0); sub >= end && p->n_states > 1; end = kvt_segment_end(end)) state++;
    return state;
}

// ---- rows.cpp ----

// Scores of one sub, of rows row0 .. row0+n_rows-1 of KV head h, become weights; the rows' states move. cls: what these
// rows' queries see of it
void kvt_weigh_sub(const struct kvt_job * j, float * s, size_t ld, int h, int64_t row0, int n_rows, size_t sub, int cls,
    uint32_t lost, const struct kvt_row_state * st);
// A row's state of one segment.
struct kvt_partial {
    const float * m;
    const float * l;
    const float * o;
};
// The state of the segments so far, relative to *m, takes in the next one's.
void kvt_state_join(const struct kvt_job * j, const struct kvt_partial * part, float * m, float * l, float * o);
// All segments of one row, joined first to last; then the sink, dst, and the final exponent and 1/sum for the mass.
struct kvt_row_sum {
    float m;
    float l[KVT_SUM_LANES];
    float * o; // [d_v_pad]
};
void kvt_row_begin(const struct kvt_job * j, struct kvt_row_sum * sum, float * o);
static inline void kvt_row_join(const struct kvt_job * j, struct kvt_row_sum * sum, struct kvt_partial part) {
    kvt_state_join(j, &part, &sum->m, sum->l, sum->o);
}
void kvt_row_end(
    const struct kvt_job * j, struct kvt_row_sum * sum, int head, int64_t query, float * out_m, float * out_f);

// ---- mass.cpp ----

int kvt_mass_prepare(struct kvt_job * j, int64_t n_queries); // takes the memory for n_queries queries
int kvt_mass_apply(struct kvt_job * j);                      // after final_m and final_f are set
// The parts of it. A sub's mass of one query goes to its tokens' figures, and is returned; row r's weights times
// factors[r*ld_factors] are probabilities.
float kvt_mass_take_sub(
    const struct kvt_job * j, int64_t query, size_t sub, bool seen, const float * factors, size_t ld_factors);
void kvt_mass_take_page(const struct kvt_job * j, size_t page, float total);
