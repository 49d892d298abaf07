// The store as a whole: open and close, arrays, statistics, errors.

#include "store-internal.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

// --- shared helpers ----------------------------------------------------------------------------------------------

int store_fail(kvt_store * s, int code, const std::string& text) {
    s->last_error = text;
    s->last_code = code;
    return code;
}

kvt_array * store_array(kvt_store * s, uint32_t id) {
    kvt_array * a = id < s->arrays.size() ? s->arrays[id] : nullptr;
    if (!a) {
        store_fail(
            s, KVT_ERR_INVALID, "there is no array " + std::to_string(id) + ": its cache was freed, or never there");
    }
    return a;
}

std::string store_page_name(const kvt_array * a, uint32_t page) {
    return "layer " + std::to_string(a->params.layer) + ", page " + std::to_string(page) + " (array " +
        std::to_string(a->id) + ")";
}

void store_wait(kvt_store * s, store_lock& lk) {
    s->n_waiters++;
    s->changed.wait(lk);
    s->n_waiters--;
}

bool store_wait_until(kvt_store * s, store_lock& lk, std::chrono::steady_clock::time_point deadline) {
    s->n_waiters++;
    const bool woken = s->changed.wait_until(lk, deadline) == std::cv_status::no_timeout;
    s->n_waiters--;
    return woken;
}

void store_notify(kvt_store * s) {
    if (s->n_waiters > 0) { s->changed.notify_all(); }
}

// The hooks that this thread is inside of: a hook may cause moves of its own.
struct hook_call {
    kvt_store * s;
    store_lock& lk;
    const hook_call * outer;
    hook_call(kvt_store * store, store_lock& lock);
    ~hook_call();
};

static thread_local const hook_call * t_hook = nullptr;

hook_call::hook_call(kvt_store * store, store_lock& lock) : s(store), lk(lock), outer(t_hook) {
    t_hook = this;
    s->n_in_hooks++;
    lk.unlock();
}

hook_call::~hook_call() {
    lk.lock();
    s->n_in_hooks--;
    t_hook = outer;
    store_notify(s);
}

void store_call_hook(kvt_store * s, store_lock& lk, hook_slot slot, const kvt_array * a, uint32_t page,
    const kvt_page_layout& l, const uint8_t * data, kvt_tier tier) {
    const auto hook = s->hooks.*slot;
    void * const ctx = s->hooks.ctx;
    if (hook) {
        const hook_call call(s, lk);
        hook(ctx, { a->id, page }, a->params.layer, tier, data, l.page_bytes, l.fmt_k, l.fmt_v);
    }
}

static void count_page(kvt_tier_stats& t, const kvt_page_layout& l, int sign) {
    const uint64_t n_subs = (uint64_t) l.geo.n_head_kv * (uint64_t) (l.geo.page_tokens / KVT_SUB);
    const uint64_t k = n_subs * l.k_sub_bytes;
    const uint64_t v = l.page_bytes - k;
    t.n_pages += (uint64_t) (int64_t) sign;
    t.used_bytes += (uint64_t) ((int64_t) l.page_bytes * sign);
    t.bytes_by_format[l.fmt_k] += (uint64_t) ((int64_t) k * sign);
    t.bytes_by_format[l.fmt_v] += (uint64_t) ((int64_t) v * sign);
}

void store_count_host(kvt_store * s, const kvt_page_layout& l, int sign) {
    count_page(s->stats.tier[KVT_TIER_HOST], l, sign);
}

void store_count_disk(kvt_store * s, const kvt_page_layout& l, int sign) {
    count_page(s->stats.tier[KVT_TIER_DISK], l, sign);
}

void store_note_peak(kvt_store * s) {
    s->stats.peak_host_bytes = std::max(s->stats.peak_host_bytes, store_host_held(s));
}

