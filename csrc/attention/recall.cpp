// Bounded recall: decode that scores every key but reads few values. Per query row, the values left out carry at most eps
// of the softmax probability, and what they carry is added up, not guessed.
//
//   score    all visible keys, from the keys that stay in memory; a row's scores lie side by side
//   weigh    scores become weights 2^(s - m); where pages would have to be read, the least important ones that fit into a
//            share of eps are left out as a whole; then sub-pages, by KV head: to visit one costs more than to read a token
//            more of another; then each row gets the largest threshold below which the rest of eps fits
//   pick     tokens that some row of their KV head weighs at least its threshold
//   read     the picked values; those left out count with the mean of their sub-page (digests.h)
//
// All sums are cut and ordered by sub-pages alone, so neither the number of threads nor their timing changes a bit. Which
// pages are resident does matter: values at hand are cheap, so less of them is left out.

#include "attention-impl.h"

#include <algorithm>
#include <thread>

enum { MAX_SEGMENTS = 32, MAX_THREADS = 32, DENSE_TOKENS = 24, N_TRIED = 4, N_SAMPLED = 64 };

static const float LOWEST_LOG2 = -44.0f;   // of a weight that a threshold is looked for; the largest weight is 1
static const float PAGES_SHARE = 0.8f;     // of eps, for pages that would have to be read
static const float SUBS_SHARE  = 0.7f;     // of what is left then, for whole sub-pages

enum : uint8_t { SUB_HIDDEN, SUB_WHOLE, SUB_OPEN, SUB_LEFT_OUT };

struct sub_range { uint32_t first, end; };

struct recall {
    struct kvt_job * j;
    const struct kvt_recall * how;
    struct kvt_q_rows * q;               // [n_head_kv]
    size_t n_all;                        // rows of all KV heads: KV head h has rows h*n_rows ..
    size_t n_pages;                      // of the stream's cells 0..n_kv-1, seen or not
    size_t shift;                        // where the stream's first sub lies within its group of digests
    size_t segment_subs, n_segments;     // a segment is some groups of digests

    uint8_t  * use;                      // [n_sub]
    uint8_t  * costly;                   // [n_pages]: has to be read by I/O
    uint8_t  * wanted;                   // [n_pages]
    int32_t  * slot;                     // [n_pages]: position in refs, -1
    struct sub_range * visible;          // runs of subs
    size_t     n_visible;
    uint32_t * open;                     // [n_head_kv][n_sub]: subs that tokens are picked from, in order
    size_t   * n_open;                   // [n_head_kv]
    uint8_t  * dropped;                  // [n_head_kv][n_sub]
    uint32_t * picked;                   // [n_head_kv][n_sub]
    float    * left;                     // [n_all][ld_left]: by sub + shift, its weight; after the pick, what of it is left out
    size_t     ld_left;
    float    * segment_max;              // [n_segments][n_all]
    float    * segment_sum;              // [n_all][n_segments]
    float    * m, * l, * sink, * threshold, * left_out;   // [n_all]; left_out: by whole pages and subs
    float    * sub_threshold;            // [n_all]: subs below it, in every row of a KV head, are dropped
    float    * scratch;                  // [n_all][ld_left]
    float    * o;                        // [n_segments + 1][n_all][d_v_pad]

    uint32_t * asked;                    // [n_asked]: costly pages that may be left out
    float    * asked_weight;             // [n_asked][n_all]
    size_t     n_asked;

    std::atomic<uint64_t> tokens_read, k_bytes, v_bytes, pages_missing;
    std::atomic<uint32_t> taken[MAX_THREADS];   // of each thread's share of the tasks
    std::atomic<uint32_t> arrived, turn;
};

// Tasks over segments. Every thread has a block of consecutive segments, the same in each stage, so that what it wrote in one
// stage is in its own cache in the next; a thread that is done helps the others. `n_each`: tasks per segment; they are gone
// through one after the other over the whole block.
static bool next_segment(struct recall * r, int ith, int nth, size_t n_each, size_t * segment, size_t * which) {
    for (int k = 0; k < nth; k++) {
        const size_t owner = (size_t) ((ith + k) % nth);
        const size_t first = owner*r->n_segments/(size_t) nth, n = (owner + 1)*r->n_segments/(size_t) nth - first;
        const size_t task = r->taken[owner].load(std::memory_order_relaxed) < n*n_each ? r->taken[owner].fetch_add(1, std::memory_order_relaxed) : n*n_each;
        if (task >= n*n_each) continue;
        *segment = first + task%n;
        *which   = task/n;
        return true;
    }
    return false;
}

static float * weights_of(const struct recall * r, size_t row) { return r->j->probs + row*r->j->ld_probs; }
static float total_of(const struct recall * r, size_t row) { return r->l[row] + r->sink[row]; }

// ---- which sub-pages ----

