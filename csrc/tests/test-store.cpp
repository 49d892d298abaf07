// The store, one behaviour at a time.

#include "store-fixture.h"

#include <set>

static void test_memory_only() {
    struct kvt_store_params p;
    kvt_store_params_default(&p);
    struct kvt_store * s = open_store(p);
    struct kvt_array * a = add_array(s, array_params(3, 8));
    CHECK_EQ(kvt_array_n_pages(a), 8);
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, 2, KVT_READ, &ref), KVT_ERR_OK);
    CHECK(ref.data == nullptr && ref.page == 2);
    kvt_array_release(a, &ref);

    CHECK_EQ(kvt_array_acquire(a, 2, KVT_WRITE, &ref), KVT_ERR_OK);
    for (size_t i = 0; i < PAGE_F16; i++) { CHECK_EQ(ref.data[i], 0); }
    CHECK_EQ((uintptr_t) ref.data % 64, 0);
    CHECK_EQ(ref.layout->page_bytes, PAGE_F16);
    fill(a, ref, 1);
    CHECK(info_of(a, 2).pinned);
    CHECK_EQ(kvt_array_discard(a, 0, 8), KVT_ERR_INVALID);
    CHECK(has(last_error(s), "layer 3, page 2"));
    kvt_array_release(a, &ref);
    CHECK_EQ(check_page(a, 2, 1), KVT_ERR_OK);

    const struct kvt_page_info i = info_of(a, 2);
    CHECK(
        i.tier == KVT_TIER_HOST && i.dirty && !i.pinned && i.layer == 3 && i.cell_first == 64 && i.n_bytes == PAGE_F16);
    CHECK(i.fmt_k == KVT_FORMAT_F16 && i.fmt_v == KVT_FORMAT_F16);
    struct kvt_store_stats st = stats_of(s);
    CHECK_EQ(st.tier[KVT_TIER_HOST].n_pages, 1);
    CHECK_EQ(st.tier[KVT_TIER_HOST].used_bytes, PAGE_F16);
    CHECK_EQ(st.tier[KVT_TIER_HOST].bytes_by_format[KVT_FORMAT_F16], PAGE_F16);
    CHECK_EQ(st.n_hits, 1);

    CHECK_EQ(kvt_array_discard(a, 0, 8), KVT_ERR_OK);
    CHECK_EQ(info_of(a, 2).tier, KVT_TIER_NONE);
    st = stats_of(s);
    CHECK_EQ(st.tier[KVT_TIER_HOST].n_pages, 0);
    CHECK_EQ(st.tier[KVT_TIER_HOST].used_bytes, 0);
    CHECK_EQ(st.tier[KVT_TIER_HOST].held_bytes, 0);

    CHECK_EQ(kvt_array_acquire(a, 8, KVT_READ, &ref), KVT_ERR_INVALID);
    CHECK_EQ(kvt_array_acquire(a, 0, (enum kvt_access) 3, &ref), KVT_ERR_INVALID);
    CHECK_EQ(kvt_array_discard(a, 4, 5), KVT_ERR_INVALID);
    kvt_store_array_remove(a);
    kvt_store_close(s);
}

