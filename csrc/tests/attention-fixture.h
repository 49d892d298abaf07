#pragma once

// Pages in plain memory behind a kvt_page_source, and attention in F64 over them: what the attention tests and the
// benchmark share.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "../attention/attention.h"
#include "../include/kvtier-errors.h"

// Counts failures and goes on: one broken kernel shows in many cases, and the pattern tells which.
static int g_failures = 0;
#define CHECK_MSG(cond, ...)                                                                                           \
    do {                                                                                                               \
        if (!(cond) && g_failures++ < 20) {                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                                                 \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
        }                                                                                                              \
    } while (0)
#undef CHECK
#define CHECK(cond) CHECK_MSG(cond, "failed")
static inline int check_summary(void) {
    printf(g_failures ? "%d checks failed\n" : "all checks passed\n", g_failures);
    return g_failures ? 1 : 0;
}

static inline uint16_t f16_bits(float x) {
    uint16_t h;
    kvt_row_from_f32(KVT_FORMAT_F16, &x, &h, 1);
    return h;
}
static inline float f16_value(uint16_t h) {
    float x;
    kvt_row_to_f32(KVT_FORMAT_F16, &h, &x, 1);
    return x;
}

// One array of pages. Some may be absent (read as zeros) or missing (only `acquire` hands them out), or gone when they
// are acquired.
struct memory_pages {
    struct page {
        const kvt_page_layout * layout = nullptr;
        uint8_t * data = nullptr;
        bool absent = false, missing = false,
             drops = false;         // drops: a missing one that is dropped before anybody gets it
        std::vector<uint32_t> lost; // bits of lost cells; empty: none. A page that is all ones and absent is gone
        int pins = 0;
    };
    std::vector<page> pages;
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<kvt_page_layout *> layouts;
    std::mutex lock;
    int n_acquired = 0, fail_at = -1, error = KVT_ERR_IO; // the n-th acquire of any kind fails
    int most_missing_pins = 0;
    kvt_page_source source;

    explicit memory_pages(size_t n_pages) : pages(n_pages), bytes(n_pages) {
        source = { this, acquire_resident, acquire, release_many, prefetch, nullptr };
    }
    ~memory_pages() {
        for (kvt_page_layout * l : layouts) delete l;
    }
    memory_pages(const memory_pages&) = delete;

    const kvt_page_layout * layout(const kvt_geometry& geo, kvt_format k, kvt_format v) {
        for (kvt_page_layout * l : layouts)
            if (l->fmt_k == k && l->fmt_v == v) return l;
        kvt_page_layout * l = new kvt_page_layout;
        if (kvt_page_layout_init(l, &geo, k, v) != 0) {
            delete l;
            return nullptr;
        }
        layouts.push_back(l);
        return l;
    }
    void set(size_t i, const kvt_page_layout * l) {
        bytes[i].assign(l->page_bytes + 64, 0);
        pages[i].layout = l;
        pages[i].data = bytes[i].data() + (64 - (uintptr_t) bytes[i].data() % 64) % 64;
    }
    int n_pinned() const {
        int n = 0;
        for (const page& p : pages) n += p.pins;
        return n;
    }

    bool fails() { return n_acquired++ == fail_at; }
    const uint32_t * lost_of(uint32_t i) const { return pages[i].lost.empty() ? nullptr : pages[i].lost.data(); }
    void give(uint32_t i, kvt_page_ref * out) {
        *out = { pages[i].absent ? nullptr : pages[i].data, pages[i].layout, i, 0, lost_of(i) };
        if (!pages[i].absent) pages[i].pins++;
    }
    static int acquire_resident(
        void * ctx, const uint32_t * list, size_t n, kvt_page_ref * refs, uint32_t * out_missing, size_t * out_n) {
        memory_pages * m = (memory_pages *) ctx;
        std::lock_guard<std::mutex> guard(m->lock);
        if (m->fails()) return m->error;
        size_t n_missing = 0;
        for (size_t i = 0; i < n; i++) {
            refs[i].page = list[i];
            refs[i].lost = m->lost_of(list[i]);
            if (m->pages[list[i]].missing)
                out_missing[n_missing++] = (uint32_t) i;
            else
                m->give(list[i], &refs[i]);
        }
        *out_n = n_missing;
        return 0;
    }
    static int acquire(void * ctx, uint32_t page, kvt_page_ref * out) {
        memory_pages * m = (memory_pages *) ctx;
        std::lock_guard<std::mutex> guard(m->lock);
        if (m->fails()) return m->error;
        if (m->pages[page].drops) {
            m->pages[page].absent = true;
            m->pages[page].lost.assign((size_t) m->pages[page].layout->geo.page_tokens / 32, UINT32_MAX);
        }
        m->give(page, out);
        int pins = 0;
        for (const auto& p : m->pages) pins += p.missing ? p.pins : 0;
        if (pins > m->most_missing_pins) m->most_missing_pins = pins;
        return 0;
    }
    static void release_many(void * ctx, const kvt_page_ref * refs, size_t n) {
        memory_pages * m = (memory_pages *) ctx;
        std::lock_guard<std::mutex> guard(m->lock);
        for (size_t i = 0; i < n; i++)
            if (refs[i].data) m->pages[refs[i].page].pins--;
    }
    static void prefetch(void *, const uint32_t *, size_t) {}
};

