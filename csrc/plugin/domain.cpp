#include "domain.h"

#include "last-error.h"

kvt_domain_state::kvt_domain_state(const kvt_settings& settings, std::unique_ptr<kvt_keep> keep, store_ptr store)
    : m_settings(settings), m_keep(std::move(keep)), m_store(std::move(store)), failures(m_store.get()),
      layers(m_store.get()), summaries(m_store.get(), layers, failures),
      placement(m_store.get(), settings.lossy, layers, *m_keep, failures), offload(m_store.get()) {}

int kvt_domain_state::open(const kvt_settings& settings, std::shared_ptr<kvt_domain_state> * out) {
    std::unique_ptr<kvt_keep> keep(new kvt_keep);
    kvt_store_params p;
    kvt_store_params_default(&p);
    p.host_bytes = settings.host_bytes;
    p.disk_bytes = settings.disk_bytes;
    p.dir = settings.dir.empty() ? nullptr : settings.dir.c_str();
    p.page_tokens = settings.page_tokens;
    p.n_io_threads = settings.io_threads;
    p.n_protect_first = settings.protect_first;
    p.n_protect_last = settings.protect_last;
    p.lossy = settings.lossy;
    p.on_gone = kvt_keep::on_gone;
    p.on_gone_ctx = keep.get();
    kvt_store * opened = nullptr;
    char err[512] = "";
    const int rc = kvt_store_open(&p, &opened, err, sizeof(err));
    if (rc != KVT_OK) { return kvt_fail(rc, "%s", err); }
    store_ptr store(opened);
    const kvt_evict_policy policy = keep->policy();
    kvt_store_set_policy(opened, &policy);
    out->reset(new kvt_domain_state(settings, std::move(keep), std::move(store)));
    return KVT_OK;
}

kvt_domain_state::~kvt_domain_state() {
    while (kvt_layer * layer = layers.last()) { remove_layer(layer); }
}

int kvt_domain_state::add_layer(const kvt_array_params& params, const void * owner, kvt_layer ** out) {
    const auto alone = layers.hold_alone();
    std::unique_ptr<kvt_layer> layer;
    const int rc = kvt_layer_make(store(), m_settings, failures, params, owner, &layer);
    if (rc != KVT_OK) { return rc; }
    kvt_layer * added = layer.get();
    const uint32_t array = kvt_array_id(added->array);
    m_keep->add(array, added->mass);
    try {
        layers.add(std::move(layer));
    } catch (...) {
        m_keep->remove(array); // its mass is gone with the layer
        throw;
    }
    *out = added;
    return KVT_OK;
}

void kvt_domain_state::remove_layer(kvt_layer * layer) {
    const auto alone = layers.hold_alone();
    const std::unique_ptr<kvt_layer> owned = layers.take(layer); // goes while the layers are held alone
    if (!owned) { return; }
    m_keep->remove(kvt_array_id(owned->array));
    summaries.forget(owned.get());
}

void kvt_domain_state::forget(kvt_layer * layer) {
    m_keep->set(kvt_array_id(layer->array), {});
    summaries.forget(layer);
}

void kvt_domain_state::begin_step() {
    failures.clear();
    kvt_store_tick(store());
    if (evict_every_step.load(std::memory_order_relaxed)) { placement.evict_all(); }
}

int kvt_domain_state::set_host_budget(uint64_t n_bytes) {
    const auto held = layers.hold();
    const int rc = kvt_store_set_host_budget(store(), n_bytes);
    return rc == KVT_OK ? KVT_OK : failures.refuse(rc, "the budget cannot be changed");
}
