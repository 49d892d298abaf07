// Decode: few rows per KV head. The visible pages are cut into pieces (pieces.cpp). A piece's pages are read once, in
// order, by one thread, which keeps a running softmax of all rows of all heads for each segment; the segments' results
// are joined at the end, in order.
//
// What is added to what, and in which order, depends on the positions of the cells that a row sees: not on the number
// of threads, nor on which thread took which piece, nor on the tier a page was on, nor on the rows beside it. Prefill
// does the same sums, so a token's attention has the same bits however it is computed.

#include "summary-impl.h"

#include <algorithm>

#ifndef PREFETCH_BYTES
#    define PREFETCH_BYTES 8192 // how far ahead of the reading the prefetches run, rounded up to whole subs
#endif

struct decode {
    struct kvt_job * j;
    struct kvt_q_rows * q; // [n_head_kv]
    float * state;         // per segment: m, l, o of all rows
    size_t state_floats;
    const struct kvt_piece * pieces;
    size_t n_pieces, n_states;
    uint32_t * order; // in which pieces are taken: those that need no I/O first, the largest of them first
    std::atomic<uint64_t> k_bytes, v_bytes;
};

struct decode_thread {
    const struct kvt_piece * piece;
    float * s; // scores, [KVT_DECODE_ROWS][32]
    uint64_t k_bytes, v_bytes;
};

static size_t align_floats(size_t n) { return kvt_round_up(n, 16); }

// the rows of KV head h in the state of a segment
static struct kvt_row_state state_rows(const struct decode * d, size_t state, int h) {
    const struct kvt_job * j = d->j;
    const size_t n = (size_t) j->n_rows * j->op->geo.n_head_kv, at = (size_t) h * j->n_rows;
    float * m = d->state + state * d->state_floats;
    float * l = m + align_floats(n);
    return { m + at, l + at * KVT_SUM_LANES, l + n * KVT_SUM_LANES + at * j->d_v_pad, j->d_v_pad };
}

