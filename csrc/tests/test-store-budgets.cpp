// Budgets, and what the process really holds: the smallest that work, what too little says, changes, memory that the
// system does not give.

#include "store-fixture.h"

#include "../store/bytes-text.h"

#include <sys/resource.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define SANITIZED true
#else
#    define SANITIZED false
#endif

static void test_no_disk_is_a_budget_error() {
    struct kvt_store * s = open_store(small_params("", 4, 0));
    struct kvt_array * a = add_array(s, array_params(5, 16));
    uint32_t n = 0;
    int r = KVT_ERR_OK;
    while (n < 16 && (r = write_page(a, n, n)) == KVT_ERR_OK) {
        n++;
        check_budgets(s);
    }
    CHECK_EQ(n, 4);
    CHECK_EQ(r, KVT_ERR_BUDGET);
    CHECK(has(last_error(s), "layer 5, page 4") && has(last_error(s), std::to_string(4 * SLAB_F16)) &&
        has(last_error(s), "raise the host budget"));
    for (uint32_t i = 0; i < n; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    CHECK_EQ(kvt_array_discard(a, 0, 1), KVT_ERR_OK);
    CHECK_EQ(write_page(a, 4, 4), KVT_ERR_OK);
    kvt_store_close(s);
}

static void test_smallest_budget() {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), 4, 64);
    struct kvt_store * s = open_store(p);
    struct kvt_array * a[3] = { add_array(s, array_params(0, 8)), add_array(s, array_params(1, 8)), nullptr };
    const struct kvt_array_params third = array_params(2, 8);
    CHECK_EQ(kvt_store_array_add(s, &third, &a[2]), KVT_ERR_BUDGET);
    CHECK(a[2] == nullptr);
    CHECK(has(last_error(s), "layer 2") && has(last_error(s), kvt_bytes_text(5 * SLAB_F16)));
    for (uint32_t i = 0; i < 8; i++) {
        for (int l = 0; l < 2; l++) {
            CHECK_EQ(write_page(a[l], i, i), KVT_ERR_OK);
            check_budgets(s);
        }
    }
    for (uint32_t i = 0; i < 8; i++) {
        for (int l = 0; l < 2; l++) { CHECK_EQ(check_page(a[l], i, i), KVT_ERR_OK); }
    }
    kvt_store_array_remove(a[0]);
    a[2] = add_array(s, third); // its room is free again
    CHECK_EQ(write_page(a[2], 0, 4), KVT_ERR_OK);
    CHECK_EQ(check_page(a[1], 3, 3), KVT_ERR_OK);
    check_budgets(s);
    kvt_store_close(s);
}

// Pages of different sizes share a small budget: the bytes of one class must be able to become those of another.
static void test_mixed_sizes() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 12, 400));
    struct kvt_array_params ap[3] = { array_params(0, 20), array_params(1, 20), array_params(2, 20) };
    ap[1].geo.d_k = ap[1].geo.d_v = 32;
    ap[2].fmt_k = ap[2].fmt_v = KVT_FORMAT_Q8_0;
    ap[2].disk_fmt_k = ap[2].disk_fmt_v = KVT_FORMAT_F16;
    struct kvt_array * a[3];
    for (int l = 0; l < 3; l++) { a[l] = add_array(s, ap[l]); }
    for (int order = 0; order < 3; order++) {
        for (int l = 0; l < 3; l++) {
            const int k = (l + order) % 3;
            for (uint32_t i = 0; i < 20; i++) {
                struct kvt_page_ref ref;
                CHECK_EQ(kvt_array_acquire(a[k], i, KVT_WRITE, &ref), KVT_ERR_OK);
                kvt_array_release(a[k], &ref);
                check_budgets(s);
            }
        }
    }
    for (int l = 0; l < 2; l++) {
        for (uint32_t i = 0; i < 20; i++) { CHECK_EQ(write_page(a[l], i, 3), KVT_ERR_OK); }
    }
    for (int l = 0; l < 2; l++) {
        for (uint32_t i = 0; i < 20; i++) {
            CHECK_EQ(check_page(a[l], i, 3), KVT_ERR_OK);
            check_budgets(s);
        }
    }
    kvt_store_close(s);
}

static void test_everything_in_use() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    struct kvt_array * a = add_array(s, array_params(0, 12));
    struct kvt_page_ref refs[4], more;
    for (uint32_t i = 0; i < 4; i++) { CHECK_EQ(kvt_array_acquire(a, i, KVT_WRITE, &refs[i]), KVT_ERR_OK); }
    CHECK_EQ(kvt_array_acquire(a, 4, KVT_WRITE, &more), KVT_ERR_BUDGET);
    CHECK(has(last_error(s), "page 4") && has(last_error(s), "in use"));
    kvt_array_release_many(a, refs, 4);
    CHECK_EQ(write_page(a, 4, 0), KVT_ERR_OK);
    kvt_store_close(s);
}

struct process_bytes {
    size_t mapped, resident;
}; // 0: the system does not say
static process_bytes memory_of_process() {
    unsigned long mapped = 0, resident = 0;
    FILE * f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%lu %lu", &mapped, &resident) != 2) { mapped = resident = 0; }
    if (f) { fclose(f); }
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    return { mapped * page, resident * page };
}

