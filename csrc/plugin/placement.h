#pragma once

// What a policy in the host program says and asks of pages: where they are, moves and formats, how much each is wanted,
// and what one holds.
//
// Threads: any. Every call holds the layers (layers.h), so that none goes meanwhile; the calls that move or read pages
// wait for I/O.

#include "keep.h"
#include "layers.h"

class kvt_placement {
public:
    kvt_placement(kvt_store * store, bool is_lossy, const kvt_layers& layers, kvt_keep& keep, kvt_failures& failures)
        : m_store(store), m_is_lossy(is_lossy), m_layers(layers), m_keep(keep), m_failures(failures) {}

    // see kvtier.h for all of these
    int pages(uint32_t index, uint32_t array, size_t n_max, uint8_t * tier, uint8_t * fmt_k, uint8_t * fmt_v,
        uint64_t * last_use) const;
    int move(uint32_t array, const uint32_t * pages, size_t n, int to_tier, size_t * n_done);
    int reencode(uint32_t array, const uint32_t * pages, size_t n, int fmt_k, int fmt_v, size_t * n_done);
    int set_keep(uint32_t array, const float * scores, size_t n);
    int read_page(uint32_t array, uint32_t page, int part, float * out, size_t n);

    // every page that may leave the host goes to disk; a failure is one of the step's
    int evict_all();

private:
    int apply(const std::vector<kvt_move>& moves, size_t * n_done);

    kvt_store * m_store;
    bool m_is_lossy;
    const kvt_layers& m_layers;
    kvt_keep& m_keep;
    kvt_failures& m_failures;
};
