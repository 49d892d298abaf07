// Summaries of dropped cells against F64: every part expanded to the keys and values it stands for, beside pages.

#include <algorithm>
#include <string>

#include "../attention/summary.h"
#include "attention-fixture.h"
#include "selection.h"

struct scenario {
    int n_head_kv, group, d_k, d_v, n_queries, n_kv;
    int n_cells, n_groups, n, r_k, r_v;
    kvt_format cells, coord, basis;
    bool var, softcap, sinks, gone;
};

struct group_data {
    std::vector<float> mean[2], basis[2], coord[2];
};

// A summary, and what its formats make of the numbers: the reference computes with these.
struct summary_data {
    std::vector<float> key, value, log_count, var;
    std::vector<group_data> groups;
    std::vector<kvt_summary_group> raw;
    kvt_summary in;
};

static void fill_random(std::vector<float>& v, size_t n, float scale, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    v.resize(n);
    for (float& x : v) x = normal(rng) * scale;
}

// rows of d channels as the format keeps them
static void round_rows(std::vector<float>& v, size_t d, kvt_format fmt) {
    std::vector<uint8_t> raw(kvt_row_bytes(fmt, (int64_t) d));
    for (size_t i = 0; i + d <= v.size(); i += d) {
        kvt_row_from_f32(fmt, v.data() + i, raw.data(), (int64_t) d);
        kvt_row_to_f32(fmt, raw.data(), v.data() + i, (int64_t) d);
    }
}

static void make(summary_data& s, const scenario& c, std::mt19937& rng) {
    const size_t h = c.n_head_kv, d[2] = { (size_t) c.d_k, (size_t) c.d_v }, r[2] = { (size_t) c.r_k, (size_t) c.r_v };
    fill_random(s.key, h * c.n_cells * d[0], 1.0f, rng);
    fill_random(s.value, h * c.n_cells * d[1], 1.0f, rng);
    fill_random(s.var, h * c.n_cells * d[0], 0.3f, rng);
    fill_random(s.log_count, h * c.n_cells, 1.5f, rng);
    for (float& x : s.var) x = x * x;
    for (size_t i = 0; i < s.log_count.size(); i += 7) s.log_count[i] = -INFINITY;
    round_rows(s.key, d[0], c.cells);
    round_rows(s.value, d[1], c.cells);
    round_rows(s.var, d[0], KVT_FORMAT_BF16);
    s.in = {};
    s.in.n_cells = c.n_cells;
    s.in.fmt_cells = c.cells;
    s.in.key = s.key.data();
    s.in.value = s.value.data();
    s.in.log_count = s.log_count.data();
    s.in.key_var = c.var ? s.var.data() : nullptr;
    s.groups.resize(c.n_groups);
    for (group_data& g : s.groups) {
        for (int p = 0; p < 2; p++) {
            fill_random(g.mean[p], h * d[p], 0.5f, rng);
            fill_random(g.basis[p], h * r[p] * d[p], 1.0f / std::sqrt((float) d[p]), rng);
            fill_random(g.coord[p], h * c.n * r[p], 1.0f, rng);
            round_rows(g.basis[p], d[p], c.basis);
            round_rows(g.coord[p], r[p], c.coord);
        }
        s.raw.push_back({ -1, (uint32_t) c.n, (uint32_t) c.r_k, (uint32_t) c.r_v, c.coord, c.basis, g.mean[0].data(),
            g.basis[0].data(), g.coord[0].data(), g.mean[1].data(), g.basis[1].data(), g.coord[1].data(), 0.0f });
    }
    s.in.n_groups = c.n_groups;
    s.in.groups = s.raw.data();
}

// the same summary once more, with the groups of the first, which is gone then
static kvt_summary_set * with_groups_that_stay(
    kvt_summary_set * before, const kvt_geometry& geo, const summary_data& s) {
    kvt_summary in = s.in;
    std::vector<kvt_summary_group> groups(s.raw.size());
    for (size_t i = 0; i < groups.size(); i++) groups[i].stays = (int32_t) i;
    in.groups = groups.data();
    kvt_summary_set * set = nullptr;
    char err[256] = "";
    CHECK_MSG(kvt_summary_create(&set, &geo, &in, before, err, sizeof(err)) == 0, "%s", err);
    CHECK(kvt_summary_bytes(set) == kvt_summary_bytes(before) && (kvt_summary_shared(set) > 0) == !groups.empty());
    kvt_summary_free(before);
    return set;
}