static size_t resident_bytes() { return memory_of_process().resident; }

// What the system says the process holds agrees with what the store says: a cache of four times the budget, written and
// read twice, grows the process by the budget and a page per worker, plus the page table.
static void test_resident_memory() {
    temp_dir dir;
    const uint32_t n = 2048;
    struct kvt_store_params p = small_params(dir.path.c_str(), 0, n);
    p.host_bytes = n * PAGE_F16 / 4;
    p.n_transit = 0;
    const size_t before = resident_bytes();
    struct kvt_store * s = open_store(p);
    struct kvt_array_params ap = array_params(0, n);
    ap.disk_fmt_k = KVT_FORMAT_BF16; // through the workers' buffers
    struct kvt_array * a = add_array(s, ap);
    size_t peak = 0;
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < n; i++) {
            struct kvt_page_ref ref;
            CHECK_EQ(kvt_array_acquire(a, i, round == 0 ? KVT_WRITE : KVT_READ, &ref), KVT_ERR_OK);
            kvt_array_release(a, &ref);
            peak = i % 64 == 0 && resident_bytes() > peak ? resident_bytes() : peak;
        }
        kvt_store_tick(s);
        check_budgets(s);
    }
    CHECK(stats_of(s).peak_host_bytes > p.host_bytes / 2);
    if (before > 0 && !SANITIZED) { // the sanitizers' own memory grows with ours
        const size_t slack = 2 * PAGE_F16 + n * 256 +
            ((size_t) 3 << 20); // workers, page table, thread stacks and the allocator
        CHECK(peak <= before + p.host_bytes + slack);
    }
    kvt_store_close(s);
}

// The system gives no more memory, while the budget would allow it: that is said, and nothing is dropped for it.
static void test_no_memory() {
    const size_t mapped = memory_of_process().mapped;
    if (mapped == 0 || SANITIZED) { return; }
    for (const int32_t lossy : { 0, 1 }) {
        struct kvt_store_params p = small_params(nullptr, 0, 0);
        p.host_bytes = UINT64_MAX;
        p.lossy = lossy;
        struct kvt_store * s = open_store(p);
        struct kvt_array * a = add_array(s, array_params(2, 4096));
        struct rlimit before, limit;
        CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
        limit = before;
        limit.rlim_cur = memory_of_process().mapped + ((size_t) 16 << 20);
        CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
        uint32_t n = 0;
        int r = KVT_ERR_OK;
        while (n < 4096 && (r = write_page(a, n, n)) == KVT_ERR_OK) { n++; }
        CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
        CHECK(n > 0);
        CHECK_EQ(r, KVT_ERR_NOMEM);
        CHECK(has(last_error(s), "no memory for layer 2, page " + std::to_string(n)));
        CHECK_EQ(stats_of(s).n_gone, 0);
        for (uint32_t i = 0; i < n; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
        CHECK_EQ(write_page(a, n, n), KVT_ERR_OK);
        kvt_store_close(s);
    }
}

// Pages that passed through have left their frames behind: a budget that shrinks takes those back before it takes room
// from pages that stay, except from readers.
static void test_shrinking_after_a_scan() {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), 64, 200);
    p.n_transit = 0; // as many as the budget gives
    struct kvt_store * s = open_store(p);
    struct kvt_array * a = add_array(s, array_params(0, 80));
    for (uint32_t i = 0; i < 80; i++) {
        CHECK_EQ(write_page(a, i, i), KVT_ERR_OK);
        kvt_store_tick(s);
    }
    for (uint32_t i = 0; i < 80; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    struct kvt_page_ref refs[2];
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(info_of(a, i).tier, KVT_TIER_DISK);
        CHECK_EQ(kvt_array_acquire(a, i, KVT_READ, &refs[i]), KVT_ERR_OK);
    }
    CHECK_EQ(kvt_store_set_host_budget(s, 9 * SLAB_F16), KVT_ERR_OK);
    CHECK(matches(a, refs[0], 0) && matches(a, refs[1], 1));
    kvt_array_release_many(a, refs, 2);
    for (uint32_t i = 0; i < 80; i++) {
        CHECK_EQ(write_page(a, i, 100 + i), KVT_ERR_OK);
        CHECK(stats_of(s).tier[KVT_TIER_HOST].held_bytes <= 9 * SLAB_F16);
    }
    CHECK(stats_of(s).tier[KVT_TIER_HOST].n_pages >= 2);
    for (uint32_t i = 0; i < 80; i++) {
        CHECK_EQ(check_page(a, i, 100 + i), KVT_ERR_OK);
        CHECK(stats_of(s).tier[KVT_TIER_HOST].held_bytes <= 9 * SLAB_F16);
    }
    kvt_store_close(s);
}

int main() {
    test_resident_memory();
    test_no_disk_is_a_budget_error();
    test_smallest_budget();
    test_mixed_sizes();
    test_everything_in_use();
    test_no_memory();
    test_shrinking_after_a_scan();
    return 0;
}
