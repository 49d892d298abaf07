#pragma once

// Attention over pages: decode and prefill, exact; decode also bounded. Knows the store's formats and page layout
// (store/format.h), and takes pages through kvt_page_source, so that the store's arrays and temporary pages in memory
// are the same to it. Knows nothing of ggml.

#include "../store/format.h"
#include "../store/keys.h"
#include "../store/store.h"
#include "digests.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where pages come from. Same contracts as the functions of store.h with these names; `release_many` may get refs of
// acquire too. Any thread.
struct kvt_page_source {
    void * ctx;
    int (*acquire_resident)(void * ctx, const uint32_t * pages, size_t n, struct kvt_page_ref * refs,
        uint32_t * out_missing, size_t * out_n_missing);
    int (*acquire)(void * ctx, uint32_t page, struct kvt_page_ref * out); // READ
    void (*release_many)(void * ctx, const struct kvt_page_ref * refs, size_t n);
    void (*prefetch)(void * ctx, const uint32_t * pages, size_t n);               // (optional)
    int (*is_ready)(void * ctx, const uint32_t * pages, size_t n, uint8_t * out); // (optional) NULL: all are
};

// Attention mass of one array (a layer's cells of all streams), accumulated over decode steps. Plain arrays that Python
// maps without copies. "Mass of a token": softmax probability summed over query heads, for one query.
struct kvt_mass {
    size_t n_cells, n_pages; // n_pages == number of pages of the array; cells of page p start at p*page_tokens
    float * token_mean;      // [n_cells] decayed mean: mean = decay*mean + (1 - decay)*mass
    float * token_max;       // [n_cells] largest mass of one query so far
    float * page_mean;       // [n_pages]
    float * page_max;        // [n_pages]
    float decay;
    uint64_t n_steps; // queries accumulated
};
int kvt_mass_create(struct kvt_mass ** out, size_t n_pages, int32_t page_tokens, float decay);
void kvt_mass_free(struct kvt_mass * m);
void kvt_mass_clear(struct kvt_mass * m, size_t cell_first, size_t n); // cells that were given to another token

// Bounded recall: every key is scored, values are read only where the probability counts, and what is left out is
// known. Values that are not read count with the mean value of their sub-page (digests.h).
struct kvt_recall_report {
    uint64_t n_rows;                      // query rows (one query of one query head)
    uint64_t tokens_seen, tokens_read;    // per KV head: keys scored, values read
    uint64_t pages_wanted, pages_missing; // of those: had to be read by I/O
    double omitted_sum;           // of the rows' omitted mass: the softmax probability of values that were not read
    double bound_sum;             // the same, with what rounding of the stored keys can hide
    float omitted_max, bound_max; // of one row
};
struct kvt_recall {
    float eps;               // in (0, 1): most mass that a row may leave out
    int64_t budget_tokens;   // most values read per KV head, the whole pages included; 0: no limit. Comes before eps
    int32_t n_first, n_last; // the stream's first and newest visible pages are read whole
    const struct kvt_digests * digests;
    struct kvt_recall_report * report; // added to
};

// One attention of one stream of one layer.
struct kvt_summary_set; // summary.h
struct kvt_attention_op {
    struct kvt_geometry geo; // geo.d_v == 0: V is the first d_v_out channels of K (MLA)
    int32_t d_v_out;         // channels of the output per head (== geo.d_v unless MLA)
    int32_t n_head_q;        // multiple of geo.n_head_kv; KV head of query head h: h / (n_head_q/n_head_kv)
    int64_t n_queries;
    int64_t n_kv;        // cells 0..n_kv-1 of the stream
    uint32_t page_first; // page of cell 0; the stream's pages follow
    float scale;         // score = scale*(q.k), then softcap*tanh(score/softcap) if softcap != 0, then + slope*mask
    float softcap;
    const float * slopes; // (optional) [n_head_q] ALiBi slopes; NULL: 1
    const float * sinks;  // (optional) [n_head_q] an extra logit per head that takes part in the softmax with no value
    const char * q;
    size_t q_nb_query, q_nb_head; // F32 [d_k] rows, strides in bytes
    const char * mask;
    size_t mask_nb_query, mask_nb_head; // (optional) F16 [n_kv] rows; nb_head 0: shared by all heads
    char * dst;
    size_t dst_nb_query, dst_nb_head; // F32 [d_v_out] rows. A query that sees nothing gets zeros
    const struct kvt_page_source * source;
    struct kvt_summary_set * summary; // (optional) stands in for cells that are gone; not used together with slopes
    struct kvt_mass * mass;           // (optional) updated by decode, and by the last query of a prefill
    const struct kvt_keys * keys;     // (optional) the array's keys, kept apart: pages then hold values only
    const struct kvt_recall * recall; // (optional) decode reads values by weight; needs keys, and digests of the array
};

struct kvt_attention; // scratch memory and the chosen kernels; one per backend, one op at a time
int kvt_attention_create(struct kvt_attention ** out, int n_threads);
void kvt_attention_free(struct kvt_attention * a);
void kvt_attention_set_n_threads(struct kvt_attention * a, int n_threads);
// 0, or the first error of the page source, or NOMEM. On error dst is unspecified and no page stays pinned.
int kvt_attention_run(struct kvt_attention * a, const struct kvt_attention_op * op);
// The pages of which the last operation read values, in order.
const uint32_t * kvt_attention_pages(const struct kvt_attention * a, size_t * n);
struct kvt_attention_stats {
    uint64_t n_steps, k_bytes, v_bytes, pages_read, pages_skipped;
};
void kvt_attention_get_stats(const struct kvt_attention * a, struct kvt_attention_stats * out);

// Instruction sets: "scalar", "avx2", "avx512", "avx512vnni", "neon". The best one this processor runs is chosen at
// first use; KVTIER_ISA overrides (an unknown or unsupported name is an error that lists the possible ones).
const char * kvt_isa_active(void);
int kvt_isa_select(const char * name);                // for tests; KVT_ERR_UNSUPPORTED
size_t kvt_isa_list(const char ** out, size_t n_max); // those this processor can run, best first

#ifdef __cplusplus
}
#endif
