// Making room on the host: choosing victims, writing dirty ones back, dropping clean ones.

#include "store-internal.h"

#include <algorithm>

static const size_t VICTIMS_MAX = 64;   // one choice of the policy serves that many evictions
static const size_t WRITES_AHEAD = 16;  // writes under way while someone waits for room
static const uint64_t FAILURES_MAX = 3; // failed writes that one request for room survives

// --- leaving -----------------------------------------------------------------------------------------------------

void store_free_host(kvt_store * s, kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    store_count_host(s, *a->layouts[p.layout], -1);
    kvt_slab_free(s->slabs, p.f);
    p.f = frame();
    p.read_ahead = false;
}

void store_drop_host(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    p.io = IO_MOVING;
    store_call_hook(s, lk, &kvt_offload_hooks::on_leave, a, page, *a->layouts[p.layout], p.f.data);
    p.io = IO_NONE;
    store_free_host(s, a, page);
    p.place = PLACE_DISK;
    s->stats.n_evicted++;
    store_notify(s);
}

// --- victims -----------------------------------------------------------------------------------------------------

// Pages being written count: they are on their way out already.
static bool may_leave(const kvt_array * a, uint32_t page, uint64_t seq0, bool with_protected) {
    const page_entry& p = a->pages[page];
    return p.place == PLACE_HOST && p.pins == 0 && (p.io == IO_NONE || p.io == IO_WRITING) && p.fail_seq <= seq0 &&
        (with_protected || !store_is_protected(a, page));
}

static size_t stride_of(kvt_store * s, const kvt_page_info& i) { return kvt_slab_stride(s->slabs, page_of(s, i.id).f); }

static std::vector<kvt_page_info> candidates(kvt_store * s, uint64_t seq0, bool with_protected) {
    std::vector<kvt_page_info> out;
    for (const kvt_array * a : s->arrays) {
        for (uint32_t i = 0; a && i < a->n_pages; i++) {
            if (may_leave(a, i, seq0, with_protected)) { out.push_back(store_page_info(a, i)); }
        }
    }
    return out;
}

// Whether the policy's answer makes sense: indices in range, each once.
static bool choice_ok(const std::vector<uint32_t>& v, size_t n, size_t n_pages) {
    std::vector<bool> seen(n_pages, false);
    for (size_t i = 0; i < n; i++) {
        if (v[i] >= n_pages || seen[v[i]]) { return false; }
        seen[v[i]] = true;
    }
    return n > 0;
}

static void choose(kvt_store * s, const std::vector<kvt_page_info>& pages, size_t stride) {
    const size_t n_max = std::min(pages.size(), std::max<size_t>(1, std::min<size_t>(VICTIMS_MAX, pages.size() / 16)));
    std::vector<uint32_t> v(n_max);
    size_t n = s->policy.choose(s->policy.ctx, pages.data(), pages.size(), stride, v.data(), n_max);
    if (n > n_max || !choice_ok(v, n, pages.size())) {
        const kvt_evict_policy * lru = store_lru();
        n = lru->choose(lru->ctx, pages.data(), pages.size(), stride, v.data(), n_max);
    }
    for (size_t i = 0; i < n; i++) { s->victims.push_back({ pages[v[i]].id, pages[v[i]].last_use, s->clock }); }
}

// No single frame is large enough: empty the slab with the fewest pages of those whose pages may all leave.
static void choose_slab(kvt_store * s, uint64_t seq0, bool with_protected) {
    const slab * best = nullptr;
    for (const slab& b : s->slabs.slabs) {
        if (!b.base || (best && b.n_used >= best->n_used)) { continue; }
        bool all = true;
        for (const kvt_page_id& id : b.owner) {
            all = all && (id.page == UINT32_MAX || may_leave(s->arrays[id.array], id.page, seq0, with_protected));
        }
        best = all ? &b : best;
    }
    for (size_t i = 0; best && i < best->owner.size(); i++) {
        if (best->owner[i].page != UINT32_MAX) {
            s->victims.push_back({ best->owner[i], page_of(s, best->owner[i]).last_use, s->clock });
        }
    }
}

