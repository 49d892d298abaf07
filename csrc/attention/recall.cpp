// Bounded recall: decode that scores every key but reads few values. Per query row, the values left out carry at most
// eps of the softmax probability, and what they carry is added up, not guessed.
//
//   score    all visible keys, from the keys that stay in memory, become weights 2^(s - m); a row's weights lie side
//            by side
//   choose   where pages would have to be read, the least important ones that fit into a share of eps are left out as
//            a whole; then sub-pages, by KV head: to visit one costs more than to read a token more of another; then
//            each row gets the largest threshold below which the rest of eps fits
//   pick     tokens that some row of their KV head weighs at least its threshold
//   read     the picked values; those left out count with the mean of their sub-page (digests.h); and all weights once
//            more for the attention mass, while they are near
//
// All sums are cut and ordered by sub-pages alone, so neither the number of threads nor their timing changes a bit.
// Which pages are resident does matter: values at hand are cheap, so less of them is left out.

#include "recall-impl.h"

#include <thread>

// ---- score and weigh ----

static void score_sub(const struct recall * r, int h, size_t sub, uint8_t cls) {
    const struct kvt_job * j = r->j;
    const struct kvt_attention_op * op = j->op;
    const struct kvt_page_layout * lay = &op->keys->layout;
    const int n_rows = (int) j->n_rows;
    float * s = weights_of(r, (size_t) h * n_rows) + sub * KVT_SUB;
    const uint8_t * k = kvt_job_keys(j, h, sub);
    j->k->scores[lay->fmt_k](&r->q[h], 0, n_rows, k, s, j->ld_probs, (const char *) k + 4 * lay->k_sub_bytes);
    if (op->softcap != 0.0f) j->k->softcap(s, j->ld_probs, n_rows, op->softcap * KVT_LOG2E);
    if (cls != KVT_VIS_MIXED) return;
    for (int i = 0; i < n_rows; i++) {
        const int head = h * j->n_group + i % j->n_group;
        const uint16_t * mask = kvt_job_mask(op, i / j->n_group, head);
        j->k->mask_add(s + (size_t) i * j->ld_probs, mask ? mask + sub * KVT_SUB : NULL, kvt_job_slope(op, head),
            kvt_job_n_valid(op, sub));
    }
}

// Every row's weights are relative to the largest score of the first sub of which it sees something. What counts is
// only that no weight overflows, and the first tokens of a text are as good a guess as any (see
// kvt_recall_after_score).
static void find_references(struct recall * r) {
    const struct kvt_job * j = r->j;
    std::fill(r->m, r->m + r->n_all, -INFINITY);
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        size_t n_found = 0;
        for (size_t s = 0; s < j->n_sub && n_found < (size_t) j->n_rows; s++) {
            if (r->use[s] == SUB_HIDDEN) continue;
            score_sub(r, h, s, kvt_vis_row(j->vis, 0)[s]);
            n_found = 0;
            for (size_t row = (size_t) h * j->n_rows; row < (size_t) (h + 1) * j->n_rows; row++) {
                if (r->m[row] == -INFINITY) r->m[row] = j->k->row_max(weights_of(r, row) + s * KVT_SUB, KVT_SUB);
                n_found += r->m[row] != -INFINITY;
            }
        }
    }
}

static void score(struct recall * r, int ith, int nth) {
    struct kvt_job * j = r->j;
    const uint8_t * cls = kvt_vis_row(j->vis, 0);
    const size_t n_rows = (size_t) j->n_rows;
    size_t segment, h;
    while (next_segment(r, ith, nth, (size_t) j->op->geo.n_head_kv, &segment, &h)) {
        float m[KVT_DECODE_ROWS], sums[KVT_DECODE_ROWS], all[KVT_DECODE_ROWS] = { 0.0f };
        for (size_t i = 0; i < n_rows; i++) m[i] = r->m[h * n_rows + i] == -INFINITY ? 0.0f : r->m[h * n_rows + i];
        size_t first, end, n = 0;
        segment_subs(r, segment, &first, &end);
        for (size_t s = first; s < end; s++) {
            if (r->use[s] == SUB_HIDDEN) continue;
            score_sub(r, (int) h, s, cls[s]);
            j->k->weigh_sub(weights_of(r, h * n_rows) + s * KVT_SUB, j->ld_probs, (int) n_rows, m, sums);
            for (size_t i = 0; i < n_rows; i++) {
                r->weight[(h * n_rows + i) * r->ld_left + s + r->shift] = sums[i];
                all[i] += sums[i];
            }
            n++;
        }
        std::copy(all, all + n_rows, r->segment_sum + segment * r->n_all + h * n_rows);
        r->k_bytes.fetch_add(n * j->op->keys->layout.k_sub_bytes, std::memory_order_relaxed);
    }
}

