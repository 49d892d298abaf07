#include "buffer.h"
#include "../store/bytes-text.h"
#include "device.h"
#include "last-error.h"
#include "log.h"
#include "paged-tensor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include <sys/mman.h>

//
// the nominal types and our formats
//

int kvt_format_of_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return KVT_FORMAT_F32;
        case GGML_TYPE_F16: return KVT_FORMAT_F16;
        case GGML_TYPE_BF16: return KVT_FORMAT_BF16;
        case GGML_TYPE_Q8_0: return KVT_FORMAT_Q8_0;
        case GGML_TYPE_Q4_0: return KVT_FORMAT_Q4_0;
        case GGML_TYPE_Q4_1: return KVT_FORMAT_Q4_1;
        default: return -1;
    }
}

//
// roots and layers
//

static const ggml_tensor * root_tensor(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

kvt_buffer * kvt_buffer_of(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = root_tensor(t)->buffer;
    if (!buffer) { buffer = t->buffer; }
    return buffer && kvt_is_our_buffer(buffer) ? static_cast<kvt_buffer *>(buffer->context) : nullptr;
}

static kvt_root * root_at(kvt_buffer * buffer, const void * address) {
    const char * a = static_cast<const char *>(address);
    auto it = std::upper_bound(buffer->roots.begin(), buffer->roots.end(), a,
        [](const char * x, const std::unique_ptr<kvt_root>& r) { return x < r->base; });
    if (it == buffer->roots.begin()) { return nullptr; }
    kvt_root * root = (it - 1)->get();
    return a < root->base + root->n_bytes ? root : nullptr;
}

kvt_root * kvt_root_of(const ggml_tensor * t) {
    kvt_buffer * buffer = kvt_buffer_of(t);
    return buffer && !buffer->roots.empty() && t->data ? root_at(buffer, t->data) : nullptr;
}

// "cache_k_l7", "cache_idx_v_l12": the part and what K and V of a layer have in common. States (r, s) are not ours.
static bool parse_cache_name(const char * name, kvt_part * part, int * layer, std::string * key) {
    static const char prefix[] = "cache_";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0) { return false; }
    const char * end = strstr(name, "_l");
    for (const char * next = end; next; next = strstr(next + 1, "_l")) { end = next; }
    if (!end || end == name || (end[-1] != 'k' && end[-1] != 'v')) { return false; }
    char * stop = nullptr;
    *layer = (int) strtol(end + 2, &stop, 10);
    if (stop == end + 2 || *stop) { return false; }
    *part = end[-1] == 'k' ? KVT_PART_K : KVT_PART_V;
    *key = std::string(name, end - 1) + (end + 2);
    return true;
}

static kvt_cache_layer * cache_for(kvt_buffer * buffer, const std::string& key) {
    for (const auto& root : buffer->roots) {
        if (root->key == key) { return root->cache; }
    }
    buffer->layers.emplace_back(new kvt_cache_layer);
    return buffer->layers.back().get();
}

static void add_root(kvt_buffer * buffer, const ggml_tensor * t, kvt_part part, int layer, const std::string& key) {
    std::unique_ptr<kvt_root> root(new kvt_root);
    root->buffer = buffer;
    root->key = key;
    root->layer = layer;
    root->part = part;
    root->type = t->type;
    root->nominal = kvt_format_of_type(t->type);
    root->base = static_cast<char *>(t->data);
    root->n_bytes = g_ggml.ggml_nbytes(t);
    root->n_embd = t->ne[0];
    root->n_cells = t->ne[1];
    root->n_streams = t->ne[2];
    root->row_bytes = t->nb[1];
    root->cache = cache_for(buffer, key);
    (part == KVT_PART_K ? root->cache->k : root->cache->v) = root.get();
    auto at = std::upper_bound(buffer->roots.begin(), buffer->roots.end(), root->base,
        [](const char * x, const std::unique_ptr<kvt_root>& r) { return x < r->base; });
    buffer->roots.insert(at, std::move(root));
}