kvt_page_info store_page_info(const kvt_array * a, uint32_t page) {
    const page_entry& p = a->pages[page];
    kvt_page_info i = {};
    i.id = { a->id, page };
    i.layer = a->params.layer;
    i.cell_first = page % a->pages_per_stream * (uint32_t) a->params.geo.page_tokens;
    i.last_use = p.last_use;
    i.born = p.born;
    i.tier = p.place == PLACE_HOST ? KVT_TIER_HOST : p.place == PLACE_DISK ? KVT_TIER_DISK : KVT_TIER_NONE;
    const kvt_page_layout& l = *a->layouts[p.place == PLACE_HOST ? p.layout
            : p.place == PLACE_DISK                              ? p.slot_layout
                                                                 : LAYOUT_HOST];
    i.n_bytes = p.place == PLACE_ABSENT ? 0 : (uint32_t) l.page_bytes;
    i.fmt_k = (uint8_t) l.fmt_k;
    i.fmt_v = (uint8_t) l.fmt_v;
    i.dirty = p.place == PLACE_HOST && p.dirty;
    i.pinned = p.pins > 0;
    i.some_lost = p.some_lost;
    i.is_protected = p.place == PLACE_HOST && store_is_protected(a, page);
    return i;
}

int store_layout(kvt_array * a, kvt_format fmt_k, kvt_format fmt_v, uint8_t * out) {
    for (size_t i = 0; i < a->layouts.size(); i++) {
        if (a->layouts[i]->fmt_k == fmt_k && a->layouts[i]->fmt_v == fmt_v) {
            *out = (uint8_t) i;
            return KVT_ERR_OK;
        }
    }
    auto l = std::make_unique<kvt_page_layout>();
    const int r = kvt_page_layout_init(l.get(), &a->params.geo, fmt_k, fmt_v);
    if (r == KVT_ERR_OK) {
        *out = (uint8_t) a->layouts.size(); // at most 36 pairs of formats
        a->layouts.push_back(std::move(l));
    }
    return r;
}

// --- open and close ----------------------------------------------------------------------------------------------

void kvt_store_params_default(struct kvt_store_params * p) {
    *p = {};
    p->host_bytes = UINT64_MAX;
    p->page_tokens = KVT_SUB;
    p->n_io_threads = 2;
    p->n_protect_first = 1;
    p->n_protect_last = 2;
}

static int check_params(const struct kvt_store_params * p, std::string * err) {
    if (p->page_tokens <= 0 || p->page_tokens % KVT_SUB != 0 || p->page_tokens > 65536) {
        *err = "page_tokens is " + std::to_string(p->page_tokens) + ", but must be a multiple of " +
            std::to_string(KVT_SUB) + " up to 65536";
    } else if (p->host_bytes == 0) {
        *err = "the host budget is 0 bytes, but pages are written and read on the host tier";
    } else if (p->n_io_threads < 0 || p->n_io_threads > 256) {
        *err = "n_io_threads is " + std::to_string(p->n_io_threads) + ", but must be 0 to 256";
    } else if (p->n_transit < 0 || p->n_protect_first < 0 || p->n_protect_last < 0) {
        *err = "n_transit, n_protect_first and n_protect_last cannot be negative";
    } else if (p->disk_ops && (!p->disk_ops->read || !p->disk_ops->write)) {
        *err = "disk_ops needs read and write";
    } else if (p->lossy && (p->disk_bytes > 0 || (p->dir && p->dir[0]))) {
        *err = "a lossy store drops what has to leave, so it takes no disk tier";
    } else {
        return KVT_ERR_OK;
    }
    return KVT_ERR_CONFIG;
}