static void test_spill_and_scan() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 10, 64));
    struct kvt_array * a = add_array(s, array_params(0, 40));
    for (uint32_t i = 0; i < 40; i++) {
        CHECK_EQ(write_page(a, i, i), KVT_ERR_OK);
        kvt_store_tick(s);
        check_budgets(s);
    }
    CHECK_EQ(kvt_store_flush(s), KVT_ERR_OK);
    CHECK_EQ(dir.files().size(), 1);
    struct kvt_store_stats st = stats_of(s);
    CHECK_EQ(st.tier[KVT_TIER_HOST].n_pages, 8); // two of the ten frames are for pages passing through
    CHECK(st.n_evicted == 32 && st.disk_writes >= 32);
    std::set<uint32_t> resident;
    for (uint32_t i = 0; i < 40; i++) {
        if (info_of(a, i).tier == KVT_TIER_HOST) { resident.insert(i); }
    }
    CHECK(*resident.begin() == 32); // the least recently used left

    // a scan over everything, twice: what is resident stays so, the rest passes through
    for (int scan = 0; scan < 2; scan++) {
        std::vector<uint32_t> pages(40), missing(40);
        std::vector<struct kvt_page_ref> refs(40);
        for (uint32_t i = 0; i < 40; i++) { pages[i] = 39 - i; }
        size_t n_missing = 0;
        CHECK_EQ(kvt_array_acquire_resident(a, pages.data(), 40, refs.data(), missing.data(), &n_missing), KVT_ERR_OK);
        CHECK_EQ(n_missing, 32);
        for (size_t i = 0; i < 40; i++) {
            CHECK_EQ(refs[i].page, pages[i]);
            CHECK((refs[i].data != nullptr) == (resident.count(pages[i]) > 0));
            CHECK(!refs[i].data || matches(a, refs[i], pages[i]));
        }
        std::vector<uint32_t> order;
        for (size_t i = 0; i < n_missing; i++) {
            CHECK(i == 0 || pages[missing[i - 1]] < pages[missing[i]]); // file order
            order.push_back(pages[missing[i]]);
        }
        kvt_array_prefetch(a, order.data(), order.size());
        for (const uint32_t page : order) { CHECK_EQ(check_page(a, page, page), KVT_ERR_OK); }
        kvt_array_release_many(a, refs.data(), refs.size());
        check_budgets(s);
        kvt_store_tick(s);
    }
    for (uint32_t i = 0; i < 40; i++) {
        CHECK_EQ(info_of(a, i).tier, resident.count(i) ? KVT_TIER_HOST : KVT_TIER_DISK);
    }
    st = stats_of(s);
    CHECK_EQ(st.n_misses, 64);
    CHECK_EQ(st.n_hits, 16);
    CHECK(st.n_prefetched > 0 && st.n_prefetch_used > 0 && st.n_prefetch_used <= st.n_prefetched);
    CHECK_EQ(st.n_recalled, 0);

    // room on the host again: pages read from disk stay
    CHECK_EQ(kvt_array_discard(a, 32, 8), KVT_ERR_OK);
    for (uint32_t i = 0; i < 32; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    CHECK_EQ(stats_of(s).n_recalled, 8);
    const std::string path = dir.files()[0];
    kvt_store_close(s);
    CHECK(access(path.c_str(), F_OK) != 0);
}

static void test_write_to_a_page_on_disk() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    struct kvt_array * a = add_array(s, array_params(0, 20));
    for (uint32_t i = 0; i < 20; i++) { CHECK_EQ(write_page(a, i, 0), KVT_ERR_OK); }
    CHECK_EQ(info_of(a, 0).tier, KVT_TIER_DISK);
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, 0, KVT_WRITE, &ref), KVT_ERR_OK);
    CHECK(matches(a, ref, 0));
    fill(a, ref, 9);
    kvt_array_release(a, &ref);
    CHECK(info_of(a, 0).tier == KVT_TIER_HOST && info_of(a, 0).dirty);
    CHECK_EQ(check_page(a, 0, 9), KVT_ERR_OK);
    CHECK_EQ(kvt_array_acquire(a, 1, KVT_RESET, &ref), KVT_ERR_OK);
    for (size_t i = 0; i < PAGE_F16; i++) { CHECK_EQ(ref.data[i], 0); }
    fill(a, ref, 7);
    kvt_array_release(a, &ref);
    for (uint32_t i = 2; i < 20; i++) { // push them out again
        CHECK_EQ(write_page(a, i, 3), KVT_ERR_OK);
        kvt_store_tick(s);
    }
    CHECK_EQ(check_page(a, 0, 9), KVT_ERR_OK);
    CHECK_EQ(check_page(a, 1, 7), KVT_ERR_OK);
    kvt_store_close(s);
}

