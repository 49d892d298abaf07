// Decode: few rows per KV head. Every page is read once, in order, by one thread, which keeps a running softmax of all
// rows of all heads; the threads' results are combined at the end.

#include "attention-impl.h"

struct decode {
    struct kvt_job * j;
    struct kvt_q_rows * q;       // [n_head_kv]
    float * state;               // per thread: m, l [n_head_q*n_queries], o [..][d_v_pad], scores [KVT_DECODE_ROWS][32]
    size_t  state_floats;
    size_t  pages_per_take;
    std::atomic<uint64_t> k_bytes, v_bytes;
};

struct decode_thread {
    float * m, * l, * o, * s;
    uint64_t k_bytes, v_bytes;
};

static size_t align_floats(size_t n) { return kvt_round_up(n, 16); }

// Scales q, and makes the 16-bit form where blocks of 32 allow it.
static int prepare_q(struct decode * d) {
    struct kvt_job * j = d->j;
    const struct kvt_attention_op * op = j->op;
    const int32_t d_k = op->geo.d_k, n_blocks = d_k/32;
    const size_t n_rows = (size_t) j->n_rows, n_heads = (size_t) op->geo.n_head_kv;
    const size_t per_row = (size_t) d_k + d_k/2 + 2*n_blocks;
    const size_t q_bytes = kvt_round_up(n_heads*sizeof(struct kvt_q_rows), 64);
    char * p = (char *) kvt_buf_need(&j->a->q, q_bytes + n_heads*n_rows*per_row*sizeof(float));
    if (!p) return KVT_ERR_NOMEM;
    d->q = (struct kvt_q_rows *) p;
    float * f = (float *) (p + q_bytes);
    const float scale = kvt_job_q_scale(op);
    for (size_t h = 0; h < n_heads; h++, f += n_rows*per_row) {
        float   * step = f + n_rows*d_k;
        int32_t * pair = (int32_t *) (step + n_rows*n_blocks);
        int32_t * sum  = pair + n_rows*(d_k/2);
        d->q[h].f = f; d->q[h].step = step; d->q[h].pair = pair; d->q[h].sum = sum; d->q[h].d_k = d_k;
        for (size_t r = 0; r < n_rows; r++) {
            const float * src = kvt_job_q(op, (int64_t) (r/j->n_group), (int) (h*j->n_group + r%j->n_group));
            float * row = f + r*d_k;
            for (int c = 0; c < d_k; c++) row[c] = src[c]*scale;
            if (d_k % 32) continue;
            for (int b = 0; b < n_blocks; b++) {
                float most = 0.0f;
                for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(row[b*32 + i]));
                const float inv = most > 0.0f ? 32767.0f/most : 0.0f;
                int32_t x[32], total = 0;
                for (int i = 0; i < 32; i++) {
                    x[i] = (int32_t) (row[b*32 + i]*inv + (row[b*32 + i] < 0.0f ? -0.5f : 0.5f));
                    total += x[i];
                }
                for (int g = 0; g < 8; g++) {
                    pair[r*(d_k/2) + b*16 + 2*g]     = (int32_t) ((uint32_t) x[4*g + 2] << 16 | (uint16_t) x[4*g]);
                    pair[r*(d_k/2) + b*16 + 2*g + 1] = (int32_t) ((uint32_t) x[4*g + 3] << 16 | (uint16_t) x[4*g + 1]);
                }
                step[r*n_blocks + b] = most/32767.0f;
                sum [r*n_blocks + b] = total;
            }
        }
    }
    return 0;
}

// scores of one sub become weights; the rows' states move
static void weigh(const struct decode * d, const struct decode_thread * t, float * s, size_t ld, int h, size_t sub, int cls) {
    const struct kvt_job * j = d->j;
    const struct kvt_attention_op * op = j->op;
    const int n_rows = (int) j->n_rows;
    if (op->softcap != 0.0f) j->k->softcap(s, ld, n_rows, KVT_SUB, op->softcap*KVT_LOG2E);
    if (cls == KVT_VIS_MIXED) {
        for (int r = 0; r < n_rows; r++) {
            const int head = h*j->n_group + r%j->n_group;
            const uint16_t * mask = kvt_job_mask(op, r/j->n_group, head);
            j->k->mask_add(s + r*ld, mask ? mask + sub*KVT_SUB : NULL, kvt_job_slope(op, head), kvt_job_n_valid(op, sub));
        }
    }
    const struct kvt_row_state st = { t->m + (size_t) h*n_rows, t->l + (size_t) h*n_rows, t->o + (size_t) h*n_rows*j->d_v_pad, j->d_v_pad };
    j->k->softmax(s, ld, n_rows, KVT_SUB, &st);
    if (op->mass) {
        for (int r = 0; r < n_rows; r++) j->probs_m[((size_t) h*n_rows + r)*j->n_sub + sub] = st.m[r];
    }
}

