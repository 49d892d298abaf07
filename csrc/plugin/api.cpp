// The public C ABI (kvtier.h): thin, every failure keeps its text for kvt_last_error.

#include "domain.h"
#include "ggml-api.h"
#include "last-error.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

struct kvt_domain {
    std::shared_ptr<kvt_domain_state> state;
};

// No exception crosses the C ABI: what allocates or locks runs in here.
template <typename F> static int guarded(F f) {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return kvt_fail(KVT_ERR_NOMEM, "%s", kvt_error_message(KVT_ERR_NOMEM));
    } catch (const std::exception& e) {
        return kvt_fail(KVT_ERR_INVALID, "the call cannot be carried out: %s", e.what());
    } catch (...) { return kvt_fail(KVT_ERR_INVALID, "the call cannot be carried out"); }
}

//
// the bound domain and the default one
//

static thread_local std::weak_ptr<kvt_domain_state> t_bound;
static thread_local bool t_is_bound = false;

static int default_domain(std::shared_ptr<kvt_domain_state> * out) {
    static std::mutex mutex;
    static std::shared_ptr<kvt_domain_state> domain;
    std::lock_guard<std::mutex> lock(mutex);
    if (!domain) {
        kvt_settings settings;
        int rc = kvt_settings_parse(getenv("KVTIER_CONFIG"), &settings);
        if (rc == KVT_OK) { rc = kvt_domain_state::open(settings, &domain); }
        if (rc != KVT_OK) { return rc; }
    }
    *out = domain;
    return KVT_OK;
}

int kvt_domain_current(std::shared_ptr<kvt_domain_state> * out) {
    if (!t_is_bound) {
        return guarded([&] { return default_domain(out); });
    }
    *out = t_bound.lock();
    return *out ? KVT_OK : kvt_fail(KVT_ERR_INVALID, "the domain bound to this thread was closed");
}

static bool is_null(const void * p, const char * name) {
    if (!p) { kvt_fail(KVT_ERR_INVALID, "%s must not be NULL", name); }
    return !p;
}

//
// names
//

extern "C" {

const char * kvt_version(void) { return KVTIER_VERSION; }

const char * kvt_error_name(int code) {
    switch (code) {
#define KVT_ERROR_NAME(name, value, message)                                                                           \
    case value: return #name;
        KVT_ERROR_MAP(KVT_ERROR_NAME)
#undef KVT_ERROR_NAME
        default: return "UNKNOWN";
    }
}

const char * kvt_error_message(int code) {
    switch (code) {
#define KVT_ERROR_TEXT(name, value, message)                                                                           \
    case value: return message;
        KVT_ERROR_MAP(KVT_ERROR_TEXT)
#undef KVT_ERROR_TEXT
        default: return "unknown error";
    }
}

const char * kvt_last_error(void) { return kvt_fail_text(); }

const char * kvt_ggml_version(void) { return g_ggml.ggml_version ? g_ggml.ggml_version() : ""; }

const char * kvt_isa(void) { return kvt_isa_active(); }

int kvt_isa_set(const char * name) {
    if (is_null(name, "name")) { return KVT_ERR_INVALID; }
    const int rc = kvt_isa_select(name);
    return rc == KVT_OK ? KVT_OK : kvt_fail(rc, "this processor, or this build, has no instruction set '%s'", name);
}

//
// domains
//

static int open_domain(const char * settings, kvt_domain ** out) {
    kvt_settings parsed;
    int rc = kvt_settings_parse(settings, &parsed);
    std::shared_ptr<kvt_domain_state> state;
    if (rc == KVT_OK) { rc = kvt_domain_state::open(parsed, &state); }
    if (rc == KVT_OK) { *out = new kvt_domain{ std::move(state) }; }
    return rc;
}

int kvt_domain_open(const char * settings, kvt_domain ** out) {
    return is_null(out, "out") ? (int) KVT_ERR_INVALID : guarded([&] { return open_domain(settings, out); });
}

void kvt_domain_close(kvt_domain * dom) {
    if (!dom) { return; }
    guarded([&] {
        dom->state->offload.disarm(); // caches may outlive the handle, but not what the callbacks use
        return KVT_OK;
    });
    delete dom;
}

int kvt_domain_bind(kvt_domain * dom) {
    t_is_bound = dom != nullptr;
    t_bound = dom ? dom->state : std::shared_ptr<kvt_domain_state>();
    return KVT_OK;
}

int kvt_domain_figures(kvt_domain * dom, kvt_figures * out) {
    if (is_null(dom, "dom") || is_null(out, "out")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->figures(out); });
}