// ---- pages ----

// Lists the pages of which something was picked and pins those at hand.
static int pin_wanted(struct recall * r) {
    struct kvt_job * j = r->j;
    const struct kvt_page_source * src = j->op->source;
    memset(r->wanted, 0, r->n_pages);
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (size_t s = 0; s < j->n_sub; s++)
            r->wanted[s / j->subs_per_page] |= r->picked[(size_t) h * j->n_sub + s] != 0;
    }
    char * p = (char *) kvt_buf_need(
        &j->a->pages, r->n_pages * (sizeof(struct kvt_page_ref) + 2 * sizeof(uint32_t)) + 64);
    if (!p) return KVT_ERR_NOMEM;
    j->refs = (struct kvt_page_ref *) p;
    j->pages = (uint32_t *) (j->refs + r->n_pages);
    j->missing = j->pages + r->n_pages;
    for (size_t page = 0; page < r->n_pages; page++) {
        r->slot[page] = r->wanted[page] ? (int32_t) j->n_pages : -1;
        if (r->wanted[page]) j->pages[j->n_pages++] = j->op->page_first + (uint32_t) page;
    }
    if (j->n_pages == 0) return 0;
    const int err = src->acquire_resident(src->ctx, j->pages, j->n_pages, j->refs, j->missing, &j->n_missing);
    if (err) {
        j->n_pages = 0;
        return err;
    }
    uint32_t * list = r->asked; // its work is done
    for (size_t i = 0; i < j->n_missing; i++) {
        const uint32_t at = j->missing[i];
        list[i] = j->pages[at];
        r->slot[j->pages[at] - j->op->page_first] = -1; // wanted, but not at hand
        j->refs[at].data = NULL;
        j->refs[at].page = j->pages[at];
    }
    if (j->n_missing && src->prefetch) src->prefetch(src->ctx, list, j->n_missing);
    return 0;
}

// ---- read ----

// Inlined by force: GCC takes a function that does nothing but prefetch for one without effect, and drops its calls.
#define KVT_TOUCH __attribute__((always_inline)) static inline void

KVT_TOUCH touch(const char * p, size_t n) {
    for (size_t i = 0; i < n; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// brings the picked rows of a sub into the cache
KVT_TOUCH touch_picked(const struct kvt_page_layout * lay, const uint8_t * v, uint32_t picked) {
    const size_t d = (size_t) lay->d_v_pad;
    if (lay->fmt_v < KVT_FORMAT_Q8_0) {
        const size_t row = lay->v_sub_bytes / KVT_SUB;
        for (; picked; picked &= picked - 1) touch((const char *) v + (size_t) __builtin_ctz(picked) * row, row);
        return;
    }
    const size_t block = lay->v_sub_bytes / (d / 32),
                 scales = lay->fmt_v == KVT_FORMAT_Q4_1 ? 4 * KVT_SUB : 2 * KVT_SUB, row = (block - scales) / KVT_SUB;
    for (size_t b = 0; b < d / 32; b++) {
        const char * base = (const char *) v + b * block;
        touch(base, scales);
        for (uint32_t bits = picked; bits; bits &= bits - 1)
            __builtin_prefetch(base + scales + (size_t) __builtin_ctz(bits) * row, 0, 3);
    }
}

static void read_values(const struct recall * r, const struct kvt_page_ref * ref, size_t page, size_t first, size_t end,
    float * o, uint64_t * v_bytes) {
    const struct kvt_job * j = r->j;
    if (!ref->data) return; // absent: zeros
    const struct kvt_page_layout * lay = ref->layout;
    const size_t n_rows = (size_t) j->n_rows;
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (size_t s = first; s < end; s++) {
            const uint32_t bits = r->picked[(size_t) h * j->n_sub + s];
            if (!bits) continue;
            const uint8_t * v = ref->data + kvt_v_sub_off(lay, h, (int32_t) (s - page * j->subs_per_page));
            const float * p = weights_of(r, (size_t) h * n_rows) + s * KVT_SUB;
            float * out = o + (size_t) h * n_rows * j->d_v_pad;
            if (bits == UINT32_MAX) {
                j->k->accumulate[lay->fmt_v](p, j->ld_probs, (int) n_rows, j->d_v_pad, v, out, (const char *) v);
            } else {
                j->k->accumulate_some[lay->fmt_v](p, j->ld_probs, (int) n_rows, j->d_v_pad, v, bits, out);
            }
            *v_bytes += (uint64_t) __builtin_popcount(bits) * (lay->v_sub_bytes / KVT_SUB);
        }
    }
}

// prefetches what the page after this one will be asked for
KVT_TOUCH touch_page(const struct recall * r, size_t page) {
    const struct kvt_job * j = r->j;
    if (page >= r->n_pages || r->slot[page] < 0) return;
    const struct kvt_page_ref * ref = &j->refs[r->slot[page]];
    if (!ref->data) return;
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (size_t s = page * j->subs_per_page; s < (page + 1) * j->subs_per_page && s < j->n_sub; s++) {
            const uint32_t bits = r->picked[(size_t) h * j->n_sub + s];
            if (bits)
                touch_picked(ref->layout,
                    ref->data + kvt_v_sub_off(ref->layout, h, (int32_t) (s - page * j->subs_per_page)), bits);
        }
    }
}