// `next`: the page whose bytes come after this one's, or NULL
static void do_page(const struct decode * d, struct decode_thread * t, const struct kvt_page_ref * ref, const struct kvt_page_ref * next) {
    const struct kvt_job * j = d->j;
    const struct kvt_attention_op * op = j->op;
    const struct kvt_page_layout * lay = ref->layout;
    const uint8_t * cls = kvt_vis_row(j->vis, 0);
    const int n_rows = (int) j->n_rows, n_subs = j->subs_per_page;
    const size_t sub0 = (size_t) (ref->page - op->page_first)*n_subs;
    for (int h = 0; h < op->geo.n_head_kv; h++) {
        for (int i = 0; i < n_subs && sub0 + i < j->n_sub; i++) {
            const size_t sub = sub0 + i;
            if (cls[sub] == KVT_VIS_NONE) continue;
            float * s = op->mass ? j->probs + (size_t) h*n_rows*j->ld_probs + sub*KVT_SUB : t->s;
            const size_t ld = op->mass ? j->ld_probs : KVT_SUB;
            if (!ref->data) {
                for (int r = 0; r < n_rows; r++) memset(s + r*ld, 0, KVT_SUB*sizeof(float));
                weigh(d, t, s, ld, h, sub, cls[sub]);
                continue;
            }
            const uint8_t * k = ref->data + kvt_k_sub_off(lay, h, i), * v = k + lay->k_sub_bytes;
            const uint8_t * k_next = v + lay->v_sub_bytes;
            size_t v_next_off = lay->k_sub_bytes;
            if (h == op->geo.n_head_kv - 1 && i == n_subs - 1 && next && next->data) {
                k_next = next->data;
                v_next_off = next->layout->k_sub_bytes;
            }
            j->k->scores[lay->fmt_k](&d->q[h], 0, n_rows, k, s, ld, (const char *) k_next);
            weigh(d, t, s, ld, h, sub, cls[sub]);
            j->k->accumulate[lay->fmt_v](s, ld, n_rows, j->d_v_pad, v, t->o + (size_t) h*n_rows*j->d_v_pad, (const char *) k_next + v_next_off);
            t->k_bytes += lay->k_sub_bytes;
            t->v_bytes += lay->v_sub_bytes;
        }
    }
}

static void do_resident(const struct decode * d, struct decode_thread * t) {
    struct kvt_job * j = d->j;
    while (j->error.load(std::memory_order_relaxed) == 0) {
        const size_t first = j->next.fetch_add(d->pages_per_take, std::memory_order_relaxed);
        if (first >= j->n_pages) return;
        const size_t end = first + d->pages_per_take < j->n_pages ? first + d->pages_per_take : j->n_pages;
        for (size_t i = first; i < end; i++) {
            if (!j->is_missing[i]) do_page(d, t, &j->refs[i], i + 1 < end ? &j->refs[i + 1] : NULL);
        }
    }
}

// a thread holds at most one page that had to be read
static void do_missing(const struct decode * d, struct decode_thread * t) {
    struct kvt_job * j = d->j;
    const struct kvt_page_source * src = j->op->source;
    while (j->error.load(std::memory_order_relaxed) == 0) {
        const size_t i = j->next_missing.fetch_add(1, std::memory_order_relaxed);
        if (i >= j->n_missing) return;
        struct kvt_page_ref ref;
        const int err = src->acquire(src->ctx, j->pages[j->missing[i]], &ref);
        if (err) {
            kvt_job_fail(j, err);
            return;
        }
        ref.page = j->pages[j->missing[i]];
        if (src->prefetch && i + 1 < j->n_missing) {
            uint32_t list[16];
            size_t n = 0;
            for (; n < 16 && i + 1 + n < j->n_missing; n++) list[n] = j->pages[j->missing[i + 1 + n]];
            src->prefetch(src->ctx, list, n);
        }
        do_page(d, t, &ref, NULL);
        if (ref.data) src->release_many(src->ctx, &ref, 1);
    }
}

