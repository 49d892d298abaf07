#pragma once

// The layers of a domain, in the order in which they were first used, and what follows from that order: which pages the
// next step of the same context will want.
//
// Threads: any. Two locks, in this order. hold(): shared, pages move and layers stay; alone, a layer comes or goes. The
// mutex guards the list and what was seen; it is never held over a wait for pages.

#include "layer.h"

#include "../include/kvtier-errors.h"
#include "../include/kvtier.h"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

class kvt_layers {
public:
    explicit kvt_layers(kvt_store * store) : m_store(store) {}

    // Inside a hook it holds nothing: it may be held by somebody who waits for that hook. The store copes without it;
    // layers are out of reach then.
    std::shared_lock<std::shared_mutex> hold() const;
    std::unique_lock<std::shared_mutex> hold_alone() { return std::unique_lock<std::shared_mutex>(m_lifetime); }

    // These two with hold_alone(). add: if there is no memory for it, the layer goes again.
    void add(std::unique_ptr<kvt_layer> layer);
    std::unique_ptr<kvt_layer> take(const kvt_layer * layer); // nullptr: it is not there

    size_t size() const;
    kvt_layer * last() const; // nullptr: there is none
    // With hold(). nullptr and this thread's error: there is none, or this is a hook.
    kvt_layer * of_array(uint32_t array) const;

    // what f(layer) returns, with the mutex held, or INVALID and this thread's error: there is no layer with this index
    template <typename F> int with(uint32_t index, F&& f) const {
        std::lock_guard<std::mutex> lock(m_mutex);
        return index < m_layers.size() ? f(*m_layers[index]) : no_layer(index);
    }
    // f(layer) for each, with the mutex held
    template <typename F> void for_each(F&& f) const {
        std::lock_guard<std::mutex> lock(m_mutex);
        for (const auto& layer : m_layers) { f(*layer); }
    }

    // the pages that this layer's attention has read
    void remember(kvt_layer * layer, std::vector<uint32_t> pages);
    // the layer whose attention has just run: starts the reads of the next one of the same context
    void read_ahead(const kvt_layer * done) const;

private:
    int no_layer(uint32_t index) const; // the mutex is held

    kvt_store * m_store;
    mutable std::shared_mutex m_lifetime;
    mutable std::mutex m_mutex;
    std::vector<std::unique_ptr<kvt_layer>> m_layers;
};
