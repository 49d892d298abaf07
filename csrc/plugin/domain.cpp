#include "domain.h"
#include "last-error.h"

#include <algorithm>
#include <cmath>
#include <cstring>

int kvt_domain_state::open(const kvt_settings& settings, std::shared_ptr<kvt_domain_state> * out) {
    std::shared_ptr<kvt_domain_state> dom(new kvt_domain_state);
    dom->m_settings = settings;

    kvt_store_params p;
    kvt_store_params_default(&p);
    p.host_bytes = settings.host_bytes;
    p.disk_bytes = settings.disk_bytes;
    p.dir = settings.dir.empty() ? nullptr : dom->m_settings.dir.c_str();
    p.page_tokens = settings.page_tokens;
    p.n_io_threads = settings.io_threads;
    p.n_protect_first = settings.protect_first;
    p.n_protect_last = settings.protect_last;
    p.lossy = settings.lossy;
    p.on_gone = kvt_keep::on_gone;
    p.on_gone_ctx = &dom->m_keep;
    char err[512] = "";
    const int rc = kvt_store_open(&p, &dom->m_store, err, sizeof(err));
    if (rc != KVT_OK) { return kvt_fail(rc, "%s", err); }
    const kvt_evict_policy policy = dom->m_keep.policy();
    kvt_store_set_policy(dom->m_store, &policy);
    *out = std::move(dom);
    return KVT_OK;
}

kvt_domain_state::~kvt_domain_state() {
    while (!m_layers.empty()) { remove_layer(m_layers.back().get()); }
    kvt_store_close(m_store);
}

static enum kvt_format pick(int wanted, int fallback, int32_t d) {
    const int fmt = wanted >= 0 ? wanted : fallback;
    // a head size that is no multiple of the quantized formats' blocks is kept in F16
    return d == 0 || kvt_format_supports((enum kvt_format) fmt, d) ? (enum kvt_format) fmt : KVT_FORMAT_F16;
}

void kvt_domain_state::choose_formats(
    const kvt_geometry& geo, int nominal_k, int nominal_v, kvt_array_params * p) const {
    // a bounded cache is kept compact unless asked otherwise: rounding costs less than what is left out
    const bool compact = m_settings.eps > 0.0f && geo.d_v > 0;
    const auto of = [compact](int nominal) {
        return nominal < 0 || (compact && nominal < KVT_FORMAT_Q8_0) ? (int) KVT_FORMAT_Q8_0 : nominal;
    };
    p->fmt_k = pick(m_settings.host_fmt_k, of(nominal_k), geo.d_k);
    p->fmt_v = pick(m_settings.host_fmt_v, of(nominal_v), geo.d_v);
    p->disk_fmt_k = pick(m_settings.disk_fmt_k, p->fmt_k, geo.d_k);
    p->disk_fmt_v = pick(m_settings.disk_fmt_v, p->fmt_v, geo.d_v);
}

//
// the page source of a layer: the store's array
//

static int source_acquire_resident(
    void * ctx, const uint32_t * pages, size_t n, kvt_page_ref * refs, uint32_t * missing, size_t * n_missing) {
    return kvt_array_acquire_resident(static_cast<kvt_array *>(ctx), pages, n, refs, missing, n_missing);
}

static int source_acquire(void * ctx, uint32_t page, kvt_page_ref * out) {
    return kvt_array_acquire(static_cast<kvt_array *>(ctx), page, KVT_READ, out);
}

static void source_release_many(void * ctx, const kvt_page_ref * refs, size_t n) {
    kvt_array_release_many(static_cast<kvt_array *>(ctx), refs, n);
}

static int source_is_ready(void * ctx, const uint32_t * pages, size_t n, uint8_t * out) {
    return kvt_array_is_ready(static_cast<kvt_array *>(ctx), pages, n, out);
}

static void source_prefetch(void * ctx, const uint32_t * pages, size_t n) {
    kvt_array_prefetch(static_cast<kvt_array *>(ctx), pages, n);
}

// Inside a hook it may be held by somebody who waits for that hook. The store copes without it; layers are out of reach
// then.
std::shared_lock<std::shared_mutex> kvt_domain_state::hold_layers() const {
    return kvt_store_in_hook(m_store) ? std::shared_lock<std::shared_mutex>()
                                      : std::shared_lock<std::shared_mutex>(m_lifetime);
}

