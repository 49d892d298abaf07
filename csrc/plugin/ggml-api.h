#pragma once

// The ggml functions that the plug-in calls, found at run time in the ggml that loads it.
//
// Nothing links to ggml: the same binary serves the libraries that llama-cpp-python ships and those of a llama.cpp
// build, whatever their file names. The table is filled once, in ggml_backend_init, before anything else of ours runs.

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

// X(function)
#define KVT_GGML_FUNCTIONS(X)                                                                                          \
    X(ggml_version)                                                                                                    \
    X(ggml_op_name)                                                                                                    \
    X(ggml_type_name)                                                                                                  \
    X(ggml_tensor_overhead)                                                                                            \
    X(ggml_nbytes)                                                                                                     \
    X(ggml_nelements)                                                                                                  \
    X(ggml_row_size)                                                                                                   \
    X(ggml_is_contiguous)                                                                                              \
    X(ggml_get_type_traits)                                                                                            \
    X(ggml_quantize_chunk)                                                                                             \
    X(ggml_init)                                                                                                       \
    X(ggml_free)                                                                                                       \
    X(ggml_new_graph_custom)                                                                                           \
    X(ggml_graph_overhead_custom)                                                                                      \
    X(ggml_build_forward_expand)                                                                                       \
    X(ggml_graph_n_nodes)                                                                                              \
    X(ggml_graph_node)                                                                                                 \
    X(ggml_backend_buffer_init)                                                                                        \
    X(ggml_backend_graph_compute)                                                                                      \
    X(ggml_backend_free)

// these live in the registry library (libggml), the ones above in libggml-base
#define KVT_GGML_REGISTRY_FUNCTIONS(X)                                                                                 \
    X(ggml_backend_dev_by_type)                                                                                        \
    X(ggml_backend_dev_init)                                                                                           \
    X(ggml_backend_dev_supports_op)                                                                                    \
    X(ggml_backend_dev_backend_reg)                                                                                    \
    X(ggml_backend_reg_get_proc_address)

struct kvt_ggml_api {
#define KVT_GGML_SLOT(fn) decltype(&::fn) fn;
    KVT_GGML_FUNCTIONS(KVT_GGML_SLOT)
    KVT_GGML_REGISTRY_FUNCTIONS(KVT_GGML_SLOT)
#undef KVT_GGML_SLOT
};

// valid after kvt_ggml_resolve
extern kvt_ggml_api g_ggml;

// Finds every function in the ggml around `caller` (an address inside the library that called us), and checks that its
// tensors and operations are laid out as the headers we were compiled with say. Returns 0, or KVT_ERR_VERSION with a
// message in kvt_last_error that names what differs.
int kvt_ggml_resolve(const void * caller);

// a symbol of that ggml beside the table, NULL if it is not exported
void * kvt_ggml_symbol(const char * name);
