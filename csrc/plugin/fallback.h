#pragma once

// Operations on our buffers that are not ours run on ggml's own CPU backend: over plain memory for recurrent states,
// over gathered rows for caches (their nominal layout is laid out in memory, and what the operation changed is put
// back).

#include "buffer.h"

class kvt_fallback {
public:
    ~kvt_fallback();
    void set_n_threads(int n_threads);
    int compute(ggml_tensor * node); // 0 or a negative kvt_error
    // whether the CPU backend knows the operation
    static bool supports(const ggml_tensor * op);

private:
    bool start();
    ggml_backend_t m_cpu = nullptr;
    int m_n_threads = 4;
};