static void test_lossy_disk_format_stays() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    struct kvt_array_params ap = array_params(0, 20);
    ap.disk_fmt_k = KVT_FORMAT_Q8_0;
    ap.disk_fmt_v = KVT_FORMAT_Q4_1;
    struct kvt_array * a = add_array(s, ap);
    std::vector<float> row(128), q(128), got(128);
    for (int i = 0; i < 128; i++) { row[i] = 0.01f * (float) (i * 7 % 100) - 0.3f; }
    for (uint32_t i = 0; i < 20; i++) {
        struct kvt_page_ref ref;
        CHECK_EQ(kvt_array_acquire(a, i, KVT_WRITE, &ref), KVT_ERR_OK);
        kvt_page_put_f32(ref.layout, ref.data, KVT_PART_K, 3, row.data());
        kvt_page_put_f32(ref.layout, ref.data, KVT_PART_V, 3, row.data());
        kvt_array_release(a, &ref);
        check_budgets(s);
    }
    CHECK(info_of(a, 0).tier == KVT_TIER_DISK && info_of(a, 0).fmt_k == KVT_FORMAT_Q8_0 &&
        info_of(a, 0).fmt_v == KVT_FORMAT_Q4_1);
    const struct kvt_store_stats st = stats_of(s);
    CHECK(st.tier[KVT_TIER_DISK].bytes_by_format[KVT_FORMAT_Q8_0] > 0 &&
        st.tier[KVT_TIER_DISK].bytes_by_format[KVT_FORMAT_F16] == 0);
    for (const enum kvt_access access : { KVT_READ, KVT_WRITE }) {
        struct kvt_page_ref ref;
        CHECK_EQ(kvt_array_acquire(a, 0, access, &ref), KVT_ERR_OK);
        CHECK_EQ(ref.layout->fmt_k, KVT_FORMAT_Q8_0);
        CHECK_EQ(ref.layout->fmt_v, KVT_FORMAT_Q4_1);
        kvt_row_from_f32(KVT_FORMAT_F16, row.data(), got.data(), 128);
        std::vector<uint16_t> h(128);
        std::vector<uint8_t> blocks(kvt_row_bytes(KVT_FORMAT_Q8_0, 128));
        kvt_row_from_f32(KVT_FORMAT_F16, row.data(), h.data(), 128);
        kvt_row_to_f32(KVT_FORMAT_F16, h.data(), q.data(), 128);
        kvt_row_from_f32(KVT_FORMAT_Q8_0, q.data(), blocks.data(), 128);
        kvt_row_to_f32(KVT_FORMAT_Q8_0, blocks.data(), q.data(), 128);
        kvt_page_get_f32(ref.layout, ref.data, KVT_PART_K, 3, got.data());
        CHECK(got == q);
        kvt_array_release(a, &ref);
        check_budgets(s);
    }
    CHECK(info_of(a, 0).tier == KVT_TIER_HOST && info_of(a, 0).fmt_k == KVT_FORMAT_Q8_0);
    // given to new content, the page takes the host's format again
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, 0, KVT_RESET, &ref), KVT_ERR_OK);
    CHECK_EQ(ref.layout->fmt_k, KVT_FORMAT_F16);
    kvt_array_release(a, &ref);
    check_budgets(s);
    kvt_store_close(s);
}