static void expand(const group_data& g, int p, const scenario& c, int h, int t, std::vector<double>& out) {
    const size_t d = p ? c.d_v : c.d_k, r = p ? c.r_v : c.r_k;
    out.assign(d, 0.0);
    for (size_t ch = 0; ch < d; ch++) {
        out[ch] = g.mean[p][h * d + ch];
        for (size_t j = 0; j < r; j++)
            out[ch] += (double) g.coord[p][((size_t) h * c.n + t) * r + j] * g.basis[p][((size_t) h * r + j) * d + ch];
    }
}

// One row over pages and summary. mass: probability of the cells, then of each group.
static std::vector<double> reference(const scenario& c, const kvt_attention_op& op, const memory_pages& mem,
    const summary_data& s, int query, int head, std::vector<double>& mass) {
    const int h = head / c.group;
    const float * q = (const float *) (op.q + query * op.q_nb_query + head * op.q_nb_head);
    std::vector<double> scores;
    std::vector<std::vector<double>> values;
    std::vector<int> part;
    const auto dot = [&](const auto& k) {
        double x = 0;
        for (int ch = 0; ch < c.d_k; ch++) x += (double) q[ch] * k[ch];
        return x * op.scale;
    };
    const auto capped = [&](double x) { return op.softcap != 0.0f ? op.softcap * std::tanh(x / op.softcap) : x; };
    std::vector<float> krow((size_t) c.n_head_kv * c.d_k), vrow((size_t) c.n_head_kv * c.d_v);
    for (int t = 0; t < c.n_kv; t++) {
        const auto& pg = mem.pages[t / 32];
        if (!pg.lost.empty() || t > c.n_kv - c.n_queries + query) continue;
        kvt_page_get_f32(pg.layout, pg.data, KVT_PART_K, t % 32, krow.data());
        kvt_page_get_f32(pg.layout, pg.data, KVT_PART_V, t % 32, vrow.data());
        scores.push_back(capped(dot(krow.data() + h * c.d_k)));
        values.emplace_back(vrow.begin() + h * c.d_v, vrow.begin() + (h + 1) * c.d_v);
        part.push_back(-1);
    }
    for (int t = 0; t < c.n_cells; t++) {
        const size_t at = (size_t) h * c.n_cells + t;
        double x = dot(s.key.data() + at * c.d_k);
        for (int ch = 0; c.var && ch < c.d_k; ch++)
            x += 0.5 * op.scale * op.scale * q[ch] * q[ch] * s.var[at * c.d_k + ch];
        scores.push_back(capped(x) + s.log_count[at]);
        values.emplace_back(s.value.begin() + at * c.d_v, s.value.begin() + (at + 1) * c.d_v);
        part.push_back(0);
    }
    std::vector<double> row;
    for (int i = 0; i < c.n_groups; i++)
        for (int t = 0; t < c.n; t++) {
            expand(s.groups[i], 0, c, h, t, row);
            scores.push_back(capped(dot(row)));
            expand(s.groups[i], 1, c, h, t, row);
            values.push_back(row);
            part.push_back((c.n_cells > 0) + i);
        }
    double most = *std::max_element(scores.begin(), scores.end()), sum = 0;
    if (op.sinks) most = std::max(most, (double) op.sinks[head]);
    for (double& x : scores) sum += x = std::exp(x - most);
    if (op.sinks) sum += std::exp(op.sinks[head] - most);
    std::vector<double> out(c.d_v, 0.0);
    for (size_t i = 0; i < scores.size(); i++) {
        for (int ch = 0; ch < c.d_v; ch++) out[ch] += scores[i] / sum * values[i][ch];
        if (part[i] >= 0) mass[part[i]] += scores[i] / sum;
    }
    return out;
}

