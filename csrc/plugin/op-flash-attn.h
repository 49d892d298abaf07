#pragma once

// FLASH_ATTN_EXT over pages: those of the caches, or temporary ones made of plain K and V.

#include "buffer.h"

// What an attention backend keeps between graphs.
class kvt_flash_attn {
public:
    ~kvt_flash_attn();
    int open(int n_threads);
    void set_n_threads(int n_threads);

    // Whether our kernels compute it (on temporary pages if need be). Learns the head geometry of caches on the way.
    static bool supports(const ggml_tensor * op);

    // 0 or a negative kvt_error. *native is false, and nothing is done, if the operation has to take the fallback.
    int compute(ggml_tensor * op, bool * native);

private:
    int run_streams(ggml_tensor * op, kvt_attention_op * a, kvt_layer * layer, std::vector<uint32_t> * seen,
        uint32_t page_first, uint32_t page_stride);
    int run_cached(ggml_tensor * op, kvt_attention_op * a, kvt_root * k, bool * native);
    int run_plain(ggml_tensor * op, kvt_attention_op * a);
    void account(kvt_domain_state * dom);

    kvt_attention * m_attention = nullptr;
    std::vector<float> m_slopes;
    const void * m_first_array = nullptr; // the layer with which a step begins
    kvt_attention_stats m_seen = {};
};
