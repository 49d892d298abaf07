#include "placement.h"

#include "last-error.h"

#include <cmath>

int kvt_placement::pages(uint32_t index, uint32_t array, size_t n_max, uint8_t * tier, uint8_t * fmt_k, uint8_t * fmt_v,
    uint64_t * last_use) const {
    return m_layers.with(index, [&](const kvt_layer& layer) -> int {
        if (kvt_array_id(layer.array) != array || kvt_array_n_pages(layer.array) > n_max) {
            return kvt_fail(KVT_ERR_INVALID,
                "layer %u is array %u with %u pages, not array %u with at most %zu: the caches have changed", index,
                kvt_array_id(layer.array), kvt_array_n_pages(layer.array), array, n_max);
        }
        for (uint32_t page = 0; page < kvt_array_n_pages(layer.array); page++) {
            kvt_page_info info;
            const int rc = kvt_array_info(layer.array, page, &info);
            if (rc != KVT_OK) { return rc; }
            if (tier) { tier[page] = info.tier; }
            if (fmt_k) { fmt_k[page] = info.fmt_k; }
            if (fmt_v) { fmt_v[page] = info.fmt_v; }
            if (last_use) { last_use[page] = info.last_use; }
        }
        return KVT_OK;
    });
}

int kvt_placement::move(uint32_t array, const uint32_t * pages, size_t n, int to_tier, size_t * n_done) {
    if (to_tier != KVT_TIER_HOST && to_tier != KVT_TIER_DISK && to_tier != KVT_TIER_NONE) {
        return kvt_fail(
            KVT_ERR_INVALID, "pages move between the tiers host (2) and disk (3), or to none (0), not to %d", to_tier);
    }
    if (to_tier == KVT_TIER_NONE && !m_is_lossy) {
        return kvt_fail(
            KVT_ERR_INVALID, "pages can be dropped for good only where that was asked for (setting fidelity=lossy)");
    }
    std::vector<kvt_move> moves(n);
    for (size_t i = 0; i < n; i++) { moves[i] = { { array, pages[i] }, (uint8_t) to_tier, 255, 255 }; }
    return apply(moves, n_done);
}

int kvt_placement::reencode(uint32_t array, const uint32_t * pages, size_t n, int fmt_k, int fmt_v, size_t * n_done) {
    if (fmt_k < 0 || fmt_k >= KVT_FORMAT_COUNT || fmt_v < 0 || fmt_v >= KVT_FORMAT_COUNT) {
        return kvt_fail(KVT_ERR_INVALID, "%d and %d are not two storage formats", fmt_k, fmt_v);
    }
    std::vector<kvt_move> moves(n);
    for (size_t i = 0; i < n; i++) {
        moves[i] = { { array, pages[i] }, KVT_TIER_HOST, (uint8_t) fmt_k, (uint8_t) fmt_v };
    }
    return apply(moves, n_done);
}

int kvt_placement::apply(const std::vector<kvt_move>& moves, size_t * n_done) {
    const auto held = m_layers.hold();
    size_t done = 0;
    const int rc = kvt_store_apply(m_store, moves.data(), moves.size(), &done);
    if (n_done) { *n_done = done; }
    // the caller learns of it at once: last_error is for failures that llama.cpp only reports as such
    return rc == KVT_OK ? KVT_OK : m_failures.refuse(rc, "a move failed");
}

int kvt_placement::set_keep(uint32_t array, const float * scores, size_t n) {
    const auto held = m_layers.hold();
    kvt_layer * layer = m_layers.of_array(array);
    if (!layer) { return KVT_ERR_INVALID; }
    if (n != kvt_array_n_pages(layer->array)) {
        return kvt_fail(KVT_ERR_INVALID, "%zu scores are given for the %u pages of array %u", n,
            kvt_array_n_pages(layer->array), array);
    }
    std::vector<kvt_page_info> infos(n);
    kvt_array_infos(layer->array, infos.data());
    std::vector<float> keep(scores, scores + n);
    for (size_t i = 0; i < n; i++) {
        if (std::isnan(keep[i])) {
            return kvt_fail(KVT_ERR_INVALID, "the score of page %zu of array %u is not a number", i, array);
        }
        if (infos[i].tier == KVT_TIER_NONE) { keep[i] = INFINITY; }
    }
    m_keep.set(array, std::move(keep));
    return KVT_OK;
}

int kvt_placement::read_page(uint32_t array, uint32_t page, int part, float * out, size_t n) {
    const auto held = m_layers.hold();
    kvt_layer * layer = m_layers.of_array(array);
    if (!layer) { return KVT_ERR_INVALID; }
    const kvt_geometry& geo = layer->geo;
    const size_t width = (size_t) geo.n_head_kv * (size_t) (part == KVT_PART_K ? geo.d_k : geo.d_v);
    if ((part != KVT_PART_K && part != KVT_PART_V) || width == 0 || n < width * (size_t) geo.page_tokens) {
        return kvt_fail(KVT_ERR_INVALID, "part %d of a page of array %u takes %zu floats, not %zu", part, array,
            width * (size_t) geo.page_tokens, n);
    }
    kvt_page_ref ref;
    const int rc = kvt_array_acquire(layer->array, page, KVT_READ, &ref);
    if (rc != KVT_OK) { return m_failures.refuse(rc, "cannot read a page"); }
    if (!ref.data) {
        return kvt_fail(
            KVT_ERR_INVALID, "page %u of array %u has no content%s", page, array, ref.lost ? ": it was dropped" : "");
    }
    const kvt_keys * apart = part == KVT_PART_K ? layer->keys : nullptr; // the page itself then holds values only
    for (int32_t cell = 0; cell < geo.page_tokens; cell++) {
        kvt_page_get_f32(apart ? &apart->layout : ref.layout, apart ? apart->data : ref.data, (kvt_part) part,
            apart ? (int32_t) page * geo.page_tokens + cell : cell, out + (size_t) cell * width);
    }
    kvt_array_release(layer->array, &ref);
    return KVT_OK;
}

int kvt_placement::evict_all() {
    const auto held = m_layers.hold();
    std::vector<kvt_move> moves;
    m_layers.for_each([&moves](const kvt_layer& layer) {
        for (uint32_t page = 0; page < kvt_array_n_pages(layer.array); page++) {
            kvt_page_info info;
            if (kvt_array_info(layer.array, page, &info) == KVT_OK && info.tier == KVT_TIER_HOST &&
                !info.is_protected && !info.pinned) {
                moves.push_back({ info.id, KVT_TIER_DISK, 255, 255 });
            }
        }
    });
    size_t n_done = 0;
    const int rc = kvt_store_apply(m_store, moves.data(), moves.size(), &n_done);
    return rc == KVT_OK ? KVT_OK : m_failures.fail(rc, "cannot evict");
}
