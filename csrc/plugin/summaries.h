#pragma once

// Summaries of what was dropped from layers, and what is set aside of the host budget for them: what the host program
// asked for, and at least what summaries take.
//
// Threads: any. Locks, after that of the layers: one change of summaries or of the reservation at a time; the pointers
// of all layers, for as long as it takes to copy one, so that a step never waits for a change.

#include "layers.h"

class kvt_summaries {
public:
    kvt_summaries(kvt_store * store, const kvt_layers& layers, const kvt_failures& failures)
        : m_store(store), m_layers(layers), m_failures(failures) {}

    // see kvtier.h
    int set(uint32_t array, const kvt_summary * summary);
    int mass(uint32_t array, float * out, size_t n_max) const;
    int reserve(uint64_t n_bytes);

    // what stays while it is held, whatever is set meanwhile; nullptr: none
    std::shared_ptr<kvt_summary_set> of(const kvt_layer * layer) const;
    void forget(kvt_layer * layer); // of a layer that goes, or whose cells were all given away

private:
    int reserve_for(uint64_t summary_bytes); // m_change is held

    kvt_store * m_store;
    const kvt_layers& m_layers;
    const kvt_failures& m_failures;

    std::mutex m_change; // guards what follows
    uint64_t m_summary_bytes = 0, m_reserve_bytes = 0,
             m_reserved = 0;       // summaries; asked for; what the store has set aside
    mutable std::mutex m_pointers; // guards every layer's summary
};
