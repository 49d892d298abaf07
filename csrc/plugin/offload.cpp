#include "offload.h"

#include "../include/kvtier-errors.h"
#include "last-error.h"

static void hook_leave(
    void * ctx, kvt_page_id id, int32_t layer, int tier, const void * data, size_t n, int fmt_k, int fmt_v) {
    const auto * o = static_cast<const kvt_offload::callbacks *>(ctx);
    if (o->on_leave) { o->on_leave(o->user, id.array, id.page, layer, tier, data, n, fmt_k, fmt_v); }
}

static void hook_return(
    void * ctx, kvt_page_id id, int32_t layer, int tier, const void * data, size_t n, int fmt_k, int fmt_v) {
    const auto * o = static_cast<const kvt_offload::callbacks *>(ctx);
    if (o->on_return) { o->on_return(o->user, id.array, id.page, layer, tier, data, n, fmt_k, fmt_v); }
}

int kvt_offload::set(kvt_offload_fn on_leave, kvt_offload_fn on_return, void * user) {
    if (kvt_store_in_hook(m_store)) {
        return kvt_fail(KVT_ERR_INVALID, "an offload callback cannot replace the callbacks: it is one of them");
    }
    std::lock_guard<std::mutex> lock(m_mutex);
    kvt_store_set_hooks(m_store, nullptr); // none runs while the pointers change
    m_callbacks = { on_leave, on_return, user };
    if (on_leave || on_return) {
        const kvt_offload_hooks hooks = { &m_callbacks, hook_leave, hook_return };
        kvt_store_set_hooks(m_store, &hooks);
    }
    return KVT_OK;
}

void kvt_offload::disarm() { kvt_store_set_hooks(m_store, nullptr); }
