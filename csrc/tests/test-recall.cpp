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

#include "keys-fixture.h"
#include "selection.h"

struct shape {
    int n_head_kv, group, d, page_tokens, n_queries, n_kv;
    kvt_format fmt_k, fmt_v;
    float eps, spread; // spread: standard deviation of the keys: the larger, the fewer tokens matter
    bool softcap, sinks, window;
    int missing_every, absent_every;
    int n_threads;
    int n_shifts = 0;     // of all keys, after they were written, by way of rows of F16 or Q8_0
    bool are_told = true; // what the shifts made is handed in before it was rounded
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
        shift_keys(keys, i % 2 ? KVT_FORMAT_Q8_0 : KVT_FORMAT_F16, (size_t) PAGE_FIRST * c.page_tokens, exact_keys,
            { c.d }, c.are_told);
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
        "absent %d threads %d shifts %d%s",
        kvt_isa_active(), c.n_head_kv, c.group, c.d, c.page_tokens, c.n_queries, c.n_kv, kvt_format_name(c.fmt_k),
        kvt_format_name(c.fmt_v), c.eps, c.spread, c.softcap, c.sinks, c.window, c.missing_every, c.absent_every,
        c.n_threads, c.n_shifts, c.are_told ? "" : " untold");
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

// Errors add up, shift by shift, and no faster: after n of them scores can be off by n + 1 times what they were.
static void shifted_positions(kvt_attention * a) {
    for (int d : { 64, 128 }) {
        double first = 0;
        for (int n_shifts = 0; n_shifts < 4; n_shifts++) {
            shape c = BASE;
            c.d = d;
            c.n_shifts = n_shifts;
            problem p(c, 41);
            CHECK(kvt_attention_run(a, &p.op) == 0);
            const double n = (double) p.report.n_rows, bound = p.report.bound_sum / n,
                         omitted = p.report.omitted_sum / n, factor = std::log(bound / omitted);
            first = n_shifts == 0 ? factor : first;
            printf("%d channels, %d shifts: %.4f left out, at most %.4f\n", d, n_shifts, omitted, bound);
            CHECK_MSG(factor <= 1.1 * (n_shifts + 1) * first, "%d channels, %d shifts: %g after %g", d, n_shifts,
                factor, first);
        }
    }
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
        for (int shifts : { 1, 4 })
            for (bool are_told : { true, false }) {
                shape c = BASE;
                c.fmt_k = k;
                c.n_shifts = shifts;
                c.are_told = are_told;
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
    selection chosen(argc, argv);
    for (size_t i = 0; i < n_isa; i++) {
        if (!chosen.takes_isa(isas[i])) continue;
        CHECK(kvt_isa_select(isas[i]) == 0);
        uint32_t seed = 1;
        for (const shape& c : shapes()) {
            if (chosen.takes_case(seed)) {
                certificate(a, c, random_inputs(c, seed));
                output(a, c, seed);
            }
            seed++;
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
        shifted_positions(a);
        bad_operations(a);
        printf("%-11s %zu shapes\n", isas[i], shapes().size());
    }
    kvt_attention_free(a);
    return check_summary();
}