static void test_protected_pages() {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), 16, 200);
    p.n_protect_first = 1;
    p.n_protect_last = 2;
    struct kvt_store * s = open_store(p);
    struct kvt_array * a = add_array(s, array_params(0, 30, 2));
    for (uint32_t i = 0; i < 30; i++) {
        for (uint32_t stream = 0; stream < 2; stream++) {
            CHECK_EQ(write_page(a, stream * 30 + i, 1), KVT_ERR_OK);
            kvt_store_tick(s);
            CHECK(info_of(a, stream * 30).tier == KVT_TIER_HOST && info_of(a, stream * 30).is_protected);
            CHECK(i == 0 || info_of(a, stream * 30 + i - 1).tier == KVT_TIER_HOST);
            CHECK(info_of(a, stream * 30 + i).is_protected);
        }
    }
    CHECK(!info_of(a, 27).is_protected && info_of(a, 28).is_protected && info_of(a, 29).is_protected);
    const struct kvt_move m = { { kvt_array_id(a), 29 }, KVT_TIER_DISK, 255, 255 };
    size_t n_done = 9;
    CHECK_EQ(kvt_store_apply(s, &m, 1, &n_done), KVT_ERR_INVALID);
    CHECK_EQ(n_done, 0);
    CHECK(has(last_error(s), "protected"));
    kvt_store_close(s);

    // where the budget cannot protect that much, it protects less and still works
    p.host_bytes = 5 * SLAB_F16;
    s = open_store(p);
    a = add_array(s, array_params(0, 30, 2));
    for (uint32_t i = 0; i < 60; i++) {
        CHECK_EQ(write_page(a, i, 1), KVT_ERR_OK);
        check_budgets(s);
    }
    for (uint32_t i = 0; i < 60; i++) { CHECK_EQ(check_page(a, i, 1), KVT_ERR_OK); }
    kvt_store_close(s);
}

static void test_plan() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 20, 64));
    struct kvt_array * a = add_array(s, array_params(7, 12));
    for (uint32_t i = 0; i < 8; i++) { CHECK_EQ(write_page(a, i, i), KVT_ERR_OK); }
    std::vector<struct kvt_move> moves;
    for (uint32_t i = 0; i < 6; i++) { moves.push_back({ { kvt_array_id(a), i }, KVT_TIER_DISK, 255, 255 }); }
    size_t n_done = 0;
    CHECK_EQ(kvt_store_apply(s, moves.data(), moves.size(), &n_done), KVT_ERR_OK);
    CHECK_EQ(n_done, 6);
    for (uint32_t i = 0; i < 8; i++) { CHECK_EQ(info_of(a, i).tier, i < 6 ? KVT_TIER_DISK : KVT_TIER_HOST); }
    moves.resize(2);
    moves[0] = { { kvt_array_id(a), 0 }, KVT_TIER_HOST, 255, 255 };
    moves[1] = { { kvt_array_id(a), 6 }, KVT_TIER_DISK, KVT_FORMAT_Q8_0, 255 };
    CHECK_EQ(kvt_store_apply(s, moves.data(), 2, &n_done), KVT_ERR_OK);
    CHECK_EQ(n_done, 2);
    CHECK(info_of(a, 0).tier == KVT_TIER_HOST && !info_of(a, 0).dirty);
    CHECK(info_of(a, 6).tier == KVT_TIER_DISK && info_of(a, 6).fmt_k == KVT_FORMAT_Q8_0 &&
        info_of(a, 6).fmt_v == KVT_FORMAT_F16);
    CHECK_EQ(check_page(a, 0, 0), KVT_ERR_OK);
    // a smaller format in place
    moves[0] = { { kvt_array_id(a), 7 }, KVT_TIER_HOST, KVT_FORMAT_Q4_0, KVT_FORMAT_Q4_0 };
    CHECK_EQ(kvt_store_apply(s, moves.data(), 1, &n_done), KVT_ERR_OK);
    CHECK(info_of(a, 7).fmt_k == KVT_FORMAT_Q4_0 && info_of(a, 7).tier == KVT_TIER_HOST && info_of(a, 7).dirty);

    const struct kvt_move bad[] = {
        { { kvt_array_id(a), 99 }, KVT_TIER_DISK, 255, 255 },
        { { 44, 0 }, KVT_TIER_DISK, 255, 255 },
        { { kvt_array_id(a), 0 }, KVT_TIER_DEVICE, 255, 255 },
        { { kvt_array_id(a), 0 }, KVT_TIER_REMOTE, 255, 255 },
        { { kvt_array_id(a), 0 }, KVT_TIER_DISK, 77, 255 },
        { { kvt_array_id(a), 0 }, KVT_TIER_DISK, KVT_FORMAT_F32, KVT_FORMAT_F32 },
        { { kvt_array_id(a), 11 }, KVT_TIER_HOST, 255, 255 },
        { { kvt_array_id(a), 11 }, KVT_TIER_DISK, 255, 255 },
    };
    for (const struct kvt_move& m : bad) {
        n_done = 5;
        CHECK(kvt_store_apply(s, &m, 1, &n_done) < 0);
        CHECK_EQ(n_done, 0);
    }
    CHECK_EQ(info_of(a, 0).tier, KVT_TIER_HOST);
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, 0, KVT_READ, &ref), KVT_ERR_OK);
    const struct kvt_move pinned = { { kvt_array_id(a), 0 }, KVT_TIER_DISK, 255, 255 };
    CHECK_EQ(kvt_store_apply(s, &pinned, 1, &n_done), KVT_ERR_BUSY);
    CHECK(has(last_error(s), "in use"));
    kvt_array_release(a, &ref);
    kvt_store_close(s);
}