static int open_store(const struct kvt_store_params * p, kvt_store * s, std::string * err) {
    int r = check_params(p, err);
    if (r != KVT_ERR_OK) { return r; }
    s->params = *p;
    s->params.dir = nullptr; // the caller's strings and structs may go: file keeps what is needed
    s->params.disk_ops = nullptr;
    s->has_disk = p->disk_bytes > 0 && p->dir && p->dir[0];
    s->policy = *store_lru();
    s->protect_first = p->n_protect_first;
    s->protect_last = p->n_protect_last;
    // pages of several formats come and go in a lossy store: small slabs are empty, and of use to another format,
    // sooner
    s->slabs.budget_bytes = p->lossy && p->host_bytes != UINT64_MAX
        ? std::min<uint64_t>(p->host_bytes, std::max<uint64_t>(p->host_bytes / 4, 4 << 20))
        : p->host_bytes;
    s->slabs.limit_bytes = p->host_bytes;
    s->stats.tier[KVT_TIER_HOST].budget_bytes = p->host_bytes;
    if (!s->has_disk) { return KVT_ERR_OK; }
    s->stats.tier[KVT_TIER_DISK].budget_bytes = p->disk_bytes;
    r = kvt_disk_open(&s->file, p->dir, p->disk_ops, err);
    if (r == KVT_ERR_OK) {
        r = store_start_workers(s);
        if (r != KVT_ERR_OK) {
            *err = "no thread could be started for the disk tier";
            kvt_disk_close(&s->file);
        }
    }
    return r;
}

int kvt_store_open(const struct kvt_store_params * p, struct kvt_store ** out, char * err, size_t err_size) {
    std::string text;
    int r = KVT_ERR_INVALID;
    if (p && out) {
        try {
            auto s = std::make_unique<kvt_store>();
            r = open_store(p, s.get(), &text);
            if (r == KVT_ERR_OK) { *out = s.release(); }
        } catch (const std::bad_alloc&) { r = KVT_ERR_NOMEM; }
    }
    if (err && err_size > 0) { snprintf(err, err_size, "%s", text.c_str()); }
    return r;
}

void kvt_store_close(struct kvt_store * s) {
    if (!s) { return; }
    {
        store_lock lk(s->mutex);
        store_stop_workers(s, lk); // each ends the operation it is at; what still waits in the queues is not needed
    }
    kvt_disk_close(&s->file);
    kvt_slab_clear(s->slabs);
    kvt_transit_clear(s->transit);
    for (kvt_array * a : s->arrays) { delete a; }
    delete s;
}

void kvt_store_last_error(struct kvt_store * s, char * buf, size_t size) {
    if (!buf || size == 0) { return; }
    buf[0] = 0;
    if (s) {
        store_lock lk(s->mutex);
        snprintf(buf, size, "%s", s->last_error.c_str());
    }
}

void kvt_store_take_error(struct kvt_store * s, int code, char * buf, size_t size) {
    store_lock lk(s->mutex);
    const bool is_it = s->last_code == code;
    snprintf(buf, size, "%s", is_it ? s->last_error.c_str() : "");
    s->last_code = is_it ? 0 : s->last_code;
}

void kvt_store_clear_error(struct kvt_store * s) {
    store_lock lk(s->mutex);
    s->last_error.clear();
    s->last_code = 0;
}

void kvt_store_set_hooks(struct kvt_store * s, const struct kvt_offload_hooks * hooks) {
    store_lock lk(s->mutex);
    s->hooks = kvt_offload_hooks(); // no more calls begin, so the wait ends
    while (s->n_in_hooks > 0 && !kvt_store_in_hook(s)) { store_wait(s, lk); }
    s->hooks = hooks ? *hooks : kvt_offload_hooks();
}

int kvt_store_in_hook(const struct kvt_store * s) {
    for (const hook_call * call = t_hook; call; call = call->outer) {
        if (call->s == s) { return 1; }
    }
    return 0;
}

void kvt_store_set_policy(struct kvt_store * s, const struct kvt_evict_policy * policy) {
    store_lock lk(s->mutex);
    s->policy = policy && policy->version == 1 && policy->choose ? *policy : *store_lru();
    s->victims.clear();
}

void kvt_store_tick(struct kvt_store * s) {
    store_lock lk(s->mutex);
    s->clock++;
}

void kvt_store_get_stats(struct kvt_store * s, struct kvt_store_stats * out) {
    store_lock lk(s->mutex);
    *out = s->stats;
    out->tier[KVT_TIER_HOST].held_bytes = store_host_held(s);
    out->tier[KVT_TIER_HOST].used_bytes += s->reserved_bytes;
    out->reserved_bytes = s->reserved_bytes;
}

