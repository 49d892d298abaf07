#pragma once

// A domain: the settings, the store and the layers of the caches that belong together (one budget per tier for all of
// them). Buffers share it; the public handle (kvt_domain) is one more owner.
//
// It puts its parts together and does what takes several of them; each part has one idea, its own locks and a header
// that says so. Threads: any; begin_step, by the one thread that computes a context's graph.

#include "counts.h"
#include "failures.h"
#include "keep.h"
#include "layers.h"
#include "offload.h"
#include "placement.h"
#include "settings.h"
#include "summaries.h"

#include <atomic>
#include <memory>

class kvt_domain_state {
    struct store_closer {
        void operator()(kvt_store * store) const { kvt_store_close(store); }
    };
    using store_ptr = std::unique_ptr<kvt_store, store_closer>;

    const kvt_settings m_settings;
    const std::unique_ptr<kvt_keep> m_keep; // the store calls it, so it goes after the store
    const store_ptr m_store;

    kvt_domain_state(const kvt_settings& settings, std::unique_ptr<kvt_keep> keep, store_ptr store);

public:
    static int open(const kvt_settings& settings, std::shared_ptr<kvt_domain_state> * out);
    ~kvt_domain_state(); // no layer is in use any more

    const kvt_settings& settings() const { return m_settings; }
    kvt_store * store() const { return m_store.get(); }
    bool has_disk() const { return m_settings.disk_bytes > 0; }

    kvt_failures failures;
    kvt_layers layers;
    kvt_counts counts;
    kvt_summaries summaries;
    kvt_placement placement;
    kvt_offload offload;

    // owner: what holds this cache; only compared
    int add_layer(const kvt_array_params& params, const void * owner, kvt_layer ** out);
    void remove_layer(kvt_layer * layer);
    void forget(kvt_layer * layer); // its cells were all given away

    // called when a step of the model begins: forgets the last error, ticks the store, and evicts if that test switch
    // is on
    void begin_step();
    std::atomic<bool> evict_every_step{ false };

    // see kvtier.h
    int set_host_budget(uint64_t n_bytes);
    int figures(kvt_figures * out) const;
    int layer_figures(uint32_t index, kvt_layer_figures * out) const;
};

// the domain of caches that this thread allocates: the bound one, or the default one made from KVTIER_CONFIG
int kvt_domain_current(std::shared_ptr<kvt_domain_state> * out);
