#include "op-flash-attn.h"
#include "temporary-pages.h"

#include <cmath>
#include <cstring>
#include <utility>

kvt_flash_attn::~kvt_flash_attn() { kvt_attention_free(m_attention); }

int kvt_flash_attn::open(int n_threads) { return kvt_attention_create(&m_attention, n_threads); }

void kvt_flash_attn::set_n_threads(int n_threads) { kvt_attention_set_n_threads(m_attention, n_threads); }

// K and V as an attention of the caches sees them: [d, n_kv, n_head, n_streams], heads adjacent in a row.
static bool is_cache_view(const ggml_tensor * t, const kvt_root * root) {
    const size_t d_bytes = g_ggml.ggml_row_size(t->type, t->ne[0]);
    return t->type == root->type && (t->ne[1] == 1 || t->nb[1] == root->row_bytes) &&
        (t->ne[2] == 1 || t->nb[2] == d_bytes) && (t->ne[3] == 1 || t->nb[3] % (root->row_bytes * root->n_cells) == 0);
}

// first cell of the view within its stream must be 0, heads must begin at 0; gives the stream
static bool stream_of(const ggml_tensor * t, const kvt_root * root, int64_t * stream) {
    const size_t off = (char *) t->data - root->base;
    *stream = (int64_t) (off / (root->row_bytes * root->n_cells));
    return off % (root->row_bytes * root->n_cells) == 0;
}

bool kvt_flash_attn::supports(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const bool shapes = q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && k->ne[2] == v->ne[2] &&
        q->ne[2] % k->ne[2] == 0 && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] && k->ne[0] == q->ne[0] &&
        k->ne[1] == v->ne[1] &&
        (!mask ||
            (mask->type == GGML_TYPE_F16 && (mask->ne[2] == 1 || mask->ne[2] == q->ne[2]) &&
                mask->ne[0] >= k->ne[1])) &&
        (!sinks || sinks->type == GGML_TYPE_F32);
    if (!shapes || !kvt_temporary_pages_can_hold(k) || !kvt_temporary_pages_can_hold(v)) { return false; }
    kvt_root * k_root = kvt_root_of(k);
    if (k_root && is_cache_view(k, k_root)) { kvt_cache_propose(k_root, kvt_root_of(v), k->ne[2], k->ne[0], v->ne[0]); }
    return true;
}

static void fill_slopes(float max_bias, int64_t n_head, std::vector<float> * slopes) {
    slopes->clear();
    if (max_bias <= 0.0f) { return; }
    // ALiBi's geometric series (Press et al. 2022), with the interleaved second series for the heads beyond a power of
    // two
    const int64_t n_pow2 = (int64_t) 1 << (int) std::floor(std::log2((double) n_head));
    const float m0 = std::pow(2.0f, -max_bias / n_pow2);
    const float m1 = std::pow(2.0f, -(max_bias / 2.0f) / n_pow2);
    for (int64_t h = 0; h < n_head; h++) {
        slopes->push_back(h < n_pow2 ? std::pow(m0, (float) (h + 1)) : std::pow(m1, (float) (2 * (h - n_pow2) + 1)));
    }
}

// The pages that this step reads of a stream, for the next step's read-ahead.
static void add_pages(const kvt_attention * attention, std::vector<uint32_t> * pages) {
    size_t n = 0;
    const uint32_t * read = kvt_attention_pages(attention, &n);
    pages->insert(pages->end(), read, read + n);
}

int kvt_flash_attn::run_streams(ggml_tensor * op, kvt_attention_op * a, kvt_layer * layer, std::vector<uint32_t> * seen,
    uint32_t page_first, uint32_t page_stride) {
    const ggml_tensor *q = op->src[0], *mask = op->src[3];
    a->mass = layer ? layer->mass : nullptr;
    for (int64_t s = 0; s < q->ne[3]; s++) {
        a->page_first = page_first + (uint32_t) s * page_stride;
        a->q = (const char *) q->data + s * q->nb[3];
        a->q_nb_query = q->nb[1];
        a->q_nb_head = q->nb[2];
        a->mask = mask ? (const char *) mask->data + (s % mask->ne[3]) * mask->nb[3] : nullptr;
        a->mask_nb_query = mask ? mask->nb[1] : 0;
        a->mask_nb_head = mask && mask->ne[2] > 1 ? mask->nb[2] : 0;
        a->dst = (char *) op->data + s * op->nb[3];
        a->dst_nb_head = op->nb[1];
        a->dst_nb_query = op->nb[2];
        const int rc = kvt_attention_run(m_attention, a);
        if (rc != KVT_OK) { return rc; }
        if (seen) { add_pages(m_attention, seen); }
    }
    return KVT_OK;
}

