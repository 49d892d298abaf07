// Bounded recall against F64: what is left out is at most eps, is what was reported, and is covered by the bound even
// when judged with the keys as they were before they were rounded. Budgets, pages that would have to be read, threads,
// errors.
//
//   test-recall [ISA]             made-up queries and keys
//   test-recall --captured FILE   those of a model (tests/test_certificate.py writes them)

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "attention-fixture.h"

struct shape {
    int n_head_kv, group, d, page_tokens, n_queries, n_kv;
    kvt_format fmt_k, fmt_v;
    float eps, spread; // spread: standard deviation of the keys: the larger, the fewer tokens matter
    bool softcap, sinks, window;
    int missing_every, absent_every;
    int n_threads;
    int n_shifts = 0; // of all keys, after they were written, by way of rows of F16 or Q8_0
};
static const shape BASE = { 3, 3, 64, 32, 1, 2000, KVT_FORMAT_Q8_0, KVT_FORMAT_F16, 0.05f, 2.0f, false, false, false, 0,
    0, 2 };
static const uint32_t PAGE_FIRST = 3;
static const int N_WHOLE = 1; // first, and newest, pages

// What a problem is made of: of a random generator, or of a model.
struct inputs {
    std::vector<float> keys, values, q, sinks; // keys, values: [n_kv][n_head_kv*d]; q: [n_queries][n_head_q][d]
    std::vector<uint16_t> mask;                // [n_queries][n_kv]
    float scale;
};

static inputs random_inputs(const shape& c, uint32_t seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const int n_row = c.n_head_kv * c.d, n_head_q = c.n_head_kv * c.group;
    inputs in;
    in.scale = 1.0f / std::sqrt((float) c.d);
    in.keys.resize((size_t) c.n_kv * n_row);
    for (float& x : in.keys) x = normal(rng) * c.spread;
    in.values.resize((size_t) c.n_kv * n_row);
    for (float& x : in.values) x = normal(rng);
    in.q.resize((size_t) c.n_queries * n_head_q * c.d);
    for (float& x : in.q) x = normal(rng);
    for (int h = 0; h < n_head_q; h++) in.sinks.push_back(normal(rng) * 2);
    for (int i = 0; i < c.n_queries; i++)
        for (int t = 0; t < c.n_kv; t++) {
            const int pos = c.n_kv - c.n_queries + i;
            in.mask.push_back(t <= pos && (!c.window || t > pos - 700) ? 0 : 0xfc00);
        }
    return in;
}

// all keys count against its budget
static kvt_store * some_store() {
    static kvt_store * store = [] {
        kvt_store_params params;
        kvt_store_params_default(&params);
        kvt_store * s = nullptr;
        char err[256] = "";
        CHECK_MSG(kvt_store_open(&params, &s, err, sizeof(err)) == 0, "%s", err);
        return s;
    }();
    return store;
}

// What a shift of positions does: the first channels of every head are turned against each other, c and c +
// n_channels/2, and stretched.
struct turning {
    int n_channels;
    float stretch = 1.0f;
    double angle = NAN; // NAN: each cell and channel has its own
};

static void turn(float * row, int n_head, int d, size_t cell, const turning& how) {
    for (int h = 0; h < n_head; h++)
        for (int c = 0; c < how.n_channels / 2; c++) {
            float *a = row + h * d + c, *b = a + how.n_channels / 2;
            const double own = (double) (cell % 5 + 1) * std::pow(10000.0, -2.0 * c / how.n_channels),
                         angle = std::isnan(how.angle) ? own : how.angle, x = *a, y = *b;
            *a = (float) (how.stretch * (x * std::cos(angle) - y * std::sin(angle)));
            *b = (float) (how.stretch * (x * std::sin(angle) + y * std::cos(angle)));
        }
}

// Turns the cells from `first` on where they are, as rows of `fmt`, and what they were before they were ever rounded,
// [n][n_head_kv*d].
static void shift_keys(kvt_keys * keys, kvt_format fmt, size_t first, std::vector<float>& exact, const turning& how) {
    const kvt_geometry& geo = keys->layout.geo;
    const int n_row = geo.n_head_kv * geo.d_k;
    const std::vector<float> noted(kvt_keys_errors(keys, 0, 0), kvt_keys_errors(keys, geo.n_head_kv, 0));
    std::vector<uint8_t> before(kvt_row_bytes(fmt, n_row)), after(before.size());
    std::vector<float> row(n_row);
    for (size_t i = 0; i * n_row < exact.size(); i++) {
        kvt_page_get_row(&keys->layout, keys->data, KVT_PART_K, (int32_t) (first + i), fmt, before.data());
        kvt_row_to_f32(fmt, before.data(), row.data(), n_row);
        turn(row.data(), geo.n_head_kv, geo.d_k, i, how);
        kvt_row_from_f32(fmt, row.data(), after.data(), n_row);
        kvt_keys_change(keys, first + i, fmt, before.data(), after.data(), noted.data());
        turn(&exact[i * n_row], geo.n_head_kv, geo.d_k, i, how);
    }
}

// Keys apart from pages of values, and everything an operation points to.
struct problem {
    shape c;
    memory_pages mem;
    std::vector<float> exact_keys, values; // [n_kv][n_head_kv*d], before rounding
    kvt_keys * keys = nullptr;
    kvt_digests * digests = nullptr;
    std::vector<float> q, dst, sinks;
    std::vector<uint16_t> mask;
    kvt_recall_report report = {};
    kvt_recall recall;
    kvt_attention_op op = {};