int kvt_store_flush(struct kvt_store * s) {
    store_lock lk(s->mutex);
    while (s->n_writing > 0 || s->n_reading > 0 || !s->reads.empty()) { store_wait(s, lk); }
    const int r = s->pending_error;
    if (r != KVT_ERR_OK) {
        store_fail(s, r, s->pending_text);
        s->pending_error = KVT_ERR_OK;
    }
    return r;
}

// --- arrays ------------------------------------------------------------------------------------------------------

// A range of the sparse file: the first free one that is large enough, or the end.
static int64_t take_range(kvt_store * s, uint64_t n_bytes) {
    for (size_t i = 0; i < s->free_ranges.size(); i++) {
        file_range& r = s->free_ranges[i];
        if (r.n_bytes >= n_bytes) {
            const int64_t base = r.base;
            r.base += (int64_t) n_bytes;
            r.n_bytes -= n_bytes;
            return base;
        }
    }
    const int64_t base = s->file_end;
    s->file_end += (int64_t) n_bytes;
    return base;
}

static void give_range(kvt_store * s, int64_t base, uint64_t n_bytes) {
    s->free_ranges.push_back({ base, n_bytes });
    std::sort(s->free_ranges.begin(), s->free_ranges.end(),
        [](const file_range& x, const file_range& y) { return x.base < y.base; });
    std::vector<file_range> merged;
    for (const file_range& r : s->free_ranges) {
        if (r.n_bytes == 0) { continue; }
        if (!merged.empty() && merged.back().base + (int64_t) merged.back().n_bytes == r.base) {
            merged.back().n_bytes += r.n_bytes;
        } else {
            merged.push_back(r);
        }
    }
    s->free_ranges = merged;
}

// What is left of others' slots in the array's range counts as its pages' slots, which will be written over it.
static void take_left_slots(kvt_store * s, kvt_array * a) {
    const int64_t begin = a->base, end = slot_off(a, a->n_pages);
    auto it = s->left_slots.upper_bound(begin);
    it = it == s->left_slots.begin() ? it : std::prev(it);
    while (it != s->left_slots.end() && it->first < end) {
        const int64_t at = it->first, stop = at + (int64_t) it->second;
        if (stop <= begin) {
            ++it;
            continue;
        }
        it = s->left_slots.erase(it);
        if (at < begin) { s->left_slots[at] = (uint64_t) (begin - at); }
        if (stop > end) { s->left_slots[end] = (uint64_t) (stop - end); }
        for (int64_t i = std::max(at, begin); i < std::min(stop, end);) {
            const uint32_t page = (uint32_t) ((uint64_t) (i - begin) / a->slot_stride);
            const int64_t next = std::min({ stop, end, slot_off(a, page + 1) });
            a->pages[page].slot_bytes += (uint32_t) (next - i);
            i = next;
        }
    }
}

static void leave_slots(kvt_store * s, const kvt_array * a) {
    for (uint32_t i = 0; i < a->n_pages; i++) {
        if (a->pages[i].slot_bytes > 0) { s->left_slots[slot_off(a, i)] = a->pages[i].slot_bytes; }
    }
}

static int make_layouts(kvt_store * s, kvt_array * a) {
    const kvt_array_params& p = a->params;
    a->layouts.push_back(std::make_unique<kvt_page_layout>());
    int r = kvt_page_layout_init(a->layouts[0].get(), &p.geo, p.fmt_k, p.fmt_v);
    if (r != KVT_ERR_OK) {
        return store_fail(s, r,
            "layer " + std::to_string(p.layer) + ": pages of " + std::to_string(p.geo.d_k) + " and " +
                std::to_string(p.geo.d_v) + " channels cannot be stored in the formats asked for");
    }
    // a head that the disk's format cannot hold stays in its own
    const kvt_format dk = p.geo.d_k > 0 && kvt_format_supports(p.disk_fmt_k, p.geo.d_k) ? p.disk_fmt_k : p.fmt_k;
    const kvt_format dv = p.geo.d_v > 0 && kvt_format_supports(p.disk_fmt_v, p.geo.d_v) ? p.disk_fmt_v : p.fmt_v;
    a->layouts.push_back(std::make_unique<kvt_page_layout>());
    r = kvt_page_layout_init(a->layouts[1].get(), &p.geo, dk, dv);
    a->slot_stride = std::max(kvt_slot_bytes(a->layouts[0]->page_bytes), kvt_slot_bytes(a->layouts[1]->page_bytes));
    return r;
}