static void list_visible(struct recall * r) {
    size_t n = 0;
    for (size_t s = 0; s < r->j->n_sub; s++) {
        if (r->use[s] == SUB_HIDDEN) continue;
        if (n && r->visible[n - 1].end == s) r->visible[n - 1].end++;
        else r->visible[n++] = { (uint32_t) s, (uint32_t) s + 1 };
    }
    r->n_visible = n;
}

// The sub-pages that must be read whole, and those that are open to choice.
static int classify(struct recall * r) {
    const struct kvt_job * j = r->j;
    const struct kvt_attention_op * op = j->op;
    const uint8_t * any = kvt_vis_any(j->vis);
    const size_t first_sub = (size_t) op->page_first*j->subs_per_page;
    size_t n_newest = 0, newest = r->n_pages;   // pages from `newest` on are whole
    for (size_t page = r->n_pages; page-- > 0 && n_newest < (size_t) r->how->n_last; ) {
        bool seen = false;
        for (size_t s = page*j->subs_per_page; s < (page + 1)*j->subs_per_page && s < j->n_sub; s++) seen |= any[s] != 0;
        if (seen) {
            newest = page;
            n_newest++;
        }
    }
    uint32_t * seen_pages = r->asked;
    size_t n_seen = 0;
    for (size_t s = 0; s < j->n_sub; s++) {
        const size_t page = s/j->subs_per_page;
        const bool whole = page < (size_t) r->how->n_first || page >= newest || !r->how->digests->valid[first_sub + s];
        r->use[s] = !any[s] ? SUB_HIDDEN : whole ? SUB_WHOLE : SUB_OPEN;
        if (any[s] && (n_seen == 0 || seen_pages[n_seen - 1] != op->page_first + page)) seen_pages[n_seen++] = op->page_first + (uint32_t) page;
    }
    list_visible(r);
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
        for (size_t s = page*j->subs_per_page; s < (page + 1)*j->subs_per_page && s < j->n_sub; s++) {
            open  |= r->use[s] == SUB_OPEN;
            whole |= r->use[s] == SUB_WHOLE;
        }
        if (r->costly[page] && open && !whole) r->asked[r->n_asked++] = (uint32_t) page;
    }
}

// ---- score ----

static void score_sub(const struct recall * r, int h, size_t sub, uint8_t cls, float * segment_max) {
    const struct kvt_job * j = r->j;
    const struct kvt_attention_op * op = j->op;
    const struct kvt_page_layout * lay = &op->keys->layout;
    const int n_rows = (int) j->n_rows;
    float * s = weights_of(r, (size_t) h*n_rows) + sub*KVT_SUB;
    const uint8_t * k = kvt_job_keys(j, h, sub);
    j->k->scores[lay->fmt_k](&r->q[h], 0, n_rows, k, s, j->ld_probs, (const char *) k + 4*lay->k_sub_bytes);
    if (op->softcap != 0.0f) j->k->softcap(s, j->ld_probs, n_rows, KVT_SUB, op->softcap*KVT_LOG2E);
    for (int i = 0; i < n_rows; i++) {
        float * row = s + (size_t) i*j->ld_probs;
        if (cls == KVT_VIS_MIXED) {
            const int head = h*j->n_group + i%j->n_group;
            const uint16_t * mask = kvt_job_mask(op, i/j->n_group, head);
            j->k->mask_add(row, mask ? mask + sub*KVT_SUB : NULL, kvt_job_slope(op, head), kvt_job_n_valid(op, sub));
        }
        const float most = j->k->row_max(row, KVT_SUB);
        if (most > segment_max[i]) segment_max[i] = most;
    }
}

static void segment_subs(const struct recall * r, size_t segment, size_t * first, size_t * end) {
    const size_t a = segment*r->segment_subs, b = a + r->segment_subs;
    *first = a > r->shift ? a - r->shift : 0;
    *end   = b - r->shift < r->j->n_sub ? b - r->shift : r->j->n_sub;
}

static void score(struct recall * r, int ith, int nth) {
    struct kvt_job * j = r->j;
    const uint8_t * cls = kvt_vis_row(j->vis, 0);
    size_t segment, h;
    while (next_segment(r, ith, nth, (size_t) j->op->geo.n_head_kv, &segment, &h)) {
        float most[KVT_DECODE_ROWS];   // not in place: the neighbours of that line belong to other threads
        std::fill(most, most + j->n_rows, -INFINITY);
        size_t first, end, n = 0;
        segment_subs(r, segment, &first, &end);
        for (size_t s = first; s < end; s++) {
            if (r->use[s] == SUB_HIDDEN) continue;
            score_sub(r, (int) h, s, cls[s], most);
            n++;
        }
        std::copy(most, most + j->n_rows, r->segment_max + segment*r->n_all + h*j->n_rows);
        r->k_bytes.fetch_add(n*j->op->keys->layout.k_sub_bytes, std::memory_order_relaxed);
    }
}

// ---- thresholds ----

// Weights among which a threshold is looked for: a plain row of them, or those of listed subs.
struct candidates { const float * p; const uint32_t * subs; size_t n; };   // n: subs, or groups of 32 weights