    problem(const shape& shape, const inputs& in);
    problem(const shape& shape, uint32_t seed) : problem(shape, random_inputs(shape, seed)) {}
    ~problem() {
        kvt_digests_free(digests);
        kvt_keys_free(keys);
    }
    void set_values(const std::vector<float>& rows);
    static int is_ready(void * ctx, const uint32_t * pages, size_t n, uint8_t * out) {
        for (size_t i = 0; i < n; i++) out[i] = !((memory_pages *) ctx)->pages[pages[i]].missing;
        return 0;
    }
};

problem::problem(const shape& s, const inputs& in)
    : c(s), mem(PAGE_FIRST + (size_t) (s.n_kv + s.page_tokens - 1) / s.page_tokens + 1), exact_keys(in.keys), q(in.q),
      sinks(in.sinks), mask(in.mask) {
    const int n_row = c.n_head_kv * c.d, n_head_q = c.n_head_kv * c.group;
    const size_t n_cells = mem.pages.size() * c.page_tokens;
    CHECK(kvt_keys_create(some_store(), c.n_head_kv, c.d, n_cells, c.fmt_k, &keys) == 0);
    for (int t = 0; t < c.n_kv; t++)
        kvt_keys_put(keys, (size_t) PAGE_FIRST * c.page_tokens + t, &exact_keys[(size_t) t * n_row]);
    for (int i = 0; i < c.n_shifts; i++)
        shift_keys(
            keys, i % 2 ? KVT_FORMAT_Q8_0 : KVT_FORMAT_F16, (size_t) PAGE_FIRST * c.page_tokens, exact_keys, { c.d });
    CHECK(kvt_digests_create(&digests, c.n_head_kv, c.d, n_cells / KVT_SUB) == 0);
    set_values(in.values);
    for (size_t i = PAGE_FIRST; i + 1 < mem.pages.size(); i++) {
        mem.pages[i].missing = c.missing_every && i % c.missing_every == 0;
    }
    dst.assign((size_t) c.n_queries * n_head_q * c.d, NAN);
    recall = { c.eps, 0, N_WHOLE, N_WHOLE, digests, &report };
    op.geo = { c.n_head_kv, c.d, c.d, c.page_tokens };
    op.d_v_out = c.d;
    op.n_head_q = n_head_q;
    op.n_queries = c.n_queries;
    op.n_kv = c.n_kv;
    op.page_first = PAGE_FIRST;
    op.scale = in.scale;
    op.softcap = c.softcap ? 8.0f : 0.0f;
    op.sinks = c.sinks ? sinks.data() : nullptr;
    op.q = (const char *) q.data();
    op.q_nb_head = c.d * sizeof(float);
    op.q_nb_query = op.q_nb_head * n_head_q;
    op.mask = (const char *) mask.data();
    op.mask_nb_query = c.n_kv * sizeof(uint16_t);
    op.dst = (char *) dst.data();
    op.dst_nb_head = c.d * sizeof(float);
    op.dst_nb_query = op.dst_nb_head * n_head_q;
    mem.source.is_ready = is_ready;
    op.source = &mem.source;
    op.keys = keys;
    op.recall = &recall;
}

// rows: [n_kv][n_head_kv*d]
void problem::set_values(const std::vector<float>& rows) {
    values = rows;
    const kvt_geometry geo = { c.n_head_kv, 0, c.d, c.page_tokens };
    const kvt_page_layout * l = mem.layout(geo, KVT_FORMAT_F16, c.fmt_v);
    for (size_t i = PAGE_FIRST; i + 1 < mem.pages.size(); i++) {
        mem.set(i, l);
        mem.pages[i].absent = c.absent_every && i % c.absent_every == 1;
        if (mem.pages[i].absent) continue;
        for (int t = 0; t < c.page_tokens; t++) {
            const size_t cell = (i - PAGE_FIRST) * c.page_tokens + t;
            if (cell < (size_t) c.n_kv)
                kvt_page_put_f32(l, mem.pages[i].data, KVT_PART_V, t, &values[cell * c.n_head_kv * c.d]);
        }
        const kvt_page_ref ref = { mem.pages[i].data, l, (uint32_t) i, 0, nullptr };
        for (int s = 0; s < c.page_tokens; s += KVT_SUB) kvt_digests_note_write(digests, &ref, s, KVT_SUB);
    }
}

// softmax of one query head in F64, over the keys as they were or as they are stored: [n_kv]
static std::vector<double> softmax_f64(const problem& p, int query, int head, bool stored) {
    const shape& c = p.c;
    const int n_row = c.n_head_kv * c.d, h = head / c.group;
    const float * q = &p.q[((size_t) query * c.n_head_kv * c.group + head) * c.d];
    std::vector<double> s(c.n_kv);
    std::vector<float> row(n_row);
    double most = c.sinks ? p.sinks[head] : -INFINITY;
    for (int t = 0; t < c.n_kv; t++) {
        if (stored)
            kvt_page_get_f32(
                &p.keys->layout, p.keys->data, KVT_PART_K, (int32_t) (PAGE_FIRST * c.page_tokens + t), row.data());
        const float * k = (stored ? row.data() : &p.exact_keys[(size_t) t * n_row]) + h * c.d;
        double x = 0;
        for (int i = 0; i < c.d; i++) x += (double) q[i] * k[i];
        x *= p.op.scale;
        if (c.softcap) x = 8.0 * std::tanh(x / 8.0);
        s[t] = p.mask[(size_t) query * c.n_kv + t] ? -INFINITY : x;
        most = std::max(most, s[t]);
    }
    double sum = c.sinks ? std::exp(p.sinks[head] - most) : 0.0;
    for (double& x : s) sum += x = std::exp(x - most);
    for (double& x : s) x /= sum;
    return s;
}