void kvt_flash_attn::account(kvt_domain_state * dom) {
    kvt_attention_stats now;
    kvt_attention_get_stats(m_attention, &now);
    dom->counts.n_attention++;
    dom->counts.k_bytes += now.k_bytes - m_seen.k_bytes;
    dom->counts.v_bytes += now.v_bytes - m_seen.v_bytes;
    dom->counts.pages_read += now.pages_read - m_seen.pages_read;
    dom->counts.pages_skipped += now.pages_skipped - m_seen.pages_skipped;
    m_seen = now;
}

int kvt_flash_attn::run_cached(ggml_tensor * op, kvt_attention_op * a, kvt_root * k_root, bool * native) {
    const ggml_tensor *k = op->src[1], *v = op->src[2];
    kvt_root * v_root = kvt_root_of(v);
    int64_t k_stream = 0, v_stream = 0;
    const bool is_mla = v_root == k_root;
    *native = v_root && is_cache_view(k, k_root) && stream_of(k, k_root, &k_stream) && is_cache_view(v, v_root) &&
        stream_of(v, v_root, &v_stream) && k_stream == v_stream && k->ne[1] <= k_root->n_cells &&
        (!is_mla || k->ne[2] == 1) && kvt_cache_propose(k_root, v_root, k->ne[2], k->ne[0], v->ne[0]);
    if (!*native) { return KVT_OK; }
    kvt_domain_state * dom = k_root->buffer->domain.get();
    kvt_layer * layer = nullptr;
    int rc = kvt_cache_open(k_root->cache, &layer);
    if (rc != KVT_OK) { return rc; }
    if (!m_first_array || m_first_array == layer->array) {
        m_first_array = layer->array;
        dom->begin_step();
    }
    const uint32_t per_stream = (uint32_t) ((k_root->n_cells + layer->geo.page_tokens - 1) / layer->geo.page_tokens);
    const uint32_t n_between = k->ne[3] > 1 ? (uint32_t) (k->nb[3] / (k_root->row_bytes * k_root->n_cells)) : 1;
    const kvt_settings& settings = dom->settings();
    kvt_recall_report report = {};
    const kvt_recall recall = { settings.eps, settings.read_budget, settings.protect_first, settings.protect_last,
        layer->digests, &report };
    a->geo = layer->geo;
    a->source = &layer->source;
    a->keys = layer->keys;
    a->recall = layer->keys ? &recall : nullptr;
    const std::shared_ptr<kvt_summary_set> summary = dom->summaries.of(layer); // stays while it is read
    a->summary = k->ne[3] == 1 ? summary.get() : nullptr; // several streams: no telling whose it is
    std::vector<uint32_t> seen;
    rc = run_streams(
        op, a, layer, dom->has_disk() ? &seen : nullptr, (uint32_t) k_stream * per_stream, per_stream * n_between);
    if (rc != KVT_OK) { return dom->failures.fail(rc, "attention could not read the cache"); }
    account(dom);
    if (report.n_rows > 0) { dom->counts.report(layer, report); }
    if (dom->has_disk()) {
        dom->layers.remember(layer, std::move(seen));
        dom->layers.read_ahead(layer);
    }
    return KVT_OK;
}

int kvt_flash_attn::run_plain(ggml_tensor * op, kvt_attention_op * a) {
    kvt_temporary_pages pages;
    const int rc = pages.fill(op->src[1], op->src[2]);
    if (rc != KVT_OK) { return rc; }
    a->geo = pages.geometry();
    a->source = pages.source();
    return run_streams(op, a, nullptr, nullptr, 0, pages.pages_per_stream());
}

int kvt_flash_attn::compute(ggml_tensor * op, bool * native) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *sinks = op->src[4];
    float params[3];
    memcpy(params, op->op_params, sizeof(params));
    fill_slopes(params[1], q->ne[2], &m_slopes);

    kvt_attention_op a = {};
    a.d_v_out = (int32_t) v->ne[0];
    a.n_head_q = (int32_t) q->ne[2];
    a.n_queries = q->ne[1];
    a.n_kv = k->ne[1];
    a.scale = params[0];
    a.softcap = params[2];
    a.slopes = m_slopes.empty() ? nullptr : m_slopes.data();
    a.sinks = sinks ? (const float *) sinks->data : nullptr;

    *native = true;
    kvt_root * k_root = kvt_root_of(k);
    if (k_root) { return run_cached(op, &a, k_root, native); }
    if (kvt_root_of(v)) {
        *native = false;
        return KVT_OK;
    }
    return run_plain(op, &a);
}
