// Attention over pages against F64: formats, geometries, masks, tiers of pages, threads, and every instruction set of
// this processor.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../attention/attention-impl.h"
#include "attention-problem.h"
#include "selection.h"

static double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        if (!std::isfinite(got[i])) return INFINITY;
        diff += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

static void check_mass(
    const scenario& c, const problem& p, const kvt_mass * m, const std::vector<double>& want, const std::string& what) {
    const bool decode = c.d_v != 0 && c.group * c.n_queries <= 16;
    std::vector<double> mean(c.n_kv, 0.0), most(c.n_kv, 0.0);
    for (int q = decode ? 0 : c.n_queries - 1; q < c.n_queries; q++)
        for (int t = 0; t < c.n_kv; t++) {
            mean[t] = 0.75 * mean[t] + 0.25 * want[(size_t) q * c.n_kv + t];
            most[t] = std::max(most[t], want[(size_t) q * c.n_kv + t]);
        }
    const size_t first = (size_t) PAGE_FIRST * c.page_tokens,
                 n_pages = (size_t) (c.n_kv + c.page_tokens - 1) / c.page_tokens;
    double worst = 0, token_sum = 0;
    for (int t = 0; t < c.n_kv; t++) {
        worst = std::max(
            { worst, std::fabs(m->token_mean[first + t] - mean[t]), std::fabs(m->token_max[first + t] - most[t]) });
        token_sum += m->token_mean[first + t];
    }
    for (size_t i = 0; i < n_pages; i++) {
        double page_mean = 0, page_max = 0;
        for (int q = decode ? 0 : c.n_queries - 1; q < c.n_queries; q++) {
            double sum = 0;
            for (size_t t = i * c.page_tokens; t < (i + 1) * c.page_tokens && t < (size_t) c.n_kv; t++)
                sum += want[(size_t) q * c.n_kv + t];
            page_mean = 0.75 * page_mean + 0.25 * sum;
            page_max = std::max(page_max, sum);
        }
        worst = std::max({ worst, std::fabs(m->page_mean[PAGE_FIRST + i] - page_mean),
            std::fabs(m->page_max[PAGE_FIRST + i] - page_max) });
    }
    const double n_head_q = c.group * c.n_head_kv;
    CHECK_MSG(worst < 2e-5 * n_head_q, "%s: mass off by %g", what.c_str(), worst);
    if (c.mask == CAUSAL && !c.sinks && (!decode || c.n_queries == 1)) {
        CHECK_MSG(std::fabs(token_sum - 0.25 * n_head_q) < 1e-4 * n_head_q, "%s: mass of a query is %g", what.c_str(),
            4 * token_sum);
    }
    for (size_t i = 0; i < m->n_cells; i++) { // other streams' cells stay as they were
        if (i < first || i >= first + c.n_kv) CHECK(m->token_mean[i] == 0.0f && m->token_max[i] == 0.0f);
    }
    CHECK(m->n_steps == (uint64_t) (decode ? c.n_queries : 1));
    (void) p;
}

static double g_worst[KVT_FORMAT_COUNT];

static void run(kvt_attention * a, const scenario& c, const char * isa, uint32_t seed) {
    const std::string what = describe(c, isa);
    problem p(c, seed);
    kvt_mass * mass = nullptr;
    if (c.mass) CHECK(kvt_mass_create(&mass, p.mem.pages.size(), c.page_tokens, 0.75f) == 0);
    p.op.mass = mass;
    kvt_attention_set_n_threads(a, c.n_threads);
    if (a->probs.p)
        memset(a->probs.p, 0xff,
            a->probs.n_bytes); // NaN: weights of an earlier operation are not taken for those of this one
    const int err = kvt_attention_run(a, &p.op);
    CHECK_MSG(err == 0, "%s: error %d", what.c_str(), err);
    std::vector<double> want, want_mass;
    attention_f64(p.op, p.mem, want, &want_mass);
    const double e = relative_error(p.dst, want);
    const bool quantized = c.mixed || c.fmt_k >= KVT_FORMAT_Q8_0;
    CHECK_MSG(e < (quantized ? 1e-4 : 1e-5), "%s: relative error %g", what.c_str(), e);
    if (!c.mixed) g_worst[c.fmt_k] = std::max(g_worst[c.fmt_k], e);
    CHECK_MSG(p.mem.n_pinned() == 0, "%s: pages stay pinned", what.c_str());
    CHECK_MSG(p.mem.most_missing_pins <= c.n_threads, "%s: %d read pages held at once", what.c_str(),
        p.mem.most_missing_pins);
    if (mass) check_mass(c, p, mass, want_mass, what);
    kvt_mass_free(mass);
}