struct hook_log {
    std::vector<uint32_t> left, returned;
    bool bytes_ok = true;
    struct kvt_array * a = nullptr;
};

static bool hook_bytes_ok(const hook_log * log, struct kvt_page_id id, int32_t layer, const void * data, size_t n_bytes,
    int fmt_k, int fmt_v) {
    bool ok = n_bytes == PAGE_F16 && layer == 4 && fmt_k == KVT_FORMAT_F16 && fmt_v == KVT_FORMAT_F16;
    for (size_t i = 0; ok && i < n_bytes; i++) { ok = ((const uint8_t *) data)[i] == pattern(id.array, id.page, 5, i); }
    struct kvt_page_info info;
    return ok && kvt_array_info(log->a, id.page, &info) == KVT_ERR_OK; // the store may be asked: its lock is free
}

static void on_leave(void * ctx, struct kvt_page_id id, int32_t layer, int to_tier, const void * data, size_t n_bytes,
    int fmt_k, int fmt_v) {
    hook_log * log = (hook_log *) ctx;
    log->left.push_back(id.page);
    log->bytes_ok = log->bytes_ok && to_tier == KVT_TIER_DISK &&
        hook_bytes_ok(log, id, layer, data, n_bytes, fmt_k, fmt_v);
}

static void on_return(void * ctx, struct kvt_page_id id, int32_t layer, int from_tier, const void * data,
    size_t n_bytes, int fmt_k, int fmt_v) {
    hook_log * log = (hook_log *) ctx;
    log->returned.push_back(id.page);
    log->bytes_ok = log->bytes_ok && from_tier == KVT_TIER_DISK &&
        hook_bytes_ok(log, id, layer, data, n_bytes, fmt_k, fmt_v);
}

static void test_hooks() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 12, 64));
    struct kvt_array * a = add_array(s, array_params(4, 12));
    hook_log log;
    log.a = a;
    const struct kvt_offload_hooks hooks = { &log, on_leave, on_return };
    kvt_store_set_hooks(s, &hooks);
    for (uint32_t i = 0; i < 4; i++) { CHECK_EQ(write_page(a, i, 5), KVT_ERR_OK); }
    const struct kvt_move out[] = { { { kvt_array_id(a), 1 }, KVT_TIER_DISK, 255, 255 },
        { { kvt_array_id(a), 2 }, KVT_TIER_DISK, 255, 255 } };
    CHECK_EQ(kvt_store_apply(s, out, 2, nullptr), KVT_ERR_OK);
    CHECK(log.left == std::vector<uint32_t>({ 1, 2 }));
    CHECK_EQ(write_page(a, 2, 5), KVT_ERR_OK);
    CHECK(log.returned == std::vector<uint32_t>({ 2 }));
    CHECK_EQ(check_page(a, 1, 5), KVT_ERR_OK);
    CHECK(log.returned == std::vector<uint32_t>({ 2, 1 }));
    CHECK(log.bytes_ok);
    kvt_store_set_hooks(s, nullptr);
    CHECK_EQ(kvt_store_apply(s, out, 2, nullptr), KVT_ERR_OK);
    CHECK_EQ(log.left.size(), 2);
    kvt_store_close(s);
}

