// Content that is dropped for good: by moves, by the eviction of a lossy store, and by budgets that shrink. A random
// walk against a model, and threads.

#include "store-fixture.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <thread>

static struct kvt_store_params lossy_params(size_t n_host_frames) {
    struct kvt_store_params p = small_params(nullptr, n_host_frames, 0);
    p.lossy = 1;
    return p;
}

static int move_one(struct kvt_store * s, struct kvt_array * a, uint32_t page, uint8_t tier) {
    const struct kvt_move m = { { kvt_array_id(a), page }, tier, 255, 255 };
    size_t n_done = 0;
    const int r = kvt_store_apply(s, &m, 1, &n_done);
    CHECK_EQ(n_done, r == KVT_ERR_OK ? 1 : 0);
    return r;
}

// what a reader finds: bits of lost cells, and whether there is content
struct view {
    bool data;
    uint32_t lost;
};
static view look(struct kvt_array * a, uint32_t page) {
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, page, KVT_READ, &ref), KVT_ERR_OK);
    const view v = { ref.data != nullptr, ref.lost ? ref.lost[0] : 0 };
    kvt_array_release(a, &ref);
    struct kvt_page_ref other;
    uint32_t missing;
    size_t n_missing = 0;
    CHECK_EQ(kvt_array_acquire_resident(a, &page, 1, &other, &missing, &n_missing), KVT_ERR_OK);
    CHECK_EQ(n_missing, 0);
    CHECK_EQ(other.lost ? other.lost[0] : 0, v.lost);
    kvt_array_release_many(a, &other, 1);
    CHECK_EQ(info_of(a, page).some_lost, v.lost != 0);
    return v;
}

static void a_dropped_page() {
    struct kvt_store_params p = lossy_params(8);
    p.n_protect_first = p.n_protect_last = 1;
    struct kvt_store * s = open_store(p);
    struct kvt_array * a = add_array(s, array_params(0, 6));
    for (uint32_t i = 0; i < 5; i++) { CHECK_EQ(write_page(a, i, 7), KVT_ERR_OK); }
    CHECK_EQ(move_one(s, a, 0, KVT_TIER_NONE), KVT_ERR_INVALID);
    CHECK(has(last_error(s), "protected"));
    CHECK_EQ(move_one(s, a, 4, KVT_TIER_NONE), KVT_ERR_INVALID);
    CHECK_EQ(move_one(s, a, 5, KVT_TIER_NONE), KVT_ERR_INVALID);
    CHECK(has(last_error(s), "no content"));
    struct kvt_page_ref pinned;
    CHECK_EQ(kvt_array_acquire(a, 2, KVT_READ, &pinned), KVT_ERR_OK);
    CHECK_EQ(move_one(s, a, 2, KVT_TIER_NONE), KVT_ERR_BUSY);
    CHECK(has(last_error(s), "in use"));
    CHECK(matches(a, pinned, 7));
    kvt_array_release(a, &pinned);

    const uint64_t used = stats_of(s).tier[KVT_TIER_HOST].used_bytes;
    CHECK_EQ(look(a, 2).lost, 0);
    CHECK_EQ(move_one(s, a, 2, KVT_TIER_NONE), KVT_ERR_OK);
    CHECK_EQ(move_one(s, a, 2, KVT_TIER_NONE), KVT_ERR_OK); // it is already
    CHECK_EQ(stats_of(s).n_gone, 1);
    CHECK_EQ(stats_of(s).tier[KVT_TIER_NONE].n_pages, 1);
    CHECK_EQ(stats_of(s).tier[KVT_TIER_HOST].used_bytes, used - PAGE_F16);
    CHECK(!look(a, 2).data && look(a, 2).lost == UINT32_MAX);
    CHECK_EQ(move_one(s, a, 2, KVT_TIER_HOST), KVT_ERR_INVALID); // there is nothing to bring back

    // written again: zeros, and lost cell by cell until its writer says otherwise
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, 2, KVT_WRITE, &ref), KVT_ERR_OK);
    CHECK(std::all_of(ref.data, ref.data + ref.layout->page_bytes, [](uint8_t b) { return b == 0; }));
    CHECK(ref.lost && ref.lost[0] == UINT32_MAX);
    CHECK_EQ(kvt_array_set_lost(a, 2, 3, 2, 0), KVT_ERR_OK);
    kvt_array_release(a, &ref);
    CHECK(look(a, 2).data && look(a, 2).lost == ~(3u << 3));
    CHECK_EQ(stats_of(s).tier[KVT_TIER_NONE].n_pages, 0);
    CHECK_EQ(kvt_array_set_lost(a, 2, 0, 32, 0), KVT_ERR_OK);
    CHECK_EQ(look(a, 2).lost, 0);
    CHECK_EQ(kvt_array_set_lost(a, 2, 1, 32, 0), KVT_ERR_INVALID);
    CHECK_EQ(kvt_array_set_lost(a, 6, 0, 1, 0), KVT_ERR_INVALID);

    CHECK_EQ(move_one(s, a, 3, KVT_TIER_NONE), KVT_ERR_OK);
    CHECK_EQ(kvt_array_discard(a, 3, 1), KVT_ERR_OK); // given away: nothing is lost there any more
    CHECK_EQ(look(a, 3).lost, 0);
    CHECK_EQ(stats_of(s).tier[KVT_TIER_NONE].n_pages, 0);
    kvt_store_array_remove(a);
    kvt_store_close(s);
}

