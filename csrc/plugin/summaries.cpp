#include "summaries.h"

#include "last-error.h"

#include <algorithm>

// A smaller reservation always fits.
void kvt_summaries::forget(kvt_layer * layer) {
    std::lock_guard<std::mutex> change(m_change);
    if (!layer->summary) { return; }
    m_summary_bytes -= kvt_summary_bytes(layer->summary.get());
    {
        std::lock_guard<std::mutex> lock(m_pointers);
        layer->summary.reset();
    }
    const uint64_t wanted = std::max(m_summary_bytes, m_reserve_bytes);
    kvt_store_reserve(m_store, (int64_t) (wanted - m_reserved));
    m_reserved = wanted;
}

int kvt_summaries::reserve_for(uint64_t summary_bytes) {
    const uint64_t wanted = std::max(summary_bytes, m_reserve_bytes);
    const int rc = kvt_store_reserve(m_store, (int64_t) (wanted - m_reserved));
    if (rc != KVT_OK) { return m_failures.refuse(rc, "the budget cannot be changed"); }
    m_reserved = wanted;
    return KVT_OK;
}

int kvt_summaries::reserve(uint64_t n_bytes) {
    if (n_bytes > INT64_MAX) {
        return kvt_fail(
            KVT_ERR_INVALID, "%llu bytes cannot be set aside of a host budget", (unsigned long long) n_bytes);
    }
    const auto held = m_layers.hold();
    std::lock_guard<std::mutex> lock(m_change);
    const uint64_t before = m_reserve_bytes;
    m_reserve_bytes = n_bytes;
    const int rc = reserve_for(m_summary_bytes);
    m_reserve_bytes = rc == KVT_OK ? n_bytes : before;
    return rc;
}

// The new one is paid for before the old one goes: for a moment there are two of this array, but for the groups that
// both have.
int kvt_summaries::set(uint32_t array, const kvt_summary * summary) {
    const auto held = m_layers.hold();
    kvt_layer * layer = m_layers.of_array(array);
    if (!layer) { return KVT_ERR_INVALID; }
    std::shared_ptr<kvt_summary_set> made;
    if (summary) {
        char text[256] = "";
        kvt_summary_set * set = nullptr;
        const auto before = of(layer);
        const int rc = kvt_summary_create(&set, &layer->geo, summary, before.get(), text, sizeof(text));
        if (rc != KVT_OK) {
            return kvt_fail(
                layer->geo.d_v == 0 ? (int) KVT_ERR_UNSUPPORTED : rc, "%s", text[0] ? text : kvt_error_message(rc));
        }
        made.reset(set, kvt_summary_free);
    }
    std::lock_guard<std::mutex> change(m_change);
    const uint64_t n_new = made ? kvt_summary_bytes(made.get()) : 0,
                   n_old = layer->summary ? kvt_summary_bytes(layer->summary.get()) : 0;
    int rc = reserve_for(m_summary_bytes + n_new - (made ? kvt_summary_shared(made.get()) : 0));
    if (rc != KVT_OK) { return rc; }
    {
        std::lock_guard<std::mutex> lock(m_pointers);
        layer->summary.swap(made);
    }
    made.reset(); // unless a step is reading it just now: then it goes with that step
    m_summary_bytes += n_new - n_old;
    rc = reserve_for(m_summary_bytes);
    return rc;
}

std::shared_ptr<kvt_summary_set> kvt_summaries::of(const kvt_layer * layer) const {
    std::lock_guard<std::mutex> lock(m_pointers);
    return layer->summary;
}

int kvt_summaries::mass(uint32_t array, float * out, size_t n_max) const {
    const auto held = m_layers.hold();
    const kvt_layer * layer = m_layers.of_array(array);
    const auto summary = layer ? of(layer) : nullptr;
    return !layer ? (int) KVT_ERR_INVALID : summary ? (int) kvt_summary_mass(summary.get(), out, n_max) : 0;
}
