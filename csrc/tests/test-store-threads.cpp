// Many threads on one store: readers scan, writers write their own pages, a planner moves pages about, a discarder
// throws some away. What a page holds always names one version as a whole.

#include "store-fixture.h"

#include <atomic>
#include <mutex>
#include <random>
#include <thread>

static const uint32_t N_PAGES = 48;
static const int N_LAYERS = 2;

struct shared {
    struct kvt_store * s;
    struct kvt_array * a[N_LAYERS];
    std::mutex page_lock[N_LAYERS][N_PAGES]; // readers and writers of one page are the caller's to order
    uint32_t version[N_LAYERS][N_PAGES] = {};
    std::atomic<uint64_t> n_reads{ 0 };
};

static void writer(shared& w, uint32_t seed, int n_ops) {
    std::mt19937 rng(seed);
    for (int i = 0; i < n_ops; i++) {
        const int l = (int) (rng() % N_LAYERS);
        const uint32_t page = rng() % N_PAGES;
        std::lock_guard<std::mutex> g(w.page_lock[l][page]);
        struct kvt_page_ref ref;
        CHECK_EQ(kvt_array_acquire(w.a[l], page, rng() % 3 ? KVT_WRITE : KVT_RESET, &ref), KVT_ERR_OK);
        fill(w.a[l], ref, ++w.version[l][page]);
        kvt_array_release(w.a[l], &ref);
    }
}

static void reader(shared& w, uint32_t seed, int n_ops) {
    std::mt19937 rng(seed);
    for (int i = 0; i < n_ops; i++) {
        const int l = (int) (rng() % N_LAYERS);
        const uint32_t first = rng() % N_PAGES, n = 1 + rng() % 12;
        std::vector<uint32_t> pages, missing(n), order;
        for (uint32_t p = first; p < first + n && p < N_PAGES; p++) { pages.push_back(p); }
        if (rng() % 4 == 0) { kvt_array_prefetch(w.a[l], pages.data(), pages.size()); }
        for (const uint32_t page : pages) {
            std::lock_guard<std::mutex> g(w.page_lock[l][page]);
            struct kvt_page_ref ref;
            size_t n_missing = 0;
            uint32_t missing_at = 0;
            CHECK_EQ(kvt_array_acquire_resident(w.a[l], &page, 1, &ref, &missing_at, &n_missing), KVT_ERR_OK);
            if (n_missing) { CHECK_EQ(kvt_array_acquire(w.a[l], page, KVT_READ, &ref), KVT_ERR_OK); }
            if (w.version[l][page] == 0) {
                CHECK(ref.data == nullptr);
            } else {
                CHECK(ref.data != nullptr && matches(w.a[l], ref, w.version[l][page]));
                w.n_reads++;
            }
            kvt_array_release_many(w.a[l], &ref, 1);
        }
    }
}

static void planner(shared& w, uint32_t seed, int n_ops) {
    std::mt19937 rng(seed);
    for (int i = 0; i < n_ops; i++) {
        std::vector<struct kvt_move> moves;
        for (int k = 0; k < 4; k++) {
            moves.push_back({ { kvt_array_id(w.a[rng() % N_LAYERS]), (uint32_t) (rng() % N_PAGES) },
                (uint8_t) (rng() % 2 ? KVT_TIER_DISK : KVT_TIER_HOST), 255, 255 });
        }
        size_t n_done = 0;
        const int r = kvt_store_apply(w.s, moves.data(), moves.size(), &n_done);
        CHECK(r == KVT_ERR_OK || r == KVT_ERR_INVALID || r == KVT_ERR_BUSY);
        kvt_store_tick(w.s);
        check_budgets(w.s);
        if (i % 8 == 0) { CHECK_EQ(kvt_store_flush(w.s), KVT_ERR_OK); }
    }
}

static void discarder(shared& w, uint32_t seed, int n_ops) {
    std::mt19937 rng(seed);
    for (int i = 0; i < n_ops; i++) {
        const int l = (int) (rng() % N_LAYERS);
        const uint32_t page = rng() % N_PAGES;
        std::lock_guard<std::mutex> g(w.page_lock[l][page]);
        CHECK_EQ(kvt_array_discard(w.a[l], page, 1), KVT_ERR_OK);
        w.version[l][page] = 0;
    }
}

