// Pages of an array in use: acquire, release, read-ahead, discard.

#include "store-internal.h"

#include <algorithm>
#include <chrono>
#include <cstring>

typedef std::chrono::steady_clock steady;

// Time that one acquire waits, added to the statistics when it is over.
struct stall_clock {
    kvt_store * s;
    bool running = false;
    steady::time_point t0;
    explicit stall_clock(kvt_store * store) : s(store) {}
    void start() {
        if (!running) {
            running = true;
            t0 = steady::now();
        }
    }
    ~stall_clock() { // the lock is held here
        if (running) {
            s->stats.stall_us +=
                (uint64_t) std::chrono::duration_cast<std::chrono::microseconds>(steady::now() - t0).count();
        }
    }
};

static void pin(kvt_array * a, uint32_t page, kvt_page_ref * out) {
    page_entry& p = a->pages[page];
    p.pins++;
    p.last_use = a->store->clock;
    p.wanted = false;
    out->data = p.f.data;
    out->layout = a->layouts[p.layout].get();
    out->page = page;
    out->frame = p.f.index;
    out->lost = store_lost_of(a, page);
}

static void absent_ref(kvt_array * a, uint32_t page, kvt_page_ref * out) {
    out->data = nullptr;
    out->layout = a->layouts[LAYOUT_HOST].get();
    out->page = page;
    out->frame = 0;
    out->lost = store_lost_of(a, page);
}

static bool readable(const page_entry& p) { return p.io == IO_NONE || p.io == IO_WRITING; }

static void use_read_ahead(kvt_store * s, page_entry& p) {
    if (p.read_ahead) {
        p.read_ahead = false;
        s->stats.n_prefetch_used++;
    }
}

// A read that waits in the queue is called off.
void store_cancel_read(kvt_store * s, page_entry& p) {
    p.io = IO_NONE;
    if (is_transit(p)) {
        store_free_transit(s, p);
    } else {
        kvt_slab_free(s->slabs, p.f);
        p.f = frame();
        p.read_ahead = false;
    }
}

static int acquire_read(kvt_array * a, store_lock& lk, uint32_t page, kvt_page_ref * out) {
    kvt_store * s = a->store;
    page_entry& p = a->pages[page];
    stall_clock stall(s);
    bool missed = false;
    for (;;) {
        if (p.place == PLACE_ABSENT && p.io == IO_NONE) {
            absent_ref(a, page, out);
            return KVT_ERR_OK;
        }
        missed = missed || p.place == PLACE_DISK;
        if (p.place == PLACE_HOST && readable(p)) {
            s->stats.n_hits += missed ? 0 : 1;
            s->stats.n_misses += missed ? 1 : 0;
            use_read_ahead(s, p);
            pin(a, page, out);
            return KVT_ERR_OK;
        }
        if (p.place == PLACE_DISK && p.io == IO_NONE && p.f.data) {
            s->stats.n_misses++;
            use_read_ahead(s, p);
            kvt_transit_set(s->transit, p.f.index, TRANSIT_BUSY);
            pin(a, page, out);
            return KVT_ERR_OK;
        }
        stall.start();
        if (p.place == PLACE_DISK && (p.io == IO_QUEUED || p.io == IO_NONE)) {
            if (p.io == IO_NONE) {
                const int r = store_frame_for_read(s, a, page, true);
                if (r == KVT_ERR_BUDGET) { // all frames are in use: their users release them soon
                    store_wait(s, lk);
                    continue;
                }
                if (r != KVT_ERR_OK) { return r; }
            }
            p.io = IO_READING;
            const int r = store_read_page(s, lk, a, page);
            if (r != KVT_ERR_OK) { return r; }
            continue;
        }
        store_wait(s, lk);
    }
}

// The page becomes a zeroed frame in the array's own format.
static int create_page(kvt_array * a, store_lock& lk, uint32_t page) {
    kvt_store * s = a->store;
    page_entry& p = a->pages[page];
    frame f;
    p.io = IO_MOVING;
    const int r = store_frame_alloc(s, lk, a, page, LAYOUT_HOST, &f);
    if (r == KVT_ERR_OK) {
        const size_t n = a->layouts[LAYOUT_HOST]->page_bytes;
        lk.unlock();
        memset(f.data, 0, n);
        lk.lock();
        p.f = f;
        p.place = PLACE_HOST;
        p.layout = LAYOUT_HOST;
        p.dirty = true;
        p.born = s->clock;
        s->stats.tier[KVT_TIER_NONE].n_pages -= p.some_lost ? 1 : 0;
        store_count_host(s, *a->layouts[LAYOUT_HOST], 1);
    }
    p.io = IO_NONE;
    store_notify(s);
    return r;
}