static std::string describe(const shape& c) {
    char buf[300];
    snprintf(buf, sizeof(buf),
        "%s heads %dx%d d %d page %d queries %d kv %d %s/%s eps %g spread %g cap %d sinks %d window %d missing %d "
        "absent %d threads %d shifts %d",
        kvt_isa_active(), c.n_head_kv, c.group, c.d, c.page_tokens, c.n_queries, c.n_kv, kvt_format_name(c.fmt_k),
        kvt_format_name(c.fmt_v), c.eps, c.spread, c.softcap, c.sinks, c.window, c.missing_every, c.absent_every,
        c.n_threads, c.n_shifts);
    return buf;
}

// The judge. Values that tell what was read: row i of a KV head has a channel of its own, in which a token's value is
// the ratio of its true probability to that from the stored keys. With digests that say nothing, that channel of the
// output is the true probability of what was read; in the last channel, where every value is 1, that from the stored
// keys.
static void certificate(kvt_attention * a, const shape& c, const inputs& in) {
    problem p(c, in);
    const std::string what = describe(c);
    const int n_rows = c.group * c.n_queries, n_row = c.n_head_kv * c.d;
    p.c.fmt_v = KVT_FORMAT_F32;
    std::vector<float> rows((size_t) c.n_kv * n_row, 0.0f);
    for (int h = 0; h < c.n_head_kv; h++) {
        for (int t = 0; t < c.n_kv; t++) rows[(size_t) t * n_row + h * c.d + c.d - 1] = 1.0f;
        for (int r = 0; r < n_rows; r++) {
            const auto truth = softmax_f64(p, r / c.group, h * c.group + r % c.group, false),
                       stored = softmax_f64(p, r / c.group, h * c.group + r % c.group, true);
            for (int t = 0; t < c.n_kv; t++)
                rows[(size_t) t * n_row + h * c.d + r] = stored[t] > 0 ? (float) (truth[t] / stored[t]) : 0.0f;
        }
    }
    p.set_values(rows);
    memset(p.digests->data, 0, p.digests->layout.page_bytes);
    kvt_attention_set_n_threads(a, c.n_threads);
    CHECK_MSG(kvt_attention_run(a, &p.op) == 0, "%s", what.c_str());
    double sum = 0, most = 0, true_sum = 0, true_most = 0;
    for (int h = 0; h < c.n_head_kv; h++)
        for (int r = 0; r < n_rows; r++) {
            const int head = h * c.group + r % c.group;
            const double sink = c.sinks
                ? 1.0
                : 0.0; // a sink takes part of the probability: what is missing to 1 is not left out
            double all = 0, true_all = 0;
            for (double x : softmax_f64(p, r / c.group, head, true)) all += x;
            for (double x : softmax_f64(p, r / c.group, head, false)) true_all += x;
            const float * o = &p.dst[((size_t) (r / c.group) * c.n_head_kv * c.group + head) * c.d];
            const double left = all - o[c.d - 1], truly = true_all - o[r];
            CHECK_MSG(sink == 1.0 || std::fabs(all - 1) < 1e-9, "%s", what.c_str());
            CHECK_MSG(left <= c.eps + 1e-4, "%s: row %d leaves out %g", what.c_str(), r, left);
            sum += left;
            most = std::max(most, left);
            true_sum += truly;
            true_most = std::max(true_most, truly);
        }
    const int n_all = n_rows * c.n_head_kv;
    CHECK_MSG(p.report.n_rows == (uint64_t) n_all, "%s", what.c_str());
    CHECK_MSG(std::fabs(sum - p.report.omitted_sum) < 1e-4 * n_all && std::fabs(most - p.report.omitted_max) < 1e-4,
        "%s: left out %g, said %g", what.c_str(), sum, p.report.omitted_sum);
    CHECK_MSG(true_sum <= p.report.bound_sum + 1e-5 * n_all && true_most <= p.report.bound_max + 1e-5,
        "%s: truly %g of a row left out, bound %g", what.c_str(), true_most, p.report.bound_max);
    CHECK_MSG(p.report.bound_sum >= p.report.omitted_sum, "%s", what.c_str());
    CHECK(p.mem.n_pinned() == 0);
}

