#pragma once

// The page store: which page is on which tier, its bytes there, budgets, moves and I/O.
// Knows nothing of ggml and nothing of attention.
//
// Arrays. One array is the cells of one layer (all streams), cut into pages 0..n_pages-1. A page is in one place:
//   absent  never written (reads as zeros), takes no bytes
//   gone    absent too, but it had content, which was dropped for good: see "Lost cells"
//   host    in a slab, readable without I/O
//   disk    in the array's fixed range of the store's file: offset = array base + page * slot bytes (sparse file)
//   both    host with a valid copy on disk (clean): its host frame can be dropped without a write
//
// Budgets are hard. Host bytes are counted as slab bytes held (not only as bytes in use), disk bytes as slots in use.
// The host budget includes `n_transit` frames that reads of disk pages pass through when the policy does not admit the
// page: an exact scan over a cache larger than the budget must not push out what is resident (every page is read once
// per step, so admission would evict exactly the page that is needed next).
//
// Lost cells. A page's content can be dropped for good: by a move to KVT_TIER_NONE, or by the eviction of a store that
// is opened `lossy` (which has no disk tier, and never lacks room while some page may go). All cells of such a page are
// lost: a reader must not take the zeros that it finds for what was there. A gone page that is written again is zeroed,
// and its cells are lost still, each until its writer says otherwise (kvt_array_set_lost).
//
// Threads. All functions may be called from any thread, except open/close and array add/remove, which the owner
// serialises. Callbacks run on the thread that caused the move, without the store's lock held.
//
// Errors. Functions return 0 or a negative kvt_error; out-parameters change only on success. The text of the last
// error of a store (which page, which tier, errno's text, what to do) is in kvt_store_last_error.

#include "format.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_store;
struct kvt_array;

enum kvt_tier {
    KVT_TIER_NONE = 0,
    KVT_TIER_DEVICE = 1,
    KVT_TIER_HOST = 2,
    KVT_TIER_DISK = 3,
    KVT_TIER_REMOTE = 4,
    KVT_TIER_COUNT
};

struct kvt_page_id {
    uint32_t array;
    uint32_t page;
}; // array: the id given at array_add

// What a policy sees of a page. No bytes, no ggml.
struct kvt_page_info {
    struct kvt_page_id id;
    int32_t layer;
    uint32_t cell_first; // first cell within its stream
    uint32_t n_bytes;    // on its tier
    uint64_t last_use;   // the store's clock at the last acquire (ticks once per step, see kvt_store_tick)
    uint64_t born;       // clock at the first write
    uint8_t tier, dirty, is_protected, pinned;
    uint8_t fmt_k, fmt_v; // on its tier
    uint8_t some_lost;    // some of its cells are lost; all of them, and the page gone, if tier is NONE
};

// The built-in order, which others may fall back to: whether a leaves before b.
int kvt_lru_before(const struct kvt_page_info * a, const struct kvt_page_info * b);

// Chooses which host pages leave. Called with the store's lock held: must not call the store, must not block.
// `pages` holds the candidates (resident, not pinned, not protected). Writes up to `n_max` indices into `victims`,
// worst first, and returns how many; fewer than needed (or nonsense) makes the store fall back to its own LRU.
struct kvt_evict_policy {
    uint32_t version; // 1
    const char * name;
    void * ctx;
    size_t (*choose)(void * ctx, const struct kvt_page_info * pages, size_t n_pages, size_t bytes_needed,
        uint32_t * victims, size_t n_max);
};

struct kvt_move {
    struct kvt_page_id id;
    uint8_t to_tier;
    uint8_t fmt_k, fmt_v;
}; // fmt 255: the tier's own. NONE: dropped

// Offload callbacks: a page is about to leave the host tier (on_leave, bytes as they are in the host frame; to_tier
// NONE: it will be gone), or has come back (on_return). `data` is valid only during the call.
struct kvt_offload_hooks {
    void * ctx;
    void (*on_leave)(void * ctx, struct kvt_page_id id, int32_t layer, int to_tier, const void * data, size_t n_bytes,
        int fmt_k, int fmt_v);
    void (*on_return)(void * ctx, struct kvt_page_id id, int32_t layer, int from_tier, const void * data,
        size_t n_bytes, int fmt_k, int fmt_v);
};