// The page is on disk, IO_NONE, with no pinned frame. It comes back to a regular frame, whoever must leave for it.
static int recall_page(kvt_array * a, store_lock& lk, uint32_t page) {
    kvt_store * s = a->store;
    page_entry& p = a->pages[page];
    if (p.f.data) { store_free_transit(s, p); }
    frame f;
    p.io = IO_MOVING;
    const int r = store_frame_alloc(s, lk, a, page, p.slot_layout, &f);
    if (r != KVT_ERR_OK) {
        p.io = IO_NONE;
        store_notify(s);
        return r;
    }
    p.f = f;
    p.io = IO_READING;
    return store_read_page(s, lk, a, page);
}

int store_recall(kvt_store * s, store_lock& lk, kvt_page_id id) {
    for (;;) {
        kvt_array * a = store_array(s, id.array); // may go while we wait
        if (!a) { return KVT_ERR_INVALID; }
        page_entry& p = a->pages[id.page];
        if (p.io == IO_QUEUED) { store_cancel_read(s, p); }
        if (p.io != IO_NONE || (p.place == PLACE_DISK && p.pins > 0)) {
            store_wait(s, lk);
        } else if (p.place == PLACE_DISK) {
            return recall_page(a, lk, id.page);
        } else {
            return p.place == PLACE_HOST
                ? KVT_ERR_OK
                : store_fail(s, KVT_ERR_INVALID, store_page_name(a, id.page) + " cannot be moved: it has no content");
        }
    }
}

static void forget_content(kvt_array * a, store_lock& lk, uint32_t page) {
    kvt_store * s = a->store;
    page_entry& p = a->pages[page];
    p.io = IO_MOVING;
    store_release_slot(s, lk, a, page);
    if (is_transit(p)) {
        store_free_transit(s, p);
    } else if (p.f.data) {
        store_free_host(s, a, page);
    }
    s->stats.tier[KVT_TIER_NONE].n_pages += p.some_lost ? 1 : 0;
    p.place = PLACE_ABSENT;
    p.dirty = false;
    p.io = IO_NONE;
    store_notify(s);
}

static int acquire_write(kvt_array * a, store_lock& lk, uint32_t page, bool reset, kvt_page_ref * out) {
    kvt_store * s = a->store;
    page_entry& p = a->pages[page];
    stall_clock stall(s);
    for (;;) {
        if (p.io == IO_QUEUED) { store_cancel_read(s, p); }
        if (p.io != IO_NONE || (p.place == PLACE_DISK && p.pins > 0)) {
            stall.start();
            store_wait(s, lk);
            continue;
        }
        int r = KVT_ERR_OK;
        if (p.place == PLACE_ABSENT) {
            r = create_page(a, lk, page);
        } else if (reset && p.pins == 0 && (p.place == PLACE_DISK || p.layout != LAYOUT_HOST)) {
            forget_content(a, lk, page);
        } else if (p.place == PLACE_DISK) {
            stall.start();
            r = recall_page(a, lk, page);
        } else if (p.slot_bytes > 0 && p.has_copy) {
            p.dirty = true;
            p.io = IO_MOVING;
            store_release_slot(s, lk, a, page);
            p.io = IO_NONE;
            store_notify(s);
        } else {
            p.dirty = true;
            use_read_ahead(s, p);
            store_note_write(a, page);
            pin(a, page, out);
            return KVT_ERR_OK;
        }
        if (r != KVT_ERR_OK) { return r; }
    }
}

