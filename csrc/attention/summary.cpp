// Summaries: how they are built, and their part in the softmax.

#include "summary-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <new>

#define KVT_LN2 0.693147180559945309f

enum { ROWS = KVT_DECODE_ROWS };

// ---- building ----

struct build {
    const struct kvt_geometry * geo;
    const struct kvt_summary_set * before;
    char * err;
    size_t err_size;
    int refuse(const char * what) const {
        if (err && err_size) snprintf(err, err_size, "%s", what);
        return KVT_ERR_INVALID;
    }
};

static int32_t whole_subs(size_t n) { return (int32_t) kvt_round_up(n, KVT_SUB); }

static bool make_page(std::unique_ptr<uint8_t[]>& out, struct kvt_page_layout * l, const struct kvt_geometry& geo,
    int fmt, size_t * n_bytes) {
    if (kvt_page_layout_init(l, &geo, (enum kvt_format) fmt, (enum kvt_format) fmt) != 0) return false;
    out.reset(new uint8_t[l->page_bytes + 64]());
    *n_bytes += l->page_bytes;
    return true;
}

// src: [n_head_kv][n][d] goes to the cells 0..n-1 of the page
static void put(const struct kvt_page_layout& l, const std::unique_ptr<uint8_t[]>& page, enum kvt_part part,
    const float * src, uint32_t n) {
    const size_t d = (size_t) (part == KVT_PART_K ? l.geo.d_k : l.geo.d_v), n_heads = (size_t) l.geo.n_head_kv;
    std::vector<float> row(n_heads * d);
    for (uint32_t t = 0; t < n; t++) {
        for (size_t h = 0; h < n_heads; h++) std::copy_n(src + (h * n + t) * d, d, row.data() + h * d);
        kvt_page_put_f32(&l, const_cast<uint8_t *>(kvt_summary_at(page)), part, (int32_t) t, row.data());
    }
}

static bool all_finite(const float * p, size_t n) {
    return std::all_of(p, p + n, [](float x) { return std::isfinite(x); });
}

static bool format_ok(int fmt, int32_t d_k, int32_t d_v) {
    return fmt >= 0 && fmt < KVT_FORMAT_COUNT && kvt_format_supports((enum kvt_format) fmt, d_k) &&
        kvt_format_supports((enum kvt_format) fmt, d_v);
}

static void add_part(struct kvt_summary_set * s, std::shared_ptr<const kvt_summary_part> p, float mass) {
    s->n_bytes += p->n_bytes;
    s->parts.push_back(std::move(p));
    s->mass.push_back(mass);
}

static int add_cells(const build& b, struct kvt_summary_set * s, const kvt_summary * in) {
    const size_t n_heads = (size_t) b.geo->n_head_kv, n = in->n_cells;
    if (!in->key || !in->value || !in->log_count) return b.refuse("summary cells need keys, values and log counts");
    if (n > 1 << 20 || !format_ok(in->fmt_cells, b.geo->d_k, b.geo->d_v))
        return b.refuse("summary cells cannot be kept in that format or number");
    if (!all_finite(in->key, n_heads * n * b.geo->d_k) || !all_finite(in->value, n_heads * n * b.geo->d_v))
        return b.refuse("a summary cell holds something that is not a number");
    if (in->key_var && !std::all_of(in->key_var, in->key_var + n_heads * n * b.geo->d_k, [](float x) {
            return x >= 0 && std::isfinite(x);
        })) {
        return b.refuse("a variance of a summary cell is negative or not a number");
    }
    kvt_summary_part p = {};
    struct kvt_geometry geo = *b.geo;
    geo.page_tokens = whole_subs(n);
    if (!make_page(p.cells, &p.layout, geo, in->fmt_cells, &p.n_bytes))
        return b.refuse("summary cells cannot be laid out");
    put(p.layout, p.cells, KVT_PART_K, in->key, in->n_cells);
    put(p.layout, p.cells, KVT_PART_V, in->value, in->n_cells);
    if (in->key_var) {
        geo.d_v = 0;
        if (!make_page(p.var, &p.var_layout, geo, KVT_FORMAT_BF16, &p.n_bytes))
            return b.refuse("variances cannot be laid out");
        put(p.var_layout, p.var, KVT_PART_K, in->key_var, in->n_cells);
    }
    const size_t n_pad = (size_t) geo.page_tokens;
    p.bias.assign(n_heads * n_pad, -INFINITY);
    for (size_t h = 0; h < n_heads; h++) {
        for (size_t t = 0; t < n; t++) {
            const float x = in->log_count[h * n + t];
            if (std::isnan(x) || x == INFINITY) return b.refuse("the log count of a summary cell is not a number");
            p.bias[h * n_pad + t] = x * KVT_LOG2E;
        }
    }
    p.n_bytes += p.bias.size() * sizeof(float);
    add_part(s, std::make_shared<const kvt_summary_part>(std::move(p)), 0.0f);
    return 0;
}