// A policy is asked, and nonsense from it does no harm.
struct policy_log {
    size_t n_calls = 0;
    int mode = 0;
};

static size_t newest_first(void * ctx, const struct kvt_page_info * pages, size_t n_pages, size_t bytes_needed,
    uint32_t * victims, size_t n_max) {
    policy_log * log = (policy_log *) ctx;
    log->n_calls++;
    CHECK(n_pages > 0 && n_max > 0 && bytes_needed >= PAGE_F16);
    for (size_t i = 0; i < n_pages; i++) {
        CHECK(pages[i].tier == KVT_TIER_HOST && !pages[i].pinned && !pages[i].is_protected);
    }
    if (log->mode == 1) {
        victims[0] = 1u << 30;
        return 1;
    }
    if (log->mode == 2) { return 0; }
    victims[0] = 0;
    for (uint32_t i = 0; i < n_pages; i++) {
        victims[0] = pages[i].id.page > pages[victims[0]].id.page ? i : victims[0];
    }
    return 1;
}

static void test_policy() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    struct kvt_array * a = add_array(s, array_params(0, 12));
    policy_log log;
    const struct kvt_evict_policy policy = { 1, "newest", &log, newest_first };
    kvt_store_set_policy(s, &policy);
    for (uint32_t i = 0; i < 8; i++) { CHECK_EQ(write_page(a, i, i), KVT_ERR_OK); }
    CHECK(log.n_calls > 0);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(info_of(a, i).tier, KVT_TIER_HOST); // the plain LRU would have dropped these
    }
    for (log.mode = 1; log.mode <= 2; log.mode++) {
        for (uint32_t i = 0; i < 12; i++) { CHECK_EQ(write_page(a, i, i), KVT_ERR_OK); }
    }
    for (uint32_t i = 0; i < 12; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    kvt_store_close(s);
}

// A page whose copy on disk is still good leaves without being written again.
static void test_clean_pages_are_not_rewritten() {
    temp_dir dir;
    const uint32_t n = 64;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), n + 2, 2 * n));
    struct kvt_array * a = add_array(s, array_params(0, 2 * n));
    std::vector<struct kvt_move> moves;
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(write_page(a, i, i), KVT_ERR_OK);
        moves.push_back({ { kvt_array_id(a), i }, KVT_TIER_DISK, 255, 255 });
    }
    CHECK_EQ(kvt_store_apply(s, moves.data(), n, nullptr), KVT_ERR_OK);
    for (struct kvt_move& m : moves) { m.to_tier = KVT_TIER_HOST; }
    CHECK_EQ(kvt_store_apply(s, moves.data(), n, nullptr), KVT_ERR_OK);
    kvt_store_tick(s);
    const uint64_t n_writes = stats_of(s).disk_writes;
    CHECK_EQ(n_writes, n);
    for (uint32_t i = n; i < n + n / 2; i++) { CHECK_EQ(write_page(a, i, i), KVT_ERR_OK); }
    CHECK_EQ(kvt_store_flush(s), KVT_ERR_OK);
    CHECK(stats_of(s).n_evicted > n);
    CHECK_EQ(stats_of(s).disk_writes, n_writes);
    for (uint32_t i = 0; i < n + n / 2; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    kvt_store_close(s);
}

int main() {
    test_clean_pages_are_not_rewritten();
    test_memory_only();
    test_spill_and_scan();
    test_write_to_a_page_on_disk();
    test_lossy_disk_format_stays();
    test_protected_pages();
    test_plan();
    test_hooks();
    test_policy();
    return 0;
}