struct seen {
    int n = 0, to_none = 0;
    bool whole = true;
    struct kvt_array * a = nullptr;
};

static void hooks_are_told() {
    struct kvt_store * s = open_store(lossy_params(4));
    seen got;
    std::atomic<int> n_gone{ 0 };
    got.a = add_array(s, array_params(0, 12));
    const struct kvt_offload_hooks hooks = { &got,
        [](void * ctx, struct kvt_page_id id, int32_t, int tier, const void * data, size_t n, int, int) {
            seen * g = (seen *) ctx;
            g->n++;
            g->to_none += tier == KVT_TIER_NONE;
            for (size_t i = 0; i < n; i++) {
                g->whole = g->whole && ((const uint8_t *) data)[i] == pattern(kvt_array_id(g->a), id.page, 3, i);
            }
        },
        nullptr };
    kvt_store_set_hooks(s, &hooks);
    for (uint32_t i = 0; i < 12; i++) {
        kvt_store_tick(s);
        CHECK_EQ(write_page(got.a, i, 3), KVT_ERR_OK);
    }
    CHECK(got.n >= 8 && got.to_none == got.n && got.whole);
    CHECK_EQ(got.n, stats_of(s).n_gone);
    for (uint32_t i = 0; i < 8; i++) {
        CHECK_EQ(look(got.a, i).lost, i < (uint32_t) got.n ? UINT32_MAX : 0); // oldest first
    }
    kvt_store_set_hooks(s, nullptr);
    kvt_store_array_remove(got.a);
    kvt_store_close(s);
}