static void try_thresholds(const struct kvt_kernels * k, const struct candidates * c, size_t stride, const float * t, float * sums) {
    if (c->subs) k->sums_below_subs(c->p, c->subs, c->n, stride, t, sums);
    else         k->sums_below(c->p, c->n*KVT_SUB, t, sums);
}

// log2 of about the largest threshold below which `allowed` lies, from a sample of the subs
static float guess_threshold(const struct kvt_kernels * k, const struct candidates * c, float allowed, float * width) {
    const size_t stride = c->subs ? (c->n + N_SAMPLED - 1)/N_SAMPLED : 1;
    const float  part = (float) ((c->n + stride - 1)/stride)/(float) c->n;
    float lo = LOWEST_LOG2, hi = 0.0f;
    for (int pass = 0; pass < 3; pass++) {
        float t[N_TRIED], sums[N_TRIED] = { 0.0f };
        const float step = (hi - lo)/(N_TRIED + 1);
        for (int i = 0; i < N_TRIED; i++) t[i] = exp2f(lo + step*(float) (i + 1));
        try_thresholds(k, c, stride, t, sums);
        int n = 0;
        while (n < N_TRIED && sums[n] <= allowed*part) n++;
        lo += step*(float) n;
        hi  = lo + step;
    }
    *width = hi - lo;
    return lo;
}

// The largest of a row of thresholds below which at most `allowed` lies: measured over all candidates. FLT_MIN: none.
static float find_threshold(const struct kvt_kernels * k, const struct candidates * c, float allowed, float most) {
    if (!(allowed > 0.0f) || c->n == 0) return FLT_MIN;
    float width;
    float top = guess_threshold(k, c, allowed, &width) + width;
    for (float step = width*0.6f; top > LOWEST_LOG2; step *= 3.0f) {
        float t[N_TRIED], sums[N_TRIED] = { 0.0f };
        for (int i = 0; i < N_TRIED; i++) t[i] = exp2f(std::min(top - step*(float) i, most));
        try_thresholds(k, c, 1, t, sums);
        for (int i = 0; i < N_TRIED; i++) {
            if (sums[i] <= allowed) return std::max(t[i], FLT_MIN);
        }
        top -= step*N_TRIED;
    }
    return FLT_MIN;
}

// ---- weights ----

static void find_maxima(struct recall * r) {
    for (size_t row = 0; row < r->n_all; row++) {
        r->m[row] = -INFINITY;
        for (size_t s = 0; s < r->n_segments; s++) r->m[row] = std::max(r->m[row], r->segment_max[s*r->n_all + row]);
    }
}

static void weigh(struct recall * r, int ith, int nth) {
    const struct kvt_job * j = r->j;
    size_t segment, row;
    while (next_segment(r, ith, nth, r->n_all, &segment, &row)) {
        size_t first, end;
        segment_subs(r, segment, &first, &end);
        float * p = weights_of(r, row), * by_sub = r->left + row*r->ld_left + r->shift, l = 0.0f;
        const float m = r->m[row] == -INFINITY ? 0.0f : r->m[row];
        for (size_t s = first; s < end; ) {   // run by run
            size_t stop = s;
            while (stop < end && r->use[stop] != SUB_HIDDEN) stop++;
            if (stop > s) l += j->k->row_exp2(p + s*KVT_SUB, stop - s, m, by_sub + s);
            s = stop + 1;
        }
        r->segment_sum[row*r->n_segments + segment] = l;
    }
}

// after all weights are there: a row's sum, and what it gives to pages that may be left out
static void sum_row(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    const struct kvt_attention_op * op = j->op;
    const int head = (int) (row/j->n_rows)*j->n_group + (int) (row%j->n_rows)%j->n_group;
    const float * by_sub = r->left + row*r->ld_left + r->shift, m = r->m[row];
    float l = 0.0f;
    for (size_t s = 0; s < r->n_segments; s++) l += r->segment_sum[row*r->n_segments + s];
    r->l[row] = l;
    r->sink[row] = op->sinks && m != -INFINITY ? exp2f(std::min(op->sinks[head]*KVT_LOG2E - m, 126.0f)) : 0.0f;
    r->left_out[row] = 0.0f;
    for (size_t i = 0; i < r->n_asked; i++) {
        float sum = 0.0f;
        for (size_t s = (size_t) r->asked[i]*j->subs_per_page; s < ((size_t) r->asked[i] + 1)*j->subs_per_page && s < j->n_sub; s++) {
            if (r->use[s] == SUB_OPEN) sum += by_sub[s];
        }
        r->asked_weight[i*r->n_all + row] = sum;
    }
}

static float may_leave_out(const struct recall * r, size_t row) { return r->how->eps*total_of(r, row) - r->left_out[row]; }

