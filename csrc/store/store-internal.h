#pragma once

// What the files of the store share. One mutex guards everything in kvt_store, its arrays and its pools; it is never
// held over I/O, page copies or callbacks. What keeps others off a page meanwhile is page_entry::io.

#include "disk-file.h"
#include "slab.h"
#include "store.h"

#include "../include/kvtier-errors.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

typedef std::unique_lock<std::mutex> store_lock;

enum page_place : uint8_t { PLACE_ABSENT, PLACE_HOST, PLACE_DISK };

enum page_io : uint8_t {
    IO_NONE,
    IO_QUEUED,  // a read waits in the queue, the frame is there; whoever comes first may do the read or call it off
    IO_READING, // the frame is being filled from the slot
    IO_WRITING, // the frame is being written to the slot: may be read, not changed
    IO_MOVING,  // being zeroed, re-encoded, shown to a callback, or its slot is being freed: hands off
};

// The frame of a page is regular (its slab is set) when it is on the host, and a transit frame when it passes through.
struct page_entry {
    frame f;
    uint64_t last_use = 0;
    uint64_t born = 0;
    uint64_t fail_seq = 0; // kvt_store::fail_seq of its last failed write
    uint32_t pins = 0;
    uint32_t crc = 0;        // of the copy on disk
    uint32_t slot_bytes = 0; // what the slot counts against the disk budget; 0: no slot held
    page_place place = PLACE_ABSENT;
    page_io io = IO_NONE;
    uint8_t layout = 0;      // of the frame
    uint8_t slot_layout = 0; // of the copy on disk
    bool dirty = false;      // on the host: newer than any copy on disk
    bool has_copy = false;   // the slot holds exactly this page
    bool newest = false;     // among the last written pages of its stream
    bool some_lost = false;  // some of its cells are lost: see kvt_array::lost
    bool wanted = false;     // in the read-ahead list and not read since
    bool read_ahead = false; // the frame was filled (or is being filled) by a read-ahead nobody has used yet
};

struct kvt_array {
    kvt_store * store = nullptr;
    uint32_t id = 0;
    kvt_array_params params = {};
    uint32_t n_pages = 0;
    uint32_t pages_per_stream = 0;
    std::vector<page_entry> pages;
    std::vector<std::unique_ptr<kvt_page_layout>>
        layouts;      // [0] as first written, [1] on disk, then those plans ask for
    int64_t base = 0; // of its range in the file
    uint64_t slot_stride = 0;
    std::vector<std::vector<uint32_t>> newest; // per stream, last written first
    std::vector<uint32_t>
        lost; // [n_pages*page_tokens/32] bits of lost cells; empty until a page is dropped, never resized after
};

static const uint8_t LAYOUT_HOST = 0;
static const uint8_t LAYOUT_DISK = 1;

// A read that the system answers from its own cache costs less than to hand it to a worker and wait for its answer, all
// the more where the workers share their processors with spinning compute threads. Reads this fast are left to whoever
// needs the page.
static const double KVT_READ_US_FAST = 40.0;
static const double KVT_READ_US_SLOW = 1000.0;

static const auto KVT_PINS_WAIT = std::chrono::milliseconds(
    1000); // others hold pins only for moments; our own caller might not

struct file_range {
    int64_t base;
    uint64_t n_bytes;
};
struct victim {
    kvt_page_id id;
    uint64_t last_use, clock;
}; // as it was when chosen

struct kvt_store {
    kvt_store_params params = {};
    bool has_disk = false;
    disk_file file;

    std::mutex mutex;
    std::condition_variable changed; // a page's state, a pin or room has changed
    int n_waiters = 0;

    std::condition_variable work;
    std::deque<kvt_page_id> reads, writes;
    std::deque<kvt_page_id> ahead; // pages of ahead_array to read when transit frames come free, in order
    uint32_t ahead_array = UINT32_MAX;
    uint64_t ahead_turn = 0; // counts the changes of ahead_array
    std::vector<std::thread> workers;
    bool stop = false;
    size_t n_reading = 0, n_writing = 0; // n_writing counts queued writes too
    double read_us = KVT_READ_US_SLOW;   // running mean of what one read takes

    slab_pool slabs;
    transit_pool transit;
    std::vector<kvt_array *> arrays; // by id; NULL: removed
    uint64_t clock = 0;
    uint64_t reserved_bytes = 0;                 // of the host budget, taken by what is no page (keys.h)
    int32_t protect_first = 0, protect_last = 0; // what the budget lets be of the parameters
    int64_t file_end = 0;
    std::vector<file_range> free_ranges;
    std::map<int64_t, uint64_t> left_slots; // of free ranges: what could not be freed and still counts, place and bytes

    std::vector<victim> victims; // chosen by the policy, worst first; checked again before use
    size_t victims_stride = 0;
    kvt_evict_policy policy = {};
    kvt_offload_hooks hooks = {};
    size_t n_in_hooks = 0; // calls of hooks under way

