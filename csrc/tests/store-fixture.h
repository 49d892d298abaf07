#pragma once

// What the tests of the store share: a directory of their own, parameters of a small store, pages with known bytes.

#include "check.h"

#include "../include/kvtier-errors.h"
#include "../store/store.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

struct temp_dir {
    std::string path;
    temp_dir() {
        const char * base = getenv("TMPDIR");
        std::string t = std::string(base && base[0] ? base : "/tmp") + "/kvtier-test-XXXXXX";
        CHECK(mkdtemp(&t[0]) != nullptr);
        path = t;
    }
    std::vector<std::string> files() const {
        std::vector<std::string> out;
        DIR * d = opendir(path.c_str());
        CHECK(d != nullptr);
        while (struct dirent * e = readdir(d)) {
            if (e->d_name[0] != '.') { out.push_back(path + "/" + e->d_name); }
        }
        closedir(d);
        return out;
    }
    ~temp_dir() {
        chmod(path.c_str(), 0700);
        for (const std::string& f : files()) { unlink(f.c_str()); }
        rmdir(path.c_str());
    }
};

static const struct kvt_geometry GEO = { 2, 64, 64, 32 };
static const size_t PAGE_F16 = 2 * 2 * 64 * 32 * 2; // bytes of a page of GEO in F16
static const size_t FRAME_F16 = PAGE_F16 + 64;      // with the room for a slot's trailer
static const size_t SLOT_F16 = PAGE_F16 + 4096;

// what one such page takes of a small host budget: a slab of its own, in whole system pages
static const size_t SLAB_F16 = (FRAME_F16 + 4095) / 4096 * 4096;

static inline struct kvt_store_params small_params(const char * dir, size_t n_host_frames, size_t n_disk_slots) {
    struct kvt_store_params p;
    kvt_store_params_default(&p);
    p.host_bytes = n_host_frames * SLAB_F16;
    p.disk_bytes = n_disk_slots * SLOT_F16;
    p.dir = dir;
    p.n_transit = 2;
    p.n_protect_first = 0;
    p.n_protect_last = 0;
    return p;
}

static inline struct kvt_array_params array_params(int32_t layer, uint32_t n_pages, uint32_t n_streams = 1) {
    struct kvt_array_params p = {};
    p.geo = GEO;
    p.layer = layer;
    p.n_streams = n_streams;
    p.cells_per_stream = n_pages * KVT_SUB;
    p.fmt_k = p.fmt_v = KVT_FORMAT_F16;
    p.disk_fmt_k = p.disk_fmt_v = KVT_FORMAT_F16;
    return p;
}

static inline struct kvt_store * open_store(const struct kvt_store_params& p) {
    struct kvt_store * s = nullptr;
    char err[512] = "";
    const int r = kvt_store_open(&p, &s, err, sizeof(err));
    if (r != KVT_ERR_OK) { fprintf(stderr, "open: %s\n", err); }
    CHECK_EQ(r, KVT_ERR_OK);
    return s;
}

static inline struct kvt_array * add_array(struct kvt_store * s, const struct kvt_array_params& p) {
    struct kvt_array * a = nullptr;
    CHECK_EQ(kvt_store_array_add(s, &p, &a), KVT_ERR_OK);
    return a;
}

static inline std::string last_error(struct kvt_store * s) {
    char buf[1024];
    kvt_store_last_error(s, buf, sizeof(buf));
    return buf;
}

static inline bool has(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) { fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str()); }
    return found;
}

// bytes that name their page and version
static inline uint8_t pattern(uint32_t array, uint32_t page, uint32_t version, size_t i) {
    const uint32_t x = (array * 2654435761u) ^ (page * 40503u + 77u) ^ (version * 97u) ^
        (uint32_t) (i * 31u + i / 251u);
    return (uint8_t) (x ^ (x >> 11));
}

static inline void fill(struct kvt_array * a, const struct kvt_page_ref& ref, uint32_t version) {
    for (size_t i = 0; i < ref.layout->page_bytes; i++) {
        ref.data[i] = pattern(kvt_array_id(a), ref.page, version, i);
    }
}

static inline bool matches(struct kvt_array * a, const struct kvt_page_ref& ref, uint32_t version) {
    for (size_t i = 0; i < ref.layout->page_bytes; i++) {
        if (ref.data[i] != pattern(kvt_array_id(a), ref.page, version, i)) { return false; }
    }
    return true;
}

static inline int write_page(struct kvt_array * a, uint32_t page, uint32_t version) {
    struct kvt_page_ref ref;
    const int r = kvt_array_acquire(a, page, KVT_WRITE, &ref);
    if (r == KVT_ERR_OK) {
        fill(a, ref, version);
        kvt_array_release(a, &ref);
    }
    return r;
}

static inline int check_page(struct kvt_array * a, uint32_t page, uint32_t version) {
    struct kvt_page_ref ref;
    const int r = kvt_array_acquire(a, page, KVT_READ, &ref);
    if (r == KVT_ERR_OK) {
        CHECK(ref.data != nullptr);
        CHECK(matches(a, ref, version));
        kvt_array_release(a, &ref);
    }
    return r;
}

static inline struct kvt_page_info info_of(struct kvt_array * a, uint32_t page) {
    struct kvt_page_info i;
    CHECK_EQ(kvt_array_info(a, page, &i), KVT_ERR_OK);
    return i;
}

static inline struct kvt_store_stats stats_of(struct kvt_store * s) {
    struct kvt_store_stats st;
    kvt_store_get_stats(s, &st);
    return st;
}

static inline void check_budgets(struct kvt_store * s) {
    const struct kvt_store_stats st = stats_of(s);
    CHECK(st.tier[KVT_TIER_HOST].held_bytes <= st.tier[KVT_TIER_HOST].budget_bytes);
    CHECK(st.tier[KVT_TIER_HOST].used_bytes <= st.tier[KVT_TIER_HOST].held_bytes);
    CHECK(st.tier[KVT_TIER_DISK].held_bytes <= st.tier[KVT_TIER_DISK].budget_bytes);
    CHECK(st.tier[KVT_TIER_DISK].used_bytes <= st.tier[KVT_TIER_DISK].held_bytes);
    CHECK(st.peak_host_bytes <= st.tier[KVT_TIER_HOST].budget_bytes);
}
