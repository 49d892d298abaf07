// Frames for pages read from disk: a regular one while there is room on the host, else one of the transit frames, which
// the page leaves again after use. Read-ahead fills transit frames in the order of the hints.

#include "store-internal.h"

// The page's read is over or called off: its frame is free for others.
void store_free_transit(kvt_store * s, page_entry& p) {
    kvt_transit_set(s->transit, p.f.index, TRANSIT_FREE);
    p.f = frame();
    p.read_ahead = false;
}

// What was read ahead and will not be used any more, as far as one can tell: an earlier step's, or that of a layer
// before the last one (layers come in turn, and hints run one layer ahead at most).
static bool is_stale(const kvt_store * s, const transit_frame& f) {
    return f.state == TRANSIT_READY && (f.clock + 2 <= s->clock || f.turn + 2 <= s->ahead_turn);
}

// Frees one transit frame that nobody uses: one that was used, then a stale one. Someone who must read now also takes
// what was read ahead for later: another layer's first, then what is needed last. False: all are in use.
static bool recycle(kvt_store * s, uint32_t array, bool must) {
    transit_frame * best = nullptr;
    int rank = 0; // of best: 4 used, 3 stale, 2 another array's, 1 our own for later
    for (transit_frame& f : s->transit.frames) {
        const bool queued = f.state == TRANSIT_BUSY && page_of(s, f.owner).io == IO_QUEUED;
        const int r = f.state == TRANSIT_USED                ? 4
            : is_stale(s, f)                                 ? 3
            : !must || !(queued || f.state == TRANSIT_READY) ? 0
            : f.owner.array != array                         ? 2
                                                             : 1;
        const bool better = r > rank || (r == rank && best && (r == 1 ? f.seq > best->seq : f.seq < best->seq));
        if (r > 0 && better) {
            best = &f;
            rank = r;
        }
    }
    if (!best) { return false; }
    page_entry& p = page_of(s, best->owner);
    if (p.io == IO_QUEUED) { // the queue will skip it; a page that is being discarded stays in the discarder's hands
        p.io = IO_NONE;
    }
    store_free_transit(s, p);
    return true;
}

void store_trim_transit(kvt_store * s, uint64_t n_bytes) {
    do {
        kvt_transit_trim(s->transit, n_bytes);
    } while (s->transit.held_bytes > n_bytes && recycle(s, UINT32_MAX, true));
}

static bool any_busy(const kvt_store * s) {
    for (const transit_frame& f : s->transit.frames) {
        if (f.state == TRANSIT_BUSY) { return true; }
    }
    return false;
}

int store_frame_for_read(kvt_store * s, kvt_array * a, uint32_t page, bool must) {
    page_entry& p = a->pages[page];
    const kvt_page_id id = { a->id, page };
    const size_t stride = frame_stride(*a->layouts[p.slot_layout]);
    if (kvt_slab_alloc(s->slabs, kvt_slab_class(s->slabs, stride), id, &p.f) == KVT_ERR_OK) {
        store_note_peak(s);
        return KVT_ERR_OK;
    }
    int r;
    while ((r = kvt_transit_alloc(s->transit, stride, id, &p.f)) != KVT_ERR_OK) {
        if (!recycle(s, a->id, must)) {
            if (must && !any_busy(s)) { // waiting would not help
                return store_fail(
                    s, KVT_ERR_NOMEM, "no memory for " + store_page_name(a, page) + " to be read from the disk tier");
            }
            return KVT_ERR_BUDGET;
        }
    }
    s->transit.frames[p.f.index].clock = s->clock;
    s->transit.frames[p.f.index].turn = s->ahead_turn;
    store_note_peak(s);
    return KVT_ERR_OK;
}

void store_pump_ahead(kvt_store * s) {
    while (!s->ahead.empty()) {
        const kvt_page_id id = s->ahead.front();
        kvt_array * a = s->arrays[id.array];
        page_entry& p = a->pages[id.page];
        if (p.wanted && p.place == PLACE_DISK && p.io == IO_NONE && !p.f.data) {
            if (store_frame_for_read(s, a, id.page, false) != KVT_ERR_OK) { return; }
            p.io = IO_QUEUED;
            p.read_ahead = true;
            s->stats.n_prefetched++;
            store_queue_read(s, id);
        }
        p.wanted = false;
        s->ahead.pop_front();
    }
}

// The last hint goes first: it is the best informed. Hints for the layer before are void.
void store_add_ahead(kvt_store * s, kvt_array * a, const uint32_t * pages, size_t n) {
    const bool too_long = s->ahead.size() > 4 * (size_t) a->n_pages + n; // hints that nobody follows up
    if (s->ahead_array != a->id || too_long) {
        for (const kvt_page_id& id : s->ahead) { page_of(s, id).wanted = false; }
        s->ahead.clear();
        s->ahead_turn += s->ahead_array != a->id ? 1 : 0;
        s->ahead_array = a->id;
    }
    for (size_t i = n; i-- > 0;) {
        if (pages[i] >= a->n_pages) { continue; }
        page_entry& p = a->pages[pages[i]];
        if (p.place != PLACE_DISK) { continue; }
        if (!p.f.data) {
            p.wanted = true;
            s->ahead.push_front({ a->id, pages[i] });
        } else if (p.io == IO_NONE && p.pins == 0) { // still there from an earlier use: keep it
            kvt_transit_set(s->transit, p.f.index, TRANSIT_READY);
            s->transit.frames[p.f.index].clock = s->clock;
            s->transit.frames[p.f.index].turn = s->ahead_turn;
        }
    }
    store_pump_ahead(s);
}