// a group of the set before, by its place among the groups
static int share_group(const build& b, struct kvt_summary_set * s, int32_t place) {
    size_t n_cells = 0;
    while (b.before && n_cells < b.before->parts.size() && !b.before->parts[n_cells]->basis) n_cells++;
    const size_t i = n_cells + (size_t) place;
    if (!b.before || i >= b.before->parts.size())
        return b.refuse("the summary that is replaced has no such group that could stay");
    s->n_shared += b.before->parts[i]->n_bytes;
    add_part(s, b.before->parts[i], b.before->mass[i]);
    return 0;
}

static int add_group(const build& b, struct kvt_summary_set * s, const kvt_summary_group * in) {
    const size_t n_heads = (size_t) b.geo->n_head_kv, d_k = (size_t) b.geo->d_k, d_v = (size_t) b.geo->d_v;
    if (in->stays >= 0) return share_group(b, s, in->stays);
    if (!(in->mass >= 0.0f && std::isfinite(in->mass)))
        return b.refuse("a summary group begins with a mass that is negative or not a number");
    if (!in->k_mean || !in->k_basis || !in->k_coord || !in->v_mean || !in->v_basis || !in->v_coord)
        return b.refuse("a summary group needs means, bases and coordinates");
    if (in->n == 0 || in->n > 1 << 20 || in->r_k == 0 || in->r_v == 0 || in->r_k > d_k || in->r_v > d_v)
        return b.refuse("a summary group needs cells, and dimensions up to those of its heads");
    if (!format_ok(in->fmt_coord, (int32_t) in->r_k, (int32_t) in->r_v) ||
        !format_ok(in->fmt_basis, b.geo->d_k, b.geo->d_v)) {
        return b.refuse("a summary group cannot be kept in that format");
    }
    const bool finite = all_finite(in->k_mean, n_heads * d_k) && all_finite(in->k_basis, n_heads * in->r_k * d_k) &&
        all_finite(in->k_coord, n_heads * in->n * in->r_k) && all_finite(in->v_mean, n_heads * d_v) &&
        all_finite(in->v_basis, n_heads * in->r_v * d_v) && all_finite(in->v_coord, n_heads * in->n * in->r_v);
    if (!finite) return b.refuse("a summary group holds something that is not a number");
    kvt_summary_part p = {};
    const struct kvt_geometry coords = { b.geo->n_head_kv, (int32_t) in->r_k, (int32_t) in->r_v, whole_subs(in->n) };
    const struct kvt_geometry basis = { b.geo->n_head_kv, b.geo->d_k, b.geo->d_v,
        whole_subs(std::max(in->r_k, in->r_v)) };
    if (!make_page(p.cells, &p.layout, coords, in->fmt_coord, &p.n_bytes) ||
        !make_page(p.basis, &p.basis_layout, basis, in->fmt_basis, &p.n_bytes)) {
        return b.refuse("a summary group cannot be laid out");
    }
    put(p.layout, p.cells, KVT_PART_K, in->k_coord, in->n);
    put(p.layout, p.cells, KVT_PART_V, in->v_coord, in->n);
    put(p.basis_layout, p.basis, KVT_PART_K, in->k_basis, in->r_k);
    put(p.basis_layout, p.basis, KVT_PART_V, in->v_basis, in->r_v);
    p.mean_k.assign(in->k_mean, in->k_mean + n_heads * d_k);
    p.mean_v.assign(n_heads * (size_t) s->d_v_pad, 0.0f);
    for (size_t h = 0; h < n_heads; h++)
        std::copy_n(in->v_mean + h * d_v, d_v, p.mean_v.data() + h * (size_t) s->d_v_pad);
    p.bias.assign(n_heads * (size_t) coords.page_tokens, -INFINITY);
    for (size_t h = 0; h < n_heads; h++) std::fill_n(p.bias.data() + h * (size_t) coords.page_tokens, in->n, 0.0f);
    p.n_bytes += (p.mean_k.size() + p.mean_v.size() + p.bias.size()) * sizeof(float);
    add_part(s, std::make_shared<const kvt_summary_part>(std::move(p)), in->mass);
    return 0;
}

