// Moves that a policy asks for. They name their pages by id, so an array may be removed while a move waits: no pointer
// to an array or a page outlives a wait. While a page is in our hands (its io) its array stays.

#include "store-internal.h"

static int refuse(kvt_array * a, uint32_t page, int code, const char * why) {
    return store_fail(a->store, code, store_page_name(a, page) + " cannot be moved: " + why);
}

static int wanted_layout(kvt_array * a, const kvt_move& m, uint8_t standard, uint8_t * out) {
    *out = standard;
    if (m.fmt_k == 255 && m.fmt_v == 255) { return KVT_ERR_OK; }
    const kvt_page_layout& l = *a->layouts[standard];
    const kvt_format k = m.fmt_k == 255 ? l.fmt_k : (kvt_format) m.fmt_k;
    const kvt_format v = m.fmt_v == 255 ? l.fmt_v : (kvt_format) m.fmt_v;
    if (store_layout(a, k, v, out) != KVT_ERR_OK) {
        return refuse(a, m.id.page, KVT_ERR_UNSUPPORTED, "its heads cannot be stored in the format asked for");
    }
    return KVT_ERR_OK;
}

// Returns the page's array once no I/O of the page is under way; NULL: it is gone.
static kvt_array * wait_for_io(kvt_store * s, store_lock& lk, kvt_page_id id) {
    kvt_array * a;
    while ((a = store_array(s, id.array)) && a->pages[id.page].io != IO_NONE && a->pages[id.page].io != IO_QUEUED) {
        store_wait(s, lk);
    }
    return a;
}

// --- to disk -----------------------------------------------------------------------------------------------------

static int may_leave_now(kvt_array * a, uint32_t page) {
    const page_entry& p = a->pages[page];
    if (p.pins > 0) { return refuse(a, page, KVT_ERR_BUSY, "it is in use"); }
    if (store_is_protected(a, page)) {
        return refuse(a, page, KVT_ERR_INVALID, "it is one of the protected first or newest pages");
    }
    return KVT_ERR_OK;
}

// The write is started here and waited for in finish_leave, so that the writes of a plan overlap.
static int start_leave(kvt_store * s, store_lock& lk, const kvt_move& m) {
    kvt_array * a = wait_for_io(s, lk, m.id);
    if (!a) { return KVT_ERR_INVALID; }
    const page_entry& p = a->pages[m.id.page];
    if (p.place != PLACE_HOST) { return KVT_ERR_OK; }
    if (!s->has_disk) { return refuse(a, m.id.page, KVT_ERR_UNSUPPORTED, "the store has no disk tier"); }
    uint8_t layout = 0;
    int r = may_leave_now(a, m.id.page);
    if (r == KVT_ERR_OK) { r = wanted_layout(a, m, LAYOUT_DISK, &layout); }
    if (r != KVT_ERR_OK) { return r; }
    if (kvt_slot_bytes(a->layouts[layout]->page_bytes) > a->slot_stride) {
        return refuse(a, m.id.page, KVT_ERR_UNSUPPORTED, "the format asked for is larger than a slot of this layer");
    }
    const bool any = m.fmt_k == 255 && m.fmt_v == 255; // a page that has a copy keeps the format of the copy
    if (p.has_copy && !p.dirty && (any || p.slot_layout == layout)) { return KVT_ERR_OK; }
    return store_start_write(s, a, m.id.page, layout);
}

static int finish_leave(kvt_store * s, store_lock& lk, const kvt_move& m) {
    kvt_array * a = wait_for_io(s, lk, m.id);
    if (!a) { return KVT_ERR_INVALID; }
    const uint32_t page = m.id.page;
    const page_entry& p = a->pages[page];
    if (p.place == PLACE_DISK) { return KVT_ERR_OK; }
    if (p.place == PLACE_ABSENT) { return refuse(a, page, KVT_ERR_INVALID, "it has no content"); }
    const int r = may_leave_now(a, page);
    if (r != KVT_ERR_OK) { return r; }
    if (p.dirty || !p.has_copy) {
        return p.fail_seq > 0 ? store_fail(s, s->fail_code, s->fail_text)
                              : refuse(a, page, KVT_ERR_INVALID, "it was written to meanwhile");
    }
    store_drop_host(s, lk, a, page);
    return KVT_ERR_OK;
}

// --- to nowhere --------------------------------------------------------------------------------------------------

static int lose_now(kvt_store * s, store_lock& lk, const kvt_move& m) {
    kvt_array * a = wait_for_io(s, lk, m.id);
    if (!a) { return KVT_ERR_INVALID; }
    const uint32_t page = m.id.page;
    page_entry& p = a->pages[page];
    if (p.place == PLACE_ABSENT) {
        return p.some_lost ? (int) KVT_ERR_OK : refuse(a, page, KVT_ERR_INVALID, "it has no content");
    }
    const int r = may_leave_now(a, page);
    if (r != KVT_ERR_OK) { return r; }
    if (p.io == IO_QUEUED) { store_cancel_read(s, p); }
    return store_lose(s, lk, a, page);
}

// --- to the host -------------------------------------------------------------------------------------------------

