#pragma once

// The public C ABI of the kvtier plug-in: what Python (and any other host program) may call. The library is at the same
// time a ggml backend (it exports ggml_backend_init), so a program loads it once through ggml_backend_load or
// GGML_BACKEND_PATH and finds these symbols in the same image.
//
// This header is parsed by cffi as it is: plain C declarations, no macros that matter, one declaration at a time.
// Lines between the markers CFFI-BEGIN and CFFI-END are what Python reads.

#include <stddef.h>
#include <stdint.h>

#include "kvtier-errors.h"

#if defined(_WIN32)
#    define KVT_API __declspec(dllexport)
#else
#    define KVT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// A domain is one set of tiers with its budgets and its store: all KV buffers that a llama.cpp context allocates while
// the domain is bound belong to it. A program that never binds one gets a default domain from KVTIER_CONFIG at the
// first cache allocation.
typedef struct kvt_domain kvt_domain;

#if defined(__GNUC__)
#    pragma GCC visibility push(default)
#endif

// CFFI-BEGIN
typedef struct {
    uint64_t budget_bytes;
    uint64_t used_bytes; // bytes of pages
    uint64_t held_bytes; // bytes taken from the system (slabs, slots)
    uint64_t n_pages;
    uint64_t bytes_by_format[6]; // f32, f16, bf16, q8_0, q4_0, q4_1
} kvt_tier_figures;

typedef struct {
    kvt_tier_figures tier[5]; // none, device, host, disk, remote
    uint64_t n_hits;
    uint64_t n_misses;
    uint64_t n_prefetched;
    uint64_t n_prefetch_used;
    uint64_t n_evicted;
    uint64_t n_recalled;
    uint64_t disk_read_bytes;
    uint64_t disk_write_bytes;
    uint64_t disk_reads;
    uint64_t disk_writes;
    uint64_t stall_us;
    uint64_t peak_host_bytes;
    uint64_t n_attention;  // attention operations computed by us
    uint64_t k_bytes_read; // bytes of keys and values that attention read
    uint64_t v_bytes_read;
    uint64_t pages_read;
    uint64_t pages_skipped;  // masked out as a whole
    uint64_t n_fallback;     // operations on cache tensors that went to the CPU backend
    uint64_t n_gone;         // pages dropped for good so far; tier[0].n_pages: those that are gone now
    uint64_t reserved_bytes; // of what the host tier holds: keys that are kept apart, summaries
    double mass_lost;        // what the decayed mean attention mass of the dropped pages came to when they were dropped
    // bounded fidelity: sums over query rows (one query of one query head of one layer)
    uint64_t recall_rows;
    uint64_t tokens_seen;   // keys scored, per KV head
    uint64_t tokens_read;   // values read
    uint64_t pages_wanted;  // pages of which a value was read
    uint64_t pages_missing; // of those: not in RAM
    double omitted_sum;     // softmax probability of the values that were not read
    double max_omitted;     // of one row
    double bound_sum;       // the same with what rounding of the stored keys can hide
    double max_bound;
} kvt_figures;

typedef struct {
    uint32_t array;
    int32_t layer;
    int32_t n_head_kv;
    int32_t d_k;
    int32_t d_v; // 0: V is a view of K
    int32_t page_tokens;
    uint32_t n_streams;
    uint32_t cells_per_stream;
    uint32_t n_pages;
    uint64_t n_mass_steps;
    const float * token_mean; // [n_pages*page_tokens], owned by the domain, valid until the cache is freed
    const float * token_max;
    const float * page_mean; // [n_pages]
    const float * page_max;
    uint64_t last_seen; // bounded fidelity, the last step: keys scored and values read, per KV head
    uint64_t last_read;
    double last_omitted; // mean over rows
} kvt_layer_figures;

// Cells that sum up dropped ones, and groups of dropped cells in few dimensions, of one array. All float32, copied by
// the call that takes them; what they are kept in is a storage format (0 f32, 1 f16, 2 bf16, 3 q8_0: dimensions in
// multiples of 32). A group that was there before, and stays as it is, is named by its place among the groups of the
// summary that is replaced.
typedef struct {
    int32_t stays;        // place of the group that stays, all else counts for nothing; -1: a new group
    uint32_t n, r_k, r_v; // cells; dimensions of keys and values, at most d_k and d_v
    int32_t fmt_coord, fmt_basis;
    const float * k_mean;  // [n_head_kv][d_k]
    const float * k_basis; // [n_head_kv][r_k][d_k]
    const float * k_coord; // [n_head_kv][n][r_k]: key = mean + coord*basis
    const float * v_mean;  // the same of values
    const float * v_basis;
    const float * v_coord;
    float mass; // decayed mean mass that it begins with, as of its cells' pages
} kvt_summary_group;

typedef struct {
    uint32_t n_cells; // per KV head, 0: none
    int32_t fmt_cells;
    const float * key;       // [n_head_kv][n_cells][d_k] centres
    const float * value;     // [n_head_kv][n_cells][d_v] mean values
    const float * log_count; // [n_head_kv][n_cells] natural; -inf: the cell is not in use
    const float *
        key_var; // (optional) [n_head_kv][n_cells][d_k]: a score s = scale*q.key counts as s + scale^2*sum(q^2*var)/2
    uint32_t n_groups;
    const kvt_summary_group * groups;
} kvt_summary;