static void refill(kvt_store * s, size_t stride, uint64_t seq0, bool with_protected) {
    std::vector<kvt_page_info> pages = candidates(s, seq0, with_protected);
    pages.erase(std::remove_if(pages.begin(), pages.end(),
                    [s, stride](const kvt_page_info& i) { return stride_of(s, i) < stride; }),
        pages.end());
    s->victims_stride = stride;
    if (!pages.empty()) {
        choose(s, pages, stride);
    } else {
        choose_slab(s, seq0, with_protected);
    }
}

// Throws out of the list what was used, pinned, protected, moved or failed since it was chosen. In a lossy store every
// step uses every page: there a choice holds for the step in which it was made.
static void prune(kvt_store * s, size_t stride, uint64_t seq0) {
    if (s->victims_stride != stride) { s->victims.clear(); }
    s->victims.erase(std::remove_if(s->victims.begin(), s->victims.end(),
                         [s, seq0](const victim& v) {
                             const bool outdated = s->params.lossy ? v.clock != s->clock
                                                                   : page_of(s, v.id).last_use != v.last_use;
                             return outdated || !may_leave(s->arrays[v.id.array], v.id.page, seq0, false);
                         }),
        s->victims.end());
}

// --- room --------------------------------------------------------------------------------------------------------

static bool droppable(const page_entry& p) { return p.io == IO_NONE && p.has_copy && !p.dirty; }

static bool drop_first_clean(kvt_store * s, store_lock& lk) {
    for (size_t i = 0; i < s->victims.size(); i++) {
        const kvt_page_id id = s->victims[i].id;
        if (page_of(s, id).io == IO_WRITING) {
            return false; // it leaves first, however fast the others' writes are: what goes does not depend on time
        }
        if (droppable(page_of(s, id))) {
            s->victims.erase(s->victims.begin() + (ptrdiff_t) i);
            store_drop_host(s, lk, s->arrays[id.array], id.page);
            return true;
        }
    }
    return false;
}

static int write_victims(kvt_store * s) {
    for (const victim& v : s->victims) {
        const kvt_page_id id = v.id;
        if (s->n_writing >= WRITES_AHEAD) { break; }
        const page_entry& p = page_of(s, id);
        if (p.io == IO_NONE && !droppable(p)) { // a copy that is still good is not written again
            const int r = store_start_write(s, s->arrays[id.array], id.page, LAYOUT_DISK);
            if (r != KVT_ERR_OK) { return r; }
        }
    }
    return KVT_ERR_OK;
}

// Nothing can be written. A page that has its copy on disk may still go, whatever the policy thought of it.
static bool drop_any_clean(kvt_store * s, store_lock& lk, size_t stride, uint64_t seq0) {
    std::vector<kvt_page_info> pages = candidates(s, seq0, false);
    for (const kvt_page_info& i : pages) {
        if (droppable(page_of(s, i.id)) && stride_of(s, i) >= stride) {
            store_drop_host(s, lk, s->arrays[i.id.array], i.id.page);
            return true;
        }
    }
    return false;
}

// The disk is full, but pages that stay on the host need no copy there.
static bool give_up_a_copy(kvt_store * s, store_lock& lk) {
    for (size_t k = 0; k < s->arrays.size(); k++) { // arrays are added and removed while the lock is let go
        kvt_array * a = s->arrays[k];
        for (uint32_t i = 0; a && i < a->n_pages; i++) {
            page_entry& p = a->pages[i]; // ours while IO_MOVING, and with it the array
            if (p.place == PLACE_HOST && p.io == IO_NONE && p.slot_bytes > 0 && p.pins == 0) {
                const uint32_t before = p.slot_bytes;
                p.dirty = true;
                p.io = IO_MOVING;
                store_release_slot(s, lk, a, i);
                p.io = IO_NONE;
                store_notify(s);
                if (p.slot_bytes < before) { return true; }
            }
        }
    }
    return false;
}

static std::string host_full(kvt_store * s) {
    return "the host tier holds " + std::to_string(store_host_held(s)) + " of its budget of " +
        std::to_string(s->params.host_bytes) + " bytes";
}

static int all_in_use(kvt_store * s) {
    return store_fail(s, KVT_ERR_BUDGET, host_full(s) + " and every page of it is in use; raise the host budget");
}