static std::vector<scenario> scenarios() {
    std::vector<scenario> all;
    const kvt_format formats[] = { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0,
        KVT_FORMAT_Q4_1 };
    for (kvt_format k : formats)
        for (kvt_format v : formats)
            for (int nq : { 1, 33 }) {
                scenario c = BASE;
                c.fmt_k = k;
                c.fmt_v = v;
                c.n_queries = nq;
                c.mass = true;
                all.push_back(c);
            }
    const int shapes[][3] = { { 40, 40, 40 }, { 64, 64, 64 }, { 72, 72, 72 }, { 80, 80, 80 }, { 96, 96, 96 },
        { 112, 112, 112 }, { 128, 128, 128 }, { 192, 128, 128 }, { 256, 256, 256 }, { 576, 512, 512 }, { 576, 0, 512 },
        { 96, 0, 64 }, { 40, 0, 33 }, { 1, 1, 1 }, { 7, 50, 50 } };
    for (const auto& s : shapes)
        for (int nq : { 1, 5, 40 })
            for (int group : { 1, 4 }) {
                scenario c = BASE;
                c.n_head_kv = 2;
                c.group = group;
                c.d_k = s[0];
                c.d_v = s[1];
                c.d_v_out = s[2];
                c.n_queries = nq;
                c.n_kv = 150;
                c.mass = nq != 5;
                all.push_back(c);
                if (s[0] % 32 == 0 && s[1] % 32 == 0) {
                    c.fmt_k = KVT_FORMAT_Q8_0;
                    c.fmt_v = KVT_FORMAT_Q4_1;
                    all.push_back(c);
                    c.mixed = true;
                    all.push_back(c);
                }
            }
    for (mask_kind m : { NO_MASK, CAUSAL, WINDOW, RANDOM, BLOCKY, ALIBI, SOME_BLIND, PER_HEAD })
        for (int nq : { 1, 2, 4, 17, 100 })
            for (int bits = 0; bits < 4; bits++) {
                scenario c = BASE;
                c.mask = m;
                c.n_queries = nq;
                c.softcap = bits & 1;
                c.sinks = bits & 2;
                c.mass = !c.sinks;
                c.page_tokens = 32 << bits % 3;
                all.push_back(c);
            }
    for (int group = 1; group <= 20; group++)
        for (kvt_format f : { KVT_FORMAT_F16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0 }) {
            scenario c = BASE;
            c.n_head_kv = 1;
            c.group = group;
            c.fmt_k = c.fmt_v = f;
            all.push_back(c);
        }
    for (int n_kv : { 1, 2, 31, 32, 33, 64, 127, 1000 })
        for (int nq : { 1, 3, 30 })
            for (int threads : { 1, 2, 5 }) {
                scenario c = BASE;
                c.n_kv = n_kv;
                c.n_queries = nq;
                c.n_threads = threads;
                c.mask = n_kv < nq ? NO_MASK : CAUSAL;
                c.mass = threads == 2;
                c.missing_every = threads > 1 ? 2 : 0;
                c.absent_every = threads > 2 ? 3 : 0;
                all.push_back(c);
            }
    for (int every : { 1, 2, 3 })
        for (int nq : { 1, 50 })
            for (int pt : { 32, 128 }) {
                scenario c = BASE;
                c.n_kv = 3000;
                c.n_queries = nq;
                c.page_tokens = pt;
                c.missing_every = every;
                c.absent_every = 4;
                c.mixed = true;
                c.mass = true;
                c.mask = BLOCKY;
                all.push_back(c);
            }
    for (int every : { 3, 4, 7 })
        for (int nq : { 1, 2, 40, 200 })
            for (int pt : { 32, 128 })
                for (mask_kind m : { CAUSAL, RANDOM }) {
                    scenario c = BASE;
                    c.n_kv = 1500;
                    c.n_queries = nq;
                    c.page_tokens = pt;
                    c.mask = m;
                    c.mass = true;
                    c.missing_every = every % 2 ? 2 : 0;
                    c.lost_every = every;
                    c.n_threads = 2;
                    all.push_back(c);
                }
    for (int nq : { 1, 2, 40, 200 })
        for (int pt : { 32, 128 })
            for (int lost : { 0, 7 })
                for (int threads : { 1, 3 }) {
                    scenario c = BASE;
                    c.n_kv = 1500;
                    c.n_queries = nq;
                    c.page_tokens = pt;
                    c.mass = true;
                    c.missing_every = 5;
                    c.lost_every = lost;
                    c.drop_every = 3;
                    c.n_threads = threads;
                    all.push_back(c);
                }
    scenario mla = { 1, 128, 576, 0, 512, 32, 3, 200, KVT_FORMAT_F16, KVT_FORMAT_F16, CAUSAL, false, false, false, true,
        3, 0, 3 };
    all.push_back(mla);
    mla.n_queries = 1;
    mla.drop_every = 4;
    all.push_back(mla);
    return all;
}

