// What a row's attention gives depends on the row and the cells it sees, and on nothing else: each query of a batch is
// computed again alone, in parts of the batch, with other threads, page sizes, tiers and neighbours, and must have the
// same bits, for every instruction set of this processor.

#include <cstdlib>

#include "attention-problem.h"
#include "selection.h"

// queries first .. first+n-1 of the problem, computed as an operation of their own
static std::vector<float> part(kvt_attention * a, const problem& p, int64_t first, int64_t n, int n_threads) {
    kvt_attention_op op = p.op;
    const size_t row = p.dst.size() / (size_t) op.n_queries;
    std::vector<float> dst(row * (size_t) n, NAN);
    op.n_queries = n;
    op.q += (size_t) first * op.q_nb_query;
    if (op.mask) op.mask += (size_t) first * op.mask_nb_query;
    op.dst = (char *) dst.data();
    kvt_attention_set_n_threads(a, n_threads);
    CHECK(kvt_attention_run(a, &op) == 0);
    return dst;
}

static void compare(
    const std::vector<float>& whole, const std::vector<float>& some, size_t at, const std::string& what) {
    size_t n = 0;
    for (size_t i = 0; i < some.size(); i++) n += memcmp(&whole[at + i], &some[i], sizeof(float)) != 0;
    CHECK_MSG(n == 0, "%s: %zu of %zu numbers have other bits", what.c_str(), n, some.size());
}

// the whole batch against parts of it of several sizes: prefill's blocks and pieces, decode, and one query alone
static int batches(kvt_attention * a, const scenario& c, const char * isa, uint32_t seed) {
    problem p(c, seed);
    const std::vector<float> whole = part(a, p, 0, c.n_queries, c.n_threads);
    const size_t row = whole.size() / (size_t) c.n_queries;
    int n_done = 0;
    for (int n : { 1, 2, 5, 24, 50 }) {
        const int step = std::max(n, c.n_queries / 2 - 1);
        for (int first = 0; first + n <= c.n_queries; first += step, n_done++) {
            const int threads = 1 + (first + n) % 3;
            char how[64];
            snprintf(how, sizeof(how), " queries %d+%d threads %d", first, n, threads);
            compare(whole, part(a, p, first, n, threads), row * (size_t) first, describe(c, isa) + how);
        }
    }
    return n_done;
}

static std::vector<scenario> scenarios() {
    std::vector<scenario> all;
    const kvt_format formats[] = { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0,
        KVT_FORMAT_Q4_1 };
    scenario base = BASE;
    base.n_queries = 70;
    base.n_kv = 700;
    for (kvt_format k : formats)
        for (kvt_format v : formats) {
            scenario c = base;
            c.fmt_k = k;
            c.fmt_v = v;
            all.push_back(c);
        }
    for (mask_kind m : { NO_MASK, CAUSAL, WINDOW, RANDOM, BLOCKY, ALIBI, SOME_BLIND, PER_HEAD })
        for (int bits = 0; bits < 4; bits++) {
            scenario c = base;
            c.mask = m;
            c.softcap = bits & 1;
            c.sinks = bits & 2;
            c.mixed = bits == 3;
            c.page_tokens = 32 << bits;
            all.push_back(c);
        }
    const int shapes[][3] = { { 40, 40, 40 }, { 80, 80, 80 }, { 96, 96, 96 }, { 128, 128, 128 }, { 192, 128, 128 },
        { 256, 256, 256 }, { 576, 0, 512 }, { 40, 0, 33 }, { 7, 50, 50 } };
    for (const auto& s : shapes)
        for (int group : { 1, 2, 4, 7 }) {
            scenario c = base;
            c.n_head_kv = 2;
            c.group = group;
            c.d_k = s[0];
            c.d_v = s[1];
            c.d_v_out = s[2];
            c.n_queries = 40;
            if (s[0] % 32 == 0 && s[1] % 32 == 0) c.fmt_k = KVT_FORMAT_Q8_0, c.fmt_v = KVT_FORMAT_Q4_1;
            all.push_back(c);
        }
    for (int every : { 0, 2, 3 })
        for (int lost : { 0, 4 })
            for (int pt : { 32, 96, 256, 512 }) {
                scenario c = base;
                c.n_kv = 3000;
                c.page_tokens = pt;
                c.missing_every = every;
                c.absent_every = lost ? 0 : 5;
                c.lost_every = lost;
                c.mixed = true;
                all.push_back(c);
            }
    scenario far = base;
    far.n_kv = 9000; // segments of three sizes
    far.n_head_kv = 1;
    all.push_back(far);
    far.mask = BLOCKY;
    all.push_back(far);
    return all;
}

// The same cells in pages of other sizes, on other tiers, with other threads: the same bits.
static void places(kvt_attention * a, const char * isa) {
    for (int nq : { 1, 4, 24, 90 })
        for (kvt_format f : { KVT_FORMAT_F16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0 }) {
            std::vector<float> first;
            for (int pt : { 32, 64, 96, 128, 256, 768 })
                for (int every : { 0, 1, 3 })
                    for (int threads : { 1 + every, 5 - every }) {
                        scenario c = BASE;
                        c.n_kv = 2304; // whole pages of every size: the same cells
                        c.n_queries = nq;
                        c.fmt_k = c.fmt_v = f;
                        c.page_tokens = pt;
                        c.missing_every = every;
                        problem p(c, 11);
                        const std::vector<float> got = part(a, p, 0, nq, threads);
                        if (first.empty()) first = got;
                        c.n_threads = threads;
                        compare(first, got, 0, describe(c, isa));
                    }
        }
}

// Other sequences' queries in the batch, and other sequences' cells in the pages, change nothing.
static void neighbours(kvt_attention * a, const char * isa) {
    for (int nq : { 8, 60 }) {
        scenario c = BASE;
        c.n_kv = 1500;
        c.n_queries = nq;
        problem p(c, 17);
        const std::vector<float> alone = part(a, p, 0, nq, 2);
        const size_t row = alone.size() / (size_t) nq, stride = p.op.mask_nb_query / sizeof(uint16_t);
        for (int q = 0; q < nq; q += 2) { // every other query is now another sequence's, which sees other cells
            for (int t = 0; t < c.n_kv; t++) p.mask[(size_t) q * stride + t] = t % 3 ? 0 : 0xfc00;
        }
        const std::vector<float> mixed = part(a, p, 0, nq, 2);
        for (int q = 1; q < nq; q += 2) {
            const std::vector<float> one(mixed.begin() + (long) (row * q), mixed.begin() + (long) (row * (q + 1)));
            compare(alone, one, row * (size_t) q, describe(c, isa) + " beside other sequences");
        }
    }
}

int main(int argc, char ** argv) {
    selection chosen(argc, argv);
    const char * isas[8];
    const size_t n_isa = kvt_isa_list(isas, 8);
    kvt_attention * a = nullptr;
    CHECK(kvt_attention_create(&a, 2) == 0);
    for (size_t i = 0; i < n_isa; i++) {
        if (!chosen.takes_isa(isas[i])) continue;
        CHECK(kvt_isa_select(isas[i]) == 0);
        uint32_t seed = 1;
        int n = 0;
        for (const scenario& c : scenarios()) {
            if (chosen.takes_case(seed)) n += batches(a, c, isas[i], seed);
            seed++;
        }
        places(a, isas[i]);
        neighbours(a, isas[i]);
        printf("%-11s %d parts of batches have the bits of the whole\n", isas[i], n);
    }
    kvt_attention_free(a);
    return check_summary();
}