// scores of one sub become weights; the rows' states move
static void weigh(const struct decode * d, float * s, size_t ld, int h, size_t sub, int cls, uint32_t lost,
    const struct kvt_row_state * st) {
    const struct kvt_job * j = d->j;
    const int n_rows = (int) j->n_rows;
    kvt_weigh_sub(j, s, ld, h, 0, n_rows, sub, cls, lost, st);
    if (j->op->mass) {
        for (int r = 0; r < n_rows; r++) j->probs_m[((size_t) h * n_rows + r) * j->ld_probs_m + sub] = st->m[r];
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
            const struct kvt_row_state st = state_rows(d, kvt_piece_state(t->piece, sub), h);
            float * s = op->mass ? j->probs + (size_t) h * n_rows * j->ld_probs + sub * KVT_SUB : t->s;
            const size_t ld = op->mass ? j->ld_probs : KVT_SUB;
            if (!ref->data) {
                for (int r = 0; r < n_rows; r++) memset(s + r * ld, 0, KVT_SUB * sizeof(float));
                weigh(d, s, ld, h, sub, cls[sub], lost, &st);
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
            weigh(d, s, ld, h, sub, cls[sub], lost, &st);
            j->k->accumulate[lay->fmt_v](s, ld, n_rows, j->d_v_pad, v, st.o, (const char *) kv_next + lay->k_sub_bytes);
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

static int do_piece(const struct decode * d, struct decode_thread * t) {
    const struct kvt_job * j = d->j;
    const size_t end = t->piece->end;
    for (size_t i = t->piece->first; i < end; i++) {
        if (j->is_missing[i]) {
            const int err = do_missing_page(d, t, i);
            if (err) return err;
        } else {
            do_page(d, t, &j->refs[i], i + 1 < end ? &j->refs[i + 1] : NULL);
        }
    }
    return 0;
}

static void order_pieces(struct decode * d) {
    const struct kvt_piece * p = d->pieces;
    for (size_t i = 0; i < d->n_pieces; i++) d->order[i] = (uint32_t) i;
    std::sort(d->order, d->order + d->n_pieces, [p](uint32_t a, uint32_t b) {
        const size_t n_a = p[a].end - p[a].first, n_b = p[b].end - p[b].first;
        if ((p[a].n_missing > 0) != (p[b].n_missing > 0)) return p[a].n_missing == 0;
        return n_a != n_b ? n_a > n_b : a < b;
    });
}

static void init_states(const struct decode * d, const struct kvt_piece * piece) {
    const size_t n = (size_t) d->j->n_rows * d->j->op->geo.n_head_kv;
    for (size_t i = piece->state0; i < piece->state0 + piece->n_states; i++) {
        const struct kvt_row_state st = state_rows(d, i, 0);
        for (size_t r = 0; r < n; r++) st.m[r] = -INFINITY;
        memset(st.l, 0, n * KVT_SUM_LANES * sizeof(float));
        memset(st.o, 0, n * d->j->d_v_pad * sizeof(float));
    }
}

static void decode_thread_main(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    struct decode * d = (struct decode *) arg;
    struct kvt_job * j = d->j;
    alignas(64) float s[KVT_DECODE_ROWS * KVT_SUB];
    while (j->error.load(std::memory_order_relaxed) == 0) {
        const size_t i = j->next.fetch_add(1, std::memory_order_relaxed);
        if (i >= d->n_pieces) return;
        struct decode_thread t = { &d->pieces[d->order[i]], s, 0, 0 };
        init_states(d, t.piece);
        const int err = do_piece(d, &t);
        if (err) kvt_job_fail(j, err);
        d->k_bytes.fetch_add(t.k_bytes, std::memory_order_relaxed);
        d->v_bytes.fetch_add(t.v_bytes, std::memory_order_relaxed);
    }
}

static void finish(struct decode * d) {
    struct kvt_job * j = d->j;
    float * tmp = state_rows(d, d->n_states, 0).o; // one more state than segments
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (int64_t r = 0; r < j->n_rows; r++) {
            struct kvt_row_sum sum;
            kvt_row_begin(j, &sum, tmp);
            for (size_t i = 0; i < d->n_states; i++) {
                const struct kvt_row_state st = state_rows(d, i, h);
                kvt_row_join(j, &sum, { st.m + r, st.l + r * KVT_SUM_LANES, st.o + r * j->d_v_pad });
            }
            if (j->sum_m) kvt_row_join(j, &sum, kvt_summary_partial(j, h, r));
            const size_t row = (size_t) h * j->n_rows + r;
            const bool mass = j->op->mass != NULL;
            kvt_row_end(j, &sum, (int) (h * j->n_group + r % j->n_group), r / j->n_group,
                mass ? &j->final_m[row] : NULL, mass ? &j->final_f[row] : NULL);
        }
    }
}

static int take_states(struct decode * d) {
    struct kvt_job * j = d->j;
    const size_t n = (size_t) j->n_rows * j->op->geo.n_head_kv;
    d->state_floats = align_floats(align_floats(n) + n * ((size_t) j->d_v_pad + KVT_SUM_LANES));
    const size_t n_floats = (d->n_states + 1) * d->state_floats;
    d->state = (float *) kvt_buf_need(&j->a->state, n_floats * sizeof(float) + d->n_pieces * sizeof(uint32_t));
    if (!d->state) return KVT_ERR_NOMEM;
    d->order = (uint32_t *) (d->state + n_floats);
    return 0;
}

int kvt_decode_run(struct kvt_job * j) {
    struct decode d;
    struct kvt_piece * pieces = NULL;
    d.j = j;
    d.k_bytes = 0;
    d.v_bytes = 0;
    int err = kvt_queries_prepare(j, &d.q);
    if (!err) err = kvt_mass_prepare(j, j->op->n_queries);
    if (!err) err = kvt_pieces_cut(j, &pieces, &d.n_pieces, &d.n_states);
    d.pieces = pieces;
    if (!err) err = take_states(&d);
    if (err) return err;
    order_pieces(&d);

    // a thread is worth waking for some tens of microseconds
    const size_t units = j->n_pages * j->subs_per_page * j->op->geo.n_head_kv;
    const size_t useful = j->n_missing ? j->n_pages : units / 32 + 1;
    size_t n_threads = (size_t) j->n_threads;
    if (n_threads > useful) n_threads = useful;
    if (n_threads > d.n_pieces) n_threads = d.n_pieces;
    kvt_team_run((int) n_threads, decode_thread_main, &d);
    err = j->error.load();
    if (err) return err;
    finish(&d);
    j->a->stats.k_bytes += d.k_bytes;
    j->a->stats.v_bytes += d.v_bytes;
    return 0;
}
