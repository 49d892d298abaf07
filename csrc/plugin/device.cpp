// The ggml device KVT0 and its backend: what of a graph runs here, and in which order.

#include "device.h"
#include "buffer.h"
#include "fallback.h"
#include "last-error.h"
#include "log.h"
#include "op-flash-attn.h"
#include "op-set-rows.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include <unistd.h>

//
// context
//

struct backend_context {
    kvt_flash_attn attention;
    kvt_fallback fallback;
};

//
// ops
//

static bool is_view_op(enum ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
        op == GGML_OP_TRANSPOSE;
}

// Caches and states: whatever touches them has to run here, or the scheduler aborts. A dry run's tensors have no
// address yet and share a buffer of size zero with the weights that the loader asks about; only the latter have dotted
// names.
static bool lives_in_cache(const ggml_tensor * t) {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    const ggml_backend_buffer_t dry = root->buffer ? root->buffer : t->buffer;
    if (dry && dry->size == 0 && dry->buft == kvt_buffer_type()) {
        return root->op == GGML_OP_NONE && !strchr(root->name, '.');
    }
    const kvt_buffer * buffer = kvt_buffer_of(t);
    return buffer && buffer->is_cache;
}

static bool touches_cache(const ggml_tensor * op) {
    if (lives_in_cache(op)) { return true; }
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i] && lives_in_cache(op->src[i])) { return true; }
    }
    return false;
}

// In a buffer of another backend that outlives a step: the cache of a layer that was not given to us (fewer layers with
// -ngl, or -nkvo). Its own backend computes with it as it lies; we would copy all of it into pages at every step.
static bool lives_elsewhere(const ggml_tensor * t) {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    const ggml_backend_buffer_t buffer = root->buffer ? root->buffer : t->buffer;
    return buffer && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE && !kvt_is_our_buffer(buffer);
}

static bool is_native(const ggml_tensor * op) {
    if (op->op == GGML_OP_SET_ROWS) { return kvt_set_rows_supported(op) && !lives_elsewhere(op); }
    return op->op == GGML_OP_FLASH_ATTN_EXT && kvt_flash_attn::supports(op) && !lives_elsewhere(op->src[1]) &&
        !lives_elsewhere(op->src[2]);
}

// 0 or a negative kvt_error
static int compute_node(backend_context * ctx, ggml_tensor * node) {
    if (node->op == GGML_OP_SET_ROWS && kvt_set_rows_supported(node)) { return kvt_set_rows(node); }
    if (node->op == GGML_OP_FLASH_ATTN_EXT && kvt_flash_attn::supports(node)) {
        bool native = true;
        const int rc = ctx->attention.compute(node, &native);
        if (rc != KVT_OK || native) { return rc; }
    }
    return ctx->fallback.compute(node);
}

// A failure of an earlier byte access to the caches of this operation, which could not be reported then.
static int take_pending(const ggml_tensor * node) {
    const kvt_root * root = kvt_root_of(node);
    for (int i = 0; !root && i < GGML_MAX_SRC; i++) { root = node->src[i] ? kvt_root_of(node->src[i]) : nullptr; }
    return root ? root->buffer->pending.exchange(KVT_OK) : (int) KVT_OK;
}

//
// backend interface
//

static const char * backend_get_name(ggml_backend_t backend) {
    GGML_UNUSED(backend);
    return "KVT0";
}

static void backend_free(ggml_backend_t backend) {
    delete static_cast<backend_context *>(backend->context);
    delete backend;
}

