// What a domain tells of itself: counts of the store and of attention, layers, and where their pages are.

#include "domain.h"
#include "last-error.h"

#include <algorithm>
#include <cstring>

static void add_report(kvt_recall_report * to, const kvt_recall_report& r) {
    to->n_rows += r.n_rows;
    to->tokens_seen += r.tokens_seen;
    to->tokens_read += r.tokens_read;
    to->pages_wanted += r.pages_wanted;
    to->pages_missing += r.pages_missing;
    to->omitted_sum += r.omitted_sum;
    to->bound_sum += r.bound_sum;
    to->omitted_max = std::max(to->omitted_max, r.omitted_max);
    to->bound_max = std::max(to->bound_max, r.bound_max);
}

void kvt_domain_state::report(kvt_layer * layer, const kvt_recall_report& r) {
    std::lock_guard<std::mutex> lock(m_mutex);
    layer->last = r;
    add_report(&m_recall, r);
}

size_t kvt_domain_state::n_layers() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_layers.size();
}

int kvt_domain_state::figures(kvt_figures * out) const {
    kvt_store_stats st;
    kvt_store_get_stats(m_store, &st);
    memset(out, 0, sizeof(*out));
    for (int t = 0; t < KVT_TIER_COUNT; t++) {
        out->tier[t].budget_bytes = st.tier[t].budget_bytes;
        out->tier[t].used_bytes = st.tier[t].used_bytes;
        out->tier[t].held_bytes = st.tier[t].held_bytes;
        out->tier[t].n_pages = st.tier[t].n_pages;
        for (int f = 0; f < KVT_FORMAT_COUNT; f++) { out->tier[t].bytes_by_format[f] = st.tier[t].bytes_by_format[f]; }
    }
    out->n_hits = st.n_hits;
    out->n_misses = st.n_misses;
    out->n_prefetched = st.n_prefetched;
    out->n_prefetch_used = st.n_prefetch_used;
    out->n_evicted = st.n_evicted;
    out->n_recalled = st.n_recalled;
    out->disk_read_bytes = st.disk_read_bytes;
    out->disk_write_bytes = st.disk_write_bytes;
    out->disk_reads = st.disk_reads;
    out->disk_writes = st.disk_writes;
    out->stall_us = st.stall_us;
    out->peak_host_bytes = st.peak_host_bytes;
    out->n_attention = n_attention;
    out->k_bytes_read = k_bytes;
    out->v_bytes_read = v_bytes;
    out->pages_read = pages_read;
    out->pages_skipped = pages_skipped;
    out->n_fallback = n_fallback;
    out->n_gone = st.n_gone;
    out->reserved_bytes = st.reserved_bytes;
    out->mass_lost = m_keep.mass_lost();
    std::lock_guard<std::mutex> lock(m_mutex);
    out->recall_rows = m_recall.n_rows;
    out->tokens_seen = m_recall.tokens_seen;
    out->tokens_read = m_recall.tokens_read;
    out->pages_wanted = m_recall.pages_wanted;
    out->pages_missing = m_recall.pages_missing;
    out->omitted_sum = m_recall.omitted_sum;
    out->max_omitted = m_recall.omitted_max;
    out->bound_sum = m_recall.bound_sum;
    out->max_bound = m_recall.bound_max;
    return KVT_OK;
}

int kvt_domain_state::layer_figures(uint32_t index, kvt_layer_figures * out) const {
    std::lock_guard<std::mutex> lock(m_mutex);
    if (index >= m_layers.size()) {
        return kvt_fail(KVT_ERR_INVALID, "there is no layer %u: the caches have %zu", index, m_layers.size());
    }
    const kvt_layer& layer = *m_layers[index];
    out->array = kvt_array_id(layer.array);
    out->layer = layer.params.layer;
    out->n_head_kv = layer.geo.n_head_kv;
    out->d_k = layer.geo.d_k;
    out->d_v = layer.geo.d_v;
    out->page_tokens = layer.geo.page_tokens;
    out->n_streams = layer.params.n_streams;
    out->cells_per_stream = layer.params.cells_per_stream;
    out->n_pages = kvt_array_n_pages(layer.array);
    out->n_mass_steps = layer.mass->n_steps;
    out->token_mean = layer.mass->token_mean;
    out->token_max = layer.mass->token_max;
    out->page_mean = layer.mass->page_mean;
    out->page_max = layer.mass->page_max;
    out->last_seen = layer.last.tokens_seen;
    out->last_read = layer.last.tokens_read;
    out->last_omitted = layer.last.n_rows ? layer.last.omitted_sum / (double) layer.last.n_rows : 0.0;
    return KVT_OK;
}

int kvt_domain_state::pages(uint32_t index, uint32_t array, size_t n_max, uint8_t * tier, uint8_t * fmt_k,
    uint8_t * fmt_v, uint64_t * last_use) const {
    std::lock_guard<std::mutex> lock(m_mutex);
    if (index >= m_layers.size()) {
        return kvt_fail(KVT_ERR_INVALID, "there is no layer %u: the caches have %zu", index, m_layers.size());
    }
    const kvt_layer& layer = *m_layers[index];
    if (kvt_array_id(layer.array) != array || kvt_array_n_pages(layer.array) > n_max) {
        return kvt_fail(KVT_ERR_INVALID,
            "layer %u is array %u with %u pages, not array %u with at most %zu: the caches have changed", index,
            kvt_array_id(layer.array), kvt_array_n_pages(layer.array), array, n_max);
    }
    for (uint32_t page = 0; page < kvt_array_n_pages(layer.array); page++) {
        kvt_page_info info;
        const int rc = kvt_array_info(layer.array, page, &info);
        if (rc != KVT_OK) { return rc; }
        if (tier) { tier[page] = info.tier; }
        if (fmt_k) { fmt_k[page] = info.fmt_k; }
        if (fmt_v) { fmt_v[page] = info.fmt_v; }
        if (last_use) { last_use[page] = info.last_use; }
    }
    return KVT_OK;
}