// A page is about to leave the host tier, or has come back; data is valid only during the call. From inside, set_keep,
// read_page, set_summary and summary_mass are refused (INVALID): the caches of other threads may go meanwhile.
typedef void (*kvt_offload_fn)(void * user, uint32_t array, uint32_t page, int32_t layer, int tier, const void * data,
    size_t n_bytes, int fmt_k, int fmt_v);

const char * kvt_version(void);
const char * kvt_error_name(int code);
const char * kvt_error_message(int code);
const char * kvt_last_error(void);   // of this thread's last failing kvt_ call, or the domain bound to it; never NULL
const char * kvt_ggml_version(void); // the ggml this library is running on, "" if not loaded as a backend
const char * kvt_isa(void);
int kvt_isa_set(const char * name);

// Settings are "key=value" pairs separated by commas or newlines (the syntax of KVTIER_CONFIG, which may also be
// "@FILE"):
//   host=BYTES disk=BYTES dir=PATH host-k=FMT host-v=FMT disk-k=FMT disk-v=FMT page-tokens=N io-threads=N
//   protect-first=PAGES protect-last=PAGES mass-decay=X fidelity=exact|bounded|bounded:EPS|lossy read-budget=TOKENS
// With bounded fidelity the keys stay in RAM and count against the host budget; host-k and host-v are Q8_0 by default,
// where the cache type is a wider one. With lossy fidelity what has to leave RAM is dropped; there is no disk then.
// BYTES take K/M/G/T and KiB/MiB/GiB/TiB (powers of 1024); FMT is f32 f16 bf16 q8_0 q4_0 q4_1.
// Unknown keys and bad values: KVT_ERR_CONFIG, kvt_last_error names the key, the value and what is allowed.
int kvt_domain_open(const char * settings, kvt_domain ** out);
void kvt_domain_close(
    kvt_domain * dom); // caches still alive keep the store until they are freed; no callback runs any more
int kvt_domain_bind(kvt_domain * dom); // caches that this thread allocates from now on; NULL: the default domain
int kvt_domain_figures(kvt_domain * dom, kvt_figures * out);
int kvt_domain_n_layers(kvt_domain * dom, uint32_t * out);
int kvt_domain_layer(kvt_domain * dom, uint32_t index, kvt_layer_figures * out);
// The pages of a layer: [n_pages] each, any may be NULL. INVALID unless the layer at index is still `array` (see
// kvt_domain_layer) and has at most n_max pages: nothing is written then.
int kvt_domain_pages(kvt_domain * dom, uint32_t index, uint32_t array, size_t n_max, uint8_t * tier, uint8_t * fmt_k,
    uint8_t * fmt_v, uint64_t * last_use);
// Of llama.cpp's calls, which only report that they failed. A step that begins clears it; a kvt_ call's own is in
// kvt_last_error.
int kvt_domain_last_error(kvt_domain * dom, char * buf, size_t size); // length, 0 if there was none
int kvt_domain_last_code(kvt_domain * dom);                           // the code that goes with it, 0 if there was none
// Returns when no call of the old callbacks is under way. INVALID from inside a callback. Either may be NULL.
int kvt_domain_set_offload(kvt_domain * dom, kvt_offload_fn on_leave, kvt_offload_fn on_return, void * user);
int kvt_domain_move(kvt_domain * dom, uint32_t array, const uint32_t * pages, size_t n, int to_tier, size_t * n_done);
// to_tier 0: dropped for good, in a lossy domain only.
// How much each page of an array is wanted: pages with the lowest scores leave first. Pages without content now, and
// those written later, count as infinitely wanted until they are scored; where scores agree, the least recently used
// goes. n: the array's pages.
int kvt_domain_set_keep(kvt_domain * dom, uint32_t array, const float * scores, size_t n);
// Keys (part 0) or values (part 1) of a page as F32 [page_tokens][n_head_kv][d]; n: floats that fit. INVALID if it has
// no content.
int kvt_domain_read_page(kvt_domain * dom, uint32_t array, uint32_t page, int part, float * out, size_t n);
// Pages in RAM change the formats of their keys and values there. Pages that are in use are left out: BUSY, and n_done
// is less.
int kvt_domain_reencode(
    kvt_domain * dom, uint32_t array, const uint32_t * pages, size_t n, int fmt_k, int fmt_v, size_t * n_done);
int kvt_domain_set_host_budget(kvt_domain * dom, uint64_t n_bytes); // pages leave at once if it shrinks
int kvt_domain_reserve(
    kvt_domain * dom, uint64_t n_bytes); // of the host budget, for summaries: at least what they take
// What stands in for the dropped cells of an array, from the next step on; NULL: nothing. Its bytes count against the
// host budget: see kvt_domain_reserve, of which they are a part. UNSUPPORTED for layers without values of their own
// (MLA).
int kvt_domain_set_summary(kvt_domain * dom, uint32_t array, const kvt_summary * summary);
// Decayed mean attention mass of the array's summary: its cells (0 without any), then each group. The length, or an
// error.
int kvt_domain_summary_mass(kvt_domain * dom, uint32_t array, float * out, size_t n_max);
int kvt_domain_compact(kvt_domain * dom); // gives back to the system what is only sparsely filled
int kvt_domain_evict_every_step(
    kvt_domain * dom, int on); // a test switch: unprotected pages leave the host after every step
// CFFI-END

#if defined(__GNUC__)
#    pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