int kvt_domain_n_layers(kvt_domain * dom, uint32_t * out) {
    if (is_null(dom, "dom") || is_null(out, "out")) { return KVT_ERR_INVALID; }
    return guarded([&] {
        *out = (uint32_t) dom->state->layers.size();
        return KVT_OK;
    });
}

int kvt_domain_layer(kvt_domain * dom, uint32_t index, kvt_layer_figures * out) {
    if (is_null(dom, "dom") || is_null(out, "out")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->layer_figures(index, out); });
}

int kvt_domain_pages(kvt_domain * dom, uint32_t index, uint32_t array, size_t n_max, uint8_t * tier, uint8_t * fmt_k,
    uint8_t * fmt_v, uint64_t * last_use) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->placement.pages(index, array, n_max, tier, fmt_k, fmt_v, last_use); });
}

int kvt_domain_last_error(kvt_domain * dom, char * buf, size_t size) {
    if (is_null(dom, "dom") || is_null(buf, "buf") || size == 0) { return KVT_ERR_INVALID; }
    return guarded([&] {
        const std::string text = dom->state->failures.text();
        const size_t n = text.size() < size - 1 ? text.size() : size - 1;
        memcpy(buf, text.data(), n);
        buf[n] = '\0';
        return (int) n;
    });
}

int kvt_domain_last_code(kvt_domain * dom) {
    return is_null(dom, "dom") ? (int) KVT_ERR_INVALID : guarded([&] { return dom->state->failures.code(); });
}

int kvt_domain_set_offload(kvt_domain * dom, kvt_offload_fn on_leave, kvt_offload_fn on_return, void * user) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->offload.set(on_leave, on_return, user); });
}

int kvt_domain_move(kvt_domain * dom, uint32_t array, const uint32_t * pages, size_t n, int to_tier, size_t * n_done) {
    if (is_null(dom, "dom") || is_null(pages, "pages")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->placement.move(array, pages, n, to_tier, n_done); });
}

int kvt_domain_set_keep(kvt_domain * dom, uint32_t array, const float * scores, size_t n) {
    if (is_null(dom, "dom") || is_null(scores, "scores")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->placement.set_keep(array, scores, n); });
}

int kvt_domain_read_page(kvt_domain * dom, uint32_t array, uint32_t page, int part, float * out, size_t n) {
    if (is_null(dom, "dom") || is_null(out, "out")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->placement.read_page(array, page, part, out, n); });
}

int kvt_domain_reencode(
    kvt_domain * dom, uint32_t array, const uint32_t * pages, size_t n, int fmt_k, int fmt_v, size_t * n_done) {
    if (is_null(dom, "dom") || is_null(pages, "pages")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->placement.reencode(array, pages, n, fmt_k, fmt_v, n_done); });
}

int kvt_domain_set_host_budget(kvt_domain * dom, uint64_t n_bytes) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->set_host_budget(n_bytes); });
}

int kvt_domain_reserve(kvt_domain * dom, uint64_t n_bytes) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->summaries.reserve(n_bytes); });
}

int kvt_domain_set_summary(kvt_domain * dom, uint32_t array, const kvt_summary * summary) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->summaries.set(array, summary); });
}

int kvt_domain_summary_mass(kvt_domain * dom, uint32_t array, float * out, size_t n_max) {
    if (is_null(dom, "dom") || is_null(out, "out")) { return KVT_ERR_INVALID; }
    return guarded([&] { return dom->state->summaries.mass(array, out, n_max); });
}

int kvt_domain_compact(kvt_domain * dom) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    return guarded([&] { return kvt_store_compact(dom->state->store()); });
}

int kvt_domain_evict_every_step(kvt_domain * dom, int on) {
    if (is_null(dom, "dom")) { return KVT_ERR_INVALID; }
    dom->state->evict_every_step = on != 0;
    return KVT_OK;
}

} // extern "C"