static int read_page(struct recall * r, size_t page, size_t first, size_t end, float * o, uint64_t * v_bytes) {
    const struct kvt_job * j = r->j;
    const struct kvt_page_source * src = j->op->source;
    if (!r->wanted[page]) return 0;
    touch_page(r, page + 4);
    if (r->slot[page] >= 0) {
        read_values(r, &j->refs[r->slot[page]], page, first, end, o, v_bytes);
        return 0;
    }
    struct kvt_page_ref ref;
    const int err = src->acquire(src->ctx, j->op->page_first + (uint32_t) page, &ref);
    if (err) return err;
    r->pages_missing.fetch_add(1, std::memory_order_relaxed);
    read_values(r, &ref, page, first, end, o, v_bytes);
    if (ref.data) src->release_many(src->ctx, &ref, 1);
    return 0;
}

// What was left out and what was read, had the keys not been rounded: at most, and at least.
static void bound(const struct recall * r, size_t segment) {
    const struct kvt_job * j = r->j;
    const struct kvt_keys * keys = j->op->keys;
    const int32_t n_blocks = (j->op->geo.d_k + 31) / 32;
    const size_t from = segment * r->segment_subs, n = std::min(r->segment_subs, r->ld_left - from),
                 first = first_group_of(r) * KVT_SUB + from;
    for (size_t row = 0; row < r->n_all; row++) {
        const size_t at = segment * r->n_all + row, i = row * r->ld_left + from;
        const float * errors = kvt_keys_errors(keys, (int32_t) (row / j->n_rows), 0) + first;
        j->k->bound_sums(r->weight + i, r->left + i, n, errors, keys->ld_error, r->q_norm + row * (n_blocks + 1),
            n_blocks, &r->at_most[at], &r->at_least[at]);
    }
}

// what was left out, with the means of its sub-pages
static void add_means(const struct recall * r, size_t segment, float * o, uint64_t * v_bytes) {
    const struct kvt_job * j = r->j;
    const struct kvt_digests * d = r->how->digests;
    const size_t n_rows = (size_t) j->n_rows, first_group = first_group_of(r);
    for (size_t c = segment * r->segment_subs; c < (segment + 1) * r->segment_subs && c < r->ld_left; c += KVT_SUB) {
        for (int h = 0; h < j->op->geo.n_head_kv; h++) {
            const float * left = r->left + (size_t) h * n_rows * r->ld_left + c;
            const uint8_t * means = kvt_digests_group(d, h, first_group + c / KVT_SUB);
            j->k->accumulate[d->layout.fmt_v](left, r->ld_left, (int) n_rows, j->d_v_pad, means,
                o + (size_t) h * n_rows * j->d_v_pad, (const char *) means);
            *v_bytes += d->layout.v_sub_bytes;
        }
    }
}