// Drops a page for good; never a protected one.
static int make_room_by_loss(kvt_store * s, store_lock& lk, size_t stride, uint64_t seq0) {
    const auto deadline = std::chrono::steady_clock::now() + KVT_PINS_WAIT;
    do {
        if (store_compact(s, lk) > 0) { // what other formats have left sparsely filled
            return KVT_ERR_OK;
        }
        prune(s, stride, seq0);
        if (s->victims.empty()) { refill(s, stride, seq0, false); }
        for (size_t i = 0; i < s->victims.size(); i++) {
            const kvt_page_id id = s->victims[i].id;
            if (page_of(s, id).io == IO_NONE) {
                s->victims.erase(s->victims.begin() + (ptrdiff_t) i);
                return store_lose(s, lk, s->arrays[id.array], id.page);
            }
        }
    } while (
        store_wait_until(s, lk, deadline)); // pages that are being shown to a callback, or are pinned, come free soon
    return all_in_use(s);
}

// Frees a bit of host memory or waits for some to come free: the caller tries again after OK. seq0 is the store's
// fail_seq when the caller began, so that it does not try the same failing page for ever.
int store_make_room(kvt_store * s, store_lock& lk, size_t stride, uint64_t seq0) {
    if (s->params.lossy) { return make_room_by_loss(s, lk, stride, seq0); }
    if (!s->has_disk) {
        return store_fail(s, KVT_ERR_BUDGET,
            host_full(s) +
                " and there is no disk tier to move pages to; raise the host budget, "
                "give a disk budget and a directory, use a smaller format, or a shorter context");
    }
    const auto deadline = std::chrono::steady_clock::now() + KVT_PINS_WAIT;
    for (;;) {
        prune(s, stride, seq0);
        for (int with_protected = 0; with_protected < 2 && s->victims.empty(); with_protected++) {
            refill(s, stride, seq0, with_protected != 0); // rather a protected page than no answer
        }
        if (drop_first_clean(s, lk)) {
            if (s->n_writing < WRITES_AHEAD / 2) {
                write_victims(s); // so that the next one who needs room finds a clean one too
            }
            return KVT_ERR_OK;
        }
        const bool give_up = s->fail_seq > seq0 &&
            (s->fail_code == KVT_ERR_DISK_FULL || s->fail_seq - seq0 >= FAILURES_MAX);
        const int r = give_up ? s->fail_code : write_victims(s);
        if (s->n_writing > 0) {
            store_wait(s, lk);
            return KVT_ERR_OK;
        }
        if (drop_any_clean(s, lk, stride, seq0)) { return KVT_ERR_OK; }
        if (r == KVT_ERR_DISK_FULL && !give_up && give_up_a_copy(s, lk)) { continue; }
        if (s->fail_seq > seq0) { return store_fail(s, s->fail_code, s->fail_text); }
        if (r != KVT_ERR_OK) { return r; }
        return store_wait_until(s, lk, deadline) ? (int) KVT_ERR_OK : all_in_use(s); // all that is left is in use
    }
}

static int frame_alloc(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page, uint8_t layout, frame * out) {
    const size_t stride = frame_stride(*a->layouts[layout]);
    const uint32_t cls = kvt_slab_class(s->slabs, stride);
    const uint64_t seq0 = s->fail_seq;
    for (;;) {
        const int r = kvt_slab_alloc(s->slabs, cls, { a->id, page }, out);
        if (r == KVT_ERR_OK) {
            store_note_peak(s);
            return KVT_ERR_OK;
        }
        if (r == KVT_ERR_NOMEM &&
            (s->slabs.held_bytes == 0 || !s->has_disk)) { // nothing is dropped for good while the budget is not full
            return store_fail(s, r, "no memory for " + store_page_name(a, page) + " on the host tier");
        }
        const int e = store_make_room(s, lk, stride, seq0);
        if (e != KVT_ERR_OK) {
            return store_fail(s, e, "no room for " + store_page_name(a, page) + " on the host tier: " + s->last_error);
        }
    }
}

// The caller has the page in its hands (its io): nothing is thrown past that.
int store_frame_alloc(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page, uint8_t layout, frame * out) {
    return store_guard([&] { return frame_alloc(s, lk, a, page, layout, out); });
}