static int build_set(const build& b, struct kvt_summary_set * s, const kvt_summary * in) {
    s->geo = *b.geo;
    s->d_v_pad = (int32_t) kvt_round_up((size_t) b.geo->d_v, 16);
    s->n_bytes = sizeof(*s);
    s->n_shared = 0;
    int err = in->n_cells ? add_cells(b, s, in) : 0;
    if (!err && in->n_groups && !in->groups) err = b.refuse("the groups of the summary are missing");
    for (uint32_t i = 0; !err && i < in->n_groups; i++) err = add_group(b, s, &in->groups[i]);
    return err;
}

extern "C" int kvt_summary_create(struct kvt_summary_set ** out, const struct kvt_geometry * geo,
    const kvt_summary * in, const struct kvt_summary_set * before, char * err, size_t err_size) {
    const build b = { geo, before, err, err_size };
    if (geo->d_v == 0) return b.refuse("layers without values of their own take no summary");
    try {
        std::unique_ptr<kvt_summary_set> s(new kvt_summary_set());
        const int r = build_set(b, s.get(), in);
        if (r == 0) *out = s.release();
        return r;
    } catch (const std::bad_alloc&) { return KVT_ERR_NOMEM; }
}

extern "C" void kvt_summary_free(struct kvt_summary_set * s) { delete s; }
extern "C" size_t kvt_summary_bytes(const struct kvt_summary_set * s) { return s->n_bytes; }
extern "C" size_t kvt_summary_shared(const struct kvt_summary_set * s) { return s->n_shared; }

extern "C" size_t kvt_summary_mass(const struct kvt_summary_set * s, float * out, size_t n_max) {
    std::copy_n(s->mass.data(), std::min(n_max, s->mass.size()), out);
    return s->mass.size();
}

// ---- attention ----

// Scratch of one thread, sized for the widest part.
struct scratch {
    float * q;    // [ROWS][d_k] scaled
    float * q2;   // [ROWS][d_k] squares
    float * qc;   // [ROWS][width] compressed
    float * step; // [ROWS][width/32]
    int32_t *pair, *sum;
    float * s;        // [ROWS][32]
    float * t;        // [ROWS][width] scores of the basis, later the output's coordinates
    float *m, *l, *o; // one part's state: [ROWS], [ROWS][KVT_SUM_LANES], [ROWS][width_o]
    float * full;     // [ROWS][d_v_pad]
    float shift[ROWS];
};

struct summary_work {
    struct kvt_job * j;
    const struct kvt_summary_set * set;
    size_t width, width_o, n_blocks,
        scratch_floats; // width: channels of keys or directions of a basis, a multiple of 32
    float * scratch;
    std::atomic<size_t> next;
};

// Everything is a multiple of 16 floats, as ROWS is.
static size_t scratch_floats(size_t width, size_t width_o) {
    return ROWS * (5 * width + 3 * (width / 32) + 2 * width_o + KVT_SUB + 1 + KVT_SUM_LANES);
}

static struct scratch cut_scratch(const struct summary_work * w, float * at) {
    const auto take = [&at](size_t per_row) {
        float * q = at;
        at += ROWS * per_row;
        return q;
    };
    struct scratch x;
    x.q = take(w->width);
    x.q2 = take(w->width);
    x.qc = take(w->width);
    x.t = take(w->width);
    x.pair = (int32_t *) take(w->width);
    x.step = take(w->width / 32);
    x.sum = (int32_t *) take(w->width / 32);
    x.m = take(1);
    x.s = take(KVT_SUB);
    x.l = take(KVT_SUM_LANES);
    x.o = take(w->width_o);
    x.full = take(w->width_o);
    return x;
}

