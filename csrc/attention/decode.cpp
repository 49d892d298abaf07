// Decode: few rows per KV head. The visible pages are cut into segments. A segment's pages are read once, in order, by
// one thread, which keeps a running softmax of all rows of all heads; the segments' results are combined at the end, in
// order.
//
// What is added to what, and in which order, depends on the list of visible pages alone: not on the number of threads,
// nor on which thread took which segment, nor on the tier a page was on. So the result is the same to the last bit
// wherever the pages live, and a generation does not change with the budgets.

#include "summary-impl.h"

enum { MAX_SEGMENTS = 32, MIN_SEGMENT_PAGES = 4 };

#ifndef PREFETCH_BYTES
#    define PREFETCH_BYTES 8192 // how far ahead of the reading the prefetches run, rounded up to whole subs
#endif

struct decode {
    struct kvt_job * j;
    struct kvt_q_rows * q; // [n_head_kv]
    float * state;         // per segment: m, l, o of all rows, scores [KVT_DECODE_ROWS][32]
    size_t state_floats;
    size_t n_segments, segment_pages;
    uint8_t order[MAX_SEGMENTS]; // in which segments are taken: those that need no I/O first
    std::atomic<uint64_t> k_bytes, v_bytes;
};

struct decode_thread {
    float *m, *l, *o, *s;
    uint64_t k_bytes, v_bytes;
};

static size_t align_floats(size_t n) { return kvt_round_up(n, 16); }

// scores of one sub become weights; the rows' states move
static void weigh(const struct decode * d, const struct decode_thread * t, float * s, size_t ld, int h, size_t sub,
    int cls, uint32_t lost) {
    const struct kvt_job * j = d->j;
    const struct kvt_attention_op * op = j->op;
    const int n_rows = (int) j->n_rows;
    if (op->softcap != 0.0f) j->k->softcap(s, ld, n_rows, KVT_SUB, op->softcap * KVT_LOG2E);
    if (cls == KVT_VIS_MIXED) {
        for (int r = 0; r < n_rows; r++) {
            const int head = h * j->n_group + r % j->n_group;
            const uint16_t * mask = kvt_job_mask(op, r / j->n_group, head);
            j->k->mask_add(
                s + r * ld, mask ? mask + sub * KVT_SUB : NULL, kvt_job_slope(op, head), kvt_job_n_valid(op, sub));
        }
    }
    for (int r = 0; lost && r < n_rows; r++) kvt_hide_lost(s + r * ld, lost);
    const struct kvt_row_state st = { t->m + (size_t) h * n_rows, t->l + (size_t) h * n_rows * KVT_SUM_LANES,
        t->o + (size_t) h * n_rows * j->d_v_pad, j->d_v_pad };
    j->k->softmax(s, ld, n_rows, KVT_SUB, &st);
    if (op->mass) {
        for (int r = 0; r < n_rows; r++) j->probs_m[((size_t) h * n_rows + r) * j->ld_probs_m + sub] = st.m[r];
    }
}