// The output is as far from the exact one as what was left out allows, and reading little happens where little matters.
static void output(kvt_attention * a, const shape& c, uint32_t seed) {
    problem p(c, seed), exact(c, seed);
    const std::string what = describe(c);
    exact.op.recall = nullptr;
    kvt_attention_set_n_threads(a, c.n_threads);
    kvt_mass *mass = nullptr, *exact_mass = nullptr;
    CHECK(kvt_mass_create(&mass, p.mem.pages.size(), c.page_tokens, 0.5f) == 0 &&
        kvt_mass_create(&exact_mass, p.mem.pages.size(), c.page_tokens, 0.5f) == 0);
    p.op.mass = mass;
    exact.op.mass = exact_mass;
    kvt_attention_stats stats[3];
    kvt_attention_get_stats(a, &stats[0]);
    CHECK_MSG(kvt_attention_run(a, &p.op) == 0, "%s", what.c_str());
    kvt_attention_get_stats(a, &stats[1]);
    CHECK_MSG(kvt_attention_run(a, &exact.op) == 0, "%s", what.c_str());
    kvt_attention_get_stats(a, &stats[2]);
    CHECK_MSG(stats[1].pages_skipped - stats[0].pages_skipped == stats[2].pages_skipped - stats[1].pages_skipped,
        "%s: %g pages are masked out", what.c_str(), (double) (stats[1].pages_skipped - stats[0].pages_skipped));
    double worst_mass = 0;
    for (size_t i = 0; i < mass->n_cells; i++)
        worst_mass = std::max(worst_mass, (double) std::fabs(mass->token_mean[i] - exact_mass->token_mean[i]));
    CHECK_MSG(worst_mass < 1e-4, "%s: mass differs by %g", what.c_str(), worst_mass);
    double largest = 0;
    for (float x : p.values) largest = std::max(largest, (double) std::fabs(x));
    double worst = 0;
    for (size_t i = 0; i < p.dst.size(); i++) worst = std::max(worst, (double) std::fabs(p.dst[i] - exact.dst[i]));
    CHECK_MSG(worst <= 2 * c.eps * largest + 1e-3, "%s: off by %g", what.c_str(), worst);
    CHECK_MSG(p.report.tokens_read <= p.report.tokens_seen, "%s", what.c_str());
    const int64_t seen = std::min(c.n_kv, c.window ? 700 + 32 : c.n_kv);
    CHECK_MSG(p.report.tokens_seen <= (uint64_t) ((seen + 32) * c.n_head_kv), "%s", what.c_str());
    if (c.spread >= 4.0f && c.eps >= 0.05f && !c.softcap) {
        CHECK_MSG(p.report.tokens_read < p.report.tokens_seen / 2, "%s: read %g of %g", what.c_str(),
            (double) p.report.tokens_read, (double) p.report.tokens_seen);
    }
    CHECK(p.mem.n_pinned() == 0);
    kvt_mass_free(mass);
    kvt_mass_free(exact_mass);
}

static void budget(kvt_attention * a) {
    for (int64_t tokens : { 64, 100, 500, 1900 })
        for (bool window : { false, true }) {
            shape c = BASE;
            c.spread = 0.3f;
            c.eps = 0.001f;
            c.window = window;
            problem p(c, 3);
            p.recall.budget_tokens = tokens;
            CHECK(kvt_attention_run(a, &p.op) == 0);
            CHECK_MSG(p.report.tokens_read <= (uint64_t) (tokens * c.n_head_kv), "budget %lld: read %g",
                (long long) tokens, (double) p.report.tokens_read);
            CHECK(p.report.tokens_read > (uint64_t) (std::min<int64_t>(tokens, 600) * c.n_head_kv) / 4);
        }
}

// pages that would have to be read are left out where that is allowed, and few are read where few matter
static void missing_pages(kvt_attention * a) {
    for (int every : { 1, 2, 3 }) {
        shape c = BASE;
        c.spread = 3.0f;
        c.eps = 0.2f;
        c.missing_every = every;
        c.n_head_kv = 1;
        c.group = 2;
        problem p(c, 17);
        const int before = p.mem.n_acquired;
        CHECK(kvt_attention_run(a, &p.op) == 0);
        const int n_missing = (int) std::count_if(
            p.mem.pages.begin(), p.mem.pages.end(), [](const memory_pages::page& x) { return x.missing; });
        CHECK(p.report.pages_missing <= (uint64_t) n_missing && p.report.pages_missing < p.report.pages_wanted + 1);
        CHECK_MSG(p.mem.n_acquired - before - 1 < n_missing * 3 / 4, "every %d: %d of %d were read", every,
            p.mem.n_acquired - before - 1, n_missing);
        CHECK(p.report.omitted_max <= 0.2001f);
    }
}

static void errors_unpin(kvt_attention * a) {
    for (int threads : { 1, 3 })
        for (int n = 0;; n++) {
            shape c = BASE;
            c.missing_every = 2;
            c.n_threads = threads;
            c.n_kv = 700;
            c.spread = 0.5f;
            c.eps = 0.01f;
            problem p(c, 5);
            p.mem.fail_at = n;
            kvt_attention_set_n_threads(a, threads);
            const int err = kvt_attention_run(a, &p.op);
            CHECK(p.mem.n_pinned() == 0);
            if (p.mem.n_acquired <= n) {
                CHECK(err == 0);
                break;
            }
            CHECK(err == KVT_ERR_IO);
        }
}

static void same_bits(kvt_attention * a) {
    for (kvt_format v : { KVT_FORMAT_F16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_1 }) {
        std::vector<float> first;
        for (int threads : { 1, 2, 5 }) {
            shape c = BASE;
            c.fmt_v = v;
            c.n_threads = threads;
            c.n_kv = 5000;
            problem p(c, 11);
            kvt_attention_set_n_threads(a, threads);
            CHECK(kvt_attention_run(a, &p.op) == 0);
            if (first.empty()) first = p.dst;
            CHECK(memcmp(first.data(), p.dst.data(), first.size() * sizeof(float)) == 0);
        }
    }
}

