// What a domain tells of itself: counts of the store and of attention, and its layers.

#include "domain.h"

#include <cstring>

int kvt_domain_state::figures(kvt_figures * out) const {
    kvt_store_stats st;
    kvt_store_get_stats(store(), &st);
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
    out->n_attention = counts.n_attention;
    out->k_bytes_read = counts.k_bytes;
    out->v_bytes_read = counts.v_bytes;
    out->pages_read = counts.pages_read;
    out->pages_skipped = counts.pages_skipped;
    out->n_fallback = counts.n_fallback;
    out->n_gone = st.n_gone;
    out->reserved_bytes = st.reserved_bytes;
    out->mass_lost = m_keep->mass_lost();
    const kvt_recall_report recall = counts.recall();
    out->recall_rows = recall.n_rows;
    out->tokens_seen = recall.tokens_seen;
    out->tokens_read = recall.tokens_read;
    out->pages_wanted = recall.pages_wanted;
    out->pages_missing = recall.pages_missing;
    out->omitted_sum = recall.omitted_sum;
    out->max_omitted = recall.omitted_max;
    out->bound_sum = recall.bound_sum;
    out->max_bound = recall.bound_max;
    return KVT_OK;
}

int kvt_domain_state::layer_figures(uint32_t index, kvt_layer_figures * out) const {
    return layers.with(index, [&](const kvt_layer& layer) -> int {
        const kvt_recall_report last = counts.last_of(layer);
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
        out->last_seen = last.tokens_seen;
        out->last_read = last.tokens_read;
        out->last_omitted = last.n_rows ? last.omitted_sum / (double) last.n_rows : 0.0;
        return KVT_OK;
    });
}