// The file operations of the disk tier, so that tests can inject faults. All return 0 or a negative kvt_error.
struct kvt_disk_ops {
    void * ctx;
    int (*read)(void * ctx, int fd, void * buf, size_t n_bytes, int64_t off_bytes, int * sys_errno);
    int (*write)(void * ctx, int fd, const void * buf, size_t n_bytes, int64_t off_bytes, int * sys_errno);
    int (*punch)(
        void * ctx, int fd, int64_t off_bytes, size_t n_bytes, int * sys_errno); // (optional) frees a slot's blocks
};

struct kvt_store_params {
    uint64_t host_bytes;                  // budget; UINT64_MAX: unlimited
    uint64_t disk_bytes;                  // budget; 0: no disk tier
    const char * dir;                     // directory of the disk tier; NULL or "": no disk tier. Must exist
    int32_t page_tokens;                  // multiple of KVT_SUB
    int32_t n_io_threads;                 // workers for reads and writes (0: 2)
    int32_t n_transit;                    // frames for pages read but not admitted (0: the store chooses)
    int32_t n_protect_first;              // first pages of each stream that never leave the host
    int32_t n_protect_last;               // newest pages of each stream that never leave the host
    int32_t lossy;                        // 1: what has to leave the host is dropped. Not with a disk tier
    const struct kvt_disk_ops * disk_ops; // (optional) NULL: pread/pwrite/fallocate
    // (optional) a page has just become gone. Called with the store's lock held: must not call the store, must not
    // block
    void (*on_gone)(void * ctx, struct kvt_page_id id);
    void * on_gone_ctx;
};
void kvt_store_params_default(struct kvt_store_params * p);

// Opens the store. With a disk tier it creates a file "kvtier-<pid>-<random>.pages" in dir, exclusively, holds an
// advisory lock on it, and first removes files of that pattern whose lock nobody holds (left by a killed process).
// The file is unlinked at close. Errors: CONFIG, DIR (missing, not a directory, not writable: names dir and errno),
// NOMEM.
int kvt_store_open(const struct kvt_store_params * p, struct kvt_store ** out, char * err, size_t err_size);
void kvt_store_close(struct kvt_store * s); // waits for I/O, frees everything, unlinks the file
void kvt_store_last_error(struct kvt_store * s, char * buf, size_t size);
// The same for a caller that has just got `code` from the store, or from something else that may have asked the store:
// "" if the store's last error was another one, or its text has been taken or cleared since.
void kvt_store_take_error(struct kvt_store * s, int code, char * buf, size_t size);
void kvt_store_clear_error(struct kvt_store * s);
// Blocks until no call of the old hooks is under way, so that what they use may go afterwards. From inside a hook it
// does not wait: other threads may then still be in the old ones. Moves that happen during the change may go
// unreported.
void kvt_store_set_hooks(struct kvt_store * s, const struct kvt_offload_hooks * hooks); // NULL: none
int kvt_store_in_hook(const struct kvt_store * s); // whether this thread is inside a hook of this store
void kvt_store_set_policy(struct kvt_store * s, const struct kvt_evict_policy * policy); // NULL: the built-in LRU
void kvt_store_tick(struct kvt_store * s); // one decode step or micro-batch has passed: the clock of last_use

// Takes bytes out of the host budget (negative: gives them back) for memory that is no page: keys that stay, digests,
// summaries. BUDGET: the arrays' least pages would no longer fit; nothing is taken then.
int kvt_store_reserve(struct kvt_store * s, int64_t n_bytes);

struct kvt_array_params {
    struct kvt_geometry geo; // geo.page_tokens is the store's
    int32_t layer;
    uint32_t n_streams;
    uint32_t
        cells_per_stream; // pages of a stream: ceil(cells_per_stream / page_tokens); page = stream*pages_per_stream + i
    enum kvt_format fmt_k, fmt_v;           // format of this array's pages when first written
    enum kvt_format disk_fmt_k, disk_fmt_v; // format of this array's pages on the disk tier
};
// The least host budget for n such arrays beside so many reserved bytes; 0: their formats do not go together.
uint64_t kvt_store_least_host(
    struct kvt_store * s, const struct kvt_array_params * p, size_t n_arrays, uint64_t reserved_bytes);
// Errors: BUDGET if the budgets cannot hold the protected pages plus one, DISK_FULL, NOMEM, INVALID.
int kvt_store_array_add(struct kvt_store * s, const struct kvt_array_params * p, struct kvt_array ** out);
void kvt_store_array_remove(struct kvt_array * a); // no page may be pinned
uint32_t kvt_array_id(const struct kvt_array * a);
uint32_t kvt_array_n_pages(const struct kvt_array * a);

