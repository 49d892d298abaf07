// Frames for pages read from disk: a regular one while there is room on the host, else one of the transit frames, which
// the page leaves again after use. Read-ahead fills transit frames in the order of the hints.

#include "store-internal.h"

// The page's read is over or called off: its frame is free for others.
void store_free_transit(kvt_store * s, page_entry & p) {
    kvt_transit_set(s->transit, p.f.index, TRANSIT_FREE);
    p.f          = frame();
    p.read_ahead = false;
}

// Frees one transit frame that nobody uses: one that was used; then what was read ahead in an earlier step and never
// used. Someone who must read now also takes what was read ahead for later, last needed first. False: all are in use.
static bool recycle(kvt_store * s, bool must) {
    transit_frame * used = nullptr;
    transit_frame * stale = nullptr;
    transit_frame * later = nullptr;
    for (transit_frame & f : s->transit.frames) {
        if (f.state == TRANSIT_USED) {
            used = !used || f.seq < used->seq ? &f : used;
        } else if (f.state == TRANSIT_READY && f.clock + 2 <= s->clock) {
            stale = !stale || f.seq < stale->seq ? &f : stale;
        } else if (f.state == TRANSIT_READY || (f.state == TRANSIT_BUSY && page_of(s, f.owner).io == IO_QUEUED)) {
            later = !later || f.seq > later->seq ? &f : later;
        }
    }
    transit_frame * f = used ? used : stale ? stale : must ? later : nullptr;
    if (!f) {
        return false;
    }
    page_entry & p = page_of(s, f->owner);
    p.io = IO_NONE; // it was IO_NONE or IO_QUEUED: the queue skips it
    store_free_transit(s, p);
    return true;
}

static bool any_busy(const kvt_store * s) {
    for (const transit_frame & f : s->transit.frames) {
        if (f.state == TRANSIT_BUSY) {
            return true;
        }
    }
    return false;
}

int store_frame_for_read(kvt_store * s, kvt_array * a, uint32_t page, bool must) {
    page_entry & p = a->pages[page];
    const kvt_page_id id = { a->id, page };
    const size_t stride = frame_stride(*a->layouts[p.slot_layout]);
    if (kvt_slab_alloc(s->slabs, kvt_slab_class(s->slabs, stride), id, &p.f) == KVT_ERR_OK) {
        store_note_peak(s);
        return KVT_ERR_OK;
    }
    int r;
    while ((r = kvt_transit_alloc(s->transit, stride, id, &p.f)) != KVT_ERR_OK) {
        if (!recycle(s, must)) {
            if (must && !any_busy(s)) { // waiting would not help
                return store_fail(s, KVT_ERR_NOMEM, "no memory for " + store_page_name(a, page) + " to be read from the disk tier");
            }
            return KVT_ERR_BUDGET;
        }
    }
    s->transit.frames[p.f.index].clock = s->clock;
    store_note_peak(s);
    return KVT_ERR_OK;
}

void store_pump_ahead(kvt_store * s) {
    while (!s->ahead.empty()) {
        const kvt_page_id id = s->ahead.front();
        kvt_array * a = s->arrays[id.array];
        page_entry & p = a->pages[id.page];
        if (p.wanted && p.place == PLACE_DISK && p.io == IO_NONE && !p.f.data) {
            if (store_frame_for_read(s, a, id.page, false) != KVT_ERR_OK) {
                return;
            }
            p.io         = IO_QUEUED;
            p.read_ahead = true;
            s->stats.n_prefetched++;
            store_queue_read(s, id);
        }
        p.wanted = false;
        s->ahead.pop_front();
    }
}