static void parameters_and_budgets() {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), 8, 8);
    p.lossy = 1;
    struct kvt_store * s = nullptr;
    char err[512] = "";
    CHECK_EQ(kvt_store_open(&p, &s, err, sizeof(err)), KVT_ERR_CONFIG);
    CHECK(has(err, "disk"));

    p = lossy_params(8);
    p.n_protect_first = 2;
    p.n_protect_last = 3;
    s = open_store(p);
    struct kvt_array *a = add_array(s, array_params(0, 20)), *b = nullptr;
    const struct kvt_array_params second = array_params(1, 20);
    CHECK_EQ(kvt_store_array_add(s, &second, &b), KVT_ERR_BUDGET); // the protected pages of both do not fit
    CHECK(has(last_error(s), "never"));
    for (uint32_t i = 0; i < 20; i++) {
        kvt_store_tick(s);
        CHECK_EQ(write_page(a, i, i), KVT_ERR_OK);
        check_budgets(s);
    }
    for (const uint32_t i : { 0u, 1u, 17u, 18u, 19u }) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    CHECK_EQ(stats_of(s).n_gone, 12);

    CHECK_EQ(kvt_store_reserve(s, 2 * SLAB_F16), KVT_ERR_OK); // what is left holds the protected pages and one more
    check_budgets(s);
    CHECK_EQ(stats_of(s).n_gone, 14);
    CHECK_EQ(kvt_store_reserve(s, 1 * SLAB_F16), KVT_ERR_BUDGET);
    CHECK_EQ(kvt_store_reserve(s, 100 * SLAB_F16), KVT_ERR_BUDGET);
    CHECK_EQ(stats_of(s).reserved_bytes, 2 * SLAB_F16);
    CHECK_EQ(kvt_store_set_host_budget(s, 7 * SLAB_F16), KVT_ERR_BUDGET);
    CHECK_EQ(stats_of(s).tier[KVT_TIER_HOST].budget_bytes, 8 * SLAB_F16);
    CHECK_EQ(kvt_store_set_host_budget(s, 12 * SLAB_F16), KVT_ERR_OK);
    for (uint32_t i = 2; i < 12; i++) { CHECK_EQ(write_page(a, i, 50), KVT_ERR_OK); }
    CHECK_EQ(stats_of(s).tier[KVT_TIER_HOST].n_pages, 10);
    kvt_store_array_remove(a);
    kvt_store_close(s);
}

// A slab holds many pages here: dropping one of each leaves holes, and compaction makes whole slabs of them.
static void compaction() {
    struct kvt_store_params p = lossy_params(320); // slabs of 10 pages
    struct kvt_store * s = open_store(p);
    struct kvt_array * a = add_array(s, array_params(0, 200));
    for (uint32_t i = 0; i < 200; i++) { CHECK_EQ(write_page(a, i, i), KVT_ERR_OK); }
    const uint64_t full = stats_of(s).tier[KVT_TIER_HOST].held_bytes;
    std::mt19937 rng(4);
    std::vector<uint32_t> order(200);
    for (uint32_t i = 0; i < 200; i++) { order[i] = i; }
    std::shuffle(order.begin(), order.end(), rng);
    for (size_t i = 0; i < 100; i++) { CHECK_EQ(move_one(s, a, order[i], KVT_TIER_NONE), KVT_ERR_OK); }
    CHECK(stats_of(s).tier[KVT_TIER_HOST].held_bytes > full * 3 / 4);
    struct kvt_page_ref pinned; // where it is, it stays
    CHECK_EQ(kvt_array_acquire(a, order[150], KVT_READ, &pinned), KVT_ERR_OK);
    const uint8_t * before = pinned.data;
    CHECK_EQ(kvt_store_compact(s), KVT_ERR_OK);
    CHECK(stats_of(s).tier[KVT_TIER_HOST].held_bytes < full * 6 / 10);
    CHECK(pinned.data == before && matches(a, pinned, order[150]));
    kvt_array_release(a, &pinned);
    for (size_t i = 100; i < 200; i++) { CHECK_EQ(check_page(a, order[i], order[i]), KVT_ERR_OK); }
    // a budget that shrinks takes as many pages as it must, and no more
    const struct kvt_store_stats st = stats_of(s);
    const uint64_t slab = full / 20;
    CHECK_EQ(kvt_store_set_host_budget(s, st.tier[KVT_TIER_HOST].held_bytes - 3 * slab), KVT_ERR_OK);
    CHECK(stats_of(s).tier[KVT_TIER_HOST].held_bytes <= stats_of(s).tier[KVT_TIER_HOST].budget_bytes);
    CHECK(stats_of(s).n_gone - st.n_gone <= 34); // of two pages to a slab
    kvt_store_array_remove(a);
    kvt_store_close(s);
}

// --- a random walk -----------------------------------------------------------------------------------------------

struct model_page {
    bool content = false;
    uint32_t lost = 0, version = 0;
};

struct walk {
    struct kvt_store * s;
    struct kvt_array * a;
    std::vector<model_page> pages;
    std::mt19937 rng;
    static void on_gone(void * ctx, struct kvt_page_id id) {
        model_page& m = ((walk *) ctx)->pages[id.page];
        CHECK(m.content);
        m = { false, UINT32_MAX, 0 };
    }
};

