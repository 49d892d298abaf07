#include "slab.h"

#include "../include/kvtier-errors.h"

#include <sys/mman.h>

#include <algorithm>

static const size_t SYS_PAGE = 4096;
static const size_t SLAB_MAX = (size_t) 2 << 20;
static const uint64_t SLABS_PER_BUDGET = 32;

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static uint8_t * map_plain(size_t n_bytes) {
    void * p = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? nullptr : (uint8_t *) p;
}

// A full-size slab is aligned to its size, so that the kernel can back it with one huge page: attention reads pages in
// an order that the small TLB does not like.
static uint8_t * map_slab(size_t n_bytes) {
    if (n_bytes != SLAB_MAX) { return map_plain(n_bytes); }
    uint8_t * p = map_plain(2 * SLAB_MAX);
    if (!p) { return map_plain(n_bytes); }
    uint8_t * at = (uint8_t *) round_up((size_t) p, SLAB_MAX);
    if (at > p) { munmap(p, (size_t) (at - p)); }
    const size_t tail = (size_t) (p + 2 * SLAB_MAX - (at + SLAB_MAX));
    if (tail > 0) { munmap(at + SLAB_MAX, tail); }
#ifdef MADV_HUGEPAGE
    madvise(at, SLAB_MAX, MADV_HUGEPAGE);
#endif
    return at;
}

// --- slabs -------------------------------------------------------------------------------------------------------

size_t kvt_slab_bytes(const slab_pool& pool, size_t stride) {
    const uint64_t want = std::min<uint64_t>(pool.budget_bytes / SLABS_PER_BUDGET, SLAB_MAX);
    if (want >= SLAB_MAX && stride <= SLAB_MAX) { return SLAB_MAX; }
    return round_up(std::max<size_t>((size_t) want / stride, 1) * stride, SYS_PAGE);
}

uint32_t kvt_slab_class(slab_pool& pool, size_t stride) {
    for (size_t i = 0; i < pool.classes.size(); i++) {
        if (pool.classes[i].stride == stride) { return (uint32_t) i; }
    }
    slab_class c;
    c.stride = stride;
    c.slab_bytes = kvt_slab_bytes(pool, stride);
    c.n_frames = (uint32_t) (c.slab_bytes / stride);
    pool.classes.push_back(c);
    return (uint32_t) pool.classes.size() - 1;
}

static int grow(slab_pool& pool, uint32_t cls) {
    slab_class& c = pool.classes[cls];
    if (pool.held_bytes + c.slab_bytes > pool.limit_bytes) { return KVT_ERR_BUDGET; }
    // what may throw comes first, and freeing needs no memory later
    if (pool.free_ids.empty()) {
        pool.slabs.emplace_back();
        pool.free_ids.reserve(pool.slabs.capacity());
        pool.free_ids.push_back((uint32_t) pool.slabs.size() - 1);
    }
    c.partial.reserve(pool.slabs.capacity());
    const uint32_t id = pool.free_ids.back();
    slab& s = pool.slabs[id];
    s.owner.assign(c.n_frames, { UINT32_MAX, UINT32_MAX });
    s.free_frames.clear();
    for (uint32_t i = c.n_frames; i-- > 0;) { s.free_frames.push_back(i); }
    s.base = map_slab(c.slab_bytes);
    if (!s.base) { return KVT_ERR_NOMEM; }
    pool.free_ids.pop_back();
    s.n_bytes = c.slab_bytes;
    s.cls = cls;
    s.n_used = 0;
    c.partial.push_back(id);
    pool.held_bytes += c.slab_bytes;
    return KVT_ERR_OK;
}

static void take(slab_pool& pool, uint32_t cls, struct kvt_page_id owner, frame * out) {
    slab_class& c = pool.classes[cls];
    const uint32_t id = c.partial.back();
    slab& s = pool.slabs[id];
    const uint32_t i = s.free_frames.back();
    s.free_frames.pop_back();
    s.n_used++;
    s.owner[i] = owner;
    if (s.free_frames.empty()) { c.partial.pop_back(); }
    out->data = s.base + (size_t) i * c.stride;
    out->slab = id;
    out->index = i;
}

int kvt_slab_alloc_own(slab_pool& pool, uint32_t cls, struct kvt_page_id owner, frame * out) {
    const int err = pool.classes[cls].partial.empty() ? grow(pool, cls) : (int) KVT_ERR_OK;
    if (err == KVT_ERR_OK) { take(pool, cls, owner, out); }
    return err;
}