bool kvt_cache_propose(kvt_root * k, kvt_root * v, int64_t n_head_kv, int64_t d_k, int64_t d_v) {
    kvt_cache_layer * cache = k->cache;
    const bool is_mla = v == nullptr || v == k;
    if (n_head_kv * d_k != k->n_embd || cache->k != k ||
        (is_mla ? cache->v != nullptr : cache->v != v || n_head_kv * d_v != v->n_embd)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(k->buffer->mutex);
    if (!cache->layer) {
        cache->n_head_kv = (int32_t) n_head_kv;
        cache->d_k = (int32_t) d_k;
        cache->d_v = is_mla ? 0 : (int32_t) d_v;
        return true;
    }
    return cache->n_head_kv == n_head_kv && cache->d_k == d_k && (is_mla || cache->d_v == d_v);
}

// The store says what is too little for the layers that it has seen, which come one by one; what a person has to give
// is enough for every layer of this cache.
static std::string with_all_layers(const kvt_buffer * buffer, const kvt_array_params& p) {
    const size_t n_layers = buffer->layers.size();
    const uint64_t least = kvt_layer_least_host(buffer->domain->store(), buffer->domain->settings(), p, n_layers);
    const std::string text = kvt_fail_text();
    return least == 0 ? text
                      : text + "; all " + std::to_string(n_layers) + " layers of this cache need " +
            kvt_bytes_text(least) + " at the very least";
}

static int make_layer(kvt_cache_layer * cache) {
    const kvt_root * root = cache->k ? cache->k : cache->v;
    kvt_domain_state * dom = root->buffer->domain.get();
    if (cache->d_k == 0) {
        cache->n_head_kv = 1; // nothing is known of the heads: one head as wide as the row
        cache->d_k = (int32_t) (cache->k ? cache->k->n_embd : cache->v->n_embd);
        cache->d_v = (int32_t) (cache->v ? cache->v->n_embd : 0);
    }
    kvt_array_params p = {};
    p.geo = { cache->n_head_kv, cache->d_k, cache->d_v, dom->settings().page_tokens };
    p.layer = root->layer;
    p.n_streams = (uint32_t) root->n_streams;
    p.cells_per_stream = (uint32_t) root->n_cells;
    kvt_layer_choose_formats(
        dom->settings(), p.geo, cache->k ? cache->k->nominal : -1, cache->v ? cache->v->nominal : -1, &p);
    const int rc = dom->add_layer(p, root->buffer, &cache->layer);
    return rc == KVT_ERR_BUDGET ? dom->failures.fail(rc, with_all_layers(root->buffer, p).c_str()) : rc;
}

int kvt_cache_open(kvt_cache_layer * cache, kvt_layer ** out) {
    kvt_buffer * buffer = (cache->k ? cache->k : cache->v)->buffer;
    std::lock_guard<std::mutex> lock(buffer->mutex);
    if (!cache->layer) {
        const int rc = make_layer(cache);
        if (rc != KVT_OK) { return rc; }
    }
    *out = cache->layer;
    return KVT_OK;
}

//
// buffer interface
//

static void buffer_free(ggml_backend_buffer_t b) {
    kvt_buffer * buffer = static_cast<kvt_buffer *>(b->context);
    for (const auto& cache : buffer->layers) {
        if (cache->layer) { buffer->domain->remove_layer(cache->layer); }
    }
    if (buffer->base) { munmap(buffer->base, buffer->n_bytes); }
    delete buffer;
}

static void * buffer_get_base(ggml_backend_buffer_t b) {
    const kvt_buffer * buffer = static_cast<const kvt_buffer *>(b->context);
    // a buffer of size zero (a dry run) still needs an address that is not NULL
    static char nowhere[64];
    return buffer->base ? buffer->base : nowhere;
}

static enum ggml_status init_cache_tensor(kvt_buffer * buffer, const ggml_tensor * t) {
    kvt_part part;
    int layer;
    std::string key;
    if (!parse_cache_name(t->name, &part, &layer, &key)) { return GGML_STATUS_SUCCESS; }
    if (!buffer->domain && kvt_domain_current(&buffer->domain) != KVT_OK) {
        kvt_log_error("kvtier: %s\n", kvt_fail_text());
        return GGML_STATUS_FAILED;
    }
    add_root(buffer, t, part, layer, key);
    return GGML_STATUS_SUCCESS;
}

static enum ggml_status buffer_init_tensor(ggml_backend_buffer_t b, ggml_tensor * t) {
    kvt_buffer * buffer = static_cast<kvt_buffer *>(b->context);
    if (t->view_src || strncmp(t->name, "cache_", 6) != 0 || !buffer->base) { return GGML_STATUS_SUCCESS; }
    buffer->is_cache = true;
    try {
        return init_cache_tensor(buffer, t);
    } catch (const std::bad_alloc&) { return GGML_STATUS_ALLOC_FAILED; }
}

// ggml's byte access has no way to report an error: it is logged at once and kept, so that the next graph that touches
// these caches fails with it. No exception may cross into ggml either.
template <typename F> static int guarded(kvt_root * root, F access) {
    int rc;
    try {
        rc = access();
    } catch (const std::bad_alloc&) {
        rc = root->buffer->domain->failures.fail(KVT_ERR_NOMEM, "byte access to the cache");
    }
    if (rc != KVT_OK) {
        kvt_log_error("kvtier: %s: %s\n", kvt_error_name(rc), kvt_fail_text());
        root->buffer->pending = rc;
    }
    return rc;
}

static void buffer_memset_tensor(ggml_backend_buffer_t b, ggml_tensor * t, uint8_t value, size_t off, size_t size) {
    GGML_UNUSED(b);
    if (kvt_root * root = kvt_root_of(t)) {
        guarded(root, [&] { return kvt_paged_fill(root, (char *) t->data - root->base + off, size, value); });
        return;
    }
    memset((char *) t->data + off, value, size);
}

static void buffer_set_tensor(ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t off, size_t size) {
    GGML_UNUSED(b);
    if (kvt_root * root = kvt_root_of(t)) {
        guarded(root, [&] { return kvt_paged_write(root, (char *) t->data - root->base + off, size, data); });
        return;
    }
    memcpy((char *) t->data + off, data, size);
}

static void buffer_get_tensor(ggml_backend_buffer_t b, const ggml_tensor * t, void * data, size_t off, size_t size) {
    GGML_UNUSED(b);
    if (kvt_root * root = kvt_root_of(t)) {
        if (guarded(root, [&] {
                return kvt_paged_read(root, (char *) t->data - root->base + off, size, data, false);
            }) != KVT_OK) {
            memset(data, 0, size); // never bytes that were in that memory before
        }
        return;
    }
    memcpy(data, (const char *) t->data + off, size);
}

// Copies between our own buffers; everything else takes ggml's ordinary way through host memory.
static bool buffer_cpy_tensor(ggml_backend_buffer_t b, const ggml_tensor * src, ggml_tensor * dst) {
    GGML_UNUSED(b);
    kvt_buffer * from = kvt_buffer_of(src);
    kvt_root * s = from ? kvt_root_of(src) : nullptr;
    kvt_root * d = kvt_root_of(dst);
    if (!from || !s || !d || s->row_bytes != d->row_bytes || s->type != d->type || s->part != d->part) { return false; }
    const size_t s_off = (char *) src->data - s->base, d_off = (char *) dst->data - d->base;
    const size_t size = g_ggml.ggml_nbytes(src);
    if (!g_ggml.ggml_is_contiguous(src) || s_off % s->row_bytes || d_off % d->row_bytes || size % s->row_bytes) {
        return false;
    }
    guarded(
        d, [&] { return kvt_paged_copy_rows(s, s_off / s->row_bytes, d, d_off / d->row_bytes, size / s->row_bytes); });
    return true;
}

static void buffer_clear(ggml_backend_buffer_t b, uint8_t value) {
    kvt_buffer * buffer = static_cast<kvt_buffer *>(b->context);
    for (const auto& cache : buffer->layers) {
        guarded(cache->k ? cache->k : cache->v, [&] { return kvt_paged_clear(cache.get()); });
    }
    char * at = buffer->base; // the ranges between the caches are plain memory
    for (const auto& root : buffer->roots) {
        memset(at, value, root->base - at);
        at = root->base + root->n_bytes;
        if (value != 0) {
            guarded(root.get(), [&] { return kvt_paged_fill(root.get(), 0, root->n_bytes, value); });
        }
    }
    if (at) { memset(at, value, buffer->base + buffer->n_bytes - at); }
}

static const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ buffer_init_tensor,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ NULL,
    /* .get_tensor_2d = */ NULL,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ NULL,
};

