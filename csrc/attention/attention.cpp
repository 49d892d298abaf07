// The operation: which pages are visible, pinning them, and the choice of driver.

#include "summary-impl.h"

void * kvt_buf_need(struct kvt_buf * b, size_t n_bytes) {
    if (b->n_bytes >= n_bytes && b->p) return b->p;
    const size_t n = kvt_round_up(n_bytes + n_bytes / 4 + 64, 64);
    void * p = aligned_alloc(64, n);
    if (!p) return NULL;
    free(b->p);
    b->p = p;
    b->n_bytes = n;
    return p;
}

void kvt_buf_free(struct kvt_buf * b) {
    free(b->p);
    b->p = NULL;
    b->n_bytes = 0;
}

extern "C" int kvt_attention_create(struct kvt_attention ** out, int n_threads) {
    if (!kvt_kernels_active()) return KVT_ERR_CONFIG; // KVTIER_ISA names nothing that runs here
    struct kvt_attention * a = (struct kvt_attention *) calloc(1, sizeof(*a));
    if (!a) return KVT_ERR_NOMEM;
    kvt_attention_set_n_threads(a, n_threads);
    *out = a;
    return 0;
}

extern "C" void kvt_attention_free(struct kvt_attention * a) {
    if (!a) return;
    struct kvt_buf * all[] = { &a->vis.cls, &a->vis.any, &a->pages, &a->pieces, &a->q, &a->state, &a->tiles, &a->slots,
        &a->probs, &a->mass, &a->recall, &a->bounds, &a->lost, &a->summary };
    for (struct kvt_buf * b : all) kvt_buf_free(b);
    free(a);
}

extern "C" void kvt_attention_set_n_threads(struct kvt_attention * a, int n_threads) {
    a->n_threads = n_threads < 1 ? 1 : n_threads;
}
extern "C" void kvt_attention_get_stats(const struct kvt_attention * a, struct kvt_attention_stats * out) {
    *out = a->stats;
}

extern "C" const uint32_t * kvt_attention_pages(const struct kvt_attention * a, size_t * n) {
    *n = a->n_pages_read;
    return a->pages_read;
}

static int check_op(const struct kvt_attention_op * op) {
    const struct kvt_geometry * g = &op->geo;
    if (g->n_head_kv < 1 || g->d_k < 1 || g->d_v < 0 || g->page_tokens < KVT_SUB || g->page_tokens % KVT_SUB)
        return KVT_ERR_INVALID;
    if (op->n_head_q < 1 || op->n_head_q % g->n_head_kv || op->n_queries < 1 || op->n_kv < 1) return KVT_ERR_INVALID;
    if (op->d_v_out < 1 || (g->d_v ? op->d_v_out != g->d_v : op->d_v_out > g->d_k)) return KVT_ERR_INVALID;
    if (!op->source || !op->q || !op->dst) return KVT_ERR_INVALID;
    if (op->keys && (op->keys->layout.geo.n_head_kv != g->n_head_kv || op->keys->layout.geo.d_k != g->d_k))
        return KVT_ERR_INVALID;
    if (op->recall &&
        (!op->keys || !op->recall->digests || !op->recall->report ||
            !(op->recall->eps > 0.0f && op->recall->eps < 1.0f)))
        return KVT_ERR_INVALID;
    const size_t n_pages = (size_t) (op->n_kv + g->page_tokens - 1) / g->page_tokens;
    if (op->mass &&
        (op->page_first + n_pages > op->mass->n_pages ||
            op->mass->n_cells != op->mass->n_pages * (size_t) g->page_tokens))
        return KVT_ERR_INVALID;
    return 0;
}

static int find_visibility(struct kvt_job * j) {
    const struct kvt_attention_op * op = j->op;
    const int64_t n_head = op->mask && op->mask_nb_head ? op->n_head_q : 1;
    j->vis = &j->a->vis;
    return kvt_visibility_compute(
        &j->a->vis, op->mask, op->mask_nb_query, op->mask_nb_head, n_head, op->n_kv, op->n_queries, j->n_threads);
}

// Pages that are gone leave the list: nothing of them can be read. Sets j->lost if some page has lost cells.
static int leave_out_gone(struct kvt_job * j, size_t n_all) {
    size_t n_lost = 0, n = 0;
    for (size_t i = 0; i < j->n_pages; i++) n_lost += j->refs[i].lost != NULL;
    if (n_lost == 0) return 0;
    const uint32_t ** lost = (const uint32_t **) kvt_buf_need(&j->a->lost, n_all * sizeof(*lost));
    if (!lost) return KVT_ERR_NOMEM;
    memset(lost, 0, n_all * sizeof(*lost));
    for (size_t i = 0; i < j->n_pages; i++) {
        const uint32_t * words = j->refs[i].lost;
        bool gone = words && !j->refs[i].data && !j->is_missing[i];
        for (int s = 0; gone && s < j->subs_per_page; s++) gone = words[s] == UINT32_MAX;
        lost[j->pages[i] - j->op->page_first] = words;
        if (gone) continue;
        j->pages[n] = j->pages[i];
        j->refs[n] = j->refs[i];
        j->is_missing[n] = j->is_missing[i];
        n++;
    }
    j->n_pages = n;
    j->lost = lost;
    size_t n_missing = 0;
    for (size_t i = 0; i < n; i++) {
        if (j->is_missing[i]) j->missing[n_missing++] = (uint32_t) i;
    }
    return 0;
}