static void run(kvt_attention * a, const scenario& c, uint32_t seed, const char * isa) {
    std::mt19937 rng(seed);
    summary_data s;
    make(s, c, rng);
    const kvt_geometry geo = { c.n_head_kv, c.d_k, c.d_v, 32 };
    kvt_summary_set * set = nullptr;
    char err[256] = "";
    CHECK_MSG(kvt_summary_create(&set, &geo, &s.in, nullptr, err, sizeof(err)) == 0, "%s", err);
    set = with_groups_that_stay(set, geo, s);
    if (!set) return;

    memory_pages mem((size_t) (c.n_kv + 31) / 32);
    const kvt_page_layout * l = mem.layout(geo, KVT_FORMAT_F16, KVT_FORMAT_F16);
    std::vector<float> row;
    for (size_t i = 0; i < mem.pages.size(); i++) {
        mem.set(i, l);
        for (int t = 0; t < 32; t++) {
            fill_random(row, (size_t) c.n_head_kv * c.d_k, 1.0f, rng);
            kvt_page_put_f32(l, mem.pages[i].data, KVT_PART_K, t, row.data());
            fill_random(row, (size_t) c.n_head_kv * c.d_v, 1.0f, rng);
            kvt_page_put_f32(l, mem.pages[i].data, KVT_PART_V, t, row.data());
        }
        if (c.gone && i + 2 < mem.pages.size()) {
            mem.pages[i].absent = true;
            mem.pages[i].lost.assign(1, UINT32_MAX);
        }
    }
    const int n_head_q = c.n_head_kv * c.group;
    std::vector<float> q, sinks, dst((size_t) c.n_queries * n_head_q * c.d_v, NAN);
    fill_random(q, (size_t) c.n_queries * n_head_q * c.d_k, 1.0f, rng);
    fill_random(sinks, (size_t) n_head_q, 2.0f, rng);
    std::vector<uint16_t> mask;
    for (int i = 0; i < c.n_queries; i++)
        for (int t = 0; t < c.n_kv; t++) mask.push_back(t <= c.n_kv - c.n_queries + i ? 0 : 0xfc00);
    kvt_mass * m = nullptr;
    CHECK(kvt_mass_create(&m, mem.pages.size(), 32, 0.5f) == 0);

    kvt_attention_op op = {};
    op.geo = geo;
    op.d_v_out = c.d_v;
    op.n_head_q = n_head_q;
    op.n_queries = c.n_queries;
    op.n_kv = c.n_kv;
    op.scale = 1.0f / std::sqrt((float) c.d_k);
    op.softcap = c.softcap ? 4.0f : 0.0f;
    op.sinks = c.sinks ? sinks.data() : nullptr;
    op.q = (const char *) q.data();
    op.q_nb_head = c.d_k * sizeof(float);
    op.q_nb_query = op.q_nb_head * n_head_q;
    op.mask = (const char *) mask.data();
    op.mask_nb_query = c.n_kv * sizeof(uint16_t);
    op.dst = (char *) dst.data();
    op.dst_nb_head = c.d_v * sizeof(float);
    op.dst_nb_query = op.dst_nb_head * n_head_q;
    op.source = &mem.source;
    op.mass = m;
    op.summary = set;
    CHECK(kvt_attention_run(a, &op) == 0);

    double diff = 0, norm = 0;
    const bool decode = c.n_queries * c.group <= 16;
    std::vector<double> want_mass((size_t) (c.n_cells > 0) + c.n_groups, 0.0);
    double total_mass = 0;
    for (int i = 0; i < c.n_queries; i++) {
        std::vector<double> mass(want_mass.size(), 0.0);
        for (int h = 0; h < n_head_q; h++) {
            const std::vector<double> want = reference(c, op, mem, s, i, h, mass);
            for (int ch = 0; ch < c.d_v; ch++) {
                const double got = dst[((size_t) i * n_head_q + h) * c.d_v + ch];
                diff += (got - want[ch]) * (got - want[ch]);
                norm += want[ch] * want[ch];
            }
        }
        if (decode || i + 1 == c.n_queries) {
            for (size_t p = 0; p < mass.size(); p++) want_mass[p] = 0.5 * want_mass[p] + 0.5 * mass[p];
            total_mass = 0.5 * total_mass + 0.5 * n_head_q;
        }
    }
    const double e = std::sqrt(diff / norm),
                 limit = c.coord >= KVT_FORMAT_Q8_0 || c.cells >= KVT_FORMAT_Q8_0 || c.basis >= KVT_FORMAT_Q8_0 ? 2e-4
                                                                                                                : 1e-5;
    CHECK_MSG(e < limit, "%s seed %u: relative error %g", isa, seed, e);
    std::vector<float> got_mass(want_mass.size());
    CHECK(kvt_summary_mass(set, got_mass.data(), got_mass.size()) == got_mass.size());
    double sum = 0;
    for (size_t p = 0; p < want_mass.size(); p++) {
        CHECK_MSG(std::fabs(got_mass[p] - want_mass[p]) < 1e-3, "%s seed %u: mass of part %zu is %g, not %g", isa, seed,
            p, got_mass[p], want_mass[p]);
        sum += got_mass[p];
    }
    for (size_t i = 0; i < m->n_pages; i++) sum += m->page_mean[i];
    CHECK_MSG(
        c.sinks || std::fabs(sum - total_mass) < 1e-3, "mass of pages and summary is %g, not %g", sum, total_mass);
    kvt_mass_free(m);
    kvt_summary_free(set);
}