static bool params_ok(const kvt_store * s, const struct kvt_array_params * p) {
    return p->geo.page_tokens == s->params.page_tokens && p->n_streams > 0 && p->cells_per_stream > 0 &&
        ((uint64_t) p->cells_per_stream + (uint64_t) p->geo.page_tokens) * p->n_streams <= UINT32_MAX;
}

static void forget_array(kvt_store * s, kvt_array * a) {
    store_unqueue(s, a->id);
    s->arrays[a->id] = nullptr;
    store_guard([s, a] { // without memory its range of the file lies fallow
        if (s->has_disk) {
            leave_slots(s, a);
            give_range(s, a->base, a->slot_stride * a->n_pages);
        }
        std::string unused;
        return store_plan_budget(s, &unused); // fewer arrays always fit
    });
}

static int make_place(kvt_store * s, store_lock& lk, kvt_array * a) {
    if (s->has_disk) { take_left_slots(s, a); }
    std::string err;
    int r = store_plan_budget(s, &err);
    if (r != KVT_ERR_OK) { return store_fail(s, r, "layer " + std::to_string(a->params.layer) + ": " + err); }
    const uint64_t seq0 = s->fail_seq;
    while (r == KVT_ERR_OK &&
        s->slabs.held_bytes > s->slabs.limit_bytes) { // its transit frames come out of what others hold
        r = store_make_room(s, lk, 0, seq0);
    }
    return r;
}

static int add_array(kvt_store * s, store_lock& lk, std::unique_ptr<kvt_array> a, kvt_array ** out) {
    int r = make_layouts(s, a.get());
    if (r != KVT_ERR_OK) { return r; }
    a->pages.resize(a->n_pages);
    a->newest.resize(a->params.n_streams);
    s->arrays.push_back(a.get());
    a->base = s->has_disk ? take_range(s, a->slot_stride * a->n_pages) : 0;
    r = store_guard([&] { return make_place(s, lk, a.get()); });
    if (r != KVT_ERR_OK) {
        forget_array(s, a.get());
        return r;
    }
    *out = a.release();
    return KVT_ERR_OK;
}

int kvt_store_array_add(struct kvt_store * s, const struct kvt_array_params * p, struct kvt_array ** out) {
    if (!s || !p || !out) { return KVT_ERR_INVALID; }
    store_lock lk(s->mutex);
    if (!params_ok(s, p)) {
        return store_fail(s, KVT_ERR_INVALID,
            "layer " + std::to_string(p->layer) + ": an array needs streams, cells, and pages of the store's " +
                std::to_string(s->params.page_tokens) + " tokens");
    }
    try {
        auto a = std::make_unique<kvt_array>();
        a->store = s;
        a->id = (uint32_t) s->arrays.size();
        a->params = *p;
        a->pages_per_stream = (p->cells_per_stream + (uint32_t) p->geo.page_tokens - 1) / (uint32_t) p->geo.page_tokens;
        a->n_pages = a->pages_per_stream * p->n_streams;
        return add_array(s, lk, std::move(a), out);
    } catch (const std::bad_alloc&) {
        return store_fail(s, KVT_ERR_NOMEM, "no memory for the page table of layer " + std::to_string(p->layer));
    }
}

void kvt_store_array_remove(struct kvt_array * a) {
    if (!a) { return; }
    kvt_store * s = a->store;
    {
        store_lock lk(s->mutex);
        for (page_entry& p : a->pages) {
            p.pins = 0; // whoever still holds a page broke the contract; the memory goes all the same
        }
    }
    kvt_array_discard(a, 0, a->n_pages);
    store_lock lk(s->mutex);
    forget_array(s, a);
    delete a;
}

uint32_t kvt_array_id(const struct kvt_array * a) { return a->id; }

uint32_t kvt_array_n_pages(const struct kvt_array * a) { return a->n_pages; }