static void load_queries(const struct summary_work * w, struct scratch * x, int h, int64_t row0, int n_rows) {
    const struct kvt_job * j = w->j;
    const int d_k = w->set->geo.d_k;
    const float scale = kvt_job_q_scale(j->op);
    for (int r = 0; r < n_rows; r++) {
        const float * q = kvt_job_q(j->op, (row0 + r) / j->n_group, h * j->n_group + (int) ((row0 + r) % j->n_group));
        for (int c = 0; c < d_k; c++) {
            x->q[r * d_k + c] = q[c] * scale;
            x->q2[r * d_k + c] = x->q[r * d_k + c] * x->q[r * d_k + c];
        }
    }
}

// The rows as the part's cells meet them: themselves, or compressed. shift: what every score of the row has in common.
static struct kvt_q_rows part_queries(
    const struct summary_work * w, const struct kvt_summary_part * p, struct scratch * x, int h, int n_rows) {
    const struct kvt_job * j = w->j;
    const int d_k = w->set->geo.d_k, r_k = p->layout.geo.d_k;
    struct kvt_q_rows q = { x->q, x->pair, x->step, x->sum, d_k };
    for (int r = 0; r < n_rows; r++) x->shift[r] = 0.0f;
    if (p->basis) {
        const uint8_t * basis = kvt_summary_at(p->basis);
        const size_t ld = (size_t) p->basis_layout.geo.page_tokens;
        if (p->basis_layout.fmt_k >= KVT_FORMAT_Q8_0) {
            for (int r = 0; r < n_rows; r++)
                kvt_quantize_row(x->q + r * d_k, d_k / 32, x->pair + r * (d_k / 2), x->step + r * (d_k / 32),
                    x->sum + r * (d_k / 32));
        }
        for (size_t sub = 0; sub * KVT_SUB < ld; sub++) {
            const uint8_t * k = basis + kvt_k_sub_off(&p->basis_layout, h, (int32_t) sub);
            j->k->scores[p->basis_layout.fmt_k](&q, 0, n_rows, k, x->t + sub * KVT_SUB, ld, (const char *) k);
        }
        const float * mean = p->mean_k.data() + (size_t) h * d_k;
        for (int r = 0; r < n_rows; r++) {
            for (int c = 0; c < d_k; c++) x->shift[r] += x->q[r * d_k + c] * mean[c];
            memcpy(x->qc + (size_t) r * r_k, x->t + r * ld, (size_t) r_k * sizeof(float));
        }
        q.f = x->qc;
        q.d_k = r_k;
    }
    if (p->layout.fmt_k >= KVT_FORMAT_Q8_0) {
        const int n_blocks = q.d_k / 32;
        for (int r = 0; r < n_rows; r++)
            kvt_quantize_row(q.f + (size_t) r * q.d_k, n_blocks, x->pair + r * (q.d_k / 2), x->step + r * n_blocks,
                x->sum + r * n_blocks);
    }
    return q;
}

// scores of 32 cells of the part, ready for the softmax
static void part_scores(const struct summary_work * w, const struct kvt_summary_part * p, struct scratch * x,
    const struct kvt_q_rows * q, int h, int sub, int n_rows) {
    const struct kvt_job * j = w->j;
    const float softcap = j->op->softcap;
    const uint8_t * k = kvt_summary_at(p->cells) + kvt_k_sub_off(&p->layout, h, sub);
    j->k->scores[p->layout.fmt_k](q, 0, n_rows, k, x->s, KVT_SUB, (const char *) k);
    if (p->var) {
        float extra[ROWS * KVT_SUB];
        const struct kvt_q_rows q2 = { x->q2, NULL, NULL, NULL, w->set->geo.d_k };
        const uint8_t * var = kvt_summary_at(p->var) + kvt_k_sub_off(&p->var_layout, h, sub);
        j->k->scores[p->var_layout.fmt_k](&q2, 0, n_rows, var, extra, KVT_SUB, (const char *) var);
        const float f = softcap != 0.0f ? 0.5f * softcap : 0.5f * KVT_LN2;
        for (int i = 0; i < n_rows * KVT_SUB; i++) x->s[i] += f * extra[i];
    }
    for (int r = 0; p->basis && r < n_rows; r++) {
        for (int t = 0; t < KVT_SUB; t++) x->s[r * KVT_SUB + t] += x->shift[r];
    }
    if (softcap != 0.0f) j->k->softcap(x->s, KVT_SUB, n_rows, softcap * KVT_LOG2E);
    const float * bias = p->bias.data() + (size_t) h * p->layout.geo.page_tokens + (size_t) sub * KVT_SUB;
    for (int r = 0; r < n_rows; r++) {
        for (int t = 0; t < KVT_SUB; t++) x->s[r * KVT_SUB + t] += bias[t];
    }
}

