// What a bounded step reads: which sub-pages are open to choice, which pages and sub-pages are left out as a whole, the
// rows' thresholds, and the tokens that reach them. recall.cpp tells how the stages follow each other.

#include "recall-impl.h"

enum { DENSE_TOKENS = 24, N_TRIED = 4, N_SAMPLED = 64, MOST_AGAIN = 32 };

static const float LOWEST_LOG2 = -44.0f; // thresholds are looked for from here on, relative to the row's sum
static const float MOST_LOG2 = 1.0f;     // no weight is larger, relative to the power of two below the sum
static const float MOST_SUM = 1.2e24f;   // 2^80
static const float RISE_LOG2 = 100.0f;   // lifts what made a sum of 2^80 or more to 2^-20 or more
static const float PAGES_SHARE = 0.8f;   // of eps, for pages that would have to be read
static const float SUBS_SHARE = 0.7f;    // of what is left then, for whole sub-pages

// Tasks that are rows, or KV heads: whoever is free takes the next of n.
static bool next_task(struct recall * r, size_t n, size_t * task) {
    *task = r->j->next.fetch_add(1, std::memory_order_relaxed);
    return *task < n;
}

// ---- which sub-pages ----

// The sub-pages that must be read whole, and those that are open to choice.
int kvt_recall_classify(struct recall * r) {
    const struct kvt_job * j = r->j;
    const struct kvt_attention_op * op = j->op;
    const uint8_t * any = kvt_vis_any(j->vis);
    const size_t first_sub = (size_t) op->page_first * j->subs_per_page;
    size_t n_newest = 0, newest = r->n_pages; // pages from `newest` on are whole
    for (size_t page = r->n_pages; page-- > 0 && n_newest < (size_t) r->how->n_last;) {
        bool seen = false;
        for (size_t s = page * j->subs_per_page; s < (page + 1) * j->subs_per_page && s < j->n_sub; s++)
            seen |= any[s] != 0;
        if (seen) {
            newest = page;
            n_newest++;
        }
    }
    uint32_t * seen_pages = r->asked;
    size_t n_seen = 0;
    for (size_t s = 0; s < j->n_sub; s++) {
        const size_t page = s / j->subs_per_page;
        const bool whole = page < (size_t) r->how->n_first || page >= newest || !r->how->digests->valid[first_sub + s];
        r->use[s] = !any[s] ? SUB_HIDDEN : whole ? SUB_WHOLE : SUB_OPEN;
        if (any[s] && (n_seen == 0 || seen_pages[n_seen - 1] != op->page_first + page))
            seen_pages[n_seen++] = op->page_first + (uint32_t) page;
    }
    j->a->stats.pages_skipped += r->n_pages - n_seen;
    memset(r->costly, 0, r->n_pages);
    r->n_asked = 0;
    if (!op->source->is_ready || n_seen == 0) return 0;
    uint8_t * ready = r->wanted;
    const int err = op->source->is_ready(op->source->ctx, seen_pages, n_seen, ready);
    for (size_t i = 0; !err && i < n_seen; i++) r->costly[seen_pages[i] - op->page_first] = !ready[i];
    return err;
}

// Pages that would have to be read, and of which nothing has to be.
static void list_asked(struct recall * r) {
    const struct kvt_job * j = r->j;
    for (size_t page = 0; page < r->n_pages; page++) {
        bool open = false, whole = false;
        for (size_t s = page * j->subs_per_page; s < (page + 1) * j->subs_per_page && s < j->n_sub; s++) {
            open |= r->use[s] == SUB_OPEN;
            whole |= r->use[s] == SUB_WHOLE;
        }
        if (r->costly[page] && open && !whole) r->asked[r->n_asked++] = (uint32_t) page;
    }
}

// ---- thresholds ----

// Weights among which a threshold is looked for: a plain row of them, or those of listed subs.
struct candidates {
    const float * p;
    const uint32_t * subs;
    size_t n;
}; // n: subs, or groups of 32 weights

static void try_thresholds(
    const struct kvt_kernels * k, const struct candidates * c, size_t stride, const float * t, float * sums) {
    if (c->subs)
        k->sums_below_subs(c->p, c->subs, c->n, stride, t, sums);
    else
        k->sums_below(c->p, c->n * KVT_SUB, t, sums);
}

