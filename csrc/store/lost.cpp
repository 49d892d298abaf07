// Content that is dropped for good, and the cells that are lost with it.

#include "store-internal.h"

#include <algorithm>

static uint32_t subs_per_page(const kvt_array * a) { return (uint32_t) a->params.geo.page_tokens / KVT_SUB; }

static uint32_t * words_of(kvt_array * a, uint32_t page) {
    if (a->lost.empty()) {
        a->lost.resize((size_t) a->n_pages * subs_per_page(a), 0); // once: readers keep pointers into it
    }
    return a->lost.data() + (size_t) page * subs_per_page(a);
}

int store_lose(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    uint32_t * words = words_of(a, page); // may throw: before anything has changed
    p.io = IO_MOVING;
    if (p.place == PLACE_HOST) {
        store_call_hook(s, lk, &kvt_offload_hooks::on_leave, a, page, *a->layouts[p.layout], p.f.data, KVT_TIER_NONE);
    }
    store_release_slot(s, lk, a, page);
    if (is_transit(p)) {
        store_free_transit(s, p);
    } else if (p.f.data) {
        store_free_host(s, a, page);
    }
    p.place = PLACE_ABSENT;
    p.dirty = false;
    p.wanted = false;
    p.some_lost = true;
    p.io = IO_NONE;
    std::fill(words, words + subs_per_page(a), UINT32_MAX);
    s->stats.n_gone++;
    s->stats.tier[KVT_TIER_NONE].n_pages++;
    if (s->params.on_gone) { s->params.on_gone(s->params.on_gone_ctx, { a->id, page }); }
    store_notify(s);
    return KVT_ERR_OK;
}

void store_find_lost(kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    if (!p.some_lost) { return; }
    a->store->stats.tier[KVT_TIER_NONE].n_pages -= p.place == PLACE_ABSENT ? 1 : 0;
    p.some_lost = false;
    uint32_t * words = words_of(a, page);
    std::fill(words, words + subs_per_page(a), 0u);
}

static void set_bits(uint32_t * words, uint32_t first, uint32_t end, bool lost) {
    for (uint32_t c = first; c < end; c++) {
        const uint32_t bit = 1u << (c % KVT_SUB);
        words[c / KVT_SUB] = lost ? words[c / KVT_SUB] | bit : words[c / KVT_SUB] & ~bit;
    }
}

int kvt_array_set_lost(struct kvt_array * a, uint32_t page, int32_t cell, int32_t n, int lost) {
    if (!a || page >= a->n_pages || cell < 0 || n < 0 || n > a->params.geo.page_tokens - cell) {
        return KVT_ERR_INVALID;
    }
    store_lock lk(a->store->mutex);
    return store_guard([&]() -> int {
        page_entry& p = a->pages[page];
        if (!lost && !p.some_lost) { return KVT_ERR_OK; }
        uint32_t * words = words_of(a, page);
        set_bits(words, (uint32_t) cell, (uint32_t) (cell + n), lost != 0);
        const bool some = std::any_of(words, words + subs_per_page(a), [](uint32_t w) { return w != 0; });
        if (p.place == PLACE_ABSENT && some != p.some_lost) {
            a->store->stats.tier[KVT_TIER_NONE].n_pages += some ? 1 : (uint64_t) -1;
        }
        p.some_lost = some;
        return KVT_ERR_OK;
    });
}