// A pinned page. `data` is NULL for an absent page (zeros). Valid until released.
struct kvt_page_ref {
    uint8_t * data;
    const struct kvt_page_layout * layout; // formats of this copy; owned by the array
    uint32_t page;
    uint32_t frame;        // the store's own
    const uint32_t * lost; // [page_tokens/32] bit t: cell t of these 32 is lost. NULL: no cell of the page is
};

enum kvt_access {
    KVT_READ = 0,  // absent: data == NULL. On disk: blocks for the read
    KVT_WRITE = 1, // absent: a zeroed frame. On disk: read back and admitted. Marks the page dirty
    KVT_RESET = 2, // as WRITE, but the old content is not needed: no read
};
int kvt_array_acquire(struct kvt_array * a, uint32_t page, enum kvt_access access, struct kvt_page_ref * out);
void kvt_array_release(struct kvt_array * a, const struct kvt_page_ref * ref);

// Pins, under one lock, every page of `pages` that is resident or absent. refs[i].page is always set; out_missing gets
// the positions (indices into pages) of those on disk, in file order; returns 0. READ access only. Touches last_use.
int kvt_array_acquire_resident(struct kvt_array * a, const uint32_t * pages, size_t n, struct kvt_page_ref * refs,
    uint32_t * out_missing, size_t * out_n_missing);
// out[i] = 1 where reading pages[i] needs no I/O (resident or absent), else 0. A hint: pages may move right after.
int kvt_array_is_ready(struct kvt_array * a, const uint32_t * pages, size_t n, uint8_t * out);
void kvt_array_release_many(
    struct kvt_array * a, const struct kvt_page_ref * refs, size_t n); // skips refs with data == NULL

// A hint that these pages will be read soon, in this order. Starts as many reads as there are free transit frames and
// returns at once; a later acquire finds them done or under way. Never an error.
void kvt_array_prefetch(struct kvt_array * a, const uint32_t * pages, size_t n);

int kvt_array_discard(struct kvt_array * a, uint32_t first,
    uint32_t n); // become absent; waits for their I/O. INVALID if one stays pinned
int kvt_array_info(struct kvt_array * a, uint32_t page, struct kvt_page_info * out);
int kvt_array_infos(struct kvt_array * a, struct kvt_page_info * out); // of all pages: [n_pages]
// Cells of one page, from `cell` (within the page) on, were written, or are copies of lost ones.
int kvt_array_set_lost(struct kvt_array * a, uint32_t page, int32_t cell, int32_t n, int lost);
// Another host budget. Pages leave at once if they must. BUDGET: it cannot hold the least that arrays need; then it is
// as before.
int kvt_store_set_host_budget(struct kvt_store * s, uint64_t n_bytes);
// Moves pages out of sparsely filled slabs as far as others have room, so that empty ones go back to the system.
int kvt_store_compact(struct kvt_store * s);
// A policy's plan. Each move is tried; the count of those done is returned in n_done. Returns the first error, or 0.
int kvt_store_apply(struct kvt_store * s, const struct kvt_move * moves, size_t n, size_t * n_done);
int kvt_store_flush(struct kvt_store * s); // waits until no I/O is under way; first pending error

struct kvt_tier_stats {
    uint64_t budget_bytes, used_bytes, held_bytes, n_pages, bytes_by_format[KVT_FORMAT_COUNT];
};
struct kvt_store_stats {
    struct kvt_tier_stats tier[KVT_TIER_COUNT];
    uint64_t n_hits,
        n_misses; // acquires for reading that found the page on host / on disk, where read-ahead may have it already
    uint64_t n_prefetched, n_prefetch_used;
    uint64_t n_evicted, n_recalled; // host to disk, disk to host (admitted)
    uint64_t disk_read_bytes, disk_write_bytes, disk_reads, disk_writes;
    uint64_t stall_us; // time that acquires waited for I/O
    uint64_t peak_host_bytes;
    uint64_t n_gone;         // pages dropped so far; tier[NONE].n_pages: those that are gone now
    uint64_t reserved_bytes; // see kvt_store_reserve; part of what the host tier holds
};
void kvt_store_get_stats(struct kvt_store * s, struct kvt_store_stats * out);

#ifdef __cplusplus
}
#endif
