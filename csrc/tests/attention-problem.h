#pragma once

// Attention problems made from a description: pages, queries, masks, and the operation over them. What the tests of
// attention share.

#include <algorithm>
#include <cstdio>
#include <string>

#include "../attention/attention-impl.h"
#include "attention-fixture.h"

enum mask_kind { NO_MASK, CAUSAL, WINDOW, RANDOM, BLOCKY, ALIBI, SOME_BLIND, PER_HEAD };

struct scenario {
    int n_head_kv, group, d_k, d_v, d_v_out, page_tokens;
    int n_queries, n_kv;
    kvt_format fmt_k, fmt_v;
    mask_kind mask;
    bool softcap, sinks, mixed, mass;
    int missing_every, absent_every; // 0: none
    int n_threads;
    int lost_every = 0; // 0: no lost cells; else of these pages one is gone, one has lost subs, one lost cells
    int drop_every = 0; // 0: none; else of these pages one goes between pinning and reading
};

static inline std::string describe(const scenario& c, const char * isa) {
    char buf[400];
    snprintf(buf, sizeof(buf),
        "%s kv heads %d group %d d %d/%d/%d page %d queries %d kv %d %s/%s mask %d softcap %d sinks %d mixed %d mass "
        "%d missing %d absent %d threads %d lost %d drop %d",
        isa, c.n_head_kv, c.group, c.d_k, c.d_v, c.d_v_out, c.page_tokens, c.n_queries, c.n_kv,
        kvt_format_name(c.fmt_k), kvt_format_name(c.fmt_v), c.mask, c.softcap, c.sinks, c.mixed, c.mass,
        c.missing_every, c.absent_every, c.n_threads, c.lost_every, c.drop_every);
    return buf;
}

static inline uint16_t mask_entry(const scenario& c, int head, int q, int t, std::mt19937& rng) {
    const uint16_t inf = 0xfc00;
    const int pos = c.n_kv - c.n_queries + q;
    switch (c.mask) {
        case NO_MASK: return 0;
        case CAUSAL: return t <= pos ? 0 : inf;
        case WINDOW: return t <= pos && t > pos - 70 ? 0 : inf;
        case RANDOM: return rng() % 3 == 0 ? inf : f16_bits((float) (rng() % 100) / 50 - 1);
        case BLOCKY: return (t / 64 + q / 16) % 3 == 0 ? inf : 0;
        case ALIBI: return t <= pos ? f16_bits((float) (t - pos)) : inf;
        case SOME_BLIND: return q % 3 == 1 || t > pos ? inf : 0;
        case PER_HEAD: return (t + head * 7) % 5 == 0 ? inf : f16_bits((float) head / 8);
    }
    return 0;
}

// everything an operation points to
struct problem {
    memory_pages mem;
    std::vector<float> q, dst, slopes, sinks;
    std::vector<uint16_t> mask;
    kvt_attention_op op;

    problem(const scenario& c, uint32_t seed);
};

static const uint32_t PAGE_FIRST = 3;

inline problem::problem(const scenario& c, uint32_t seed)
    : mem(PAGE_FIRST + (size_t) (c.n_kv + c.page_tokens - 1) / c.page_tokens + 1) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const kvt_geometry geo = { c.n_head_kv, c.d_k, c.d_v, c.page_tokens };
    const kvt_format all[] = { KVT_FORMAT_F32, KVT_FORMAT_F16, KVT_FORMAT_BF16, KVT_FORMAT_Q8_0, KVT_FORMAT_Q4_0,
        KVT_FORMAT_Q4_1 };
    std::vector<float> row((size_t) c.n_head_kv * std::max(c.d_k, c.d_v));
    for (size_t i = PAGE_FIRST; i + 1 < mem.pages.size(); i++) {
        const kvt_page_layout * l = mem.layout(
            geo, c.mixed ? all[rng() % 6] : c.fmt_k, c.mixed ? all[rng() % 6] : c.fmt_v);
        if (!l) l = mem.layout(geo, c.fmt_k, c.fmt_v);
        mem.set(i, l);
        for (int t = 0; t < c.page_tokens; t++) {
            for (float& x : row) x = normal(rng) * 1.5f;
            kvt_page_put_f32(l, mem.pages[i].data, KVT_PART_K, t, row.data());
            for (float& x : row) x = normal(rng);
            if (c.d_v) kvt_page_put_f32(l, mem.pages[i].data, KVT_PART_V, t, row.data());
        }
        mem.pages[i].missing = c.missing_every && i % c.missing_every == 0;
        mem.pages[i].absent = c.absent_every && i % c.absent_every == 1;
        if (c.lost_every && i % c.lost_every < 3) {
            const int kind = i % c.lost_every;
            for (int s = 0; s < c.page_tokens / 32; s++)
                mem.pages[i].lost.push_back(kind == 0 || (kind == 1 && s % 2) ? UINT32_MAX : kind == 1 ? 0 : rng());
            if (kind == 0) mem.pages[i].absent = true, mem.pages[i].missing = false;
        }
        if (c.drop_every && i % c.drop_every == 1) mem.pages[i].missing = mem.pages[i].drops = true;
    }
    const int n_head_q = c.n_head_kv * c.group;
    q.resize((size_t) c.n_queries * n_head_q * c.d_k);
    for (float& x : q) x = normal(rng);
    dst.assign((size_t) c.n_queries * n_head_q * c.d_v_out, NAN);
    for (int h = 0; h < n_head_q; h++) {
        slopes.push_back(std::exp2(-(float) (h + 1) / 2));
        sinks.push_back(normal(rng) * 3);
    }
    const int n_masks = c.mask == PER_HEAD ? n_head_q : 1, stride = c.n_kv + 5; // rows need not be aligned
    if (c.mask != NO_MASK) {
        for (int h = 0; h < n_masks; h++)
            for (int i = 0; i < c.n_queries; i++)
                for (int t = 0; t < stride; t++) {
                    mask.push_back(t < c.n_kv ? mask_entry(c, h, i, t, rng)
                                              : 0x7e00); // NaN behind the row: must not be read as mask
                }
    }
    memset(&op, 0, sizeof(op));
    op.geo = geo;
    op.d_v_out = c.d_v_out;
    op.n_head_q = n_head_q;
    op.n_queries = c.n_queries;
    op.n_kv = c.n_kv;
    op.page_first = PAGE_FIRST;
    op.scale = 1.0f / std::sqrt((float) c.d_k);
    op.softcap = c.softcap ? 5.0f : 0.0f;
    op.slopes = c.mask == ALIBI || c.mask == RANDOM ? slopes.data() : nullptr;
    op.sinks = c.sinks ? sinks.data() : nullptr;
    op.q = (const char *) q.data();
    op.q_nb_head = c.d_k * sizeof(float);
    op.q_nb_query = op.q_nb_head * n_head_q;
    op.mask = mask.empty() ? nullptr : (const char *) mask.data();
    op.mask_nb_query = stride * sizeof(uint16_t);
    op.mask_nb_head = c.mask == PER_HEAD ? op.mask_nb_query * c.n_queries : 0;
    op.dst = (char *) dst.data();
    op.dst_nb_head = c.d_v_out * sizeof(float);
    op.dst_nb_query = op.dst_nb_head * n_head_q;
    op.source = &mem.source;
}

static const scenario BASE = { 3, 3, 64, 64, 64, 32, 1, 300, KVT_FORMAT_F16, KVT_FORMAT_F16, CAUSAL, false, false,
    false, false, 0, 0, 2 };