// one part's state of the rows, from nothing
static void run_part(
    const struct summary_work * w, const struct kvt_summary_part * p, struct scratch * x, int h, int n_rows) {
    const struct kvt_job * j = w->j;
    const int d_o = p->layout.d_v_pad;
    const struct kvt_q_rows q = part_queries(w, p, x, h, n_rows);
    for (int r = 0; r < n_rows; r++) x->m[r] = -INFINITY;
    memset(x->l, 0, (size_t) n_rows * KVT_SUM_LANES * sizeof(float));
    memset(x->o, 0, (size_t) n_rows * d_o * sizeof(float));
    const struct kvt_row_state st = { x->m, x->l, x->o, d_o };
    for (int sub = 0; sub < p->layout.geo.page_tokens / KVT_SUB; sub++) {
        part_scores(w, p, x, &q, h, sub, n_rows);
        j->k->softmax(x->s, KVT_SUB, n_rows, &st);
        const uint8_t * v = kvt_summary_at(p->cells) + kvt_v_sub_off(&p->layout, h, sub);
        j->k->accumulate[p->layout.fmt_v](x->s, KVT_SUB, n_rows, d_o, v, x->o, (const char *) v);
    }
}

static float lane_sum(const float * l) {
    float sum = 0.0f;
    for (int i = 0; i < KVT_SUM_LANES; i++) sum += l[i];
    return sum;
}

// coordinates of the output become the output: [n_rows][d_v_pad] in x->full
static void expand_output(
    const struct summary_work * w, const struct kvt_summary_part * p, struct scratch * x, int h, int n_rows) {
    const struct kvt_job * j = w->j;
    const size_t d_o = (size_t) p->layout.d_v_pad, r_v = (size_t) p->layout.geo.d_v,
                 ld = (size_t) p->basis_layout.geo.page_tokens;
    const size_t d_v_pad = (size_t) w->set->d_v_pad;
    for (int r = 0; r < n_rows; r++) {
        memset(x->t + r * ld, 0, ld * sizeof(float));
        memcpy(x->t + r * ld, x->o + r * d_o, r_v * sizeof(float));
        const float sum = lane_sum(x->l + (size_t) r * KVT_SUM_LANES);
        for (size_t c = 0; c < d_v_pad; c++) x->full[r * d_v_pad + c] = sum * p->mean_v[(size_t) h * d_v_pad + c];
    }
    for (size_t sub = 0; sub * KVT_SUB < ld; sub++) {
        const uint8_t * v = kvt_summary_at(p->basis) + kvt_v_sub_off(&p->basis_layout, h, (int32_t) sub);
        j->k->accumulate[p->basis_layout.fmt_v](
            x->t + sub * KVT_SUB, ld, n_rows, (int) d_v_pad, v, x->full, (const char *) v);
    }
}

static void run_block(const struct summary_work * w, struct scratch * x, int h, int64_t row0, int n_rows) {
    const struct kvt_job * j = w->j;
    const size_t n_parts = w->set->parts.size(), at = (size_t) h * j->n_rows + (size_t) row0;
    for (size_t i = at; i < at + (size_t) n_rows; i++) j->sum_m[i] = -INFINITY;
    memset(j->sum_l + at * KVT_SUM_LANES, 0, (size_t) n_rows * KVT_SUM_LANES * sizeof(float));
    memset(j->sum_o + at * j->d_v_pad, 0, (size_t) n_rows * j->d_v_pad * sizeof(float));
    load_queries(w, x, h, row0, n_rows);
    for (size_t i = 0; i < n_parts; i++) {
        const struct kvt_summary_part * p = w->set->parts[i].get();
        run_part(w, p, x, h, n_rows);
        if (p->basis) expand_output(w, p, x, h, n_rows);
        const float * o = p->basis ? x->full : x->o;
        for (int r = 0; r < n_rows; r++) {
            const float * l = x->l + (size_t) r * KVT_SUM_LANES;
            const struct kvt_partial part = { &x->m[r], l, o + (size_t) r * j->d_v_pad };
            kvt_state_join(
                j, &part, j->sum_m + at + r, j->sum_l + (at + r) * KVT_SUM_LANES, j->sum_o + (at + r) * j->d_v_pad);
            j->sum_parts[((at + r) * n_parts + i) * 2] = x->m[r];
            j->sum_parts[((at + r) * n_parts + i) * 2 + 1] = lane_sum(l);
        }
    }
}