static void run(size_t n_host, int32_t n_transit, int32_t n_io) {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), n_host, 200);
    p.n_transit = n_transit;
    p.n_io_threads = n_io;
    p.n_protect_first = 1;
    p.n_protect_last = 1;
    shared w;
    w.s = open_store(p);
    for (int l = 0; l < N_LAYERS; l++) { w.a[l] = add_array(w.s, array_params(l, N_PAGES)); }
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 2; i++) {
        threads.emplace_back(writer, std::ref(w), 10 + i, 250);
        threads.emplace_back(reader, std::ref(w), 20 + i, 120);
    }
    threads.emplace_back(planner, std::ref(w), 30, 80);
    threads.emplace_back(discarder, std::ref(w), 40, 60);
    for (std::thread& t : threads) { t.join(); }
    reader(w, 50, 40); // on a busy machine the others may have read before anything was written
    CHECK(w.n_reads > 0);
    CHECK_EQ(kvt_store_flush(w.s), KVT_ERR_OK);
    for (int l = 0; l < N_LAYERS; l++) {
        for (uint32_t page = 0; page < N_PAGES; page++) {
            if (w.version[l][page]) { CHECK_EQ(check_page(w.a[l], page, w.version[l][page]), KVT_ERR_OK); }
        }
    }
    // read-ahead and writes may be under way when an array, then the store, goes
    std::vector<uint32_t> all(N_PAGES);
    for (uint32_t i = 0; i < N_PAGES; i++) { all[i] = i; }
    kvt_array_prefetch(w.a[0], all.data(), all.size());
    kvt_array_prefetch(w.a[1], all.data(), all.size());
    kvt_store_array_remove(w.a[0]);
    kvt_store_close(w.s);
    CHECK(dir.files().empty());
}

// Moves name their pages by id: those of an array that goes meanwhile are refused, whatever they are waiting for.
static void arrays_come_and_go() {
    static const uint32_t n_pages = 16;
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 2 * n_pages, 2 * n_pages));
    std::atomic<uint32_t> id{ 0 };
    std::atomic<uint64_t> n_moved{ 0 };
    std::atomic<bool> stop{ false };
    std::vector<std::thread> planners;
    for (uint32_t seed = 0; seed < 3; seed++) {
        planners.emplace_back([&, seed] {
            std::mt19937 rng(seed);
            while (!stop) {
                std::vector<struct kvt_move> moves;
                for (uint32_t page = 0; page < n_pages; page++) {
                    const uint8_t fmt = rng() % 2 ? 255 : KVT_FORMAT_Q8_0;
                    moves.push_back({ { id, page }, (uint8_t) (rng() % 2 ? KVT_TIER_DISK : KVT_TIER_HOST), fmt, fmt });
                }
                size_t n_done = 0;
                const int r = kvt_store_apply(s, moves.data(), moves.size(), &n_done);
                CHECK(r == KVT_ERR_OK || r == KVT_ERR_INVALID || r == KVT_ERR_BUSY);
                n_moved += n_done;
            }
        });
    }
    for (int i = 0; i < 100; i++) {
        struct kvt_array * a = add_array(s, array_params(i, n_pages));
        for (uint32_t page = 0; page < n_pages; page++) { CHECK_EQ(write_page(a, page, 1), KVT_ERR_OK); }
        id = kvt_array_id(a);
        const uint64_t n = n_moved;
        while (n_moved < n + n_pages) { std::this_thread::yield(); }
        kvt_store_array_remove(a);
    }
    stop = true;
    for (std::thread& t : planners) { t.join(); }
    kvt_store_close(s);
}

// A reader holds a page for a moment: who gives all pages away waits for it.
static void discard_waits_for_readers() {
    struct kvt_store * s = open_store(small_params(nullptr, 8, 0));
    struct kvt_array * a = add_array(s, array_params(0, 8));
    for (uint32_t page = 0; page < 8; page++) { CHECK_EQ(write_page(a, page, page), KVT_ERR_OK); }
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(a, 5, KVT_READ, &ref), KVT_ERR_OK);
    std::atomic<bool> done{ false };
    std::thread discarder([&] {
        CHECK_EQ(kvt_array_discard(a, 0, 8), KVT_ERR_OK);
        done = true;
    });
    const uint32_t first = 0;
    uint8_t is_ready = 1;
    while (is_ready && !done) { // until the first page is in its hands
        std::this_thread::yield();
        CHECK_EQ(kvt_array_is_ready(a, &first, 1, &is_ready), KVT_ERR_OK);
    }
    CHECK(matches(a, ref, 5));
    kvt_array_release(a, &ref);
    discarder.join();
    for (uint32_t page = 0; page < 8; page++) { CHECK_EQ(info_of(a, page).tier, KVT_TIER_NONE); }
    kvt_store_close(s);
}

int main() {
    arrays_come_and_go();
    discard_waits_for_readers();
    run(14, 2, 1);
    run(24, 4, 2);
    run(40, 8, 3);
    return 0;
}