static enum ggml_status compute_graph(backend_context * ctx, ggml_cgraph * graph) {
    const int n_nodes = g_ggml.ggml_graph_n_nodes(graph);
    for (int i = 0; i < n_nodes; i++) {
        ggml_tensor * node = g_ggml.ggml_graph_node(graph, i);
        if (is_view_op(node->op) || g_ggml.ggml_nelements(node) == 0 || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;
        }
        int rc = take_pending(node);
        rc = rc == KVT_OK ? compute_node(ctx, node) : rc;
        if (rc != KVT_OK) {
            kvt_log_error("kvtier: %s of %s: %s: %s\n", g_ggml.ggml_op_name(node->op), node->name, kvt_error_name(rc),
                kvt_fail_text());
            return rc == KVT_ERR_NOMEM ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    try { // no exception may cross into ggml: memory that runs out is an answer like any other
        return compute_graph(static_cast<backend_context *>(backend->context), graph);
    } catch (const std::bad_alloc&) {
        kvt_log_error("kvtier: out of memory\n");
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception& err) {
        kvt_log_error("kvtier: %s\n", err.what());
        return GGML_STATUS_FAILED;
    }
}

static const ggml_backend_i backend_interface = {
    /* .get_name            = */ backend_get_name,
    /* .free                = */ backend_free,
    /* .set_tensor_async    = */ NULL,
    /* .get_tensor_async    = */ NULL,
    /* .set_tensor_2d_async = */ NULL,
    /* .get_tensor_2d_async = */ NULL,
    /* .cpy_tensor_async    = */ NULL,
    /* .synchronize         = */ NULL,
    /* .graph_plan_create   = */ NULL,
    /* .graph_plan_free     = */ NULL,
    /* .graph_plan_update   = */ NULL,
    /* .graph_plan_compute  = */ NULL,
    /* .graph_compute       = */ backend_graph_compute,
    /* .event_record        = */ NULL,
    /* .event_wait          = */ NULL,
    /* .graph_optimize      = */ NULL,
};

static ggml_guid_t backend_guid(void) {
    static ggml_guid guid = { 0x6b, 0x76, 0x74, 0x69, 0x65, 0x72, 0x2d, 0x70, 0x61, 0x67, 0x65, 0x64, 0x2d, 0x4b, 0x56,
        0x30 };
    return &guid;
}

static void set_n_threads(ggml_backend_t backend, int n_threads) {
    backend_context * ctx = static_cast<backend_context *>(backend->context);
    ctx->attention.set_n_threads(n_threads);
    ctx->fallback.set_n_threads(n_threads);
}

//
// device interface
//

static const char * device_get_name(ggml_backend_dev_t dev) {
    GGML_UNUSED(dev);
    return "KVT0";
}

static const char * device_get_description(ggml_backend_dev_t dev) {
    GGML_UNUSED(dev);
    return "kvtier: KV cache in pages on tiers";
}

static void device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    GGML_UNUSED(dev);
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    *free = (size_t) sysconf(_SC_AVPHYS_PAGES) * page;
    *total = (size_t) sysconf(_SC_PHYS_PAGES) * page;
}

static enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t dev) {
    GGML_UNUSED(dev);
    return GGML_BACKEND_DEVICE_TYPE_GPU; // the KV cache follows the layers, and layers go to GPUs
}

static void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    memset(props, 0, sizeof(*props));
    props->name = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type = device_get_type(dev);
    device_get_memory(dev, &props->memory_free, &props->memory_total);
}

static void log_start_failure(int rc) {
    const char * names[8];
    std::string list;
    const size_t n = kvt_isa_list(names, 8);
    for (size_t i = 0; i < n && i < 8; i++) { list += (i ? ", " : "") + std::string(names[i]); }
    const char * wanted = getenv("KVTIER_ISA");
    kvt_log_error("kvtier: cannot start the attention: %s (KVTIER_ISA is '%s'; this processor runs %s)\n",
        kvt_error_message(rc), wanted ? wanted : "", list.c_str());
}

static ggml_backend_dev_t computing_device(void);

static ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char * params) {
    GGML_UNUSED(dev);
    GGML_UNUSED(params);
    try {
        std::unique_ptr<backend_context> ctx(new backend_context);
        const int rc = ctx->attention.open((int) sysconf(_SC_NPROCESSORS_ONLN));
        if (rc != KVT_OK) {
            log_start_failure(rc);
            return nullptr;
        }
        ggml_backend_t backend = new ggml_backend{ /* .guid = */ backend_guid(), /* .iface = */ backend_interface,
            /* .device = */ computing_device(), /* .context = */ ctx.get() };
        ctx.release();
        return backend;
    } catch (const std::bad_alloc&) { return nullptr; }
}

static ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    GGML_UNUSED(dev);
    return kvt_buffer_type();
}

static bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    GGML_UNUSED(dev);
    if (is_view_op(op->op)) { return true; }
    return is_native(op) || (touches_cache(op) && kvt_fallback::supports(op));
}

// What a step hands us lies in memory of the host, and is read where it is.
static bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    GGML_UNUSED(dev);
    return buft == kvt_buffer_type() || (buft->iface.is_host && buft->iface.is_host(buft));
}

static ggml_backend_device make_device(ggml_backend_buffer_type_t (*buffer_type)(ggml_backend_dev_t)) {
    return {
        /* .iface   = */ {
            /* .get_name             = */ device_get_name,
            /* .get_description      = */ device_get_description,
            /* .get_memory           = */ device_get_memory,
            /* .get_type             = */ device_get_type,
            /* .get_props            = */ device_get_props,
            /* .init_backend         = */ device_init_backend,
            /* .get_buffer_type      = */ buffer_type,
            /* .get_host_buffer_type = */ NULL,
            /* .buffer_from_host_ptr = */ NULL,
            /* .supports_op          = */ device_supports_op,
            /* .supports_buft        = */ device_supports_buft,
            /* .offload_op           = */ NULL,
            /* .event_new            = */ NULL,
            /* .event_free           = */ NULL,
            /* .event_synchronize    = */ NULL,
        },
        /* .reg     = */ kvt_registry(),
        /* .context = */ NULL,
    };
}

ggml_backend_dev_t kvt_device(void) {
    static ggml_backend_device device = make_device(device_get_buffer_type);
    return &device;
}

// llama.cpp allocates caches in the buffer type of a layer's device, which is the one above; but what lies between the
// operations of a step in that of the backend's device. The backend therefore carries this one: its own results lie in
// the CPU backend's memory, so that nothing is copied between the two.
static ggml_backend_buffer_type_t computing_buffer_type(ggml_backend_dev_t dev) {
    ggml_backend_dev_t cpu = g_ggml.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return cpu ? cpu->iface.get_buffer_type(cpu) : device_get_buffer_type(dev);
}

static ggml_backend_dev_t computing_device(void) {
    static ggml_backend_device device = make_device(computing_buffer_type);
    return &device;
}

//
// registry interface
//

static const char * registry_get_name(ggml_backend_reg_t reg) {
    GGML_UNUSED(reg);
    return "KVT";
}

static size_t registry_get_device_count(ggml_backend_reg_t reg) {
    GGML_UNUSED(reg);
    return 1;
}

static ggml_backend_dev_t registry_get_device(ggml_backend_reg_t reg, size_t index) {
    GGML_UNUSED(reg);
    return index == 0 ? kvt_device() : nullptr;
}

static void * registry_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    GGML_UNUSED(reg);
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *) set_n_threads : nullptr;
}

ggml_backend_reg_t kvt_registry(void) {
    static ggml_backend_reg registry = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */
        {
            /* .get_name         = */ registry_get_name,
            /* .get_device_count = */ registry_get_device_count,
            /* .get_device       = */ registry_get_device,
            /* .get_proc_address = */ registry_get_proc_address,
        },
        /* .context     = */ NULL,
    };
    return &registry;
}

//
// what ggml's loader calls
//

extern "C" KVT_API ggml_backend_reg_t ggml_backend_init(void) {
    if (kvt_ggml_resolve(__builtin_return_address(0)) != KVT_OK) {
        fprintf(stderr, "kvtier: cannot be used with this llama.cpp: %s\n", kvt_fail_text());
        return nullptr;
    }
    return kvt_registry();
}
