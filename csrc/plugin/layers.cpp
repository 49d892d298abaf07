#include "layers.h"

#include "last-error.h"

#include <algorithm>

std::shared_lock<std::shared_mutex> kvt_layers::hold() const {
    return kvt_store_in_hook(m_store) ? std::shared_lock<std::shared_mutex>()
                                      : std::shared_lock<std::shared_mutex>(m_lifetime);
}

void kvt_layers::add(std::unique_ptr<kvt_layer> layer) {
    std::lock_guard<std::mutex> lock(m_mutex);
    m_layers.push_back(std::move(layer));
}

std::unique_ptr<kvt_layer> kvt_layers::take(const kvt_layer * layer) {
    std::lock_guard<std::mutex> lock(m_mutex);
    const auto at = std::find_if(m_layers.begin(), m_layers.end(), [layer](const auto& l) { return l.get() == layer; });
    std::unique_ptr<kvt_layer> taken;
    if (at != m_layers.end()) {
        taken = std::move(*at);
        m_layers.erase(at);
    }
    return taken;
}

size_t kvt_layers::size() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_layers.size();
}

kvt_layer * kvt_layers::last() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_layers.empty() ? nullptr : m_layers.back().get();
}

kvt_layer * kvt_layers::of_array(uint32_t array) const {
    if (kvt_store_in_hook(m_store)) {
        kvt_fail(
            KVT_ERR_INVALID, "an offload callback cannot ask for array %u: its cache may be on its way out", array);
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(m_mutex);
    for (const auto& layer : m_layers) {
        if (kvt_array_id(layer->array) == array) { return layer.get(); }
    }
    kvt_fail(KVT_ERR_INVALID, "there is no array %u: its cache was freed, or never there", array);
    return nullptr;
}

int kvt_layers::no_layer(uint32_t index) const {
    return kvt_fail(KVT_ERR_INVALID, "there is no layer %u: the caches have %zu", index, m_layers.size());
}

void kvt_layers::remember(kvt_layer * layer, std::vector<uint32_t> pages) {
    std::lock_guard<std::mutex> lock(m_mutex); // another cache's thread may be looking for its next layer
    layer->seen.swap(pages);
}

// Layers are in the order of their first use. Those of one context may have several owners, which alternate (a model
// with sliding windows has two caches); those of different contexts follow each other. So the context of a layer is its
// owner's layers with all between them, and those of the owners that occur there.
static void context_around(
    const std::vector<std::unique_ptr<kvt_layer>>& layers, size_t i, size_t * first, size_t * end) {
    *first = i;
    *end = i + 1;
    const auto is_inside = [&](const void * owner) {
        return std::any_of(
            layers.begin() + *first, layers.begin() + *end, [owner](const auto& l) { return l->owner == owner; });
    };
    for (bool grown = true; grown;) {
        grown = false;
        for (size_t j = 0; j < layers.size(); j++) {
            if ((j < *first || j >= *end) && is_inside(layers[j]->owner)) {
                *first = std::min(*first, j);
                *end = std::max(*end, j + 1);
                grown = true;
            }
        }
    }
}

void kvt_layers::read_ahead(const kvt_layer * done) const {
    std::lock_guard<std::mutex> lock(m_mutex);
    for (size_t i = 0; i < m_layers.size(); i++) {
        if (m_layers[i].get() == done) {
            size_t first, end;
            context_around(m_layers, i, &first, &end);
            const kvt_layer * next =
                m_layers[i + 1 < end ? i + 1 : first].get(); // after the last, the next step's first
            kvt_array_prefetch(next->array, next->seen.data(), next->seen.size());
            return;
        }
    }
}