// The power of two at or below a row's sum: thresholds are tried at fixed distances from it, whatever weights are
// relative to.
static float unit_of(float sum) {
    int e;
    frexpf(sum, &e);
    return ldexpf(1.0f, e - 1);
}

// log2 of about the largest threshold below which `allowed` lies, from a sample of the subs
static float guess_threshold(
    const struct kvt_kernels * k, const struct candidates * c, float unit, float allowed, float * width) {
    const size_t stride = c->subs ? (c->n + N_SAMPLED - 1) / N_SAMPLED : 1;
    const float part = (float) ((c->n + stride - 1) / stride) / (float) c->n;
    float lo = LOWEST_LOG2, hi = MOST_LOG2;
    for (int pass = 0; pass < 3; pass++) {
        float t[N_TRIED], sums[N_TRIED] = { 0.0f };
        const float step = (hi - lo) / (N_TRIED + 1);
        for (int i = 0; i < N_TRIED; i++) t[i] = unit * exp2f(lo + step * (float) (i + 1));
        try_thresholds(k, c, stride, t, sums);
        int n = 0;
        while (n < N_TRIED && sums[n] <= allowed * part) n++;
        lo += step * (float) n;
        hi = lo + step;
    }
    *width = hi - lo;
    return lo;
}

// The largest of a row of thresholds below which at most `allowed` of a row's sum lies: measured over all candidates.
// FLT_MIN: none.
static float find_threshold(const struct kvt_kernels * k, const struct candidates * c, float sum, float allowed) {
    if (!(allowed > 0.0f) || c->n == 0) return FLT_MIN;
    const float unit = unit_of(sum);
    float width;
    float top = guess_threshold(k, c, unit, allowed, &width) + width;
    for (float step = width * 0.6f; top > LOWEST_LOG2; step *= 3.0f) {
        float t[N_TRIED], sums[N_TRIED] = { 0.0f };
        for (int i = 0; i < N_TRIED; i++) t[i] = unit * exp2f(std::min(top - step * (float) i, MOST_LOG2));
        try_thresholds(k, c, 1, t, sums);
        for (int i = 0; i < N_TRIED; i++) {
            if (sums[i] <= allowed) return std::max(t[i], FLT_MIN);
        }
        top -= step * N_TRIED;
    }
    return FLT_MIN;
}

// ---- sums ----

// after all weights are there: what a row gives to pages that may be left out
static void sum_row(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    const struct kvt_attention_op * op = j->op;
    const int head = (int) (row / j->n_rows) * j->n_group + (int) (row % j->n_rows) % j->n_group;
    const float *by_sub = r->weight + row * r->ld_left + r->shift, m = r->m[row];
    r->sink[row] = op->sinks && m != -INFINITY ? exp2f(std::min(op->sinks[head] * KVT_LOG2E - m, 126.0f)) : 0.0f;
    r->to_probability[row] = m != -INFINITY ? 1.0f / total_of(r, row) : 0.0f;
    r->left_out[row] = 0.0f;
    for (size_t i = 0; i < r->n_asked; i++) {
        float sum = 0.0f;
        for (size_t s = (size_t) r->asked[i] * j->subs_per_page;
            s < ((size_t) r->asked[i] + 1) * j->subs_per_page && s < j->n_sub; s++) {
            if (r->use[s] == SUB_OPEN) sum += by_sub[s];
        }
        r->asked_weight[i * r->n_all + row] = sum;
    }
}

static float may_leave_out(const struct recall * r, size_t row) {
    return r->how->eps * total_of(r, row) - r->left_out[row];
}

static void set_sub_threshold(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    r->sub_threshold[row] = INFINITY; // a row that sees nothing forbids nothing
    if (r->m[row] == -INFINITY) return;
    const float * by_sub = r->weight + row * r->ld_left + r->shift;
    float * open = r->scratch + row * r->ld_left;
    size_t n = 0;
    for (size_t s = 0; s < j->n_sub; s++) {
        if (r->use[s] == SUB_OPEN) open[n++] = by_sub[s];
    }
    while (n % KVT_SUB) open[n++] = INFINITY; // below no threshold
    const struct candidates c = { open, NULL, n / KVT_SUB };
    r->sub_threshold[row] = find_threshold(j->k, &c, total_of(r, row), SUBS_SHARE * may_leave_out(r, row));
}