static void step(walk& w, uint32_t version) {
    const uint32_t page = w.rng() % (uint32_t) w.pages.size();
    model_page& m = w.pages[page];
    switch (w.rng() % 8) {
        case 0:
        case 1:
        case 2: {
            struct kvt_page_ref ref;
            CHECK_EQ(kvt_array_acquire(w.a, page, KVT_WRITE, &ref), KVT_ERR_OK); // others may be gone by now
            CHECK(!m.content || m.version == 0 || matches(w.a, ref, m.version));
            fill(w.a, ref, version);
            const int32_t cell = (int32_t) (w.rng() % 32), n = (int32_t) (w.rng() % (uint32_t) (33 - cell));
            CHECK_EQ(kvt_array_set_lost(w.a, page, cell, n, 0), KVT_ERR_OK);
            for (int32_t c = cell; c < cell + n; c++) { m.lost &= ~(1u << c); }
            m.content = true;
            m.version = version;
            kvt_array_release(w.a, &ref);
            break;
        }
        case 3: {
            const int r = move_one(w.s, w.a, page, KVT_TIER_NONE);
            CHECK(r == KVT_ERR_OK ||
                (r == KVT_ERR_INVALID && (has(last_error(w.s), m.content ? "protected" : "no content"))));
            break;
        }
        case 4:
            CHECK_EQ(kvt_array_discard(w.a, page, 1), KVT_ERR_OK);
            m = model_page();
            break;
        case 5: kvt_store_tick(w.s); break;
        case 6: CHECK_EQ(kvt_store_compact(w.s), KVT_ERR_OK); break;
        default: {
            const int r = kvt_store_reserve(
                w.s, (int64_t) (w.rng() % 4 * SLAB_F16) - (int64_t) stats_of(w.s).reserved_bytes);
            CHECK(r == KVT_ERR_OK || r == KVT_ERR_BUDGET);
        }
    }
}

static void random_walk(uint32_t seed, size_t n_host, int32_t protect) {
    walk w;
    w.rng.seed(seed);
    struct kvt_store_params p = lossy_params(n_host);
    p.n_protect_first = protect;
    p.n_protect_last = protect;
    p.on_gone = walk::on_gone;
    p.on_gone_ctx = &w;
    w.s = open_store(p);
    w.a = add_array(w.s, array_params(0, 40));
    w.pages.resize(40);
    for (uint32_t i = 1; i < 3000; i++) {
        step(w, i);
        check_budgets(w.s);
        uint64_t n_gone = 0;
        for (uint32_t page = 0; i % 20 == 0 && page < w.pages.size(); page++) {
            const view v = look(w.a, page);
            CHECK_EQ(v.data, w.pages[page].content);
            CHECK_EQ(v.lost, w.pages[page].lost);
            n_gone += !v.data && v.lost;
        }
        CHECK(i % 20 != 0 || stats_of(w.s).tier[KVT_TIER_NONE].n_pages == n_gone);
    }
    kvt_store_array_remove(w.a);
    CHECK_EQ(stats_of(w.s).tier[KVT_TIER_HOST].used_bytes, stats_of(w.s).reserved_bytes);
    CHECK_EQ(stats_of(w.s).tier[KVT_TIER_NONE].n_pages, 0);
    kvt_store_close(w.s);
}

// --- threads -----------------------------------------------------------------------------------------------------