    uint64_t fail_seq = 0; // failed writes so far
    int fail_code = 0;     // of the last one
    std::string fail_text;
    int pending_error = 0; // first failed write since the last flush
    std::string pending_text;
    std::string last_error;
    int last_code = 0; // what last_error goes with; 0 once it has been taken

    kvt_store_stats stats = {};
};

static inline uint64_t store_host_held(const kvt_store * s) {
    return s->slabs.held_bytes + s->transit.held_bytes + s->reserved_bytes;
}
static inline page_entry& page_of(kvt_store * s, kvt_page_id id) { return s->arrays[id.array]->pages[id.page]; }
static inline bool is_transit(const page_entry& p) { return p.f.data && p.f.slab == KVT_NO_SLAB; }
static inline size_t frame_stride(const kvt_page_layout& l) { return l.page_bytes + sizeof(slot_trailer); }
static inline int64_t slot_off(const kvt_array * a, uint32_t page) {
    return a->base + (int64_t) (page * a->slot_stride);
}

// No exception crosses the C ABI: what little the store allocates as it works may fail too.
template <typename F> static inline int store_guard(F f) {
    try {
        return f();
    } catch (const std::bad_alloc&) { return KVT_ERR_NOMEM; }
}

// Everything below is called with the lock held; functions that take `lk` may let go of it in between.

// store.cpp
kvt_array * store_array(kvt_store * s, uint32_t id); // NULL and the error's text: removed, or there never was one
int store_fail(kvt_store * s, int code, const std::string& text);
std::string store_page_name(const kvt_array * a, uint32_t page);
void store_wait(kvt_store * s, store_lock& lk);
bool store_wait_until(
    kvt_store * s, store_lock& lk, std::chrono::steady_clock::time_point deadline); // false: it is over
void store_notify(kvt_store * s);
typedef decltype(kvt_offload_hooks::on_leave) kvt_offload_hooks::* hook_slot;
// Calls a hook, if it is set, without the lock. The page is in our hands meanwhile (its io), so it and its array stay.
void store_call_hook(kvt_store * s, store_lock& lk, hook_slot slot, const kvt_array * a, uint32_t page,
    const kvt_page_layout& l, const uint8_t * data, kvt_tier tier = KVT_TIER_DISK);
void store_count_host(kvt_store * s, const kvt_page_layout& l, int sign);
void store_count_disk(kvt_store * s, const kvt_page_layout& l, int sign);
void store_note_peak(kvt_store * s);
kvt_page_info store_page_info(const kvt_array * a, uint32_t page);
int store_layout(kvt_array * a, kvt_format fmt_k, kvt_format fmt_v, uint8_t * out); // finds or adds

// budget.cpp
int store_plan_budget(kvt_store * s, std::string * err);
bool store_is_protected(const kvt_array * a, uint32_t page);
void store_note_write(kvt_array * a, uint32_t page); // it is the newest of its stream now
void store_trim_newest(kvt_array * a);

// io-queue.cpp
int store_start_workers(kvt_store * s);
void store_stop_workers(kvt_store * s, store_lock& lk);
void store_queue_read(kvt_store * s, kvt_page_id id);                                    // the page is IO_QUEUED
int store_read_page(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page);        // the page is IO_READING
int store_start_write(kvt_store * s, kvt_array * a, uint32_t page, uint8_t slot_layout); // DISK_FULL if no slot
void store_release_slot(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page);    // the page is IO_MOVING
void store_unqueue(kvt_store * s, uint32_t array); // forgets all requests of an array

// transit.cpp
int store_frame_for_read(kvt_store * s, kvt_array * a, uint32_t page, bool must); // BUDGET: none free right now
void store_free_transit(kvt_store * s, page_entry& p);
void store_trim_transit(
    kvt_store * s, uint64_t n_bytes); // frames beyond that go back to the system, but for those in use
void store_pump_ahead(kvt_store * s);
void store_add_ahead(kvt_store * s, kvt_array * a, const uint32_t * pages, size_t n);

// array.cpp
int store_recall(
    kvt_store * s, store_lock& lk, kvt_page_id id);   // from disk to the host, to stay. INVALID: the array is gone
void store_cancel_read(kvt_store * s, page_entry& p); // the page is IO_QUEUED

// lost.cpp
int store_lose(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page); // not pinned, IO_NONE, with content
void store_find_lost(kvt_array * a, uint32_t page);                          // it has no content any more, nor had any
static inline const uint32_t * store_lost_of(const kvt_array * a, uint32_t page) {
    return a->pages[page].some_lost ? a->lost.data() + (size_t) page * (size_t) (a->params.geo.page_tokens / KVT_SUB)
                                    : nullptr;
}

// evict.cpp
int store_frame_alloc(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page, uint8_t layout, frame * out);
int store_make_room(kvt_store * s, store_lock& lk, size_t stride, uint64_t seq0);
void store_free_host(kvt_store * s, kvt_array * a, uint32_t page);
void store_drop_host(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page); // clean, not pinned, IO_NONE

// compact.cpp
size_t store_compact(kvt_store * s, store_lock& lk); // slabs that were given back

// evict-lru.cpp
const kvt_evict_policy * store_lru();
