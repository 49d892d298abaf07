#pragma once

// K and V that live in plain memory, taken into pages for the time of one attention: what a model without a cache, a
// cross-attention or a conformance test hands us runs through the same kernels as the caches.

#include "ggml-api.h"

#include "../attention/attention.h"

#include <vector>

bool kvt_temporary_pages_can_hold(const ggml_tensor * k_or_v);

class kvt_temporary_pages {
public:
    // k: [d_k, n_kv, n_head_kv, n_streams], v: [d_v, n_kv, n_head_kv, n_streams], any strides. 0, NOMEM or UNSUPPORTED.
    int fill(const ggml_tensor * k, const ggml_tensor * v);
    const kvt_geometry& geometry() const { return m_layout.geo; }
    const kvt_page_source * source() const { return &m_source; }
    uint32_t pages_per_stream() const { return m_per_stream; }

private:
    static int acquire_resident(
        void * ctx, const uint32_t * pages, size_t n, kvt_page_ref * refs, uint32_t * missing, size_t * n_missing);
    static int acquire(void * ctx, uint32_t page, kvt_page_ref * out);
    static void release_many(void * ctx, const kvt_page_ref * refs, size_t n);
    void put(const ggml_tensor * t, kvt_part part);

    kvt_page_layout m_layout = {};
    uint32_t m_per_stream = 0;
    std::vector<uint8_t> m_bytes;
    uint8_t * m_first = nullptr; // 64-byte aligned
    kvt_page_source m_source = {};
};