static void take_mass(const struct recall * r, size_t first, size_t end) {
    const struct kvt_job * j = r->j;
    for (size_t s = first; s < end; s++) {
        for (int64_t q = 0; q < j->n_mass_queries; q++) {
            r->sub_mass[(size_t) q * j->n_sub + s] = kvt_mass_take_sub(
                j, q, s, r->use[s] != SUB_HIDDEN, r->to_probability, 1);
        }
    }
}

static void read(struct recall * r, int ith, int nth) {
    struct kvt_job * j = r->j;
    const size_t n_o = r->n_all * j->d_v_pad;
    size_t segment, only;
    while (j->error.load(std::memory_order_relaxed) == 0 && next_segment(r, ith, nth, 1, &segment, &only)) {
        float * o = r->o + segment * n_o;
        uint64_t v_bytes = 0;
        size_t first, end;
        memset(o, 0, n_o * sizeof(float));
        segment_subs(r, segment, &first, &end);
        for (size_t s = first; s < end;) {
            const size_t page = s / j->subs_per_page, stop = std::min(end, (page + 1) * j->subs_per_page);
            const int err = read_page(r, page, s, stop, o, &v_bytes);
            if (err) kvt_job_fail(j, err);
            s = stop;
        }
        add_means(r, segment, o, &v_bytes);
        bound(r, segment);
        if (j->op->mass) take_mass(r, first, end);
        r->v_bytes.fetch_add(v_bytes, std::memory_order_relaxed);
    }
}

// ---- the end ----

static void report_row(const struct recall * r, size_t row) {
    struct kvt_recall_report * out = r->how->report;
    if (r->m[row] == -INFINITY) return;
    double sum = 0.0, most = 0.0, least = r->sink[row];
    for (size_t s = 0; s < r->j->n_sub; s++) sum += r->left[row * r->ld_left + s + r->shift];
    for (size_t s = 0; s < r->n_segments; s++) {
        most += r->at_most[s * r->n_all + row];
        least += r->at_least[s * r->n_all + row];
    }
    const double omitted = sum / total_of(r, row),
                 share = most / (most + least) + 1e-5 * omitted + 1e-7; // the last two: single precision
    const double bound = share < 1.0 ? share : 1.0;
    out->n_rows++;
    out->omitted_sum += omitted;
    out->bound_sum += bound;
    out->omitted_max = std::max(out->omitted_max, (float) omitted);
    out->bound_max = std::max(out->bound_max, (float) bound);
}

static void finish_mass(const struct recall * r) {
    const struct kvt_job * j = r->j;
    for (int64_t q = 0; q < j->n_mass_queries; q++) {
        for (size_t page = 0; page < r->n_pages; page++) {
            float total = 0.0f;
            for (size_t s = page * j->subs_per_page; s < (page + 1) * j->subs_per_page && s < j->n_sub; s++)
                total += r->sub_mass[(size_t) q * j->n_sub + s];
            kvt_mass_take_page(j, page, total);
        }
        j->op->mass->n_steps++;
    }
}

static void finish(struct recall * r) {
    struct kvt_job * j = r->j;
    const size_t n_o = r->n_all * j->d_v_pad;
    float * tmp = r->o + r->n_segments * n_o;
    for (size_t row = 0; row < r->n_all; row++) {
        struct kvt_row_sum sum;
        kvt_row_begin(j, &sum, tmp);
        const float none[KVT_SUM_LANES] = { 0.0f }, all[KVT_SUM_LANES] = { r->l[row] };
        for (size_t s = 0; s < r->n_segments; s++)
            kvt_row_join(j, &sum, { &r->m[row], s == 0 ? all : none, r->o + s * n_o + row * j->d_v_pad });
        const int h = (int) (row / j->n_rows), i = (int) (row % j->n_rows);
        kvt_row_end(j, &sum, h * j->n_group + i % j->n_group, i / j->n_group, NULL, NULL);
        report_row(r, row);
    }
    if (j->op->mass) finish_mass(r);
    struct kvt_recall_report * out = r->how->report;
    size_t n_seen = 0;
    for (size_t s = 0; s < j->n_sub; s++) n_seen += r->use[s] != SUB_HIDDEN ? (size_t) kvt_job_n_valid(j->op, s) : 0;
    out->tokens_seen += n_seen * j->op->geo.n_head_kv;
    out->tokens_read += r->tokens_read;
    out->pages_wanted += j->n_pages;
    out->pages_missing += r->pages_missing;
    j->a->stats.k_bytes += r->k_bytes;
    j->a->stats.v_bytes += r->v_bytes;
    j->a->stats.pages_read += j->n_pages;
}