// the n-th acquire fails, for every n: the error comes out and nothing stays pinned
static void errors_unpin(kvt_attention * a) {
    for (int nq : { 1, 40 })
        for (int threads : { 1, 3 })
            for (int n = 0;; n++) {
                scenario c = BASE;
                c.n_kv = 700;
                c.n_queries = nq;
                c.missing_every = 2;
                c.n_threads = threads;
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

// neither the number of threads nor what had to be read changes a bit
static void same_bits(kvt_attention * a) {
    for (int nq : { 1, 4, 40, 200 })
        for (kvt_format f : { KVT_FORMAT_F16, KVT_FORMAT_Q8_0 }) {
            std::vector<float> first;
            for (int threads : { 1, 2, 5 })
                for (int every : { 0, 1, 3 }) {
                    scenario c = BASE;
                    c.n_kv = 2100;
                    c.n_queries = nq;
                    c.fmt_k = c.fmt_v = f;
                    c.n_threads = threads;
                    c.missing_every = every;
                    problem p(c, 11);
                    kvt_attention_set_n_threads(a, threads);
                    CHECK(kvt_attention_run(a, &p.op) == 0);
                    if (first.empty()) first = p.dst;
                    CHECK_MSG(memcmp(first.data(), p.dst.data(), first.size() * sizeof(float)) == 0, "%s: other bits",
                        describe(c, kvt_isa_active()).c_str());
                }
        }
}

// A page may be dropped, and its mass with it, as soon as nobody holds it: nothing is added to that mass afterwards.
static kvt_mass * g_mass;
static void release_and_drop(void * ctx, const kvt_page_ref * refs, size_t n) {
    memory_pages::release_many(ctx, refs, n);
    for (size_t i = 0; i < n; i++) kvt_mass_clear(g_mass, (size_t) refs[i].page * BASE.page_tokens, BASE.page_tokens);
}

static void mass_goes_with_its_page(kvt_attention * a) {
    for (int nq : { 1, 40 }) {
        scenario c = BASE;
        c.n_queries = nq;
        problem p(c, 13);
        p.mem.source.release_many = release_and_drop;
        CHECK(kvt_mass_create(&g_mass, p.mem.pages.size(), c.page_tokens, 0.5f) == 0);
        p.op.mass = g_mass;
        CHECK(kvt_attention_run(a, &p.op) == 0);
        CHECK(g_mass->n_steps == 1);
        CHECK(std::all_of(g_mass->token_mean, g_mass->token_mean + g_mass->n_cells, [](float x) { return x == 0.0f; }));
        CHECK(std::all_of(g_mass->page_mean, g_mass->page_mean + g_mass->n_pages, [](float x) { return x == 0.0f; }));
        kvt_mass_free(g_mass);
    }
}

static void bad_operations(kvt_attention * a) {
    const auto refuse = [a](void (*spoil)(kvt_attention_op&)) {
        problem p(BASE, 9);
        spoil(p.op);
        CHECK(kvt_attention_run(a, &p.op) == KVT_ERR_INVALID);
        CHECK(p.mem.n_pinned() == 0);
    };
    refuse([](kvt_attention_op& op) { op.n_kv = 0; });
    refuse([](kvt_attention_op& op) { op.n_queries = 0; });
    refuse([](kvt_attention_op& op) { op.n_head_q = 10; });
    refuse([](kvt_attention_op& op) { op.d_v_out = 65; });
    refuse([](kvt_attention_op& op) { op.geo.page_tokens = 48; });
    refuse([](kvt_attention_op& op) { op.q = nullptr; });
}

int main(int argc, char ** argv) {
    selection chosen(argc, argv);
    const char * isas[8];
    const size_t n_isa = kvt_isa_list(isas, 8);
    kvt_attention * a = nullptr;
    CHECK(kvt_attention_create(&a, 2) == 0);
    CHECK(kvt_isa_select("no-such-isa") == KVT_ERR_UNSUPPORTED);
    const std::vector<scenario> all = scenarios();
    for (size_t i = 0; i < n_isa; i++) {
        if (!chosen.takes_isa(isas[i])) continue;
        CHECK(kvt_isa_select(isas[i]) == 0);
        CHECK(strcmp(kvt_isa_active(), isas[i]) == 0);
        uint32_t seed = 1;
        std::fill(g_worst, g_worst + KVT_FORMAT_COUNT, 0.0);
        for (const scenario& c : all) {
            if (chosen.takes_case(seed)) run(a, c, isas[i], seed);
            seed++;
        }
        errors_unpin(a);
        same_bits(a);
        mass_goes_with_its_page(a);
        bad_operations(a);
        printf("%-11s %zu cases, largest relative error per key format:", isas[i], all.size());
        for (int f = 0; f < KVT_FORMAT_COUNT; f++) printf(" %s %.1e", kvt_format_name((kvt_format) f), g_worst[f]);
        printf("\n");
    }
    kvt_attention_free(a);
    return check_summary();
}