static void set_sub_threshold(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    r->sub_threshold[row] = INFINITY;   // a row that sees nothing forbids nothing
    if (r->m[row] == -INFINITY) return;
    const float * by_sub = r->left + row*r->ld_left + r->shift;
    float * open = r->scratch + row*r->ld_left;
    size_t n = 0;
    for (size_t s = 0; s < j->n_sub; s++) {
        if (r->use[s] == SUB_OPEN) open[n++] = by_sub[s];
    }
    while (n % KVT_SUB) open[n++] = INFINITY;   // below no threshold
    const struct candidates c = { open, NULL, n/KVT_SUB };
    r->sub_threshold[row] = find_threshold(j->k, &c, SUBS_SHARE*may_leave_out(r, row), (float) 6);   // a sub weighs at most 2^5
}

static void set_threshold(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    const size_t h = row/j->n_rows;
    r->threshold[row] = INFINITY;
    if (r->m[row] == -INFINITY) return;
    const float * by_sub = r->left + row*r->ld_left + r->shift;
    const uint8_t * dropped = r->dropped + h*j->n_sub;
    float sum = 0.0f;
    for (size_t s = 0; s < j->n_sub; s++) sum += dropped[s] ? by_sub[s] : 0.0f;
    r->left_out[row] += sum;
    const struct candidates c = { weights_of(r, row), r->open + h*j->n_sub, r->n_open[h] };
    r->threshold[row] = find_threshold(j->k, &c, may_leave_out(r, row), 0.0f);
}

static void sum_rows(struct recall * r, int ith, int nth) {
    (void) ith; (void) nth;
    for (;;) {
        const size_t row = r->j->next.fetch_add(1, std::memory_order_relaxed);
        if (row >= r->n_all) return;
        sum_row(r, row);
        if (r->n_asked == 0) set_sub_threshold(r, row);
    }
}

static void set_sub_thresholds(struct recall * r, int ith, int nth) {
    (void) ith; (void) nth;
    for (;;) {
        const size_t row = r->j->next.fetch_add(1, std::memory_order_relaxed);
        if (row >= r->n_all) return;
        set_sub_threshold(r, row);
    }
}

static void set_thresholds(struct recall * r, int ith, int nth) {
    (void) ith; (void) nth;
    for (;;) {
        const size_t row = r->j->next.fetch_add(1, std::memory_order_relaxed);
        if (row >= r->n_all) return;
        set_threshold(r, row);
    }
}

