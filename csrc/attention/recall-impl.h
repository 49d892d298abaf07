#pragma once

// One bounded step while it runs: what its driver (recall.cpp) and the choice of what is read (recall-choice.cpp)
// share.

#include "attention-impl.h"

#include <algorithm>

enum { MAX_SEGMENTS = 32, MAX_THREADS = 32 };

enum : uint8_t { SUB_HIDDEN, SUB_WHOLE, SUB_OPEN, SUB_LEFT_OUT };

struct recall {
    struct kvt_job * j;
    const struct kvt_recall * how;
    struct kvt_q_rows * q;           // [n_head_kv]
    size_t n_all;                    // rows of all KV heads: KV head h has rows h*n_rows ..
    size_t n_pages;                  // of the stream's cells 0..n_kv-1, seen or not
    size_t shift;                    // where the stream's first sub lies within its group of digests
    size_t segment_subs, n_segments; // a segment is some groups of digests

    uint8_t * use;     // [n_sub]
    uint8_t * costly;  // [n_pages]: has to be read by I/O
    uint8_t * wanted;  // [n_pages]
    int32_t * slot;    // [n_pages]: position in refs, -1
    uint32_t * open;   // [n_head_kv][n_sub]: subs that tokens are picked from, in order
    size_t * n_open;   // [n_head_kv]
    uint8_t * dropped; // [n_head_kv][n_sub]
    uint32_t * picked; // [n_head_kv][n_sub]
    float * weight;    // [n_all][ld_left]: by sub + shift, its weight
    float * left;      // [n_all][ld_left]: what of it is left out
    size_t ld_left;
    float * segment_sum; // [n_segments][n_all]
    float *m, *l, *sink, *threshold,
        *left_out;             // [n_all]; m: what weights are relative to; left_out: by whole pages and subs
    float * to_probability;    // [n_all]: factor of a weight
    float * q_norm;            // [n_all][ceil(d_k/32) + 1]: of a row's query, by 32 channels, and as a whole
    float *at_most, *at_least; // [n_segments][n_all]: what is left out, and what is read, with keys as they were
    float * sub_mass;          // [n_mass_queries][n_sub]
    bool again;                // weights overflowed: they are computed once more, relative to a larger m
    int n_again;
    float * sub_threshold; // [n_all]: subs below it, in every row of a KV head, are dropped
    float * scratch;       // [n_all][ld_left]
    float * o;             // [n_segments + 1][n_all][d_v_pad]

    uint32_t * asked;     // [n_asked]: costly pages that may be left out
    float * asked_weight; // [n_asked][n_all]
    size_t n_asked;

    std::atomic<uint64_t> tokens_read, k_bytes, v_bytes, pages_missing;
    std::atomic<uint32_t> taken[MAX_THREADS]; // of each thread's share of the tasks
    std::atomic<uint32_t> arrived, turn;
};

// Tasks over segments. Every thread has a block of consecutive segments, the same in each stage, so that what it wrote
// in one stage is in its own cache in the next; a thread that is done helps the others. `n_each`: tasks per segment;
// they are gone through one after the other over the whole block.
static inline bool next_segment(struct recall * r, int ith, int nth, size_t n_each, size_t * segment, size_t * which) {
    for (int k = 0; k < nth; k++) {
        const size_t owner = (size_t) ((ith + k) % nth);
        const size_t first = owner * r->n_segments / (size_t) nth,
                     n = (owner + 1) * r->n_segments / (size_t) nth - first;
        const size_t task = r->taken[owner].load(std::memory_order_relaxed) < n * n_each
            ? r->taken[owner].fetch_add(1, std::memory_order_relaxed)
            : n * n_each;
        if (task >= n * n_each) continue;
        *segment = first + task % n;
        *which = task / n;
        return true;
    }
    return false;
}

static inline float * weights_of(const struct recall * r, size_t row) { return r->j->probs + row * r->j->ld_probs; }
static inline float total_of(const struct recall * r, size_t row) { return r->l[row] + r->sink[row]; }

// of the stream's first sub, among the groups of digests and of errors
static inline size_t first_group_of(const struct recall * r) {
    return ((size_t) r->j->op->page_first * r->j->subs_per_page) / KVT_SUB;
}

static inline void segment_subs(const struct recall * r, size_t segment, size_t * first, size_t * end) {
    const size_t a = segment * r->segment_subs, b = a + r->segment_subs;
    *first = a > r->shift ? a - r->shift : 0;
    *end = b - r->shift < r->j->n_sub ? b - r->shift : r->j->n_sub;
}

// The choice, stage by stage. All threads call a stage with an ith; the others are called by one.
int kvt_recall_classify(struct recall * r); // whole, open and hidden sub-pages, and pages that need I/O
void kvt_recall_after_score(struct recall * r);
void kvt_recall_sum_rows(struct recall * r, int ith, int nth);
void kvt_recall_leave_pages_out(struct recall * r);
void kvt_recall_set_sub_thresholds(struct recall * r, int ith, int nth);
void kvt_recall_drop_subs(struct recall * r, int ith, int nth);
void kvt_recall_set_thresholds(struct recall * r, int ith, int nth);
void kvt_recall_keep_budgets(struct recall * r, int ith, int nth);
void kvt_recall_pick(struct recall * r, int ith, int nth);