bool kvt_is_our_buffer(ggml_backend_buffer_t buffer) { return buffer->iface.free_buffer == buffer_free; }

//
// buffer type interface
//

static const char * buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    GGML_UNUSED(buft);
    return "KVT0";
}

static ggml_backend_buffer_t buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    kvt_buffer * buffer = new (std::nothrow) kvt_buffer;
    if (!buffer) { return nullptr; }
    if (size > 0) {
        // reserved, not committed: a page of memory counts when it is first touched, and those of the caches never are
        void * base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) {
            delete buffer;
            return nullptr;
        }
        buffer->base = static_cast<char *>(base);
        buffer->n_bytes = size;
    }
    return g_ggml.ggml_backend_buffer_init(buft, buffer_interface, buffer, size);
}

static size_t buffer_type_get_alignment(ggml_backend_buffer_type_t buft) {
    GGML_UNUSED(buft);
    return 64;
}

static bool buffer_type_is_host(ggml_backend_buffer_type_t buft) {
    GGML_UNUSED(buft);
    return false; // or the CPU backend would read the nominal addresses
}

ggml_backend_buffer_type_t kvt_buffer_type(void) {
    static ggml_backend_buffer_type type = {
        /* .iface   = */ {
            /* .get_name       = */ buffer_type_get_name,
            /* .alloc_buffer   = */ buffer_type_alloc_buffer,
            /* .get_alignment  = */ buffer_type_get_alignment,
            /* .get_max_size   = */ NULL,
            /* .get_alloc_size = */ NULL,
            /* .is_host        = */ buffer_type_is_host,
        },
        /* .device  = */ kvt_device(),
        /* .context = */ NULL,
    };
    return &type;
}