// In a lossy store no page is dropped so that another may change its format: pages move together instead, which gives
// room.
static int frame_for_format(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page, uint8_t layout, frame * f) {
    if (!s->params.lossy) { return store_frame_alloc(s, lk, a, page, layout, f); }
    const uint32_t cls = kvt_slab_class(s->slabs, frame_stride(*a->layouts[layout]));
    int r;
    do {
        r = kvt_slab_alloc_own(s->slabs, cls, { a->id, page }, f);
    } while (r == KVT_ERR_BUDGET && store_compact(s, lk) > 0);
    store_note_peak(s);
    return r == KVT_ERR_BUDGET ? refuse(a, page, r, "there is no room to change its format") : r;
}

// The page is on the host, not pinned, IO_NONE: it changes its format there and is dirty afterwards.
static int reencode(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page, uint8_t layout) {
    page_entry& p = a->pages[page];
    frame f;
    p.io = IO_MOVING;
    const int r = store_guard([&] { return frame_for_format(s, lk, a, page, layout, &f); });
    if (r == KVT_ERR_OK) {
        const kvt_page_layout& from = *a->layouts[p.layout];
        const kvt_page_layout& to = *a->layouts[layout];
        const uint8_t * src = p.f.data;
        lk.unlock();
        kvt_page_transcode(&from, src, &to, f.data);
        lk.lock();
        store_release_slot(s, lk, a, page);
        store_free_host(s, a, page);
        p.f = f;
        p.layout = layout;
        p.dirty = true;
        store_count_host(s, to, 1);
    }
    p.io = IO_NONE;
    store_notify(s);
    return r;
}

static int come_back(kvt_store * s, store_lock& lk, const kvt_move& m) {
    const int recalled = store_recall(s, lk, m.id);
    if (recalled != KVT_ERR_OK || (m.fmt_k == 255 && m.fmt_v == 255)) { return recalled; }
    kvt_array * a = wait_for_io(s, lk, m.id);
    if (!a) { return KVT_ERR_INVALID; }
    const page_entry& p = a->pages[m.id.page];
    uint8_t layout = 0;
    const int r = wanted_layout(a, m, p.layout, &layout);
    if (r != KVT_ERR_OK || layout == p.layout) { return r; }
    if (p.pins > 0 || p.place != PLACE_HOST) { return refuse(a, m.id.page, KVT_ERR_BUSY, "it is in use"); }
    return reencode(s, lk, a, m.id.page, layout);
}

// --- the plan ----------------------------------------------------------------------------------------------------

static int check_move(kvt_store * s, const kvt_move& m) {
    kvt_array * a = store_array(s, m.id.array);
    if (!a) { return KVT_ERR_INVALID; }
    if (m.id.page >= a->n_pages) {
        return store_fail(s, KVT_ERR_INVALID,
            "there is no page " + std::to_string(m.id.page) + " of array " + std::to_string(m.id.array));
    }
    if (m.to_tier != KVT_TIER_HOST && m.to_tier != KVT_TIER_DISK && m.to_tier != KVT_TIER_NONE) {
        return refuse(a, m.id.page, KVT_ERR_UNSUPPORTED, "only the host and the disk tier take pages");
    }
    return KVT_ERR_OK;
}

static int apply(kvt_store * s, store_lock& lk, const kvt_move * moves, size_t n, size_t * n_done) {
    int first = KVT_ERR_OK;
    std::string text;
    size_t done = 0;
    const auto note = [&](int r) {
        if (r != KVT_ERR_OK && first == KVT_ERR_OK) {
            first = r;
            text = s->last_error;
        }
        return r == KVT_ERR_OK;
    };
    std::vector<bool> tried(n, false);
    for (size_t i = 0; i < n; i++) {
        const bool ok = note(check_move(s, moves[i]));
        tried[i] = ok && (moves[i].to_tier != KVT_TIER_DISK || note(start_leave(s, lk, moves[i])));
    }
    // what leaves goes first: it makes room for what comes
    typedef int (*move_fn)(kvt_store * s, store_lock& lk, const kvt_move& m);
    static const struct {
        uint8_t tier;
        move_fn move;
    } order[] = { { KVT_TIER_NONE, lose_now }, { KVT_TIER_DISK, finish_leave }, { KVT_TIER_HOST, come_back } };
    for (const auto& o : order) {
        for (size_t i = 0; i < n; i++) {
            if (!tried[i] || moves[i].to_tier != o.tier) { continue; }
            done += note(o.move(s, lk, moves[i])) ? 1 : 0;
        }
    }
    if (first != KVT_ERR_OK) { store_fail(s, first, text); }
    *n_done = done;
    return first;
}

int kvt_store_apply(struct kvt_store * s, const struct kvt_move * moves, size_t n, size_t * n_done) {
    if (!s || (n > 0 && !moves)) { return KVT_ERR_INVALID; }
    size_t done = 0;
    store_lock lk(s->mutex);
    const int r = store_guard([&] { return apply(s, lk, moves, n, &done); });
    if (n_done) { *n_done = done; }
    return r;
}