// cells that were written without their sub-page being completed have no digest: they are read, whatever they weigh
static void without_digests(kvt_attention * a) {
    problem p(BASE, 23);
    kvt_digests_clear(p.digests);
    CHECK(
        std::all_of(p.digests->data, p.digests->data + p.digests->layout.page_bytes, [](uint8_t x) { return x == 0; }));
    CHECK(kvt_attention_run(a, &p.op) == 0);
    CHECK(p.report.tokens_read == p.report.tokens_seen && p.report.omitted_sum == 0.0);
}

// Values that their format, or that of their digest, cannot hold: where nothing sees them they change no bit of the
// output.
static void means_that_are_no_numbers(kvt_attention * a) {
    for (kvt_format fmt : { KVT_FORMAT_F32, KVT_FORMAT_F16 }) {
        shape c = BASE;
        c.fmt_v = fmt;
        inputs in = random_inputs(c, 37);
        const size_t n_row = (size_t) c.n_head_kv * c.d, cell = 480,
                     sub = (size_t) PAGE_FIRST * c.page_tokens / KVT_SUB + cell / KVT_SUB;
        for (size_t t = cell; t < cell + KVT_SUB; t++) in.mask[t] = 0xfc00;
        problem p(c, in), plain(c, in);
        CHECK(p.digests->valid[sub]);
        std::fill_n(in.values.begin() + cell * n_row, KVT_SUB * n_row,
            fmt == KVT_FORMAT_F32 ? 1e7f : 1e30f); // a Q8_0 block goes to 8e6, F16 to 65504
        p.set_values(in.values);
        CHECK(!p.digests->valid[sub] && p.digests->valid[sub - 1] && p.digests->valid[sub + 1]);
        CHECK(kvt_attention_run(a, &p.op) == 0 && kvt_attention_run(a, &plain.op) == 0);
        CHECK(memcmp(p.dst.data(), plain.dst.data(), p.dst.size() * sizeof(float)) == 0);
        p.set_values(plain.values);
        CHECK(p.digests->valid[sub] && memcmp(p.digests->data, plain.digests->data, p.digests->layout.page_bytes) == 0);
    }
}

// a score that is no number weighs nothing, and keys are not gone through again and again for its sake
static void not_a_number(kvt_attention * a) {
    shape c = BASE;
    c.fmt_k = KVT_FORMAT_F32;
    uint64_t k_bytes[2];
    for (int broken = 0; broken < 2; broken++) {
        problem p(c, 31);
        if (broken) { // one key of the first head, and a whole query
            const std::vector<float> row((size_t) c.n_head_kv * c.d, NAN);
            kvt_page_put_f32(
                &p.keys->layout, p.keys->data, KVT_PART_K, (int32_t) (PAGE_FIRST * c.page_tokens + 500), row.data());
            std::fill_n(p.q.begin(), c.d, NAN);
        }
        kvt_attention_stats before, after;
        kvt_attention_get_stats(a, &before);
        CHECK(kvt_attention_run(a, &p.op) == 0);
        kvt_attention_get_stats(a, &after);
        k_bytes[broken] = after.k_bytes - before.k_bytes;
        for (size_t i = c.d; i < p.dst.size(); i++) CHECK(std::isfinite(p.dst[i]));
    }
    CHECK(k_bytes[0] == k_bytes[1]);
}

// What is assumed of cells whose rounding is not known covers what it really was, by little, and a cleared cache knows
// nothing of it.
static void errors_of_keys() {
    for (kvt_format fmt :
        { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 })
        for (int d : { 64, 96, 80 }) {
            if (!kvt_format_supports(fmt, d)) continue;
            const int n_head = 2, n_cells = 320, n_blocks = (d + 31) / 32;
            kvt_keys *known = nullptr, *unknown = nullptr;
            CHECK(kvt_keys_create(some_store(), n_head, d, n_cells, fmt, &known) == 0 &&
                kvt_keys_create(some_store(), n_head, d, n_cells, fmt, &unknown) == 0);
            std::mt19937 rng(7);
            std::normal_distribution<float> normal;
            std::vector<float> row((size_t) n_head * d);
            std::vector<uint8_t> bytes(kvt_row_bytes(fmt, n_head * d));
            for (size_t cell = 0; cell < (size_t) n_cells; cell++) {
                for (float& x : row) x = normal(rng) * (1.0f + cell / 32);
                kvt_keys_put(known, cell, row.data());
                kvt_row_from_f32(fmt, row.data(), bytes.data(), (int64_t) row.size());
                kvt_keys_put_row(unknown, cell, fmt, bytes.data());
            }
            for (int h = 0; h < n_head; h++)
                for (int b = 0; b < n_blocks; b++)
                    for (int s = 0; s < n_cells / KVT_SUB; s++) {
                        const float real = kvt_keys_errors(known, h, b)[s], most = kvt_keys_errors(unknown, h, b)[s];
                        CHECK_MSG(real > 0.0f && real <= most && most < 5 * real,
                            "%s, %d channels: sub %d rounds by %g, %g is assumed", kvt_format_name(fmt), d, s, real,
                            most);
                        CHECK(s == 0 || fmt == KVT_FORMAT_F32 ||
                            kvt_keys_errors(known, h, b)[s] < 2.5f * (float) (s + 1) * kvt_keys_errors(known, h, b)[0]);
                    }
            kvt_keys_clear(known);
            CHECK(std::all_of(known->error, known->error + (size_t) n_head * n_blocks * known->ld_error,
                [](float x) { return x == 0.0f; }));
            std::fill(row.begin(), row.end(), NAN);
            kvt_keys_put(known, 40, row.data());
            CHECK(kvt_keys_errors(known, 0, 0)[0] == 0.0f && std::isinf(kvt_keys_errors(known, 0, 0)[1]));
            kvt_keys_free(known);
            kvt_keys_free(unknown);
        }
}