// `next`: the page whose bytes come after this one's, or NULL
static void do_page(const struct decode * d, struct decode_thread * t, const struct kvt_page_ref * ref,
    const struct kvt_page_ref * next) {
    const struct kvt_job * j = d->j;
    const struct kvt_attention_op * op = j->op;
    const struct kvt_page_layout * lay = ref->layout;
    const uint8_t * cls = kvt_vis_row(j->vis, 0);
    const int n_rows = (int) j->n_rows, n_subs = j->subs_per_page;
    const size_t unit = lay ? lay->k_sub_bytes + lay->v_sub_bytes : 1,
                 distance = (PREFETCH_BYTES + unit - 1) / unit * unit;
    const size_t sub0 = (size_t) (ref->page - op->page_first) * n_subs;
    for (int h = 0; h < op->geo.n_head_kv; h++) {
        for (int i = 0; i < n_subs && sub0 + i < j->n_sub; i++) {
            const size_t sub = sub0 + i;
            const uint32_t lost = ref->lost ? ref->lost[i] : 0;
            if (cls[sub] == KVT_VIS_NONE || lost == UINT32_MAX) continue;
            float * s = op->mass ? j->probs + (size_t) h * n_rows * j->ld_probs + sub * KVT_SUB : t->s;
            const size_t ld = op->mass ? j->ld_probs : KVT_SUB;
            if (!ref->data) {
                for (int r = 0; r < n_rows; r++) memset(s + r * ld, 0, KVT_SUB * sizeof(float));
                weigh(d, t, s, ld, h, sub, cls[sub], lost);
                continue;
            }
            const uint8_t *kv = ref->data + kvt_k_sub_off(lay, h, i), *v = kv + lay->k_sub_bytes;
            // what is read some units from now: the page's bytes lie in the order of reading, and the next page's
            // follow
            const size_t ahead = (size_t) (kv - ref->data) + distance;
            const uint8_t * kv_next = ahead < lay->page_bytes ? ref->data + ahead
                : next && next->data                          ? next->data + (ahead - lay->page_bytes)
                                                              : kv;
            const struct kvt_page_layout * k_lay = op->keys ? &op->keys->layout : lay;
            const uint8_t *k = op->keys ? kvt_job_keys(j, h, sub) : kv,
                          *k_next = op->keys ? k + k_lay->k_sub_bytes : kv_next;
            j->k->scores[k_lay->fmt_k](&d->q[h], 0, n_rows, k, s, ld, (const char *) k_next);
            weigh(d, t, s, ld, h, sub, cls[sub], lost);
            j->k->accumulate[lay->fmt_v](s, ld, n_rows, j->d_v_pad, v, t->o + (size_t) h * n_rows * j->d_v_pad,
                (const char *) kv_next + lay->k_sub_bytes);
            t->k_bytes += k_lay->k_sub_bytes;
            t->v_bytes += lay->v_sub_bytes;
        }
    }
}

// Reads a page that was not resident: a thread holds at most one of these. The missing pages after it are hinted.
static int do_missing_page(const struct decode * d, struct decode_thread * t, size_t i) {
    struct kvt_job * j = d->j;
    const struct kvt_page_source * src = j->op->source;
    struct kvt_page_ref ref;
    const int err = src->acquire(src->ctx, j->pages[i], &ref);
    if (err) return err;
    ref.page = j->pages[i];
    if (src->prefetch) {
        uint32_t list[16];
        size_t n = 0;
        for (size_t next = i + 1; next < j->n_pages && n < 16; next++) {
            if (j->is_missing[next]) list[n++] = j->pages[next];
        }
        if (n) src->prefetch(src->ctx, list, n);
    }
    do_page(d, t, &ref, NULL);
    if (ref.data) src->release_many(src->ctx, &ref, 1);
    return 0;
}

static size_t segment_end(const struct decode * d, size_t segment) {
    const size_t end = (segment + 1) * d->segment_pages;
    return end < d->j->n_pages ? end : d->j->n_pages;
}

static int do_segment(const struct decode * d, struct decode_thread * t, size_t segment) {
    const struct kvt_job * j = d->j;
    const size_t end = segment_end(d, segment);
    for (size_t i = segment * d->segment_pages; i < end; i++) {
        if (j->is_missing[i]) {
            const int err = do_missing_page(d, t, i);
            if (err) return err;
        } else {
            do_page(d, t, &j->refs[i], i + 1 < end ? &j->refs[i + 1] : NULL);
        }
    }
    return 0;
}

static void cut_segments(struct decode * d) {
    const struct kvt_job * j = d->j;
    d->segment_pages = (j->n_pages + MAX_SEGMENTS - 1) / MAX_SEGMENTS;
    if (d->segment_pages < MIN_SEGMENT_PAGES) d->segment_pages = MIN_SEGMENT_PAGES;
    d->n_segments = (j->n_pages + d->segment_pages - 1) / d->segment_pages;
    size_t n = 0;
    for (int with_missing = 0; with_missing < 2; with_missing++) {
        for (size_t s = 0; s < d->n_segments; s++) {
            int missing = 0;
            for (size_t i = s * d->segment_pages; i < segment_end(d, s); i++) missing |= j->is_missing[i];
            if (missing == with_missing) d->order[n++] = (uint8_t) s;
        }
    }
}

static struct decode_thread segment_state(const struct decode * d, size_t segment) {
    const struct kvt_job * j = d->j;
    const size_t n = (size_t) j->n_rows * j->op->geo.n_head_kv;
    struct decode_thread t;
    t.m = d->state + segment * d->state_floats;
    t.l = t.m + align_floats(n);
    t.o = t.l + n * KVT_SUM_LANES;
    t.s = t.o + n * j->d_v_pad;
    t.k_bytes = t.v_bytes = 0;
    return t;
}