// One thread writes and reads like a model; others drop, compact and change the budget beside it.
static void threads(size_t n_host) {
    static const uint32_t n_pages = 48;
    struct kvt_store_params p = lossy_params(n_host);
    p.n_protect_last = 1;
    struct kvt_store * s = open_store(p);
    struct kvt_array * a = add_array(s, array_params(0, n_pages));
    std::atomic<bool> stop{ false };
    std::thread dropper([&] {
        std::mt19937 rng(1);
        while (!stop) {
            const struct kvt_move m = { { kvt_array_id(a), (uint32_t) (rng() % n_pages) }, KVT_TIER_NONE, 255, 255 };
            size_t n_done = 0;
            const int r = kvt_store_apply(s, &m, 1, &n_done);
            CHECK(r == KVT_ERR_OK || r == KVT_ERR_INVALID || r == KVT_ERR_BUSY);
            std::this_thread::yield();
        }
    });
    std::thread budgeter([&] {
        std::mt19937 rng(2);
        while (!stop) {
            CHECK_EQ(kvt_store_compact(s), KVT_ERR_OK);
            CHECK_EQ(kvt_store_set_host_budget(s, (n_host - rng() % 3) * SLAB_F16), KVT_ERR_OK);
            std::this_thread::yield();
        }
    });
    std::mt19937 rng(3);
    std::vector<uint32_t> version(n_pages, 0), all(n_pages), missing(n_pages);
    for (uint32_t i = 0; i < n_pages; i++) { all[i] = i; }
    for (uint32_t i = 1; i < 1500; i++) {
        kvt_store_tick(s);
        const uint32_t page = rng() % n_pages;
        struct kvt_page_ref ref;
        CHECK_EQ(kvt_array_acquire(a, page, KVT_WRITE, &ref), KVT_ERR_OK);
        fill(a, ref, version[page] = i);
        CHECK_EQ(kvt_array_set_lost(a, page, 0, 32, 0), KVT_ERR_OK);
        kvt_array_release(a, &ref);
        std::vector<struct kvt_page_ref> refs(n_pages);
        size_t n_missing = 0;
        CHECK_EQ(
            kvt_array_acquire_resident(a, all.data(), n_pages, refs.data(), missing.data(), &n_missing), KVT_ERR_OK);
        for (const struct kvt_page_ref& r : refs) {
            if (r.data) { CHECK(!r.lost && matches(a, r, version[r.page])); }
        }
        kvt_array_release_many(a, refs.data(), n_pages);
    }
    stop = true;
    dropper.join();
    budgeter.join();
    kvt_store_array_remove(a);
    kvt_store_close(s);
}

// One change of the budget waits for pages that are in use, and fails; what others have changed meanwhile stays.
static void failed_changes_undo_their_own() {
    struct kvt_store * s = open_store(lossy_params(8));
    struct kvt_array * a = add_array(s, array_params(0, 6));
    struct kvt_page_ref refs[6];
    for (uint32_t i = 0; i < 6; i++) { CHECK_EQ(kvt_array_acquire(a, i, KVT_WRITE, &refs[i]), KVT_ERR_OK); }
    CHECK_EQ(kvt_store_reserve(s, SLAB_F16), KVT_ERR_OK);
    std::atomic<bool> done{ false };
    std::thread taker([&] {
        CHECK_EQ(kvt_store_reserve(s, 3 * SLAB_F16), KVT_ERR_BUDGET);
        done = true;
    });
    while (stats_of(s).reserved_bytes != 4 * SLAB_F16 && !done) { std::this_thread::yield(); }
    CHECK_EQ(kvt_store_reserve(s, -(int64_t) SLAB_F16), KVT_ERR_OK);
    taker.join();
    CHECK_EQ(stats_of(s).reserved_bytes, 0);

    done = false;
    std::thread shrinker([&] {
        CHECK_EQ(kvt_store_set_host_budget(s, 5 * SLAB_F16), KVT_ERR_BUDGET);
        done = true;
    });
    while (stats_of(s).tier[KVT_TIER_HOST].budget_bytes != 5 * SLAB_F16 && !done) { std::this_thread::yield(); }
    CHECK_EQ(kvt_store_set_host_budget(s, 7 * SLAB_F16), KVT_ERR_OK);
    shrinker.join();
    CHECK_EQ(stats_of(s).tier[KVT_TIER_HOST].budget_bytes, 7 * SLAB_F16);
    kvt_array_release_many(a, refs, 6);
    kvt_store_array_remove(a);
    kvt_store_close(s);
}

int main() {
    a_dropped_page();
    failed_changes_undo_their_own();
    hooks_are_told();
    parameters_and_budgets();
    compaction();
    for (uint32_t seed = 1; seed <= 6; seed++) { random_walk(seed, 6 + 4 * seed, (int32_t) (seed % 2)); }
    threads(12);
    threads(40);
    return 0;
}
