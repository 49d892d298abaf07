#include "layer.h"

#include "../include/kvtier-errors.h"
#include "../include/kvtier.h"

kvt_layer::~kvt_layer() {
    kvt_store_array_remove(array);
    kvt_mass_free(mass);
    kvt_keys_free(keys);
    if (digests) {
        kvt_store_reserve(store, -(int64_t) digests->n_bytes);
        kvt_digests_free(digests);
    }
}

static enum kvt_format pick(int wanted, int fallback, int32_t d) {
    const int fmt = wanted >= 0 ? wanted : fallback;
    // a head size that is no multiple of the quantized formats' blocks is kept in F16
    return d == 0 || kvt_format_supports((enum kvt_format) fmt, d) ? (enum kvt_format) fmt : KVT_FORMAT_F16;
}

void kvt_layer_choose_formats(
    const kvt_settings& settings, const kvt_geometry& geo, int nominal_k, int nominal_v, kvt_array_params * p) {
    // a bounded cache is kept compact unless asked otherwise: rounding costs less than what is left out
    const bool compact = settings.eps > 0.0f && geo.d_v > 0;
    const auto of = [compact](int nominal) {
        return nominal < 0 || (compact && nominal < KVT_FORMAT_Q8_0) ? (int) KVT_FORMAT_Q8_0 : nominal;
    };
    p->fmt_k = pick(settings.host_fmt_k, of(nominal_k), geo.d_k);
    p->fmt_v = pick(settings.host_fmt_v, of(nominal_v), geo.d_v);
    p->disk_fmt_k = pick(settings.disk_fmt_k, p->fmt_k, geo.d_k);
    p->disk_fmt_v = pick(settings.disk_fmt_v, p->fmt_v, geo.d_v);
}

//
// the page source of a layer: the store's array
//

static int source_acquire_resident(
    void * ctx, const uint32_t * pages, size_t n, kvt_page_ref * refs, uint32_t * missing, size_t * n_missing) {
    return kvt_array_acquire_resident(static_cast<kvt_array *>(ctx), pages, n, refs, missing, n_missing);
}

static int source_acquire(void * ctx, uint32_t page, kvt_page_ref * out) {
    return kvt_array_acquire(static_cast<kvt_array *>(ctx), page, KVT_READ, out);
}

static void source_release_many(void * ctx, const kvt_page_ref * refs, size_t n) {
    kvt_array_release_many(static_cast<kvt_array *>(ctx), refs, n);
}

static int source_is_ready(void * ctx, const uint32_t * pages, size_t n, uint8_t * out) {
    return kvt_array_is_ready(static_cast<kvt_array *>(ctx), pages, n, out);
}

static void source_prefetch(void * ctx, const uint32_t * pages, size_t n) {
    kvt_array_prefetch(static_cast<kvt_array *>(ctx), pages, n);
}

static size_t n_cells_of(const kvt_array_params& p) {
    const uint32_t page_tokens = (uint32_t) p.geo.page_tokens;
    return (size_t) ((p.cells_per_stream + page_tokens - 1) / page_tokens) * p.n_streams * page_tokens;
}

static bool keeps_keys_apart(const kvt_settings& settings, const kvt_array_params& p) {
    return settings.eps > 0.0f && p.geo.d_v > 0;
}

uint64_t kvt_layer_least_host(kvt_store * store, const kvt_settings& settings, kvt_array_params p, size_t n_layers) {
    uint64_t reserved = 0;
    if (keeps_keys_apart(settings, p)) {
        const size_t n_cells = n_cells_of(p);
        reserved = n_layers *
            (kvt_keys_bytes(p.geo.n_head_kv, p.geo.d_k, n_cells, p.fmt_k) +
                kvt_digests_bytes(p.geo.n_head_kv, p.geo.d_v, n_cells / KVT_SUB));
        p.geo.d_k = 0;
    }
    return kvt_store_least_host(store, &p, n_layers, reserved);
}

// The keys of the layer move out of its pages, and every sub-page gets a digest.
static int keep_keys_apart(kvt_layer * layer, kvt_failures& failures) {
    const kvt_geometry& geo = layer->geo;
    const kvt_array_params& p = layer->params;
    const size_t n_cells = n_cells_of(p);
    int rc = kvt_keys_create(layer->store, geo.n_head_kv, geo.d_k, n_cells, p.fmt_k, &layer->keys);
    if (rc != KVT_OK) { return failures.fail(rc, "no memory for the keys"); }
    kvt_digests * digests = nullptr;
    rc = kvt_digests_create(&digests, geo.n_head_kv, geo.d_v, n_cells / KVT_SUB);
    if (rc == KVT_OK && (rc = kvt_store_reserve(layer->store, (int64_t) digests->n_bytes)) != KVT_OK) {
        kvt_digests_free(digests);
    }
    if (rc != KVT_OK) { return failures.fail(rc, "no memory for the digests of the pages"); }
    layer->digests = digests;
    layer->params.geo.d_k = 0;
    return KVT_OK;
}

int kvt_layer_make(kvt_store * store, const kvt_settings& settings, kvt_failures& failures,
    const kvt_array_params& params, const void * owner, std::unique_ptr<kvt_layer> * out) {
    std::unique_ptr<kvt_layer> layer(new kvt_layer);
    layer->params = params;
    layer->geo = params.geo;
    layer->owner = owner;
    layer->store = store;
    int rc = keeps_keys_apart(settings, params) ? keep_keys_apart(layer.get(), failures) : (int) KVT_OK;
    if (rc != KVT_OK) { return rc; }
    rc = kvt_store_array_add(store, &layer->params, &layer->array);
    if (rc != KVT_OK) { return failures.fail(rc, "cannot add a layer's cache to the store"); }
    rc = kvt_mass_create(&layer->mass, kvt_array_n_pages(layer->array), params.geo.page_tokens, settings.mass_decay);
    if (rc != KVT_OK) { return failures.fail(rc, "no memory for the attention statistics"); }
    layer->source = { layer->array, source_acquire_resident, source_acquire, source_release_many, source_prefetch,
        settings.disk_bytes > 0 ? source_is_ready : nullptr };
    *out = std::move(layer);
    return KVT_OK;
}