// Per KV head, subs that every row weighs less than its threshold are dropped; the other open ones are listed.
static void drop_subs(struct recall * r, int ith, int nth) {
    (void) ith; (void) nth;
    const struct kvt_job * j = r->j;
    for (;;) {
        const size_t h = r->j->next.fetch_add(1, std::memory_order_relaxed);
        if (h >= (size_t) j->op->geo.n_head_kv) return;
        uint8_t * dropped = r->dropped + h*j->n_sub;
        uint32_t * open = r->open + h*j->n_sub;
        for (size_t s = 0; s < j->n_sub; s++) dropped[s] = r->use[s] == SUB_OPEN;
        for (size_t row = h*j->n_rows; row < (h + 1)*j->n_rows; row++) {
            const float * by_sub = r->left + row*r->ld_left + r->shift, t = r->sub_threshold[row];
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
static void leave_pages_out(struct recall * r) {
    const struct kvt_job * j = r->j;
    struct ranked { float key; uint32_t i; };
    struct ranked * order = (struct ranked *) r->o;   // not in use yet, and larger by far
    for (size_t i = 0; i < r->n_asked; i++) {
        float key = 0.0f;
        for (size_t row = 0; row < r->n_all; row++) {
            if (r->m[row] != -INFINITY) key = std::max(key, r->asked_weight[i*r->n_all + row]/total_of(r, row));
        }
        order[i] = { key, (uint32_t) i };
    }
    std::sort(order, order + r->n_asked, [](const ranked & a, const ranked & b) { return a.key < b.key || (a.key == b.key && a.i < b.i); });
    for (size_t n = 0; n < r->n_asked; n++) {
        const float * w = r->asked_weight + order[n].i*r->n_all;
        bool fits = true;
        for (size_t row = 0; row < r->n_all && fits; row++) {
            fits = r->m[row] == -INFINITY || r->left_out[row] + w[row] <= PAGES_SHARE*r->how->eps*total_of(r, row);
        }
        if (!fits) continue;
        for (size_t row = 0; row < r->n_all; row++) r->left_out[row] += w[row];
        const size_t first = (size_t) r->asked[order[n].i]*j->subs_per_page;
        for (size_t s = first; s < first + j->subs_per_page && s < j->n_sub; s++) {
            if (r->use[s] == SUB_OPEN) r->use[s] = SUB_LEFT_OUT;
        }
    }
}

// ---- pick ----

static uint32_t pick_sub(const struct recall * r, size_t h, size_t sub, const float * thresholds) {
    const struct kvt_job * j = r->j;
    if (r->use[sub] == SUB_WHOLE) return UINT32_MAX;
    if (r->use[sub] != SUB_OPEN || r->dropped[h*j->n_sub + sub]) return 0;
    return j->k->pick(weights_of(r, h*j->n_rows) + sub*KVT_SUB, j->ld_probs, (int) j->n_rows, thresholds);
}

static int64_t count_picked(const struct recall * r, size_t h, const float * thresholds) {
    int64_t n = 0;
    for (size_t s = 0; s < r->j->n_sub; s++) n += __builtin_popcount(pick_sub(r, h, s, thresholds));
    return n;
}

// Raises the thresholds of a KV head, all by one factor, until no more values are read than the budget allows.
static void keep_budget(const struct recall * r, size_t h) {
    const size_t n_rows = (size_t) r->j->n_rows;
    float tried[KVT_DECODE_ROWS], * own = r->threshold + h*n_rows;
    float lo = 0.0f, hi = -2.0f*LOWEST_LOG2;   // log2 of the factor: hi leaves only what is whole
    if (count_picked(r, h, own) <= r->how->budget_tokens) return;
    for (int i = 0; i < 12; i++) {
        const float mid = (lo + hi)/2;
        for (size_t x = 0; x < n_rows; x++) tried[x] = own[x]*exp2f(mid);
        (count_picked(r, h, tried) <= r->how->budget_tokens ? hi : lo) = mid;
    }
    for (size_t x = 0; x < n_rows; x++) own[x] *= exp2f(hi);
}

static void keep_budgets(struct recall * r, int ith, int nth) {
    (void) ith; (void) nth;
    for (;;) {
        const size_t h = r->j->next.fetch_add(1, std::memory_order_relaxed);
        if (h >= (size_t) r->j->op->geo.n_head_kv) return;
        keep_budget(r, h);
    }
}

static void pick(struct recall * r, int ith, int nth) {
    struct kvt_job * j = r->j;
    const size_t n_rows = (size_t) j->n_rows;
    size_t segment, h;
    while (next_segment(r, ith, nth, (size_t) j->op->geo.n_head_kv, &segment, &h)) {
        size_t first, end;
        uint64_t n_read = 0;
        segment_subs(r, segment, &first, &end);
        for (size_t s = first; s < end; s++) {
            uint32_t bits = pick_sub(r, h, s, r->threshold + h*n_rows);
            if (__builtin_popcount(bits) >= DENSE_TOKENS && r->how->budget_tokens == 0) bits = UINT32_MAX;
            if (bits) {   // else all of it is left out, as it stands
                float left[KVT_DECODE_ROWS] = { 0.0f };
                if (bits != UINT32_MAX) j->k->sums_unpicked(weights_of(r, h*n_rows) + s*KVT_SUB, j->ld_probs, (int) n_rows, bits, left);
                for (size_t x = 0; x < n_rows; x++) r->left[(h*n_rows + x)*r->ld_left + s + r->shift] = left[x];
            }
            r->picked[h*j->n_sub + s] = bits;
            n_read += (uint64_t) __builtin_popcount(bits);
        }
        r->tokens_read.fetch_add(n_read, std::memory_order_relaxed);
    }
}

// Lists the pages of which something was picked and pins those at hand.
static int pin_wanted(struct recall * r) {
    struct kvt_job * j = r->j;
    const struct kvt_page_source * src = j->op->source;
    memset(r->wanted, 0, r->n_pages);
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (size_t s = 0; s < j->n_sub; s++) r->wanted[s/j->subs_per_page] |= r->picked[(size_t) h*j->n_sub + s] != 0;
    }
    char * p = (char *) kvt_buf_need(&j->a->pages, r->n_pages*(sizeof(struct kvt_page_ref) + 2*sizeof(uint32_t)) + 64);
    if (!p) return KVT_ERR_NOMEM;
    j->refs    = (struct kvt_page_ref *) p;
    j->pages   = (uint32_t *) (j->refs + r->n_pages);
    j->missing = j->pages + r->n_pages;
    for (size_t page = 0; page < r->n_pages; page++) {
        r->slot[page] = r->wanted[page] ? (int32_t) j->n_pages : -1;
        if (r->wanted[page]) j->pages[j->n_pages++] = j->op->page_first + (uint32_t) page;
    }
    j->a->stats.pages_skipped += r->n_pages - j->n_pages;
    if (j->n_pages == 0) return 0;
    const int err = src->acquire_resident(src->ctx, j->pages, j->n_pages, j->refs, j->missing, &j->n_missing);
    if (err) {
        j->n_pages = 0;
        return err;
    }
    uint32_t * list = r->asked;   // its work is done
    for (size_t i = 0; i < j->n_missing; i++) {
        const uint32_t at = j->missing[i];
        list[i] = j->pages[at];
        r->slot[j->pages[at] - j->op->page_first] = -1;   // wanted, but not at hand
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
        const size_t row = lay->v_sub_bytes/KVT_SUB;
        for (; picked; picked &= picked - 1) touch((const char *) v + (size_t) __builtin_ctz(picked)*row, row);
        return;
    }
    const size_t block = lay->v_sub_bytes/(d/32), scales = lay->fmt_v == KVT_FORMAT_Q4_1 ? 4*KVT_SUB : 2*KVT_SUB, row = (block - scales)/KVT_SUB;
    for (size_t b = 0; b < d/32; b++) {
        const char * base = (const char *) v + b*block;
        touch(base, scales);
        for (uint32_t bits = picked; bits; bits &= bits - 1) __builtin_prefetch(base + scales + (size_t) __builtin_ctz(bits)*row, 0, 3);
    }
}

static void read_values(const struct recall * r, const struct kvt_page_ref * ref, size_t page, size_t first, size_t end, float * o, uint64_t * v_bytes) {
    const struct kvt_job * j = r->j;
    if (!ref->data) return;   // absent: zeros
    const struct kvt_page_layout * lay = ref->layout;
    const size_t n_rows = (size_t) j->n_rows;
    for (int h = 0; h < j->op->geo.n_head_kv; h++) {
        for (size_t s = first; s < end; s++) {
            const uint32_t bits = r->picked[(size_t) h*j->n_sub + s];
            if (!bits) continue;
            const uint8_t * v = ref->data + kvt_v_sub_off(lay, h, (int32_t) (s - page*j->subs_per_page));
            const float * p = weights_of(r, (size_t) h*n_rows) + s*KVT_SUB;
            float * out = o + (size_t) h*n_rows*j->d_v_pad;
            if (bits == UINT32_MAX) {
                j->k->accumulate[lay->fmt_v](p, j->ld_probs, (int) n_rows, j->d_v_pad, v, out, (const char *) v);
            } else {
                j->k->accumulate_some[lay->fmt_v](p, j->ld_probs, (int) n_rows, j->d_v_pad, v, bits, out);
            }
            *v_bytes += (uint64_t) __builtin_popcount(bits)*(lay->v_sub_bytes/KVT_SUB);
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
        for (size_t s = page*j->subs_per_page; s < (page + 1)*j->subs_per_page && s < j->n_sub; s++) {
            const uint32_t bits = r->picked[(size_t) h*j->n_sub + s];
            if (bits) touch_picked(ref->layout, ref->data + kvt_v_sub_off(ref->layout, h, (int32_t) (s - page*j->subs_per_page)), bits);
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

// what was left out, with the means of its sub-pages
static void add_means(const struct recall * r, size_t segment, float * o, uint64_t * v_bytes) {
    const struct kvt_job * j = r->j;
    const struct kvt_digests * d = r->how->digests;
    const size_t n_rows = (size_t) j->n_rows, first_group = ((size_t) j->op->page_first*j->subs_per_page)/KVT_SUB;
    for (size_t c = segment*r->segment_subs; c < (segment + 1)*r->segment_subs && c < r->ld_left; c += KVT_SUB) {
        for (int h = 0; h < j->op->geo.n_head_kv; h++) {
            const float * left = r->left + (size_t) h*n_rows*r->ld_left + c;
            const uint8_t * means = kvt_digests_group(d, h, first_group + c/KVT_SUB);
            j->k->accumulate[KVT_FORMAT_F16](left, r->ld_left, (int) n_rows, j->d_v_pad, means, o + (size_t) h*n_rows*j->d_v_pad, (const char *) means);
            *v_bytes += d->layout.v_sub_bytes;
        }
    }
}

static void read(struct recall * r, int ith, int nth) {
    struct kvt_job * j = r->j;
    const size_t n_o = r->n_all*j->d_v_pad;
    size_t segment, only;
    while (j->error.load(std::memory_order_relaxed) == 0 && next_segment(r, ith, nth, 1, &segment, &only)) {
        float * o = r->o + segment*n_o;
        uint64_t v_bytes = 0;
        size_t first, end;
        memset(o, 0, n_o*sizeof(float));
        segment_subs(r, segment, &first, &end);
        for (size_t s = first; s < end; ) {
            const size_t page = s/j->subs_per_page, stop = std::min(end, (page + 1)*j->subs_per_page);
            const int err = read_page(r, page, s, stop, o, &v_bytes);
            if (err) kvt_job_fail(j, err);
            s = stop;
        }
        add_means(r, segment, o, &v_bytes);
        r->v_bytes.fetch_add(v_bytes, std::memory_order_relaxed);
    }
}

// ---- the end ----

// By how much, as a power of two, rounding of the stored keys can have moved the scores of this row.
static float score_error(const struct recall * r, size_t row) {
    const struct kvt_job * j = r->j;
    const struct kvt_keys * keys = j->op->keys;
    const int32_t d_k = j->op->geo.d_k, n_blocks = (d_k + 31)/32;
    const size_t h = row/j->n_rows;
    const float * q = r->q[h].f + (row%j->n_rows)*d_k, * error = keys->error_max + h*n_blocks;
    float sum = 0.0f;
    for (int32_t c = 0; c < d_k; c++) sum += fabsf(q[c])*error[c/32];
    // a soft cap has slope 1 at most; its argument is scaled by 1/cap
    return j->op->softcap != 0.0f ? sum*j->op->softcap*KVT_LOG2E : sum;
}

static void report_row(const struct recall * r, size_t row) {
    struct kvt_recall_report * out = r->how->report;
    if (r->m[row] == -INFINITY) return;
    double sum = 0.0;
    for (size_t s = 0; s < r->j->n_sub; s++) sum += r->left[row*r->ld_left + s + r->shift];
    const double omitted = sum/total_of(r, row), up = exp2(score_error(r, row));
    const double slack = 1e-5*omitted + 1e-7;   // single precision
    const double bound = std::min(1.0, omitted*up/(omitted*up + (1.0 - omitted)/up) + slack);
    out->n_rows++;
    out->omitted_sum += omitted;
    out->bound_sum   += bound;
    out->omitted_max  = std::max(out->omitted_max, (float) omitted);
    out->bound_max    = std::max(out->bound_max, (float) bound);
}

static void finish(struct recall * r) {
    struct kvt_job * j = r->j;
    const size_t n_o = r->n_all*j->d_v_pad;
    float * tmp = r->o + r->n_segments*n_o;
    for (size_t row = 0; row < r->n_all; row++) {
        struct kvt_partial parts[MAX_SEGMENTS];
        const float none[KVT_SUM_LANES] = { 0.0f }, all[KVT_SUM_LANES] = { r->l[row] };
        for (size_t s = 0; s < r->n_segments; s++) parts[s] = { &r->m[row], s == 0 ? all : none, r->o + s*n_o + row*j->d_v_pad };
        const bool mass = j->op->mass != NULL;
        const int h = (int) (row/j->n_rows), i = (int) (row%j->n_rows);
        kvt_row_finish(j, parts, (int) r->n_segments, h*j->n_group + i%j->n_group, i/j->n_group, tmp, mass ? &j->final_m[row] : NULL, mass ? &j->final_f[row] : NULL);
        report_row(r, row);
        if (!mass) continue;
        for (size_t x = 0; x < r->n_visible; x++) {
            std::fill(j->probs_m + row*j->ld_probs_m + r->visible[x].first, j->probs_m + row*j->ld_probs_m + r->visible[x].end, r->m[row]);
        }
    }
    struct kvt_recall_report * out = r->how->report;
    size_t n_seen = 0;
    for (size_t s = 0; s < j->n_sub; s++) n_seen += r->use[s] != SUB_HIDDEN ? (size_t) kvt_job_n_valid(j->op, s) : 0;
    out->tokens_seen   += n_seen*j->op->geo.n_head_kv;
    out->tokens_read   += r->tokens_read;
    out->pages_wanted  += j->n_pages;
    out->pages_missing += r->pages_missing;
    j->a->stats.k_bytes    += r->k_bytes;
    j->a->stats.v_bytes    += r->v_bytes;
    j->a->stats.pages_read += j->n_pages;
}

template <typename T>
static T * take(char ** p, size_t n) {
    T * out = (T *) *p;
    *p += kvt_round_up(n*sizeof(T), 64);
    return out;
}

static int prepare(struct recall * r) {
    struct kvt_job * j = r->j;
    const size_t n_all = r->n_all, n_sub = j->n_sub;
    r->n_pages = (n_sub + j->subs_per_page - 1)/j->subs_per_page;
    r->shift   = (size_t) j->op->page_first*j->subs_per_page % KVT_SUB;
    const size_t n_groups = (n_sub + r->shift + KVT_SUB - 1)/KVT_SUB;
    r->segment_subs = (n_groups + MAX_SEGMENTS - 1)/MAX_SEGMENTS*KVT_SUB;
    r->n_segments   = (n_sub + r->shift + r->segment_subs - 1)/r->segment_subs;
    r->ld_left      = n_groups*KVT_SUB;
    if ((size_t) (j->op->page_first)*j->subs_per_page + n_sub > r->how->digests->n_subs) return KVT_ERR_INVALID;

    const size_t n_float = n_all*(6 + 2*r->n_segments + 2*r->ld_left + r->n_pages) + 16*64;
    const size_t n_bytes = n_float*sizeof(float) + n_sub*(1 + sizeof(struct sub_range) + j->op->geo.n_head_kv*(2*sizeof(uint32_t) + 1)) + j->op->geo.n_head_kv*sizeof(size_t)
        + r->n_pages*(2 + 2*sizeof(uint32_t)) + 32*64;
    char * p = (char *) kvt_buf_need(&j->a->recall, n_bytes);
    r->o = (float *) kvt_buf_need(&j->a->state, ((r->n_segments + 1)*n_all*j->d_v_pad + 2*r->n_pages)*sizeof(float));
    if (!p || !r->o) return KVT_ERR_NOMEM;
    r->m           = take<float>(&p, n_all);
    r->l           = take<float>(&p, n_all);
    r->sink        = take<float>(&p, n_all);
    r->threshold   = take<float>(&p, n_all);
    r->left_out    = take<float>(&p, n_all);
    r->segment_max = take<float>(&p, n_all*r->n_segments);
    r->segment_sum = take<float>(&p, n_all*r->n_segments);
    r->sub_threshold = take<float>(&p, n_all);
    r->scratch     = take<float>(&p, n_all*r->ld_left);
    r->left        = take<float>(&p, n_all*r->ld_left);
    r->asked_weight = take<float>(&p, n_all*r->n_pages);
    r->picked      = take<uint32_t>(&p, n_sub*j->op->geo.n_head_kv);
    r->visible     = take<struct sub_range>(&p, n_sub);
    r->open        = take<uint32_t>(&p, n_sub*j->op->geo.n_head_kv);
    r->dropped     = take<uint8_t>(&p, n_sub*j->op->geo.n_head_kv);
    r->n_open      = take<size_t>(&p, (size_t) j->op->geo.n_head_kv);
    r->asked       = take<uint32_t>(&p, r->n_pages);
    r->slot        = take<int32_t>(&p, r->n_pages);
    r->use         = take<uint8_t>(&p, n_sub);
    r->costly      = take<uint8_t>(&p, r->n_pages);
    r->wanted      = take<uint8_t>(&p, r->n_pages);
    memset(r->left, 0, n_all*r->ld_left*sizeof(float));

    int err = kvt_mass_prepare(j, j->op->n_queries);
    if (!err && !j->op->mass) {
        j->ld_probs = n_sub*KVT_SUB + 16;
        j->probs = (float *) kvt_buf_need(&j->a->probs, n_all*j->ld_probs*sizeof(float));
        err = j->probs ? 0 : KVT_ERR_NOMEM;
    }
    if (!err) err = kvt_queries_prepare(j, j->op->keys->layout.fmt_k >= KVT_FORMAT_Q8_0, &r->q);
    return err ? err : classify(r);
}

// ---- stages ----

// All stages run in one team: to start a team costs more than a stage takes. Whoever comes last to the end of a stage does
// what lies between two stages, and lets the others go on.

static void end_stage(struct recall * r, int nth, void (*between)(struct recall *)) {
    const uint32_t turn = r->turn.load(std::memory_order_acquire);
    if (r->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t) nth) {
        r->arrived.store(0, std::memory_order_relaxed);
        r->j->next.store(0, std::memory_order_relaxed);
        for (std::atomic<uint32_t> & n : r->taken) n.store(0, std::memory_order_relaxed);
        if (between) between(r);
        r->turn.store(turn + 1, std::memory_order_release);
        return;
    }
    for (int n = 0; r->turn.load(std::memory_order_acquire) == turn; n++) {
        if (n > 20000) std::this_thread::yield();   // whoever we wait for may need this processor
    }
}

static void after_score(struct recall * r) {
    list_asked(r);
    find_maxima(r);
}

static void after_pick(struct recall * r) {
    const int err = pin_wanted(r);
    if (err) kvt_job_fail(r->j, err);
}

static void run_stages(void * arg, int ith, int nth) {
    struct recall * r = (struct recall *) arg;
    score(r, ith, nth);
    end_stage(r, nth, after_score);
    weigh(r, ith, nth);
    end_stage(r, nth, NULL);
    sum_rows(r, ith, nth);
    end_stage(r, nth, r->n_asked ? leave_pages_out : NULL);
    if (r->n_asked) {
        set_sub_thresholds(r, ith, nth);
        end_stage(r, nth, NULL);
    }
    drop_subs(r, ith, nth);
    end_stage(r, nth, NULL);
    set_thresholds(r, ith, nth);
    end_stage(r, nth, NULL);
    if (r->how->budget_tokens > 0) {
        keep_budgets(r, ith, nth);
        end_stage(r, nth, NULL);
    }
    pick(r, ith, nth);
    end_stage(r, nth, after_pick);
    read(r, ith, nth);
}

int kvt_recall_run(struct kvt_job * j) {
    struct recall r {};
    r.j     = j;
    r.how   = j->op->recall;
    r.n_all = (size_t) j->n_rows*j->op->geo.n_head_kv;
    int err = prepare(&r);
    if (err) return err;
    const size_t useful = j->n_sub*j->op->geo.n_head_kv/32 + 1;   // a thread is worth waking for some tens of microseconds
    kvt_team_run((int) std::min({ (size_t) j->n_threads, r.n_segments, useful, (size_t) MAX_THREADS }), run_stages, &r);
    err = j->error.load();
    if (j->n_pages) j->op->source->release_many(j->op->source->ctx, j->refs, j->n_pages);
    j->a->pages_read   = j->pages;
    j->a->n_pages_read = j->n_pages;
    if (!err) finish(&r);
    return err;
}