// some keys, and what they were before they were rounded
struct some_keys {
    kvt_keys * keys = nullptr;
    std::vector<float> exact; // [n_cells][n_head*d]
    static constexpr int N_HEAD = 2, N_CELLS = 96;

    some_keys(kvt_format fmt, int d, uint32_t seed, float scale = 2.0f) {
        CHECK(kvt_keys_create(some_store(), N_HEAD, d, N_CELLS, fmt, &keys) == 0);
        std::mt19937 rng(seed);
        std::normal_distribution<float> normal;
        exact.resize((size_t) N_CELLS * N_HEAD * d);
        for (float& x : exact) x = normal(rng) * scale;
    }
    ~some_keys() { kvt_keys_free(keys); }
    float * row(int cell) { return &exact[(size_t) cell * N_HEAD * keys->layout.geo.d_k]; }
    void put() {
        for (int t = 0; t < N_CELLS; t++) kvt_keys_put(keys, t, row(t));
    }

    // what is noted covers the distance of every cell from what it was, and is not more than `most` times it; 0:
    // whatever it is
    void check(const std::string& what, double most) {
        const int d = keys->layout.geo.d_k, n_blocks = (d + 31) / 32;
        std::vector<float> stored((size_t) N_HEAD * d);
        std::vector<double> off((size_t) N_HEAD * n_blocks * (N_CELLS / KVT_SUB), 0.0); // of the worst cell of each sub
        for (int t = 0; t < N_CELLS; t++) {
            kvt_page_get_f32(&keys->layout, keys->data, KVT_PART_K, t, stored.data());
            for (int h = 0; h < N_HEAD; h++)
                for (int b = 0; b < n_blocks; b++) {
                    double sum = 0;
                    for (int i = h * d + 32 * b; i < h * d + std::min(32 * b + 32, d); i++)
                        sum += ((double) stored[i] - row(t)[i]) * ((double) stored[i] - row(t)[i]);
                    double& worst = off[(size_t) (h * n_blocks + b) * (N_CELLS / KVT_SUB) + t / KVT_SUB];
                    worst = std::max(worst, std::sqrt(sum));
                }
        }
        for (int h = 0; h < N_HEAD; h++)
            for (int b = 0; b < n_blocks; b++)
                for (int s = 0; s < N_CELLS / KVT_SUB; s++) {
                    const double noted = kvt_keys_errors(keys, h, b)[s],
                                 worst = off[(size_t) (h * n_blocks + b) * (N_CELLS / KVT_SUB) + s];
                    CHECK_MSG(worst <= noted && (most == 0 || noted <= most * worst),
                        "%s: head %d block %d sub %d: off by %g, noted %g", what.c_str(), h, b, s, worst, noted);
                }
    }
};

static const kvt_format ALL_FORMATS[] = { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0,
    KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 };

// Rows that come in another format than they are kept in, at once or by way of keys that are kept in it, have been
// rounded twice.
static void errors_of_keys_in_other_formats() {
    for (kvt_format own : ALL_FORMATS)
        for (kvt_format fmt : ALL_FORMATS)
            for (int d : { 64, 80 })
                for (float scale : { 2.0f, 1e-4f }) { // 1e-4: steps below F16's normal numbers
                    if (!kvt_format_supports(own, d)) continue;
                    const int n_row = some_keys::N_HEAD * d; // with 80 channels a row has blocks across heads
                    const std::string what = std::string(kvt_format_name(fmt)) + " in " + kvt_format_name(own) + ", " +
                        std::to_string(d) + " channels of about " + std::to_string(scale);
                    some_keys x(own, d, 3, scale);
                    std::vector<uint8_t> bytes(kvt_row_bytes(fmt, n_row)), again(kvt_row_bytes(own, n_row));
                    std::vector<float> row(n_row);
                    for (int pass = 0; pass < 2; pass++) {
                        kvt_keys_clear(x.keys);
                        for (int t = 0; t < some_keys::N_CELLS; t++) {
                            std::copy_n(x.row(t), n_row, row.data());
                            if (pass == 1) { // saved by a cache like this one
                                kvt_row_from_f32(own, row.data(), again.data(), n_row);
                                kvt_row_to_f32(own, again.data(), row.data(), n_row);
                            }
                            kvt_row_from_f32(fmt, row.data(), bytes.data(), n_row);
                            kvt_keys_put_row(x.keys, t, fmt, bytes.data());
                        }
                        x.check(what, 0);
                    }
                    if (!kvt_format_supports(fmt, d)) continue;
                    some_keys from(fmt, d, 3, scale);
                    from.put();
                    kvt_keys_clear(x.keys);
                    for (int t = 0; t < some_keys::N_CELLS; t++)
                        kvt_keys_copy(x.keys, some_keys::N_CELLS - 1 - t, from.keys, t);
                    for (int t = 0; t < some_keys::N_CELLS; t++)
                        std::copy_n(from.row(t), n_row, x.row(some_keys::N_CELLS - 1 - t));
                    x.check("copied " + what, own == KVT_FORMAT_F32 ? 0 : 4);
                }
}

