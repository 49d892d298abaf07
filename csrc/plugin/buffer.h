#pragma once

// The buffer type of the device's caches. A buffer is a reserved address range: recurrent states and whatever else
// llama.cpp puts there use it as plain memory; the K and V caches own ranges of it that are never touched, because
// their bytes live in pages. A cache tensor is recognised by its name once, when llama.cpp initialises it, and by its
// address ever after.

#include "domain.h"
#include "ggml-api.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct kvt_buffer;

// A K or V cache tensor: [n_embd, n_cells, n_streams] of its nominal type.
struct kvt_root {
    kvt_buffer * buffer;
    std::string key; // the same for K and V of one layer
    int layer;
    kvt_part part;
    ggml_type type;
    int nominal; // the storage format of the same name, or -1
    char * base; // nominal address
    size_t n_bytes;
    int64_t n_embd, n_cells, n_streams;
    size_t row_bytes; // of the nominal type
    struct kvt_cache_layer * cache;
};

// K and V of one layer. `layer` is made when the first attention shows the head geometry, or at the first access.
struct kvt_cache_layer {
    kvt_root * k = nullptr;
    kvt_root * v = nullptr; // NULL: V is a view of K
    int32_t n_head_kv = 0, d_k = 0, d_v = 0;
    kvt_layer * layer = nullptr;
};

struct kvt_buffer {
    std::shared_ptr<kvt_domain_state> domain; // set with the first cache tensor
    char * base = nullptr;
    size_t n_bytes = 0;
    bool is_cache = false; // holds caches or recurrent states: every op on it must run here

    // a failure where ggml has no way to report one (byte access): the next graph on these caches returns it
    std::atomic<int> pending{ 0 };

    std::mutex mutex;                             // guards the making of layers
    std::vector<std::unique_ptr<kvt_root>> roots; // sorted by base
    std::vector<std::unique_ptr<kvt_cache_layer>> layers;
};

ggml_backend_buffer_type_t kvt_buffer_type(void);
bool kvt_is_our_buffer(ggml_backend_buffer_t buffer);

// the buffer a tensor (or the tensor it views) lives in, NULL if it is not ours
kvt_buffer * kvt_buffer_of(const ggml_tensor * t);
// the cache whose pages hold this tensor's bytes, or NULL
kvt_root * kvt_root_of(const ggml_tensor * t);

// Learns the heads of a layer. Before the layer's pages exist this decides their layout; afterwards it only compares.
// Returns true if the layer has, or will get, this geometry. v may be NULL or the K root itself (MLA).
bool kvt_cache_propose(kvt_root * k, kvt_root * v, int64_t n_head_kv, int64_t d_k, int64_t d_v);
// The layer's pages, made now if need be (with one head if nothing is known). 0 or a negative kvt_error.
int kvt_cache_open(kvt_cache_layer * cache, kvt_layer ** out);

int kvt_format_of_type(ggml_type type); // -1: none of ours