static size_t n_cells_of(const kvt_array_params& p) {
    const uint32_t page_tokens = (uint32_t) p.geo.page_tokens;
    return (size_t) ((p.cells_per_stream + page_tokens - 1) / page_tokens) * p.n_streams * page_tokens;
}

uint64_t kvt_domain_state::least_host(kvt_array_params p, size_t n_layers) const {
    uint64_t reserved = 0;
    if (keeps_keys_apart(p)) {
        const size_t n_cells = n_cells_of(p);
        reserved = n_layers *
            (kvt_keys_bytes(p.geo.n_head_kv, p.geo.d_k, n_cells, p.fmt_k) +
                kvt_digests_bytes(p.geo.n_head_kv, p.geo.d_v, n_cells / KVT_SUB));
        p.geo.d_k = 0;
    }
    return kvt_store_least_host(m_store, &p, n_layers, reserved);
}

// The keys of the layer move out of its pages, and every sub-page gets a digest.
int kvt_domain_state::keep_keys_apart(kvt_layer * layer) {
    const kvt_geometry& geo = layer->geo;
    const kvt_array_params& p = layer->params;
    const size_t n_cells = n_cells_of(p);
    int rc = kvt_keys_create(m_store, geo.n_head_kv, geo.d_k, n_cells, p.fmt_k, &layer->keys);
    if (rc != KVT_OK) { return fail(rc, "no memory for the keys"); }
    kvt_digests * digests = nullptr;
    rc = kvt_digests_create(&digests, geo.n_head_kv, geo.d_v, n_cells / KVT_SUB);
    if (rc == KVT_OK && (rc = kvt_store_reserve(m_store, (int64_t) digests->n_bytes)) != KVT_OK) {
        kvt_digests_free(digests);
    }
    if (rc != KVT_OK) { return fail(rc, "no memory for the digests of the pages"); }
    layer->digests = digests;
    layer->params.geo.d_k = 0;
    return KVT_OK;
}

int kvt_domain_state::add_layer(const kvt_array_params& params, const void * owner, kvt_layer ** out) {
    std::unique_lock<std::shared_mutex> alone(m_lifetime);
    std::unique_ptr<kvt_layer> layer(new kvt_layer);
    layer->params = params;
    layer->geo = params.geo;
    layer->owner = owner;
    layer->store = m_store;
    int rc = keeps_keys_apart(params) ? keep_keys_apart(layer.get()) : (int) KVT_OK;
    if (rc != KVT_OK) { return rc; }
    rc = kvt_store_array_add(m_store, &layer->params, &layer->array);
    if (rc != KVT_OK) { return fail(rc, "cannot add a layer's cache to the store"); }
    rc = kvt_mass_create(&layer->mass, kvt_array_n_pages(layer->array), params.geo.page_tokens, m_settings.mass_decay);
    if (rc != KVT_OK) { return fail(rc, "no memory for the attention statistics"); }
    m_keep.add(kvt_array_id(layer->array), layer->mass);
    layer->source = { layer->array, source_acquire_resident, source_acquire, source_release_many, source_prefetch,
        has_disk() ? source_is_ready : nullptr };
    kvt_layer * added = layer.get();
    std::lock_guard<std::mutex> lock(m_mutex);
    m_layers.push_back(std::move(layer)); // if there is no memory for it, the layer goes again
    *out = added;
    return KVT_OK;
}

void kvt_domain_state::remove_layer(kvt_layer * layer) {
    std::unique_lock<std::shared_mutex> alone(m_lifetime);
    std::unique_ptr<kvt_layer> owned; // goes without m_mutex: it waits for the pages' I/O
    std::unique_lock<std::mutex> lock(m_mutex);
    for (size_t i = 0; i < m_layers.size(); i++) {
        if (m_layers[i].get() == layer) {
            owned = std::move(m_layers[i]);
            m_layers.erase(m_layers.begin() + i);
            m_keep.remove(kvt_array_id(owned->array));
            break;
        }
    }
    lock.unlock();
    forget_summary(owned.get());
}

// Of a layer that goes, or whose cells were all given away. A smaller reservation always fits.
void kvt_domain_state::forget_summary(kvt_layer * layer) {
    std::lock_guard<std::mutex> change(m_summary_mutex);
    if (!layer || !layer->summary) { return; }
    m_summary_bytes -= kvt_summary_bytes(layer->summary.get());
    {
        std::lock_guard<std::mutex> lock(m_mutex);
        layer->summary.reset();
    }
    const uint64_t wanted = std::max(m_summary_bytes, m_reserve_bytes);
    kvt_store_reserve(m_store, (int64_t) (wanted - m_reserved));
    m_reserved = wanted;
}