template <typename T> static T * take(char ** p, size_t n) {
    T * out = (T *) *p;
    *p += kvt_round_up(n * sizeof(T), 64);
    return out;
}

static void norm_queries(struct recall * r) {
    const struct kvt_job * j = r->j;
    const int32_t d_k = j->op->geo.d_k, n_blocks = (d_k + 31) / 32;
    // a soft cap has slope 1 at most; its argument is scaled by 1/cap
    const float scale = j->op->softcap != 0.0f ? j->op->softcap * KVT_LOG2E : 1.0f;
    for (size_t row = 0; row < r->n_all; row++) {
        const float * q = r->q[row / j->n_rows].f + (row % j->n_rows) * d_k;
        float *norm = r->q_norm + row * (n_blocks + 1), all = 0.0f;
        for (int32_t b = 0; b < n_blocks; b++) {
            float sum = 0.0f;
            for (int32_t c = 32 * b; c < std::min(32 * b + 32, d_k); c++) sum += q[c] * q[c];
            norm[b] = scale * sqrtf(sum);
            all += sum;
        }
        norm[n_blocks] = scale * sqrtf(all);
    }
}

static int prepare(struct recall * r) {
    struct kvt_job * j = r->j;
    const size_t n_all = r->n_all, n_sub = j->n_sub;
    r->n_pages = (n_sub + j->subs_per_page - 1) / j->subs_per_page;
    r->shift = (size_t) j->op->page_first * j->subs_per_page % KVT_SUB;
    const size_t n_groups = (n_sub + r->shift + KVT_SUB - 1) / KVT_SUB;
    r->segment_subs = (n_groups + MAX_SEGMENTS - 1) / MAX_SEGMENTS * KVT_SUB;
    r->n_segments = (n_sub + r->shift + r->segment_subs - 1) / r->segment_subs;
    r->ld_left = n_groups * KVT_SUB;
    if ((size_t) (j->op->page_first) * j->subs_per_page + n_sub > r->how->digests->n_subs) return KVT_ERR_INVALID;

    j->n_mass_queries = j->op->mass ? j->op->n_queries : 0;
    const size_t n_norms = (size_t) (j->op->geo.d_k + 31) / 32 + 1;
    const size_t n_float = n_all * (7 + n_norms + 3 * r->n_segments + 3 * r->ld_left + r->n_pages) +
        (size_t) j->n_mass_queries * n_sub + 20 * 64;
    const size_t n_bytes = n_float * sizeof(float) + n_sub * (1 + j->op->geo.n_head_kv * (2 * sizeof(uint32_t) + 1)) +
        j->op->geo.n_head_kv * sizeof(size_t) + r->n_pages * (2 + 2 * sizeof(uint32_t)) + 32 * 64;
    char * p = (char *) kvt_buf_need(&j->a->recall, n_bytes);
    r->o = (float *) kvt_buf_need(
        &j->a->state, ((r->n_segments + 1) * n_all * j->d_v_pad + 2 * r->n_pages) * sizeof(float));
    if (!p || !r->o) return KVT_ERR_NOMEM;
    r->m = take<float>(&p, n_all);
    r->l = take<float>(&p, n_all);
    r->sink = take<float>(&p, n_all);
    r->threshold = take<float>(&p, n_all);
    r->left_out = take<float>(&p, n_all);
    r->to_probability = take<float>(&p, n_all);
    r->segment_sum = take<float>(&p, n_all * r->n_segments);
    r->sub_threshold = take<float>(&p, n_all);
    r->scratch = take<float>(&p, n_all * r->ld_left);
    r->weight = take<float>(&p, n_all * r->ld_left);
    r->left = take<float>(&p, n_all * r->ld_left);
    r->q_norm = take<float>(&p, n_all * n_norms);
    r->at_most = take<float>(&p, n_all * r->n_segments);
    r->at_least = take<float>(&p, n_all * r->n_segments);
    r->asked_weight = take<float>(&p, n_all * r->n_pages);
    r->sub_mass = take<float>(&p, (size_t) j->n_mass_queries * n_sub);
    r->picked = take<uint32_t>(&p, n_sub * j->op->geo.n_head_kv);
    r->open = take<uint32_t>(&p, n_sub * j->op->geo.n_head_kv);
    r->dropped = take<uint8_t>(&p, n_sub * j->op->geo.n_head_kv);
    r->n_open = take<size_t>(&p, (size_t) j->op->geo.n_head_kv);
    r->asked = take<uint32_t>(&p, r->n_pages);
    r->slot = take<int32_t>(&p, r->n_pages);
    r->use = take<uint8_t>(&p, n_sub);
    r->costly = take<uint8_t>(&p, r->n_pages);
    r->wanted = take<uint8_t>(&p, r->n_pages);
    memset(r->weight, 0, n_all * r->ld_left * sizeof(float));
    memset(r->left, 0, n_all * r->ld_left * sizeof(float));

    j->ld_probs = n_sub * KVT_SUB + 16; // rows do not start at the same place of every cache set
    j->probs = (float *) kvt_buf_need(&j->a->probs, n_all * j->ld_probs * sizeof(float));
    if (!j->probs) return KVT_ERR_NOMEM;
    int err = kvt_queries_prepare(j, &r->q);
    if (!err) norm_queries(r);
    if (!err) err = kvt_recall_classify(r);
    if (!err) find_references(r);
    return err;
}

