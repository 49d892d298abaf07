// The built-in eviction policy, through the interface that others use.

#include "store-internal.h"

#include <algorithm>

int kvt_lru_before(const struct kvt_page_info * a, const struct kvt_page_info * b) {
    if (a->last_use != b->last_use) { return a->last_use < b->last_use; }
    if (a->cell_first != b->cell_first) { // a scan touches everything at once: then the oldest cells go first
        return a->cell_first < b->cell_first;
    }
    if (a->id.array != b->id.array) { return a->id.array < b->id.array; }
    return a->id.page < b->id.page;
}

static size_t lru_choose(
    void *, const kvt_page_info * pages, size_t n_pages, size_t bytes_needed, uint32_t * victims, size_t n_max) {
    (void) bytes_needed;
    std::vector<uint32_t> order(n_pages);
    for (size_t i = 0; i < n_pages; i++) { order[i] = (uint32_t) i; }
    const size_t n = std::min(n_pages, n_max);
    std::partial_sort(order.begin(), order.begin() + (ptrdiff_t) n, order.end(),
        [pages](uint32_t x, uint32_t y) { return kvt_lru_before(&pages[x], &pages[y]) != 0; });
    std::copy(order.begin(), order.begin() + (ptrdiff_t) n, victims);
    return n;
}

const kvt_evict_policy * store_lru() {
    static const kvt_evict_policy policy = { 1, "lru", nullptr, lru_choose };
    return &policy;
}