//
// errors
//

// The store's own text if it has just failed this way, else `what`. The general message comes first: a host program
// that only has the text tells the kinds of failures apart by it.
static std::string failure_text(kvt_store * store, int code, const char * what) {
    char text[768];
    kvt_store_take_error(store, code, text, sizeof(text));
    const std::string detail = text[0] ? text : what;
    const std::string general = kvt_error_message(code);
    return detail.find(general) != std::string::npos ? detail : general + ": " + detail;
}

int kvt_domain_state::fail(int code, const char * what) {
    std::string message = failure_text(m_store, code, what);
    kvt_fail(code, "%s", message.c_str());
    std::lock_guard<std::mutex> lock(m_mutex);
    m_error = std::move(message);
    m_code = code;
    return code;
}

void kvt_domain_state::clear_error() {
    kvt_store_clear_error(m_store);
    std::lock_guard<std::mutex> lock(m_mutex);
    m_error.clear();
    m_code = KVT_OK;
}

std::string kvt_domain_state::last_error() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_error;
}

int kvt_domain_state::last_code() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_code;
}

//
// steps
//

void kvt_domain_state::begin_step() {
    clear_error();
    kvt_store_tick(m_store);
    if (evict_every_step.load(std::memory_order_relaxed)) { evict_all(); }
}

int kvt_domain_state::evict_all() {
    const auto held = hold_layers();
    std::vector<kvt_move> moves;
    {
        std::lock_guard<std::mutex> lock(m_mutex);
        for (const auto& layer : m_layers) {
            for (uint32_t page = 0; page < kvt_array_n_pages(layer->array); page++) {
                kvt_page_info info;
                if (kvt_array_info(layer->array, page, &info) == KVT_OK && info.tier == KVT_TIER_HOST &&
                    !info.is_protected && !info.pinned) {
                    moves.push_back({ info.id, KVT_TIER_DISK, 255, 255 });
                }
            }
        }
    }
    size_t n_done = 0;
    const int rc = kvt_store_apply(m_store, moves.data(), moves.size(), &n_done);
    return rc == KVT_OK ? KVT_OK : fail(rc, "cannot evict");
}