static void run_blocks(void * arg, int ith, int nth) {
    (void) nth;
    struct summary_work * w = (struct summary_work *) arg;
    struct kvt_job * j = w->j;
    struct scratch x = cut_scratch(w, w->scratch + (size_t) ith * w->scratch_floats);
    for (;;) {
        const size_t task = w->next.fetch_add(1, std::memory_order_relaxed);
        if (task >= w->n_blocks * (size_t) j->op->geo.n_head_kv) return;
        const int64_t row0 = (int64_t) (task % w->n_blocks) * ROWS;
        run_block(
            w, &x, (int) (task / w->n_blocks), row0, j->n_rows - row0 < ROWS ? (int) (j->n_rows - row0) : (int) ROWS);
    }
}

int kvt_summary_run(struct kvt_job * j) {
    const struct kvt_summary_set * set = j->op->summary;
    const struct kvt_geometry& geo = j->op->geo;
    if (!set || set->parts.empty() || j->op->slopes) return 0;
    if (set->geo.n_head_kv != geo.n_head_kv || set->geo.d_k != geo.d_k || set->geo.d_v != geo.d_v)
        return KVT_ERR_INVALID;
    struct summary_work w;
    w.j = j;
    w.set = set;
    w.next = 0;
    w.width = kvt_round_up((size_t) geo.d_k, 32);
    w.width_o = (size_t) set->d_v_pad;
    size_t n_subs = 0;
    for (const auto& p : set->parts) {
        if (p->basis) w.width = std::max(w.width, (size_t) p->basis_layout.geo.page_tokens);
        n_subs += (size_t) p->layout.geo.page_tokens / KVT_SUB;
    }
    w.n_blocks = (size_t) (j->n_rows + ROWS - 1) / ROWS;
    const size_t n_tasks = w.n_blocks * (size_t) geo.n_head_kv, n_all = (size_t) j->n_rows * (size_t) geo.n_head_kv,
                 n_parts = set->parts.size();
    w.scratch_floats = scratch_floats(w.width, w.width_o);
    const size_t per_row = 1 + KVT_SUM_LANES + (size_t) j->d_v_pad + 2 * n_parts;
    float * p = (float *) kvt_buf_need(
        &j->a->summary, ((size_t) j->n_threads * w.scratch_floats + n_all * per_row + 64) * sizeof(float));
    if (!p) return KVT_ERR_NOMEM;
    w.scratch = p;
    j->sum_l = p + (size_t) j->n_threads * w.scratch_floats;
    j->sum_o = j->sum_l + n_all * KVT_SUM_LANES;
    j->sum_m = j->sum_o + n_all * (size_t) j->d_v_pad;
    j->sum_parts = j->sum_m + n_all;
    const size_t useful = n_tasks * n_subs / 16 + 1; // a thread is worth waking for some tens of microseconds
    kvt_team_run((int) std::min({ (size_t) j->n_threads, n_tasks, useful }), run_blocks, &w);
    return 0;
}

void kvt_summary_add_mass(struct kvt_job * j) {
    if (!j->sum_m) return;
    struct kvt_summary_set * set = j->op->summary;
    const size_t n_parts = set->parts.size();
    const float decay = j->op->mass->decay;
    for (int64_t q = 0; q < j->n_mass_queries; q++) {
        const int64_t query = j->n_mass_queries == j->op->n_queries ? q : j->op->n_queries - 1;
        for (size_t i = 0; i < n_parts; i++) {
            float total = 0.0f;
            for (int h = 0; h < j->op->geo.n_head_kv; h++) {
                for (int g = 0; g < j->n_group; g++) {
                    const size_t row = (size_t) h * j->n_rows + (size_t) query * j->n_group + g;
                    const size_t fin = ((size_t) h * j->n_mass_queries + (size_t) q) * j->n_group + g;
                    const float * part = j->sum_parts + (row * n_parts + i) * 2;
                    if (part[0] != -INFINITY) total += exp2f(part[0] - j->final_m[fin]) * part[1] * j->final_f[fin];
                }
            }
            set->mass[i] = decay * set->mass[i] + (1.0f - decay) * total;
        }
    }
}