// Each time that keys are turned they are rounded again, and what rounding had done before is turned with them.
static void errors_of_shifted_keys() {
    for (kvt_format own : ALL_FORMATS)
        for (kvt_format fmt : ALL_FORMATS)
            for (int d : { 64, 96, 80 })
                for (float stretch : { 1.0f, 1.2f }) {
                    if (!kvt_format_supports(own, d)) continue;
                    some_keys x(own, d, 5);
                    x.put();
                    for (int i = 0; i < 9; i++) {
                        shift_keys(x.keys, fmt, 0, x.exact, { stretch == 1.0f ? d : d * 3 / 4, stretch });
                        x.check(std::string(kvt_format_name(own)) + " turned as " + kvt_format_name(fmt) + ", time " +
                                std::to_string(i),
                            0);
                    }
                    some_keys copy(own, d, 5);
                    copy.exact = x.exact;
                    for (int t = 0; t < some_keys::N_CELLS; t++) kvt_keys_copy(copy.keys, t, x.keys, t);
                    copy.check(std::string("copy of turned ") + kvt_format_name(own), 0);
                }
}

// Turns that leave nothing to chance: errors grow with the keys, and those of two blocks meet in one.
static void errors_that_add_up() {
    some_keys x(KVT_FORMAT_Q4_0, 32, 7);
    x.put();
    shift_keys(x.keys, KVT_FORMAT_F32, 0, x.exact, { 32, 2.0f, 0.0 }); // every stored number is doubled as it is
    x.check("doubled", 0);
    some_keys y(KVT_FORMAT_F32, 64, 7);
    const float step = 1.0f / 128; // of every block, while it is read as Q8_0: nearly all numbers are half of it off
    for (size_t i = 0; i < y.exact.size(); i++)
        y.exact[i] = step * (i % 64 == 0 || i % 64 == 33 ? 127.0f : (float) (i % 32) + 10.49f);
    y.put();
    shift_keys(y.keys, KVT_FORMAT_Q8_0, 0, y.exact, { 64, 1.0f, std::acos(0.0) / 2 });
    y.check("met", 0);
}

// one shift costs what one rounding more does, not one for each cell, and cells beside those that change keep what they
// had
static void errors_of_few_shifted_keys() {
    some_keys x(KVT_FORMAT_Q8_0, 64, 9);
    x.put();
    const float before = kvt_keys_errors(x.keys, 0, 0)[0], beside = kvt_keys_errors(x.keys, 0, 0)[1];
    x.exact.resize((size_t) KVT_SUB * some_keys::N_HEAD * 64); // the first sub
    shift_keys(x.keys, KVT_FORMAT_Q8_0, 0, x.exact, { 64 });
    CHECK(kvt_keys_errors(x.keys, 0, 0)[0] > before && kvt_keys_errors(x.keys, 0, 0)[0] < 8 * before &&
        kvt_keys_errors(x.keys, 0, 0)[1] == beside);
    kvt_keys_doubt(x.keys, 40);
    CHECK(std::isinf(kvt_keys_errors(x.keys, 1, 1)[1]) && std::isfinite(kvt_keys_errors(x.keys, 1, 1)[0]));
    kvt_keys * other = nullptr; // the same channels in other heads
    CHECK(kvt_keys_create(some_store(), 1, 128, 96, KVT_FORMAT_Q8_0, &other) == 0);
    kvt_keys_copy(other, 0, x.keys, 70);
    CHECK(std::isinf(kvt_keys_errors(other, 0, 3)[0]));
    kvt_keys_free(other);
}

static void bad_operations(kvt_attention * a) {
    const auto refuse = [a](void (*spoil)(problem&)) {
        problem p(BASE, 9);
        spoil(p);
        CHECK(kvt_attention_run(a, &p.op) == KVT_ERR_INVALID);
        CHECK(p.mem.n_pinned() == 0);
    };
    refuse([](problem& p) { p.recall.eps = 0.0f; });
    refuse([](problem& p) { p.recall.eps = 1.0f; });
    refuse([](problem& p) { p.recall.eps = NAN; });
    refuse([](problem& p) { p.op.keys = nullptr; });
    refuse([](problem& p) { p.keys->layout.geo.d_k = 32; });
    refuse([](problem& p) { p.recall.digests = nullptr; });
    refuse([](problem& p) { p.digests->n_subs = 10; });
}