int kvt_slab_alloc(slab_pool& pool, uint32_t cls, struct kvt_page_id owner, frame * out) {
    const int err = kvt_slab_alloc_own(pool, cls, owner, out);
    if (err == KVT_ERR_OK) { return KVT_ERR_OK; }
    // a free frame of a larger class is better than pushing a page out
    uint32_t best = UINT32_MAX;
    for (uint32_t i = 0; i < pool.classes.size(); i++) {
        const slab_class& c = pool.classes[i];
        if (!c.partial.empty() && c.stride >= pool.classes[cls].stride &&
            (best == UINT32_MAX || c.stride < pool.classes[best].stride)) {
            best = i;
        }
    }
    if (best == UINT32_MAX) { return err; }
    take(pool, best, owner, out);
    return KVT_ERR_OK;
}

bool kvt_slab_take_outside(slab_pool& pool, uint32_t from, struct kvt_page_id owner, frame * out) {
    std::vector<uint32_t>& partial = pool.classes[pool.slabs[from].cls].partial;
    for (size_t i = 0; i < partial.size(); i++) {
        if (partial[i] != from) {
            std::swap(partial[i], partial.back()); // take() takes of the last one
            take(pool, pool.slabs[from].cls, owner, out);
            return true;
        }
    }
    return false;
}

void kvt_slab_free(slab_pool& pool, const frame& f) {
    slab& s = pool.slabs[f.slab];
    slab_class& c = pool.classes[s.cls];
    s.owner[f.index] = { UINT32_MAX, UINT32_MAX };
    s.n_used--;
    s.free_frames.push_back(f.index);
    if (s.free_frames.size() == 1) { c.partial.push_back(f.slab); }
    if (s.n_used == 0) {
        c.partial.erase(std::find(c.partial.begin(), c.partial.end(), f.slab));
        munmap(s.base, s.n_bytes);
        pool.held_bytes -= s.n_bytes;
        s.base = nullptr;
        pool.free_ids.push_back(f.slab);
    }
}

void kvt_slab_clear(slab_pool& pool) {
    for (slab& s : pool.slabs) {
        if (s.base) { munmap(s.base, s.n_bytes); }
    }
    pool.slabs.clear();
    pool.classes.clear();
    pool.free_ids.clear();
    pool.held_bytes = 0;
}

size_t kvt_slab_stride(const slab_pool& pool, const frame& f) { return pool.classes[pool.slabs[f.slab].cls].stride; }

// --- transit frames ----------------------------------------------------------------------------------------------

static void transit_unmap(transit_pool& pool, transit_frame& f) {
    munmap(f.base, f.n_bytes);
    pool.held_bytes -= f.n_bytes;
    f.base = nullptr;
    f.n_bytes = 0;
}

static transit_frame * transit_map(transit_pool& pool, size_t n_bytes) {
    transit_frame * entry = nullptr;
    for (transit_frame& f : pool.frames) {
        if (f.state == TRANSIT_FREE && !f.base) {
            entry = &f;
            break;
        }
    }
    if (!entry) {
        pool.frames.emplace_back();
        entry = &pool.frames.back();
    }
    entry->base = map_plain(n_bytes);
    if (!entry->base) { return nullptr; }
    entry->n_bytes = n_bytes;
    pool.held_bytes += n_bytes;
    return entry;
}

size_t kvt_transit_bytes(size_t n_bytes) { return round_up(n_bytes, SYS_PAGE); }

void kvt_transit_trim(transit_pool& pool, uint64_t n_bytes) {
    for (transit_frame& f : pool.frames) {
        if (pool.held_bytes > n_bytes && f.state == TRANSIT_FREE && f.base) { transit_unmap(pool, f); }
    }
}

int kvt_transit_alloc(transit_pool& pool, size_t n_bytes, struct kvt_page_id owner, frame * out) {
    n_bytes = kvt_transit_bytes(n_bytes);
    transit_frame * best = nullptr;
    for (transit_frame& f : pool.frames) {
        if (f.state == TRANSIT_FREE && f.base && f.n_bytes >= n_bytes && (!best || f.n_bytes < best->n_bytes)) {
            best = &f;
        }
    }
    if (!best) {
        kvt_transit_trim(pool, pool.quota_bytes - std::min<uint64_t>(pool.quota_bytes, n_bytes));
        if (pool.held_bytes + n_bytes > pool.quota_bytes) { return KVT_ERR_BUDGET; }
        best = transit_map(pool, n_bytes);
        if (!best) { return KVT_ERR_NOMEM; }
    }
    best->owner = owner;
    out->data = best->base;
    out->slab = KVT_NO_SLAB;
    out->index = (uint32_t) (best - pool.frames.data());
    kvt_transit_set(pool, out->index, TRANSIT_BUSY);
    return KVT_ERR_OK;
}

void kvt_transit_set(transit_pool& pool, uint32_t index, transit_state state) {
    transit_frame& f = pool.frames[index];
    f.state = state;
    f.seq = pool.next_seq++;
}

void kvt_transit_clear(transit_pool& pool) {
    for (transit_frame& f : pool.frames) {
        if (f.base) { transit_unmap(pool, f); }
    }
    pool.frames.clear();
}