static const scenario BASE = { 3, 3, 64, 64, 1, 200, 40, 2, 70, 32, 32, KVT_FORMAT_F16, KVT_FORMAT_F16, KVT_FORMAT_F16,
    true, false, false, true };

static std::vector<scenario> scenarios() {
    std::vector<scenario> all;
    for (int nq : { 1, 3, 50 })
        for (int bits = 0; bits < 8; bits++) {
            scenario c = BASE;
            c.n_queries = nq;
            c.var = bits & 1;
            c.softcap = bits & 2;
            c.sinks = bits & 4;
            c.gone = bits != 3;
            all.push_back(c);
        }
    for (kvt_format f : { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0 })
        for (int nq : { 1, 50 }) {
            scenario c = BASE;
            c.n_queries = nq;
            c.cells = c.coord = c.basis = f;
            all.push_back(c);
        }
    for (int r : { 1, 7, 16, 33, 64 })
        for (int n : { 1, 31, 32, 100 }) {
            scenario c = BASE;
            c.r_k = r;
            c.r_v = 65 - r;
            c.n = n;
            all.push_back(c);
        }
    for (int n_cells : { 0, 1, 32, 33 })
        for (int n_groups : { 0, 1, 3 }) {
            scenario c = BASE;
            c.n_cells = n_cells;
            c.n_groups = n_groups;
            if (n_cells != 1) all.push_back(c); // the one cell is not in use: nothing but the groups
        }
    for (const auto& d : { std::pair<int, int>{ 256, 256 }, { 80, 40 }, { 40, 80 } })
        for (int group : { 1, 4, 20 }) {
            scenario c = BASE;
            c.n_head_kv = 1;
            c.group = group;
            c.d_k = d.first;
            c.d_v = d.second;
            c.r_k = c.r_v = 24;
            all.push_back(c);
        }
    return all;
}

static void refusals() {
    const kvt_geometry geo = { 3, 64, 64, 32 }, mla = { 1, 64, 0, 32 };
    const auto refuse = [&](const kvt_geometry& g, void (*spoil)(summary_data&)) {
        std::mt19937 rng(1);
        summary_data s;
        make(s, BASE, rng);
        spoil(s);
        kvt_summary_set * set = nullptr;
        char err[256] = "";
        CHECK(kvt_summary_create(&set, &g, &s.in, nullptr, err, sizeof(err)) == KVT_ERR_INVALID);
        CHECK(set == nullptr && err[0] != 0);
    };
    refuse(mla, [](summary_data&) {});
    refuse(geo, [](summary_data& s) { s.key[5] = NAN; });
    refuse(geo, [](summary_data& s) { s.value[5] = INFINITY; });
    refuse(geo, [](summary_data& s) { s.log_count[5] = NAN; });
    refuse(geo, [](summary_data& s) { s.var[5] = -1.0f; });
    refuse(geo, [](summary_data& s) { s.in.value = nullptr; });
    refuse(geo, [](summary_data& s) { s.in.fmt_cells = 9; });
    refuse(geo, [](summary_data& s) { s.in.groups = nullptr; });
    refuse(geo, [](summary_data& s) { s.raw[0].stays = 0; }); // there was nothing before
    refuse(geo, [](summary_data& s) { s.raw[0].mass = -1.0f; });
    refuse(geo, [](summary_data& s) { s.raw[0].mass = NAN; });
    refuse(geo, [](summary_data& s) { s.raw[1].r_k = 65; });
    refuse(geo, [](summary_data& s) { s.raw[1].n = 0; });
    refuse(geo, [](summary_data& s) { s.raw[0].v_coord = nullptr; });
    refuse(geo, [](summary_data& s) { s.raw[0].fmt_coord = KVT_FORMAT_Q8_0, s.raw[0].r_k = 16; });
    refuse(geo, [](summary_data& s) { s.groups[1].coord[1][3] = NAN; });
}

int main(int argc, char ** argv) {
    selection chosen(argc, argv);
    const char * isas[8];
    const size_t n_isa = kvt_isa_list(isas, 8);
    kvt_attention * a = nullptr;
    CHECK(kvt_attention_create(&a, 2) == 0);
    const std::vector<scenario> all = scenarios();
    for (size_t i = 0; i < n_isa; i++) {
        if (!chosen.takes_isa(isas[i])) continue;
        CHECK(kvt_isa_select(isas[i]) == 0);
        uint32_t seed = 1;
        for (const scenario& c : all) {
            if (chosen.takes_case(seed)) run(a, c, seed, isas[i]);
            seed++;
        }
    }
    refusals();
    kvt_attention_free(a);
    printf("%zu cases\n", all.size());
    return check_summary();
}