static void init_state(const struct decode * d, struct decode_thread * t) {
    const size_t n = (size_t) d->j->n_rows * d->j->op->geo.n_head_kv;
    for (size_t i = 0; i < n; i++) t->m[i] = -INFINITY;
    memset(t->l, 0, n * KVT_SUM_LANES * sizeof(float));
    memset(t->o, 0, n * d->j->d_v_pad * sizeof(float));
}

static void decode_thread_main(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    struct decode * d = (struct decode *) arg;
    struct kvt_job * j = d->j;
    while (j->error.load(std::memory_order_relaxed) == 0) {
        const size_t i = j->next.fetch_add(1, std::memory_order_relaxed);
        if (i >= d->n_segments) return;
        struct decode_thread t = segment_state(d, d->order[i]);
        init_state(d, &t);
        const int err = do_segment(d, &t, d->order[i]);
        if (err) kvt_job_fail(j, err);
        d->k_bytes.fetch_add(t.k_bytes, std::memory_order_relaxed);
        d->v_bytes.fetch_add(t.v_bytes, std::memory_order_relaxed);
    }
}

static void finish(struct decode * d) {
    struct kvt_job * j = d->j;
    float * tmp = segment_state(d, d->n_segments).o; // one more state than segments
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (int64_t r = 0; r < j->n_rows; r++) {
            const size_t row = (size_t) h * j->n_rows + r;
            struct kvt_partial parts[MAX_SEGMENTS + 1];
            size_t n_parts = d->n_segments;
            for (size_t i = 0; i < d->n_segments; i++) {
                const struct decode_thread t = segment_state(d, i);
                parts[i] = { t.m + row, t.l + row * KVT_SUM_LANES, t.o + row * j->d_v_pad };
            }
            if (j->sum_m) parts[n_parts++] = kvt_summary_partial(j, h, r);
            const bool mass = j->op->mass != NULL;
            kvt_row_finish(j, parts, (int) n_parts, (int) (h * j->n_group + r % j->n_group), r / j->n_group, tmp,
                mass ? &j->final_m[row] : NULL, mass ? &j->final_f[row] : NULL);
        }
    }
}

static bool meets_quantized_keys(const struct kvt_job * j) {
    if (j->op->keys) return j->op->keys->layout.fmt_k >= KVT_FORMAT_Q8_0;
    bool found = j->n_missing > 0;
    for (size_t i = 0; i < j->n_pages && !found; i++)
        found = j->refs[i].data && j->refs[i].layout->fmt_k >= KVT_FORMAT_Q8_0;
    return found;
}

int kvt_decode_run(struct kvt_job * j) {
    struct decode d;
    d.j = j;
    d.k_bytes = 0;
    d.v_bytes = 0;
    int err = kvt_queries_prepare(j, meets_quantized_keys(j), &d.q);
    if (!err) err = kvt_mass_prepare(j, j->op->n_queries);
    if (err) return err;

    // a thread is worth waking for some tens of microseconds
    const size_t units = j->n_pages * j->subs_per_page * j->op->geo.n_head_kv;
    const size_t useful = j->n_missing ? j->n_pages : units / 32 + 1;
    cut_segments(&d);
    size_t n_threads = (size_t) j->n_threads;
    if (n_threads > useful) n_threads = useful;
    if (n_threads > d.n_segments) n_threads = d.n_segments;

    const size_t n = (size_t) j->n_rows * j->op->geo.n_head_kv;
    d.state_floats = align_floats(
        align_floats(n) + n * ((size_t) j->d_v_pad + KVT_SUM_LANES) + KVT_DECODE_ROWS * KVT_SUB);
    d.state = (float *) kvt_buf_need(&j->a->state, (d.n_segments + 1) * d.state_floats * sizeof(float));
    if (!d.state) return KVT_ERR_NOMEM;
    kvt_team_run((int) n_threads, decode_thread_main, &d);
    err = j->error.load();
    if (err) return err;
    finish(&d);
    j->a->stats.k_bytes += d.k_bytes;
    j->a->stats.v_bytes += d.v_bytes;
    return 0;
}
