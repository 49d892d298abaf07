#pragma once

// Host memory of pages. Nothing here locks: the store's lock is held by every caller.
//
// Regular frames come from slabs: one mapping holds equal frames of one size class. A slab is at most 2 MiB and at most
// a 32nd of the budget (but at least one frame), so that a slab never breaks a small budget, and goes back to the
// system as soon as it is empty. Transit frames are single mappings with their own quota, so that pages passing through
// can never be starved by pages that stay.

#include "store.h"

#include <vector>

static const uint32_t KVT_NO_SLAB = UINT32_MAX;

struct slab {
    uint8_t * base = nullptr; // NULL: the entry is free
    size_t n_bytes = 0;
    uint32_t cls = 0;
    std::vector<uint32_t> free_frames;
    std::vector<struct kvt_page_id> owner; // of each frame in use
    uint32_t n_used = 0;
};

struct slab_class {
    size_t stride; // bytes of a frame
    size_t slab_bytes;
    uint32_t n_frames;             // of a slab
    std::vector<uint32_t> partial; // slabs with free frames
};

struct frame {
    uint8_t * data = nullptr;
    uint32_t slab = KVT_NO_SLAB; // KVT_NO_SLAB with data: a transit frame
    uint32_t index = 0;
};

struct slab_pool {
    uint64_t budget_bytes = 0; // the whole host budget, from which slab sizes follow
    uint64_t limit_bytes = 0;  // what slabs may take of it: the rest belongs to transit frames
    uint64_t held_bytes = 0;
    std::vector<slab_class> classes;
    std::vector<slab> slabs;
    std::vector<uint32_t> free_ids;
};

size_t kvt_slab_bytes(const slab_pool& pool, size_t stride); // what a slab of such frames takes
uint32_t kvt_slab_class(slab_pool& pool, size_t stride);     // finds or adds
// A frame of at least the class's stride: KVT_ERR_BUDGET when slabs may not grow, KVT_ERR_NOMEM when the system
// refuses.
int kvt_slab_alloc(slab_pool& pool, uint32_t cls, struct kvt_page_id owner, frame * out);
// The same of no other class than its own: a page that shrinks into a larger frame would free nothing.
int kvt_slab_alloc_own(slab_pool& pool, uint32_t cls, struct kvt_page_id owner, frame * out);
// A free frame of the same class in another slab than `slab`; the pool does not grow.
bool kvt_slab_take_outside(slab_pool& pool, uint32_t slab, struct kvt_page_id owner, frame * out);
void kvt_slab_free(slab_pool& pool, const frame& f);
void kvt_slab_clear(slab_pool& pool);
size_t kvt_slab_stride(const slab_pool& pool, const frame& f);

enum transit_state { TRANSIT_FREE, TRANSIT_BUSY, TRANSIT_READY, TRANSIT_USED };

struct transit_frame {
    uint8_t * base = nullptr;
    size_t n_bytes = 0;
    transit_state state =
        TRANSIT_FREE; // BUSY: queued, loading or pinned. READY: read ahead, not used yet. USED: may go
    struct kvt_page_id owner = { 0, 0 };
    uint64_t seq = 0;   // when it entered its state: the oldest goes first
    uint64_t clock = 0; // the store's clock and turn when it was filled
    uint64_t turn = 0;
};

struct transit_pool {
    uint64_t quota_bytes = 0;
    uint64_t held_bytes = 0;
    uint64_t next_seq = 0;
    std::vector<transit_frame> frames; // entries keep their index for life
};

size_t kvt_transit_bytes(size_t n_bytes); // what a frame for so many takes
// A free frame of n_bytes, mapping one if the quota allows; free frames that are too small are given back for it.
int kvt_transit_alloc(transit_pool& pool, size_t n_bytes, struct kvt_page_id owner, frame * out);
void kvt_transit_set(transit_pool& pool, uint32_t index, transit_state state);
void kvt_transit_trim(transit_pool& pool, uint64_t n_bytes); // gives free frames back while more is held
void kvt_transit_clear(transit_pool& pool);