// ---- stages ----

// All stages run in one team: to start a team costs more than a stage takes. Whoever comes last to the end of a stage
// does what lies between two stages, and lets the others go on.

static void end_stage(struct recall * r, int nth, void (*between)(struct recall *)) {
    const uint32_t turn = r->turn.load(std::memory_order_acquire);
    if (r->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t) nth) {
        r->arrived.store(0, std::memory_order_relaxed);
        r->j->next.store(0, std::memory_order_relaxed);
        for (std::atomic<uint32_t>& n : r->taken) n.store(0, std::memory_order_relaxed);
        if (between) between(r);
        r->turn.store(turn + 1, std::memory_order_release);
        return;
    }
    for (int n = 0; r->turn.load(std::memory_order_acquire) == turn; n++) {
        if (n > 20000) std::this_thread::yield(); // whoever we wait for may need this processor
    }
}

static void after_pick(struct recall * r) {
    const int err = pin_wanted(r);
    if (err) kvt_job_fail(r->j, err);
}

static void run_stages(void * arg, int ith, int nth) {
    struct recall * r = (struct recall *) arg;
    do {
        score(r, ith, nth);
        end_stage(r, nth, kvt_recall_after_score);
    } while (r->again);
    kvt_recall_sum_rows(r, ith, nth);
    end_stage(r, nth, r->n_asked ? kvt_recall_leave_pages_out : NULL);
    if (r->n_asked) {
        kvt_recall_set_sub_thresholds(r, ith, nth);
        end_stage(r, nth, NULL);
    }
    kvt_recall_drop_subs(r, ith, nth);
    end_stage(r, nth, NULL);
    kvt_recall_set_thresholds(r, ith, nth);
    end_stage(r, nth, NULL);
    if (r->how->budget_tokens > 0) {
        kvt_recall_keep_budgets(r, ith, nth);
        end_stage(r, nth, NULL);
    }
    kvt_recall_pick(r, ith, nth);
    end_stage(r, nth, after_pick);
    read(r, ith, nth);
}

int kvt_recall_run(struct kvt_job * j) {
    struct recall r{};
    r.j = j;
    r.how = j->op->recall;
    r.n_all = (size_t) j->n_rows * j->op->geo.n_head_kv;
    int err = prepare(&r);
    if (err) return err;
    const size_t useful = j->n_sub * j->op->geo.n_head_kv / 32 +
        1; // a thread is worth waking for some tens of microseconds
    kvt_team_run((int) std::min({ (size_t) j->n_threads, r.n_segments, useful, (size_t) MAX_THREADS }), run_stages, &r);
    err = j->error.load();
    if (j->n_pages) j->op->source->release_many(j->op->source->ctx, j->refs, j->n_pages);
    j->a->pages_read = j->pages;
    j->a->n_pages_read = j->n_pages;
    if (!err) finish(&r);
    return err;
}