// out: [n_queries][n_head_q][d_v_out]; mass (optional): [n_queries][n_kv]
static inline void attention_f64(
    const kvt_attention_op& op, const memory_pages& mem, std::vector<double>& out, std::vector<double> * mass) {
    const kvt_geometry& g = op.geo;
    const int d_k = g.d_k, d_o = op.d_v_out, n_kv = (int) op.n_kv, group = op.n_head_q / g.n_head_kv;
    std::vector<float> k((size_t) n_kv * g.n_head_kv * d_k, 0.0f), v((size_t) n_kv * g.n_head_kv * d_o, 0.0f);
    for (int t = 0; t < n_kv; t++) {
        const auto& pg = mem.pages[op.page_first + t / g.page_tokens];
        if (pg.absent) continue;
        float *krow = &k[(size_t) t * g.n_head_kv * d_k], *vrow = &v[(size_t) t * g.n_head_kv * d_o];
        kvt_page_get_f32(pg.layout, pg.data, KVT_PART_K, t % g.page_tokens, krow);
        if (g.d_v)
            kvt_page_get_f32(pg.layout, pg.data, KVT_PART_V, t % g.page_tokens, vrow);
        else
            for (int h = 0; h < g.n_head_kv; h++)
                memcpy(vrow + (size_t) h * d_o, krow + (size_t) h * d_k, d_o * sizeof(float));
    }
    out.assign((size_t) op.n_queries * op.n_head_q * d_o, 0.0);
    if (mass) mass->assign((size_t) op.n_queries * n_kv, 0.0);
    std::vector<double> s(n_kv);
    for (int64_t q = 0; q < op.n_queries; q++)
        for (int h = 0; h < op.n_head_q; h++) {
            const float * qr = (const float *) (op.q + q * op.q_nb_query + h * op.q_nb_head);
            const uint16_t * mask = op.mask ? (const uint16_t *) (op.mask + q * op.mask_nb_query + h * op.mask_nb_head)
                                            : nullptr;
            double most = -INFINITY;
            for (int t = 0; t < n_kv; t++) {
                const float * kr = &k[((size_t) t * g.n_head_kv + h / group) * d_k];
                double x = 0;
                for (int c = 0; c < d_k; c++) x += (double) qr[c] * kr[c];
                x *= op.scale;
                if (op.softcap != 0.0f) x = op.softcap * std::tanh(x / op.softcap);
                if (mask)
                    x = std::isinf(f16_value(mask[t])) ? -INFINITY
                                                       : x + (op.slopes ? op.slopes[h] : 1.0) * f16_value(mask[t]);
                const auto& lost = mem.pages[op.page_first + t / g.page_tokens].lost;
                if (!lost.empty() && lost[t % g.page_tokens / 32] >> t % 32 & 1) x = -INFINITY;
                s[t] = x;
                most = std::max(most, x);
            }
            if (most == -INFINITY) continue;
            if (op.sinks) most = std::max(most, (double) op.sinks[h]);
            double sum = op.sinks ? std::exp(op.sinks[h] - most) : 0.0;
            for (int t = 0; t < n_kv; t++) sum += s[t] = std::exp(s[t] - most);
            for (int t = 0; t < n_kv; t++) {
                const double p = s[t] / sum;
                if (mass) (*mass)[q * n_kv + t] += p;
                const float * vr = &v[((size_t) t * g.n_head_kv + h / group) * d_o];
                double * o = &out[(q * op.n_head_q + h) * d_o];
                for (int c = 0; c < d_o && p > 0; c++) o[c] += p * vr[c];
            }
        }
}
