// Random operations against a simple model: a map from page to the version of its content. Fixed seeds.

#include "store-fixture.h"

#include <algorithm>
#include <random>

struct model_page {
    bool written = false;
    uint32_t version = 0;
    bool unknown = false; // reset and not written since: any content
};

struct world {
    struct kvt_store * s;
    std::vector<struct kvt_array *> arrays;
    std::vector<std::vector<model_page>> pages;
    std::mt19937 rng;
    uint32_t next_version = 1;
    uint32_t pick(size_t n) { return (uint32_t) (rng() % n); }
};

static void do_write(world& w, uint32_t a, uint32_t page, bool reset) {
    model_page& m = w.pages[a][page];
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(w.arrays[a], page, reset ? KVT_RESET : KVT_WRITE, &ref), KVT_ERR_OK);
    CHECK(ref.data != nullptr);
    if (m.written && !m.unknown && !reset) { CHECK(matches(w.arrays[a], ref, m.version)); }
    m.unknown = w.pick(16) == 0 && (reset || !m.written);
    if (!m.unknown) {
        m.version = w.next_version++;
        fill(w.arrays[a], ref, m.version);
    }
    m.written = true;
    kvt_array_release(w.arrays[a], &ref);
}

static void do_read(world& w, uint32_t a, uint32_t page) {
    const model_page& m = w.pages[a][page];
    struct kvt_page_ref ref;
    CHECK_EQ(kvt_array_acquire(w.arrays[a], page, KVT_READ, &ref), KVT_ERR_OK);
    CHECK_EQ(ref.data != nullptr, m.written);
    CHECK(!m.written || m.unknown || matches(w.arrays[a], ref, m.version));
    kvt_array_release(w.arrays[a], &ref);
}

static void do_scan(world& w, uint32_t a) {
    const uint32_t n = (uint32_t) w.pages[a].size();
    std::vector<uint32_t> pages, missing(n), order;
    for (uint32_t i = 0; i < n; i++) {
        if (w.pick(3)) { pages.push_back(i); }
    }
    if (w.pick(4) == 0) { std::shuffle(pages.begin(), pages.end(), w.rng); }
    std::vector<struct kvt_page_ref> refs(n);
    size_t n_missing = 0;
    CHECK_EQ(
        kvt_array_acquire_resident(w.arrays[a], pages.data(), pages.size(), refs.data(), missing.data(), &n_missing),
        KVT_ERR_OK);
    std::vector<bool> is_missing(n, false);
    for (size_t i = 0; i < n_missing; i++) {
        is_missing[missing[i]] = true;
        order.push_back(pages[missing[i]]);
        CHECK(i == 0 || order[i - 1] < order[i]);
    }
    for (size_t i = 0; i < pages.size(); i++) {
        const model_page& m = w.pages[a][pages[i]];
        CHECK_EQ(refs[i].page, pages[i]);
        if (!is_missing[i]) {
            CHECK_EQ(refs[i].data != nullptr, m.written);
            CHECK(!m.written || m.unknown || matches(w.arrays[a], refs[i], m.version));
        } else {
            CHECK(m.written);
        }
    }
    if (w.pick(2)) { kvt_array_prefetch(w.arrays[a], order.data(), order.size()); }
    if (w.pick(3)) {
        for (const uint32_t page : order) { do_read(w, a, page); }
    }
    kvt_array_release_many(w.arrays[a], refs.data(), pages.size());
}

static void do_plan(world& w) {
    std::vector<struct kvt_move> moves;
    for (uint32_t i = 0; i < 1 + w.pick(6); i++) {
        const uint32_t a = w.pick(w.arrays.size());
        moves.push_back({ { kvt_array_id(w.arrays[a]), w.pick(w.pages[a].size()) },
            (uint8_t) (w.pick(2) ? KVT_TIER_HOST : KVT_TIER_DISK), 255, 255 });
    }
    size_t n_done = 0;
    const int r = kvt_store_apply(w.s, moves.data(), moves.size(), &n_done);
    CHECK(r == KVT_ERR_OK ? n_done == moves.size() : n_done < moves.size());
    CHECK(r == KVT_ERR_OK || r == KVT_ERR_INVALID || r == KVT_ERR_DISK_FULL); // absent, protected, or no slot left
}

