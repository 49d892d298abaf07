#pragma once

// A domain: the settings, the store and the layers of the caches that belong together (one budget per tier for all of
// them). Buffers share it; the public handle (kvt_domain) is one more owner.

#include "keep.h"
#include "settings.h"

#include "../attention/attention.h"
#include "../attention/summary.h"
#include "../include/kvtier-errors.h"
#include "../include/kvtier.h"
#include "../store/store.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

// One layer's cells of all streams, once its head geometry is known.
struct kvt_layer {
    kvt_array * array = nullptr;
    kvt_array_params params = {};
    kvt_geometry geo = {}; // of the layer; params.geo.d_k is 0 where the keys are kept apart
    kvt_mass * mass = nullptr;
    kvt_keys * keys = nullptr; // bounded fidelity only, as what follows
    kvt_digests * digests = nullptr;
    kvt_recall_report last = {}; // of the last step
    kvt_store * store = nullptr;
    kvt_page_source source = {};
    const void * owner = nullptr;             // the cache's buffer: its layers belong to one context
    std::shared_ptr<kvt_summary_set> summary; // guarded by the domain's mutex
    std::vector<uint32_t> seen;               // the pages that its last attention read: what the next step will want

    kvt_layer() = default;
    kvt_layer(const kvt_layer&) = delete;
    kvt_layer& operator=(const kvt_layer&) = delete;
    ~kvt_layer() {
        kvt_store_array_remove(array);
        kvt_mass_free(mass);
        kvt_keys_free(keys);
        if (digests) {
            kvt_store_reserve(store, -(int64_t) digests->n_bytes);
            kvt_digests_free(digests);
        }
    }
};

struct kvt_offload {
    kvt_offload_fn on_leave, on_return;
    void * user;
};

class kvt_domain_state {
public:
    static int open(const kvt_settings& settings, std::shared_ptr<kvt_domain_state> * out);
    ~kvt_domain_state();

    const kvt_settings& settings() const { return m_settings; }
    kvt_store * store() const { return m_store; }

    // Formats that a layer with this geometry stores, given the nominal ones (-1: not a storage format of ours).
    void choose_formats(const kvt_geometry& geo, int nominal_k, int nominal_v, kvt_array_params * params) const;

    // owner: what holds this cache; only compared
    int add_layer(const kvt_array_params& params, const void * owner, kvt_layer ** out);
    // the least host budget for so many layers like this one; 0: unknown
    uint64_t least_host(kvt_array_params params, size_t n_layers) const;
    void remove_layer(kvt_layer * layer);

    // keeps the text of a failure (the store's own, if the store failed just now) for kvt_domain_last_error; returns
    // code
    int fail(int code, const char * what);
    void clear_error();
    std::string last_error() const;
    int last_code() const;

    // adds what one operation of this layer reported
    void report(kvt_layer * layer, const kvt_recall_report& r);
    // called when a step of the model begins: forgets the last error, ticks the store, and evicts if that test switch
    // is on
    void begin_step();
    // the pages that this layer's attention has read
    void remember(kvt_layer * layer, std::vector<uint32_t> pages);
    // the layer whose attention has just run: starts the reads of the next one of the same context
    void read_ahead(const kvt_layer * done);
    bool has_disk() const { return m_settings.disk_bytes > 0; }

    int figures(kvt_figures * out) const;
    int layer_figures(uint32_t index, kvt_layer_figures * out) const;
    int pages(uint32_t index, uint32_t array, size_t n_max, uint8_t * tier, uint8_t * fmt_k, uint8_t * fmt_v,
        uint64_t * last_use) const;
    int move(uint32_t array, const uint32_t * pages, size_t n, int to_tier, size_t * n_done);
    // see kvtier.h
    int set_keep(uint32_t array, const float * scores, size_t n);
    int read_page(uint32_t array, uint32_t page, int part, float * out, size_t n);
    int reencode(uint32_t array, const uint32_t * pages, size_t n, int fmt_k, int fmt_v, size_t * n_done);
    int set_summary(uint32_t array, const kvt_summary * summary);
    int summary_mass(uint32_t array, float * out, size_t n_max) const;
    std::shared_ptr<kvt_summary_set> summary_of(const kvt_layer * layer) const;
    int reserve(uint64_t n_bytes);
    int set_host_budget(uint64_t n_bytes);
    void forget(kvt_layer * layer); // its cells were all given away

    int set_offload(kvt_offload_fn on_leave, kvt_offload_fn on_return, void * user);
    void disarm(); // no offload callback runs any more, except one that calls this
    size_t n_layers() const;

    std::atomic<uint64_t> n_attention{ 0 };
    std::atomic<uint64_t> n_fallback{ 0 };
    std::atomic<uint64_t> k_bytes{ 0 }, v_bytes{ 0 }, pages_read{ 0 }, pages_skipped{ 0 };
    std::atomic<bool> evict_every_step{ false };

private:
    kvt_domain_state() = default;
    bool keeps_keys_apart(const kvt_array_params& params) const { return m_settings.eps > 0.0f && params.geo.d_v > 0; }
    int keep_keys_apart(kvt_layer * layer);
    int evict_all();
    int apply(const std::vector<kvt_move>& moves, size_t * n_done);
    void forget_summary(kvt_layer * layer);
    template <typename N> int rebudget(int (*change)(kvt_store * s, N n_bytes), N n_bytes);
    int reserve_for(uint64_t summary_bytes); // m_summary_mutex is held
    kvt_layer * layer_of(
        uint32_t array) const; // m_lifetime is held; nullptr and the error's text: there is none, or this is a hook
    std::shared_lock<std::shared_mutex> hold_layers() const;

    kvt_settings m_settings;
    kvt_keep m_keep; // the store calls it, so it goes after the store
    kvt_store * m_store = nullptr;

    mutable std::shared_mutex m_lifetime; // shared: pages move; alone: a layer comes or goes. Before m_mutex
    mutable std::mutex m_mutex;           // guards what follows; never held over a wait for pages
    std::vector<std::unique_ptr<kvt_layer>> m_layers; // in the order in which they were first used
    std::string m_error;
    int m_code = 0;
    kvt_recall_report m_recall = {}; // of all layers, those that are gone included

    mutable std::mutex m_summary_mutex; // one change of summaries or of the reservation at a time
    uint64_t m_summary_bytes = 0, m_reserve_bytes = 0,
             m_reserved = 0; // summaries; asked for; what the store has set aside

    std::mutex m_offload_mutex; // one change of the callbacks at a time
    kvt_offload m_offload = {};
};

// the domain of caches that this thread allocates: the bound one, or the default one made from KVTIER_CONFIG
int kvt_domain_current(std::shared_ptr<kvt_domain_state> * out);
