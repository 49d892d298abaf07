#include "keep.h"

#include <algorithm>
#include <cmath>

void kvt_keep::add(uint32_t array, kvt_mass * mass) {
    std::lock_guard<std::mutex> lock(m_mutex);
    m_arrays[array] = { mass, {} };
}

void kvt_keep::remove(uint32_t array) {
    std::lock_guard<std::mutex> lock(m_mutex);
    m_arrays.erase(array);
}

void kvt_keep::set(uint32_t array, std::vector<float> scores) {
    std::lock_guard<std::mutex> lock(m_mutex);
    const auto it = m_arrays.find(array);
    if (it != m_arrays.end()) { it->second.scores.swap(scores); }
}

double kvt_keep::mass_lost() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_mass_lost;
}

float kvt_keep::score(const kvt_page_id& id) const {
    const auto it = m_arrays.find(id.array);
    return it != m_arrays.end() && id.page < it->second.scores.size() ? it->second.scores[id.page] : INFINITY;
}

void kvt_keep::on_gone(void * self, kvt_page_id id) {
    kvt_keep * k = static_cast<kvt_keep *>(self);
    std::lock_guard<std::mutex> lock(k->m_mutex);
    const auto it = k->m_arrays.find(id.array);
    if (it == k->m_arrays.end()) { return; }
    entry& e = it->second;
    const size_t page_tokens = e.mass->n_cells / e.mass->n_pages;
    k->m_mass_lost += e.mass->page_mean[id.page];
    kvt_mass_clear(e.mass, id.page * page_tokens, page_tokens);
    if (id.page < e.scores.size()) {
        e.scores[id.page] = INFINITY; // what is written there next is another page
    }
}

size_t kvt_keep::choose(
    void * self, const kvt_page_info * pages, size_t n_pages, size_t bytes_needed, uint32_t * victims, size_t n_max) {
    (void) bytes_needed;
    const kvt_keep * k = static_cast<const kvt_keep *>(self);
    std::vector<float> scores(n_pages);
    std::vector<uint32_t> order(n_pages);
    {
        std::lock_guard<std::mutex> lock(k->m_mutex);
        for (size_t i = 0; i < n_pages; i++) {
            scores[i] = k->score(pages[i].id);
            order[i] = (uint32_t) i;
        }
    }
    const auto leaves_before = [&](uint32_t x, uint32_t y) {
        return scores[x] != scores[y] ? scores[x] < scores[y] : kvt_lru_before(&pages[x], &pages[y]) != 0;
    };
    const size_t n = std::min(n_pages, n_max);
    std::partial_sort(order.begin(), order.begin() + (ptrdiff_t) n, order.end(), leaves_before);
    std::copy(order.begin(), order.begin() + (ptrdiff_t) n, victims);
    return n;
}

kvt_evict_policy kvt_keep::policy() { return { 1, "keep", this, choose }; }