// Lists the visible pages and pins those that need no I/O.
static int pin_pages(struct kvt_job * j) {
    const struct kvt_attention_op * op = j->op;
    const uint8_t * any = kvt_vis_any(j->vis);
    const size_t n_all = (j->n_sub + j->subs_per_page - 1) / j->subs_per_page;
    char * p = (char *) kvt_buf_need(&j->a->pages, n_all * (sizeof(struct kvt_page_ref) + 2 * sizeof(uint32_t) + 1));
    if (!p) return KVT_ERR_NOMEM;
    j->refs = (struct kvt_page_ref *) p;
    j->pages = (uint32_t *) (j->refs + n_all);
    j->missing = j->pages + n_all;
    j->is_missing = (uint8_t *) (j->missing + n_all);
    j->n_pages = j->n_missing = 0;
    for (size_t page = 0; page < n_all; page++) {
        bool seen = false;
        for (size_t s = page * j->subs_per_page; s < (page + 1) * j->subs_per_page && s < j->n_sub; s++)
            seen |= any[s] != 0;
        if (seen) j->pages[j->n_pages++] = op->page_first + (uint32_t) page;
    }
    j->a->stats.pages_skipped += n_all - j->n_pages;
    if (j->n_pages == 0) return 0;
    const int err = op->source->acquire_resident(
        op->source->ctx, j->pages, j->n_pages, j->refs, j->missing, &j->n_missing);
    if (err) {
        j->n_pages = 0;
        return err;
    }
    memset(j->is_missing, 0, j->n_pages);
    for (size_t i = 0; i < j->n_missing; i++) {
        j->is_missing[j->missing[i]] = 1;
        j->refs[j->missing[i]].data = NULL;
        j->refs[j->missing[i]].page = j->pages[j->missing[i]];
    }
    return leave_out_gone(j, n_all);
}

extern "C" int kvt_attention_run(struct kvt_attention * a, const struct kvt_attention_op * op) {
    int err = check_op(op);
    if (err) return err;
    struct kvt_job job;
    struct kvt_job * j = &job;
    j->a = a;
    j->op = op;
    j->k = kvt_kernels_active();
    j->n_threads = a->n_threads;
    j->n_group = op->n_head_q / op->geo.n_head_kv;
    j->n_rows = op->n_queries * j->n_group;
    j->d_v_pad = (int32_t) kvt_round_up((size_t) op->d_v_out, 16);
    j->subs_per_page = op->geo.page_tokens / KVT_SUB;
    j->n_sub = (size_t) (op->n_kv + KVT_SUB - 1) / KVT_SUB;
    j->n_mass_queries = 0;
    j->n_pages = j->n_missing = 0;
    j->error = 0;
    j->next = 0;
    j->lost = NULL;
    j->sum_m = NULL;
    err = find_visibility(j);
    if (err) return err;
    const bool decode = op->geo.d_v != 0 && j->n_rows <= KVT_DECODE_ROWS;
    if (decode && op->recall) {
        err = kvt_recall_run(j);
        a->stats.n_steps++;
        return err;
    }
    err = pin_pages(j);
    if (err && j->n_pages) op->source->release_many(op->source->ctx, j->refs, j->n_pages);
    if (err) return err;
    a->pages_read = j->pages;
    a->n_pages_read = j->n_pages;
    if (j->n_missing && op->source->prefetch) {
        uint32_t * list = (uint32_t *) kvt_buf_need(&a->mass, j->n_missing * sizeof(uint32_t));
        for (size_t i = 0; list && i < j->n_missing; i++) list[i] = j->pages[j->missing[i]];
        if (list) op->source->prefetch(op->source->ctx, list, j->n_missing);
    }
    err = kvt_summary_run(j);
    if (!err) err = decode ? kvt_decode_run(j) : kvt_prefill_run(j);
    if (!err && op->mass) { // before the pages are released: whoever drops one clears its mass
        kvt_summary_add_mass(j);
        err = kvt_mass_apply(j);
    }
    if (j->n_pages) op->source->release_many(op->source->ctx, j->refs, j->n_pages);
    a->stats.n_steps++;
    a->stats.pages_read += j->n_pages;
    return err;
}
