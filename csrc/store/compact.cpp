// Compaction: pages of sparsely filled slabs move to free frames of others, so that whole slabs go back to the system.

#include "store-internal.h"

#include <cstring>

static bool may_move(const kvt_store * s, kvt_page_id id) {
    const page_entry& p = s->arrays[id.array]->pages[id.page];
    return p.place == PLACE_HOST && p.pins == 0 && p.io == IO_NONE;
}

static size_t free_frames(const slab_pool& pool, const slab_class& c) {
    size_t n = 0;
    for (const uint32_t id : c.partial) { n += pool.slabs[id].free_frames.size(); }
    return n;
}

// The slab of a class with the fewest pages, if all may move and the other slabs of the class have room for them.
static bool emptiest(const kvt_store * s, const slab_class& c, uint32_t * out) {
    const slab_pool& pool = s->slabs;
    const size_t n_free = free_frames(pool, c);
    bool found = false;
    for (const uint32_t id : c.partial) {
        const slab& b = pool.slabs[id];
        bool ok = b.n_used <= n_free - b.free_frames.size() && (!found || b.n_used < pool.slabs[*out].n_used);
        for (size_t i = 0; ok && i < b.owner.size(); i++) {
            ok = b.owner[i].page == UINT32_MAX || may_move(s, b.owner[i]);
        }
        if (ok) {
            *out = id;
            found = true;
        }
    }
    return found;
}

// The page takes a free frame of another slab. False: somebody has it, or there is no such frame any more.
static bool move_page(kvt_store * s, store_lock& lk, kvt_page_id id, uint32_t from) {
    if (!s->arrays[id.array] || !may_move(s, id)) { return false; }
    kvt_array * a = s->arrays[id.array];
    page_entry& p = a->pages[id.page];
    frame f;
    if (p.f.slab != from || !kvt_slab_take_outside(s->slabs, from, id, &f)) { return false; }
    const uint8_t * src = p.f.data;
    const size_t n_bytes = a->layouts[p.layout]->page_bytes;
    p.io = IO_MOVING;
    lk.unlock();
    memcpy(f.data, src, n_bytes);
    lk.lock();
    kvt_slab_free(s->slabs, p.f);
    p.f = f;
    p.io = IO_NONE;
    store_notify(s);
    return true;
}

// One slab of the class is emptied. False: none can be.
static bool empty_one(kvt_store * s, store_lock& lk, size_t cls) {
    uint32_t from = 0;
    if (!emptiest(s, s->slabs.classes[cls], &from)) { return false; }
    const std::vector<kvt_page_id> owners = s->slabs.slabs[from].owner;
    for (const kvt_page_id& id : owners) {
        if (id.page != UINT32_MAX && !move_page(s, lk, id, from)) { return false; }
    }
    return true;
}

size_t store_compact(kvt_store * s, store_lock& lk) {
    size_t n = 0;
    for (size_t cls = 0; cls < s->slabs.classes.size(); cls++) {
        while (empty_one(s, lk, cls)) { n++; }
    }
    return n;
}

int kvt_store_compact(struct kvt_store * s) {
    if (!s) { return KVT_ERR_INVALID; }
    store_lock lk(s->mutex);
    return store_guard([&] {
        store_compact(s, lk);
        return KVT_ERR_OK;
    });
}
