#pragma once

// The parts of a summary, and what the drivers call.

#include "attention-impl.h"
#include "summary.h"

#include <memory>
#include <vector>

// Some cells of all KV heads. With a basis they are coordinates, and layout.geo has the compressed dimensions.
struct kvt_summary_part {
    struct kvt_page_layout layout, basis_layout, var_layout;
    std::unique_ptr<uint8_t[]> cells, basis, var; // page bytes behind at()'s alignment; basis and var may be NULL
    std::vector<float> bias;                      // [n_head_kv][page_tokens] log2 of counts; -inf behind the last cell
    std::vector<float> mean_k, mean_v;            // [n_head_kv][d_k], [n_head_kv][d_v_pad]; with a basis
    size_t n_bytes;
};

struct kvt_summary_set {
    struct kvt_geometry geo; // of the array; page_tokens is of no meaning
    int32_t d_v_pad;
    std::vector<std::shared_ptr<const kvt_summary_part>>
        parts;                // cells first, then groups; a later set may share groups
    std::vector<float> mass;  // [parts]
    size_t n_bytes, n_shared; // n_shared: bytes of parts of the set before
};

static inline const uint8_t * kvt_summary_at(const std::unique_ptr<uint8_t[]>& p) {
    return (const uint8_t *) (((uintptr_t) p.get() + 63) & ~(uintptr_t) 63);
}

int kvt_summary_run(struct kvt_job * j); // fills j->sum_*; nothing to do without a summary
// the partial state of a row of a KV head
static inline struct kvt_partial kvt_summary_partial(const struct kvt_job * j, int h, int64_t row) {
    const size_t at = (size_t) h * j->n_rows + (size_t) row;
    return { j->sum_m + at, j->sum_l + at * KVT_SUM_LANES, j->sum_o + at * j->d_v_pad };
}
void kvt_summary_add_mass(struct kvt_job * j); // after final_m and final_f are set: the queries' mass goes to the parts