static std::vector<shape> shapes() {
    std::vector<shape> all;
    for (kvt_format k :
        { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 })
        for (float eps : { 0.01f, 0.05f, 0.3f }) {
            shape c = BASE;
            c.fmt_k = k;
            c.eps = eps;
            c.n_kv = 900;
            all.push_back(c);
        }
    for (kvt_format v :
        { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_1 })
        for (int d : { 32, 64, 96, 128, 256 }) {
            shape c = BASE;
            c.fmt_v = v;
            c.d = d;
            c.n_head_kv = 2;
            c.group = d == 96 ? 1 : 4;
            c.n_kv = 1100;
            c.n_queries = d == 32 ? 3 : 1;
            all.push_back(c);
        }
    for (float spread : { 0.0f, 0.1f, 1.0f, 8.0f, 40.0f })
        for (int bits = 0; bits < 8; bits++) {
            shape c = BASE;
            c.spread = spread;
            c.softcap = bits & 1;
            c.sinks = bits & 2;
            c.window = bits & 4;
            c.n_kv = 1500;
            all.push_back(c);
        }
    for (float spread : { 1.0f, 300.0f })
        for (int bits = 0; bits < 4; bits++) { // 300: weights overflow until their reference has risen
            shape c = BASE; // with a window, the first sub that is seen has a single token, which one query sees
            c.spread = spread;
            c.sinks = bits & 1;
            c.window = bits & 2;
            c.n_queries = 4;
            c.group = 2;
            c.n_kv = 1502;
            all.push_back(c);
        }
    for (int n_kv : { 1, 31, 32, 33, 64, 97, 1025 })
        for (int pt : { 32, 96, 128 })
            for (int queries : { 1, 4 }) {
                if (n_kv < queries) continue;
                shape c = BASE;
                c.n_kv = n_kv;
                c.page_tokens = pt;
                c.n_queries = queries;
                c.group = 2;
                all.push_back(c);
            }
    for (int every : { 1, 2, 3 })
        for (int pt : { 32, 64 }) {
            shape c = BASE;
            c.missing_every = every;
            c.page_tokens = pt;
            c.n_threads = 3;
            c.n_kv = 3000;
            c.n_head_kv = 1;
            all.push_back(c);
        }
    for (kvt_format k : { KVT_FORMAT_F16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0 })
        for (int shifts : { 1, 4 }) {
            shape c = BASE;
            c.fmt_k = k;
            c.n_shifts = shifts;
            c.n_kv = 900;
            all.push_back(c);
        }
    return all;
}

// Steps of a model: of each, four int32 (KV heads, query heads per KV head, channels, cells), the scale, then queries,
// keys and the mask as in `inputs`. Every one is judged at several eps, with keys in Q8_0.
static int captured(kvt_attention * a, const char * path) {
    FILE * file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "test-recall: cannot open %s\n", path);
        return 2;
    }
    int32_t head[4];
    size_t n_steps = 0;
    const auto take = [file](void * to, size_t size, size_t n) { CHECK(fread(to, size, n, file) == n); };
    while (fread(head, sizeof(head), 1, file) == 1) {
        shape c = BASE;
        c.n_head_kv = head[0];
        c.group = head[1];
        c.d = head[2];
        c.n_kv = head[3];
        const size_t n_row = (size_t) c.n_head_kv * c.d;
        inputs in;
        take(&in.scale, sizeof(float), 1);
        in.q.resize(n_row * c.group);
        in.keys.resize(n_row * c.n_kv);
        in.values.assign(n_row * c.n_kv, 0.0f);
        in.sinks.assign((size_t) c.n_head_kv * c.group, 0.0f);
        in.mask.resize(c.n_kv);
        take(in.q.data(), sizeof(float), in.q.size());
        take(in.keys.data(), sizeof(float), in.keys.size());
        take(in.mask.data(), sizeof(uint16_t), in.mask.size());
        for (float eps : { 0.01f, 0.07f, 0.2f }) {
            c.eps = eps;
            certificate(a, c, in);
        }
        n_steps++;
    }
    fclose(file);
    CHECK(n_steps > 0);
    printf("%zu layers and steps\n", n_steps);
    return check_summary();
}

int main(int argc, char ** argv) {
    const char * isas[8];
    const size_t n_isa = kvt_isa_list(isas, 8);
    kvt_attention * a = nullptr;
    CHECK(kvt_attention_create(&a, 2) == 0);
    if (argc == 3 && strcmp(argv[1], "--captured") == 0) {
        const int rc = captured(a, argv[2]);
        kvt_attention_free(a);
        return rc;
    }
    errors_of_keys();
    errors_of_keys_in_other_formats();
    errors_of_shifted_keys();
    errors_that_add_up();
    errors_of_few_shifted_keys();
    for (size_t i = 0; i < n_isa; i++) {
        if (argc > 1 && strcmp(argv[1], isas[i]) != 0) continue;
        CHECK(kvt_isa_select(isas[i]) == 0);
        uint32_t seed = 1;
        for (const shape& c : shapes()) {
            certificate(a, c, random_inputs(c, seed));
            output(a, c, seed++);
        }
        shape c = BASE;
        c.absent_every = 4;
        problem p(c, 7); // absent pages hold zeros
        CHECK(kvt_attention_run(a, &p.op) == 0);
        budget(a);
        missing_pages(a);
        errors_unpin(a);
        same_bits(a);
        without_digests(a);
        means_that_are_no_numbers(a);
        not_a_number(a);
        bad_operations(a);
        printf("%-11s %zu shapes\n", isas[i], shapes().size());
    }
    kvt_attention_free(a);
    return check_summary();
}