int kvt_array_acquire(struct kvt_array * a, uint32_t page, enum kvt_access access, struct kvt_page_ref * out) {
    if (!a || !out) { return KVT_ERR_INVALID; }
    store_lock lk(a->store->mutex);
    if (page >= a->n_pages || access < KVT_READ || access > KVT_RESET) {
        return store_fail(a->store, KVT_ERR_INVALID,
            "no such access of " + store_page_name(a, page) + ": the array has " + std::to_string(a->n_pages) +
                " pages");
    }
    kvt_page_ref ref;
    const int r = store_guard([&] {
        return access == KVT_READ ? acquire_read(a, lk, page, &ref)
                                  : acquire_write(a, lk, page, access == KVT_RESET, &ref);
    });
    if (r == KVT_ERR_OK) { *out = ref; }
    return r;
}

static void unpin(kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    p.pins--;
    if (p.pins == 0 && is_transit(p)) {
        kvt_transit_set(a->store->transit, p.f.index, TRANSIT_USED);
        store_guard([a] {
            store_pump_ahead(a->store);
            return KVT_ERR_OK;
        });
    }
}

void kvt_array_release(struct kvt_array * a, const struct kvt_page_ref * ref) { kvt_array_release_many(a, ref, 1); }

void kvt_array_release_many(struct kvt_array * a, const struct kvt_page_ref * refs, size_t n) {
    store_lock lk(a->store->mutex);
    for (size_t i = 0; i < n; i++) {
        if (refs[i].data) { unpin(a, refs[i].page); }
    }
    store_notify(a->store);
}

// Transit frames are not pinned here: a thread that held many of them could wait for ever for one more.
int kvt_array_acquire_resident(struct kvt_array * a, const uint32_t * pages, size_t n, struct kvt_page_ref * refs,
    uint32_t * out_missing, size_t * out_n_missing) {
    if (!a || (n > 0 && (!pages || !refs || !out_missing)) || !out_n_missing) { return KVT_ERR_INVALID; }
    kvt_store * s = a->store;
    store_lock lk(s->mutex);
    for (size_t i = 0; i < n; i++) {
        if (pages[i] >= a->n_pages) {
            return store_fail(s, KVT_ERR_INVALID,
                store_page_name(a, pages[i]) + " does not exist: the array has " + std::to_string(a->n_pages) +
                    " pages");
        }
    }
    size_t n_missing = 0, n_hits = 0;
    bool sorted = true;
    for (size_t i = 0; i < n; i++) {
        page_entry& p = a->pages[pages[i]];
        if (p.place == PLACE_HOST && readable(p)) {
            n_hits++;
            use_read_ahead(s, p);
            pin(a, pages[i], &refs[i]);
            continue;
        }
        absent_ref(a, pages[i], &refs[i]);
        if (p.place != PLACE_ABSENT || p.io != IO_NONE) {
            sorted = sorted && (n_missing == 0 || pages[out_missing[n_missing - 1]] <= pages[i]);
            out_missing[n_missing++] = (uint32_t) i;
        }
    }
    s->stats.n_hits += n_hits;
    lk.unlock();
    if (!sorted) { // a page's place in the file follows its number
        std::sort(
            out_missing, out_missing + n_missing, [pages](uint32_t x, uint32_t y) { return pages[x] < pages[y]; });
    }
    *out_n_missing = n_missing;
    return KVT_ERR_OK;
}

int kvt_array_is_ready(struct kvt_array * a, const uint32_t * pages, size_t n, uint8_t * out) {
    if (!a || (n > 0 && (!pages || !out))) { return KVT_ERR_INVALID; }
    store_lock lk(a->store->mutex);
    for (size_t i = 0; i < n; i++) {
        if (pages[i] >= a->n_pages) { return KVT_ERR_INVALID; }
        const page_entry& p = a->pages[pages[i]];
        out[i] = p.place == PLACE_HOST ? readable(p) : p.place == PLACE_ABSENT && p.io == IO_NONE;
    }
    return KVT_ERR_OK;
}

void kvt_array_prefetch(struct kvt_array * a, const uint32_t * pages, size_t n) {
    if (!a || !pages || !a->store->has_disk) { return; }
    kvt_store * s = a->store;
    store_lock lk(s->mutex);
    if (s->read_us < KVT_READ_US_FAST) { return; }
    store_guard([&] {
        store_add_ahead(s, a, pages, n);
        return KVT_ERR_OK;
    });
}

// --- discard -----------------------------------------------------------------------------------------------------