static void set_threshold(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    const size_t h = row / j->n_rows;
    r->threshold[row] = INFINITY;
    if (r->m[row] == -INFINITY) return;
    const float * by_sub = r->weight + row * r->ld_left + r->shift;
    const uint8_t * dropped = r->dropped + h * j->n_sub;
    float sum = 0.0f;
    for (size_t s = 0; s < j->n_sub; s++) sum += dropped[s] ? by_sub[s] : 0.0f;
    r->left_out[row] += sum;
    const struct candidates c = { weights_of(r, row), r->open + h * j->n_sub, r->n_open[h] };
    r->threshold[row] = find_threshold(j->k, &c, total_of(r, row), may_leave_out(r, row));
}

void kvt_recall_sum_rows(struct recall * r, int ith, int nth) {
    (void) ith;
    (void) nth;
    for (size_t row; next_task(r, r->n_all, &row);) {
        sum_row(r, row);
        if (r->n_asked == 0) set_sub_threshold(r, row);
    }
}

void kvt_recall_set_sub_thresholds(struct recall * r, int ith, int nth) {
    (void) ith;
    (void) nth;
    for (size_t row; next_task(r, r->n_all, &row);) { set_sub_threshold(r, row); }
}

void kvt_recall_set_thresholds(struct recall * r, int ith, int nth) {
    (void) ith;
    (void) nth;
    for (size_t row; next_task(r, r->n_all, &row);) { set_threshold(r, row); }
}

// Per KV head, subs that every row weighs less than its threshold are dropped; the other open ones are listed.
void kvt_recall_drop_subs(struct recall * r, int ith, int nth) {
    (void) ith;
    (void) nth;
    const struct kvt_job * j = r->j;
    for (size_t h; next_task(r, (size_t) j->op->geo.n_head_kv, &h);) {
        uint8_t * dropped = r->dropped + h * j->n_sub;
        uint32_t * open = r->open + h * j->n_sub;
        for (size_t s = 0; s < j->n_sub; s++) dropped[s] = r->use[s] == SUB_OPEN;
        for (size_t row = h * j->n_rows; row < (h + 1) * j->n_rows; row++) {
            const float *by_sub = r->weight + row * r->ld_left + r->shift, t = r->sub_threshold[row];
            for (size_t s = 0; s < j->n_sub; s++) dropped[s] &= by_sub[s] < t;
        }
        size_t n = 0;
        for (size_t s = 0; s < j->n_sub; s++) {
            if (r->use[s] == SUB_OPEN && !dropped[s]) open[n++] = (uint32_t) s;
        }
        r->n_open[h] = n;
    }
}

// Leaves out pages that would have to be read, the least important first, as long as no row exceeds its share.
void kvt_recall_leave_pages_out(struct recall * r) {
    const struct kvt_job * j = r->j;
    struct ranked {
        float key;
        uint32_t i;
    };
    struct ranked * order = (struct ranked *) r->o; // not in use yet, and larger by far
    for (size_t i = 0; i < r->n_asked; i++) {
        float key = 0.0f;
        for (size_t row = 0; row < r->n_all; row++) {
            if (r->m[row] != -INFINITY) key = std::max(key, r->asked_weight[i * r->n_all + row] / total_of(r, row));
        }
        order[i] = { key, (uint32_t) i };
    }
    std::sort(order, order + r->n_asked,
        [](const ranked& a, const ranked& b) { return a.key < b.key || (a.key == b.key && a.i < b.i); });
    for (size_t n = 0; n < r->n_asked; n++) {
        const float * w = r->asked_weight + order[n].i * r->n_all;
        bool fits = true;
        for (size_t row = 0; row < r->n_all && fits; row++) {
            fits = r->m[row] == -INFINITY || r->left_out[row] + w[row] <= PAGES_SHARE * r->how->eps * total_of(r, row);
        }
        if (!fits) continue;
        for (size_t row = 0; row < r->n_all; row++) r->left_out[row] += w[row];
        const size_t first = (size_t) r->asked[order[n].i] * j->subs_per_page;
        for (size_t s = first; s < first + j->subs_per_page && s < j->n_sub; s++) {
            if (r->use[s] == SUB_OPEN) r->use[s] = SUB_LEFT_OUT;
        }
    }
}

// ---- pick ----