static void check_world(world& w) {
    check_budgets(w.s);
    const struct kvt_store_stats st = stats_of(w.s);
    uint64_t n_host = 0, n_disk = 0, n_written = 0;
    for (size_t a = 0; a < w.arrays.size(); a++) {
        for (uint32_t i = 0; i < w.pages[a].size(); i++) {
            const struct kvt_page_info info = info_of(w.arrays[a], i);
            CHECK_EQ(info.tier != KVT_TIER_NONE, w.pages[a][i].written);
            CHECK(!info.pinned);
            n_host += info.tier == KVT_TIER_HOST;
            n_disk += info.tier == KVT_TIER_DISK;
            n_written += w.pages[a][i].written;
        }
    }
    CHECK_EQ(n_host + n_disk, n_written);
    // nobody else is at work but read-ahead, which may turn disk pages into host pages between the looks
    CHECK(st.tier[KVT_TIER_HOST].n_pages <= n_written);
    CHECK(st.tier[KVT_TIER_DISK].n_pages + st.tier[KVT_TIER_HOST].n_pages >= n_written);
}

static void run(uint32_t seed, size_t n_host, size_t n_disk, int32_t first, int32_t last, uint32_t n_streams) {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), n_host, n_disk);
    p.n_protect_first = first;
    p.n_protect_last = last;
    p.n_transit = (int32_t) (seed % 3 + 2);
    p.n_io_threads = (int32_t) (seed % 2 + 1);
    world w;
    w.s = open_store(p);
    w.rng.seed(seed);
    for (int l = 0; l < 3; l++) {
        w.arrays.push_back(add_array(w.s, array_params(l, 12, n_streams)));
        w.pages.emplace_back(12 * n_streams);
    }
    for (int step = 0; step < 1500; step++) {
        const uint32_t a = w.pick(w.arrays.size());
        const uint32_t page = w.pick(w.pages[a].size());
        switch (w.pick(12)) {
            case 0:
            case 1:
            case 2: do_write(w, a, page, false); break;
            case 3: do_write(w, a, page, true); break;
            case 4:
            case 5: do_read(w, a, page); break;
            case 6: do_scan(w, a); break;
            case 7: do_plan(w); break;
            case 8: kvt_store_tick(w.s); break;
            case 9: {
                const uint32_t n = std::min<uint32_t>(w.pick(4), (uint32_t) w.pages[a].size() - page);
                CHECK_EQ(kvt_array_discard(w.arrays[a], page, n), KVT_ERR_OK);
                for (uint32_t i = 0; i < n; i++) { w.pages[a][page + i] = model_page(); }
                break;
            }
            case 10: CHECK_EQ(kvt_store_flush(w.s), KVT_ERR_OK); break;
            default:
                if (w.pick(40) == 0) { // the layer is freed and made again
                    kvt_store_array_remove(w.arrays[a]);
                    w.arrays[a] = add_array(w.s, array_params((int32_t) a, 12, n_streams));
                    w.pages[a].assign(w.pages[a].size(), model_page());
                }
                break;
        }
        check_budgets(w.s);
        if (step % 50 == 0) { check_world(w); }
    }
    for (uint32_t a = 0; a < w.arrays.size(); a++) {
        for (uint32_t i = 0; i < w.pages[a].size(); i++) { do_read(w, a, i); }
        kvt_store_array_remove(w.arrays[a]);
    }
    const struct kvt_store_stats st = stats_of(w.s);
    for (int t = 0; t < KVT_TIER_COUNT; t++) {
        CHECK_EQ(st.tier[t].used_bytes, 0);
        CHECK_EQ(st.tier[t].n_pages, 0);
        for (const uint64_t b : st.tier[t].bytes_by_format) { CHECK_EQ(b, 0); }
    }
    CHECK_EQ(st.tier[KVT_TIER_DISK].held_bytes, 0);
    CHECK_EQ(st.tier[KVT_TIER_HOST].held_bytes, 0);
    kvt_store_close(w.s);
}

int main() {
    uint32_t seed = 1;
    for (const uint32_t n_streams : { 1u, 2u }) {
        for (const size_t n_host : { 5u, 9u, 20u, 200u }) {
            for (const int32_t protect : { 0, 1 }) {
                run(seed++, n_host, 3 * 12 * n_streams + 1, protect, 2 * protect, n_streams);
            }
        }
    }
    for (int i = 0; i < 6; i++) {
        run(seed++, 16, 26, 0, 1, 1); // host and disk together barely hold the 36 pages
    }
    return 0;
}
