#pragma once

// One layer of a cache in its domain: the array of its pages, the statistics of its attention, and with bounded
// fidelity its keys, which are kept apart, and the digests of its pages. How it is stored follows from the settings.
//
// A layer is made and goes while its domain holds its layers alone (layers.h); what may change in between says who
// guards it.

#include "failures.h"
#include "settings.h"

#include "../attention/attention.h"
#include "../attention/summary.h"
#include "../store/store.h"

#include <memory>
#include <vector>

// All streams' cells, once the head geometry is known.
struct kvt_layer {
    kvt_array * array = nullptr;
    kvt_array_params params = {};
    kvt_geometry geo = {}; // of the layer; params.geo.d_k is 0 where the keys are kept apart
    kvt_mass * mass = nullptr;
    kvt_keys * keys = nullptr; // bounded fidelity only, as what follows
    kvt_digests * digests = nullptr;
    kvt_recall_report last = {}; // of the last step; kvt_counts guards it
    kvt_store * store = nullptr;
    kvt_page_source source = {};
    const void * owner = nullptr;             // the cache's buffer: its layers belong to one context
    std::shared_ptr<kvt_summary_set> summary; // kvt_summaries guards it
    std::vector<uint32_t>
        seen; // the pages that its last attention read: what the next step will want. kvt_layers guards it

    kvt_layer() = default;
    kvt_layer(const kvt_layer&) = delete;
    kvt_layer& operator=(const kvt_layer&) = delete;
    ~kvt_layer(); // waits for the I/O of its pages
};

// Formats that a layer with this geometry stores, given the nominal ones (-1: not a storage format of ours).
void kvt_layer_choose_formats(
    const kvt_settings& settings, const kvt_geometry& geo, int nominal_k, int nominal_v, kvt_array_params * params);

// owner: what holds this cache; only compared. Errors, which `failures` keeps: BUDGET, NOMEM, UNSUPPORTED.
int kvt_layer_make(kvt_store * store, const kvt_settings& settings, kvt_failures& failures,
    const kvt_array_params& params, const void * owner, std::unique_ptr<kvt_layer> * out);

// the least host budget for so many layers like this one; 0: unknown
uint64_t kvt_layer_least_host(
    kvt_store * store, const kvt_settings& settings, kvt_array_params params, size_t n_layers);