void kvt_domain_state::remember(kvt_layer * layer, std::vector<uint32_t> pages) {
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

void kvt_domain_state::read_ahead(const kvt_layer * done) {
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

//
// moves
//

int kvt_domain_state::move(uint32_t array, const uint32_t * pages, size_t n, int to_tier, size_t * n_done) {
    if (to_tier != KVT_TIER_HOST && to_tier != KVT_TIER_DISK && to_tier != KVT_TIER_NONE) {
        return kvt_fail(
            KVT_ERR_INVALID, "pages move between the tiers host (2) and disk (3), or to none (0), not to %d", to_tier);
    }
    if (to_tier == KVT_TIER_NONE && !m_settings.lossy) {
        return kvt_fail(
            KVT_ERR_INVALID, "pages can be dropped for good only where that was asked for (setting fidelity=lossy)");
    }
    std::vector<kvt_move> moves(n);
    for (size_t i = 0; i < n; i++) { moves[i] = { { array, pages[i] }, (uint8_t) to_tier, 255, 255 }; }
    return apply(moves, n_done);
}

int kvt_domain_state::reencode(
    uint32_t array, const uint32_t * pages, size_t n, int fmt_k, int fmt_v, size_t * n_done) {
    if (fmt_k < 0 || fmt_k >= KVT_FORMAT_COUNT || fmt_v < 0 || fmt_v >= KVT_FORMAT_COUNT) {
        return kvt_fail(KVT_ERR_INVALID, "%d and %d are not two storage formats", fmt_k, fmt_v);
    }
    std::vector<kvt_move> moves(n);
    for (size_t i = 0; i < n; i++) {
        moves[i] = { { array, pages[i] }, KVT_TIER_HOST, (uint8_t) fmt_k, (uint8_t) fmt_v };
    }
    return apply(moves, n_done);
}

int kvt_domain_state::apply(const std::vector<kvt_move>& moves, size_t * n_done) {
    const auto held = hold_layers();
    size_t done = 0;
    const int rc = kvt_store_apply(m_store, moves.data(), moves.size(), &done);
    if (n_done) { *n_done = done; }
    // the caller learns of it at once: last_error is for failures that llama.cpp only reports as such
    return rc == KVT_OK ? KVT_OK : kvt_fail(rc, "%s", failure_text(m_store, rc, "a move failed").c_str());
}

//
// what a policy says and asks
//

kvt_layer * kvt_domain_state::layer_of(uint32_t array) const {
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

int kvt_domain_state::set_keep(uint32_t array, const float * scores, size_t n) {
    const auto held = hold_layers();
    kvt_layer * layer = layer_of(array);
    if (!layer) { return KVT_ERR_INVALID; }
    if (n != kvt_array_n_pages(layer->array)) {
        return kvt_fail(KVT_ERR_INVALID, "%zu scores are given for the %u pages of array %u", n,
            kvt_array_n_pages(layer->array), array);
    }
    std::vector<kvt_page_info> infos(n);
    kvt_array_infos(layer->array, infos.data());
    std::vector<float> keep(scores, scores + n);
    for (size_t i = 0; i < n; i++) {
        if (std::isnan(keep[i])) {
            return kvt_fail(KVT_ERR_INVALID, "the score of page %zu of array %u is not a number", i, array);
        }
        if (infos[i].tier == KVT_TIER_NONE) { keep[i] = INFINITY; }
    }
    m_keep.set(array, std::move(keep));
    return KVT_OK;
}

int kvt_domain_state::read_page(uint32_t array, uint32_t page, int part, float * out, size_t n) {
    const auto held = hold_layers();
    kvt_layer * layer = layer_of(array);
    if (!layer) { return KVT_ERR_INVALID; }
    const kvt_geometry& geo = layer->geo;
    const size_t width = (size_t) geo.n_head_kv * (size_t) (part == KVT_PART_K ? geo.d_k : geo.d_v);
    if ((part != KVT_PART_K && part != KVT_PART_V) || width == 0 || n < width * (size_t) geo.page_tokens) {
        return kvt_fail(KVT_ERR_INVALID, "part %d of a page of array %u takes %zu floats, not %zu", part, array,
            width * (size_t) geo.page_tokens, n);
    }
    kvt_page_ref ref;
    const int rc = kvt_array_acquire(layer->array, page, KVT_READ, &ref);
    if (rc != KVT_OK) { return kvt_fail(rc, "%s", failure_text(m_store, rc, "cannot read a page").c_str()); }
    if (!ref.data) {
        return kvt_fail(
            KVT_ERR_INVALID, "page %u of array %u has no content%s", page, array, ref.lost ? ": it was dropped" : "");
    }
    const kvt_keys * apart = part == KVT_PART_K ? layer->keys : nullptr; // the page itself then holds values only
    for (int32_t cell = 0; cell < geo.page_tokens; cell++) {
        kvt_page_get_f32(apart ? &apart->layout : ref.layout, apart ? apart->data : ref.data, (kvt_part) part,
            apart ? (int32_t) page * geo.page_tokens + cell : cell, out + (size_t) cell * width);
    }
    kvt_array_release(layer->array, &ref);
    return KVT_OK;
}

template <typename N> int kvt_domain_state::rebudget(int (*change)(kvt_store * s, N n_bytes), N n_bytes) {
    const int rc = change(m_store, n_bytes);
    return rc == KVT_OK ? KVT_OK
                        : kvt_fail(rc, "%s", failure_text(m_store, rc, "the budget cannot be changed").c_str());
}

int kvt_domain_state::set_host_budget(uint64_t n_bytes) {
    const auto held = hold_layers();
    return rebudget(kvt_store_set_host_budget, n_bytes);
}

// What is set aside of the host budget is what was asked for, and at least what summaries take.
int kvt_domain_state::reserve_for(uint64_t summary_bytes) {
    const uint64_t wanted = std::max(summary_bytes, m_reserve_bytes);
    const int rc = rebudget(kvt_store_reserve, (int64_t) (wanted - m_reserved));
    m_reserved = rc == KVT_OK ? wanted : m_reserved;
    return rc;
}

int kvt_domain_state::reserve(uint64_t n_bytes) {
    if (n_bytes > INT64_MAX) {
        return kvt_fail(
            KVT_ERR_INVALID, "%llu bytes cannot be set aside of a host budget", (unsigned long long) n_bytes);
    }
    const auto held = hold_layers();
    std::lock_guard<std::mutex> lock(m_summary_mutex);
    const uint64_t before = m_reserve_bytes;
    m_reserve_bytes = n_bytes;
    const int rc = reserve_for(m_summary_bytes);
    m_reserve_bytes = rc == KVT_OK ? n_bytes : before;
    return rc;
}

// The new one is paid for before the old one goes: for a moment there are two of this array, but for the groups that
// both have.
int kvt_domain_state::set_summary(uint32_t array, const kvt_summary * summary) {
    const auto held = hold_layers();
    kvt_layer * layer = layer_of(array);
    if (!layer) { return KVT_ERR_INVALID; }
    std::shared_ptr<kvt_summary_set> made;
    if (summary) {
        char text[256] = "";
        kvt_summary_set * set = nullptr;
        const auto before = summary_of(layer);
        const int rc = kvt_summary_create(&set, &layer->geo, summary, before.get(), text, sizeof(text));
        if (rc != KVT_OK) {
            return kvt_fail(
                layer->geo.d_v == 0 ? (int) KVT_ERR_UNSUPPORTED : rc, "%s", text[0] ? text : kvt_error_message(rc));
        }
        made.reset(set, kvt_summary_free);
    }
    std::lock_guard<std::mutex> change(m_summary_mutex);
    const uint64_t n_new = made ? kvt_summary_bytes(made.get()) : 0,
                   n_old = layer->summary ? kvt_summary_bytes(layer->summary.get()) : 0;
    int rc = reserve_for(m_summary_bytes + n_new - (made ? kvt_summary_shared(made.get()) : 0));
    if (rc != KVT_OK) { return rc; }
    {
        std::lock_guard<std::mutex> lock(m_mutex);
        layer->summary.swap(made);
    }
    made.reset(); // unless a step is reading it just now: then it goes with that step
    m_summary_bytes += n_new - n_old;
    rc = reserve_for(m_summary_bytes);
    return rc;
}

std::shared_ptr<kvt_summary_set> kvt_domain_state::summary_of(const kvt_layer * layer) const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return layer->summary;
}

int kvt_domain_state::summary_mass(uint32_t array, float * out, size_t n_max) const {
    const auto held = hold_layers();
    const kvt_layer * layer = layer_of(array);
    const auto summary = layer ? summary_of(layer) : nullptr;
    return !layer ? (int) KVT_ERR_INVALID : summary ? (int) kvt_summary_mass(summary.get(), out, n_max) : 0;
}

void kvt_domain_state::forget(kvt_layer * layer) {
    m_keep.set(kvt_array_id(layer->array), {});
    forget_summary(layer);
}

//
// offload callbacks: the store's hooks, handed on with the domain's own user pointer
//

static void hook_leave(
    void * ctx, kvt_page_id id, int32_t layer, int tier, const void * data, size_t n, int fmt_k, int fmt_v) {
    const kvt_offload * o = static_cast<const kvt_offload *>(ctx);
    if (o->on_leave) { o->on_leave(o->user, id.array, id.page, layer, tier, data, n, fmt_k, fmt_v); }
}

static void hook_return(
    void * ctx, kvt_page_id id, int32_t layer, int tier, const void * data, size_t n, int fmt_k, int fmt_v) {
    const kvt_offload * o = static_cast<const kvt_offload *>(ctx);
    if (o->on_return) { o->on_return(o->user, id.array, id.page, layer, tier, data, n, fmt_k, fmt_v); }
}

int kvt_domain_state::set_offload(kvt_offload_fn on_leave, kvt_offload_fn on_return, void * user) {
    if (kvt_store_in_hook(m_store)) {
        return kvt_fail(KVT_ERR_INVALID, "an offload callback cannot replace the callbacks: it is one of them");
    }
    std::lock_guard<std::mutex> lock(m_offload_mutex);
    kvt_store_set_hooks(m_store, nullptr); // none runs while the pointers change
    m_offload = { on_leave, on_return, user };
    if (on_leave || on_return) {
        const kvt_offload_hooks hooks = { &m_offload, hook_leave, hook_return };
        kvt_store_set_hooks(m_store, &hooks);
    }
    return KVT_OK;
}

void kvt_domain_state::disarm() { kvt_store_set_hooks(m_store, nullptr); }