static uint32_t pick_sub(const struct recall * r, size_t h, size_t sub, const float * thresholds) {
    const struct kvt_job * j = r->j;
    if (r->use[sub] == SUB_WHOLE) return UINT32_MAX;
    if (r->use[sub] != SUB_OPEN || r->dropped[h * j->n_sub + sub]) return 0;
    return j->k->pick(weights_of(r, h * j->n_rows) + sub * KVT_SUB, j->ld_probs, (int) j->n_rows, thresholds);
}

// those of the picked bits that are tokens: a sub that is read whole may be the last one
static int n_tokens_of(const struct recall * r, size_t sub, uint32_t bits) {
    return __builtin_popcount(bits & (UINT32_MAX >> (KVT_SUB - kvt_job_n_valid(r->j->op, sub))));
}

static int64_t count_picked(const struct recall * r, size_t h, const float * thresholds) {
    int64_t n = 0;
    for (size_t s = 0; s < r->j->n_sub; s++) n += n_tokens_of(r, s, pick_sub(r, h, s, thresholds));
    return n;
}

// Raises the thresholds of a KV head, all by one factor, until no more values are read than the budget allows.
static void keep_budget(const struct recall * r, size_t h) {
    const size_t n_rows = (size_t) r->j->n_rows;
    float tried[KVT_DECODE_ROWS], *own = r->threshold + h * n_rows;
    float lo = 0.0f, hi = MOST_LOG2 + 1.0f - LOWEST_LOG2; // log2 of the factor: hi leaves only what is whole
    if (count_picked(r, h, own) <= r->how->budget_tokens) return;
    for (size_t x = 0; x < n_rows; x++) {
        const size_t row = h * n_rows + x;
        if (r->m[row] != -INFINITY) own[x] = std::max(own[x], unit_of(total_of(r, row)) * exp2f(LOWEST_LOG2));
    }
    for (int i = 0; i < 12; i++) {
        const float mid = (lo + hi) / 2;
        for (size_t x = 0; x < n_rows; x++) tried[x] = own[x] * exp2f(mid);
        (count_picked(r, h, tried) <= r->how->budget_tokens ? hi : lo) = mid;
    }
    for (size_t x = 0; x < n_rows; x++) own[x] *= exp2f(hi);
}

void kvt_recall_keep_budgets(struct recall * r, int ith, int nth) {
    (void) ith;
    (void) nth;
    for (size_t h; next_task(r, (size_t) r->j->op->geo.n_head_kv, &h);) { keep_budget(r, h); }
}

void kvt_recall_pick(struct recall * r, int ith, int nth) {
    struct kvt_job * j = r->j;
    const size_t n_rows = (size_t) j->n_rows;
    size_t segment, h;
    while (next_segment(r, ith, nth, (size_t) j->op->geo.n_head_kv, &segment, &h)) {
        size_t first, end;
        uint64_t n_read = 0;
        segment_subs(r, segment, &first, &end);
        for (size_t s = first; s < end; s++) {
            uint32_t bits = pick_sub(r, h, s, r->threshold + h * n_rows);
            if (__builtin_popcount(bits) >= DENSE_TOKENS && r->how->budget_tokens == 0) bits = UINT32_MAX;
            float left[KVT_DECODE_ROWS] = { 0.0f };
            if (bits && bits != UINT32_MAX)
                j->k->sums_unpicked(weights_of(r, h * n_rows) + s * KVT_SUB, j->ld_probs, (int) n_rows, bits, left);
            for (size_t x = 0; x < n_rows; x++) {
                const size_t at = (h * n_rows + x) * r->ld_left + s + r->shift;
                r->left[at] = bits ? left[x] : r->weight[at];
            }
            r->picked[h * j->n_sub + s] = bits;
            n_read += (uint64_t) n_tokens_of(r, s, bits);
        }
        r->tokens_read.fetch_add(n_read, std::memory_order_relaxed);
    }
}

// Sums of weights that are not far below the largest float: a row's reference was too low, and rises.
void kvt_recall_after_score(struct recall * r) {
    r->again = false;
    for (size_t row = 0; row < r->n_all; row++) {
        float l = 0.0f;
        for (size_t s = 0; s < r->n_segments; s++) l += r->segment_sum[s * r->n_all + row];
        r->l[row] = l;
        if (l < MOST_SUM || r->n_again == MOST_AGAIN) continue;
        r->m[row] += RISE_LOG2;
        r->again = true;
    }
    r->n_again += r->again;
    if (!r->again) list_asked(r);
}