static struct decode_thread thread_state(const struct decode * d, int ith) {
    const struct kvt_job * j = d->j;
    const size_t n = (size_t) j->n_rows*j->op->geo.n_head_kv;
    struct decode_thread t;
    t.m = d->state + (size_t) ith*d->state_floats;
    t.l = t.m + align_floats(n);
    t.o = t.l + align_floats(n);
    t.s = t.o + n*j->d_v_pad;
    t.k_bytes = t.v_bytes = 0;
    return t;
}

static void init_state(const struct decode * d, struct decode_thread * t) {
    const size_t n = (size_t) d->j->n_rows*d->j->op->geo.n_head_kv;
    for (size_t i = 0; i < n; i++) t->m[i] = -INFINITY;
    memset(t->l, 0, n*sizeof(float));
    memset(t->o, 0, n*d->j->d_v_pad*sizeof(float));
}

static void decode_thread_main(void * arg, int ith, int nth) {
    (void) nth;
    struct decode * d = (struct decode *) arg;
    struct decode_thread t = thread_state(d, ith);
    do_resident(d, &t);
    do_missing(d, &t);
    d->k_bytes.fetch_add(t.k_bytes, std::memory_order_relaxed);
    d->v_bytes.fetch_add(t.v_bytes, std::memory_order_relaxed);
}

static void finish(struct decode * d, int n_threads) {
    struct kvt_job * j = d->j;
    float * tmp = thread_state(d, n_threads).o;   // one more state than threads
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (int64_t r = 0; r < j->n_rows; r++) {
            const size_t row = (size_t) h*j->n_rows + r;
            struct kvt_partial parts[256];
            for (int i = 0; i < n_threads; i++) {
                const struct decode_thread t = thread_state(d, i);
                parts[i] = { t.m + row, t.l + row, t.o + row*j->d_v_pad };
            }
            const bool mass = j->op->mass != NULL;
            kvt_row_finish(j, parts, n_threads, (int) (h*j->n_group + r%j->n_group), r/j->n_group, tmp,
                           mass ? &j->final_m[row] : NULL, mass ? &j->final_f[row] : NULL);
        }
    }
}

int kvt_decode_run(struct kvt_job * j) {
    struct decode d;
    d.j = j;
    d.k_bytes = 0; d.v_bytes = 0;
    int err = prepare_q(&d);
    if (!err) err = kvt_mass_prepare(j, j->op->n_queries);
    if (err) return err;

    // a thread is worth waking for some tens of microseconds
    const size_t units = j->n_pages*j->subs_per_page*j->op->geo.n_head_kv;
    const size_t useful = j->n_missing ? j->n_pages : units/32 + 1;
    int n_threads = j->n_threads < 256 ? j->n_threads : 256;
    if ((size_t) n_threads > useful) n_threads = (int) useful;
    d.pages_per_take = j->n_pages/((size_t) n_threads*8) + 1;

    const size_t n = (size_t) j->n_rows*j->op->geo.n_head_kv;
    d.state_floats = align_floats(2*align_floats(n) + n*j->d_v_pad + KVT_DECODE_ROWS*KVT_SUB);
    d.state = (float *) kvt_buf_need(&j->a->state, (size_t) (n_threads + 1)*d.state_floats*sizeof(float));
    if (!d.state) return KVT_ERR_NOMEM;
    for (int i = 0; i < n_threads; i++) {   // a team may come out smaller than asked for
        struct decode_thread t = thread_state(&d, i);
        init_state(&d, &t);
    }
    kvt_team_run(n_threads, decode_thread_main, &d);
    err = j->error.load();
    if (err) return err;
    finish(&d, n_threads);
    j->a->stats.k_bytes += d.k_bytes;
    j->a->stats.v_bytes += d.v_bytes;
    return 0;
}