// Waits for the page's I/O and its readers, and takes hold of it (IO_MOVING). INVALID if it stays pinned.
static int seize(kvt_array * a, store_lock& lk, uint32_t page, steady::time_point deadline) {
    page_entry& p = a->pages[page];
    for (;;) {
        if (p.io == IO_QUEUED) { store_cancel_read(a->store, p); }
        if (p.pins == 0 && p.io == IO_NONE) {
            p.io = IO_MOVING;
            p.wanted = false;
            return KVT_ERR_OK;
        }
        if (p.pins == 0) {
            store_wait(a->store, lk);
        } else if (!store_wait_until(a->store, lk, deadline)) {
            return KVT_ERR_INVALID;
        }
    }
}

// One call for each run of slots that are held. All pages of the range are IO_MOVING.
static void punch_runs(kvt_array * a, store_lock& lk, uint32_t first, uint32_t end) {
    kvt_store * s = a->store;
    const kvt_disk_ops ops = s->file.ops;
    uint32_t i = first;
    while (i < end) {
        uint32_t j = i;
        uint64_t held = 0;
        while (j < end && a->pages[j].slot_bytes > 0) { held += a->pages[j++].slot_bytes; }
        if (j == i) {
            i++;
            continue;
        }
        int sys_errno = 0;
        lk.unlock();
        const bool freed = ops.punch &&
            ops.punch(ops.ctx, s->file.fd, slot_off(a, i), (size_t) ((j - i) * a->slot_stride), &sys_errno) ==
                KVT_ERR_OK;
        lk.lock();
        s->stats.tier[KVT_TIER_DISK].held_bytes -= freed ? held : 0;
        for (; i < j; i++) { a->pages[i].slot_bytes = freed ? 0 : a->pages[i].slot_bytes; }
    }
}

static void forget_page(kvt_array * a, uint32_t page) {
    kvt_store * s = a->store;
    page_entry& p = a->pages[page];
    if (p.has_copy) {
        store_count_disk(s, *a->layouts[p.slot_layout], -1);
        p.has_copy = false;
    }
    if (is_transit(p)) {
        store_free_transit(s, p);
    } else if (p.f.data) {
        store_free_host(s, a, page);
    }
    if (p.newest) {
        std::vector<uint32_t>& list = a->newest[page / a->pages_per_stream];
        list.erase(std::remove(list.begin(), list.end(), page), list.end());
        p.newest = false;
    }
    store_find_lost(a, page);
    p.place = PLACE_ABSENT;
    p.dirty = false;
    p.io = IO_NONE;
}

int kvt_array_discard(struct kvt_array * a, uint32_t first, uint32_t n) {
    if (!a) { return KVT_ERR_INVALID; }
    kvt_store * s = a->store;
    store_lock lk(s->mutex);
    if (first > a->n_pages || n > a->n_pages - first) {
        return store_fail(s, KVT_ERR_INVALID,
            "pages " + std::to_string(first) + " and the " + std::to_string(n) + " after it are not all in layer " +
                std::to_string(a->params.layer) + "'s " + std::to_string(a->n_pages));
    }
    const steady::time_point deadline = steady::now() + KVT_PINS_WAIT;
    for (uint32_t i = 0; i < n; i++) {
        if (seize(a, lk, first + i, deadline) != KVT_ERR_OK) {
            for (uint32_t j = 0; j < i; j++) { a->pages[first + j].io = IO_NONE; }
            store_notify(s);
            return store_fail(s, KVT_ERR_INVALID, store_page_name(a, first + i) + " cannot be discarded: it is in use");
        }
    }
    punch_runs(a, lk, first, first + n);
    for (uint32_t i = 0; i < n; i++) { forget_page(a, first + i); }
    store_notify(s);
    return KVT_ERR_OK;
}

int kvt_array_info(struct kvt_array * a, uint32_t page, struct kvt_page_info * out) {
    if (!a || !out || page >= a->n_pages) { return KVT_ERR_INVALID; }
    store_lock lk(a->store->mutex);
    *out = store_page_info(a, page);
    return KVT_ERR_OK;
}

int kvt_array_infos(struct kvt_array * a, struct kvt_page_info * out) {
    if (!a || !out) { return KVT_ERR_INVALID; }
    store_lock lk(a->store->mutex);
    for (uint32_t page = 0; page < a->n_pages; page++) { out[page] = store_page_info(a, page); }
    return KVT_ERR_OK;
}
