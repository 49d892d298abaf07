// A disk that fails: the n-th operation for every n, a full one, and one whose bytes change. The generation may end in
// an error that names tier and page, or go on; it never reads wrong bytes. And memory that ends, at every allocation.

#include "store-fixture.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <new>

struct faulty_disk {
    std::atomic<long> n_ops{ 0 };
    long fail_at = -1;     // this operation fails
    bool for_good = false; // and all after it
    int sys_errno = EIO;
    std::atomic<long> n_failed{ 0 };
    std::atomic<long> space{ 1L << 60 }; // bytes that may still be written
};

static bool fails(faulty_disk * d) {
    const long n = d->n_ops++;
    if (d->fail_at >= 0 && (n == d->fail_at || (d->for_good && n > d->fail_at))) {
        d->n_failed++;
        return true;
    }
    return false;
}

static int faulty_read(void * ctx, int fd, void * buf, size_t n_bytes, int64_t off, int * sys_errno) {
    faulty_disk * d = (faulty_disk *) ctx;
    if (fails(d)) {
        memset(buf, 0xdb, n_bytes); // half-done work must not be taken for a page
        *sys_errno = d->sys_errno;
        return KVT_ERR_IO;
    }
    CHECK_EQ(pread(fd, buf, n_bytes, off), n_bytes);
    return KVT_ERR_OK;
}

static int faulty_write(void * ctx, int fd, const void * buf, size_t n_bytes, int64_t off, int * sys_errno) {
    faulty_disk * d = (faulty_disk *) ctx;
    if (fails(d)) {
        CHECK_EQ(pwrite(fd, buf, n_bytes / 2, off), n_bytes / 2);
        *sys_errno = d->sys_errno;
        return KVT_ERR_IO;
    }
    if ((d->space -= (long) n_bytes) < 0) {
        d->space += (long) n_bytes;
        d->n_failed++;
        *sys_errno = ENOSPC;
        return KVT_ERR_DISK_FULL;
    }
    CHECK_EQ(pwrite(fd, buf, n_bytes, off), n_bytes);
    return KVT_ERR_OK;
}

static int faulty_punch(void * ctx, int, int64_t, size_t, int * sys_errno) {
    faulty_disk * d = (faulty_disk *) ctx;
    if (fails(d)) {
        *sys_errno = d->sys_errno;
        return KVT_ERR_IO;
    }
    return KVT_ERR_OK;
}

static bool names_page_and_tier(const std::string& text) {
    return has(text, "layer 6, page ") && has(text, "disk tier");
}

// Writes, scans and rewrites 12 pages over 4 host frames. Returns the number of errors seen; checks all that is read.
static size_t workload(struct kvt_store * s, struct kvt_array * a, std::vector<int>& version) {
    size_t n_errors = 0;
    const auto note = [&](int r) {
        if (r != KVT_ERR_OK) {
            n_errors++;
            CHECK(r == KVT_ERR_IO || r == KVT_ERR_DISK_FULL);
            CHECK(names_page_and_tier(last_error(s)));
        }
        check_budgets(s);
        return r == KVT_ERR_OK;
    };
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 12; i++) {
            if (note(write_page(a, i, (uint32_t) (100 * round + i)))) { version[i] = (int) (100 * round + i); }
        }
        std::vector<uint32_t> all = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 };
        kvt_array_prefetch(a, all.data(), all.size());
        for (uint32_t i = 0; i < 12; i++) {
            if (version[i] >= 0) { note(check_page(a, i, (uint32_t) version[i])); }
        }
        kvt_store_tick(s);
    }
    if (kvt_store_flush(s) != KVT_ERR_OK) { CHECK(names_page_and_tier(last_error(s))); }
    return n_errors;
}

static struct kvt_store * open_faulty(const temp_dir& dir, faulty_disk * d, struct kvt_array ** a) {
    const struct kvt_disk_ops ops = { d, faulty_read, faulty_write, faulty_punch };
    struct kvt_store_params p = small_params(dir.path.c_str(), 6, 64);
    p.disk_ops = &ops;
    struct kvt_store * s = open_store(p);
    *a = add_array(s, array_params(6, 12));
    return s;
}

// After the faults are over, every page that was written is still there with what was last written to it.
static void check_all(faulty_disk * d, struct kvt_array * a, const std::vector<int>& version) {
    d->fail_at = -1;
    d->space = 1L << 60;
    for (uint32_t i = 0; i < 12; i++) {
        if (version[i] >= 0) { CHECK_EQ(check_page(a, i, (uint32_t) version[i]), KVT_ERR_OK); }
    }
}

static void test_every_operation_fails_once() {
    long n_ops = 0;
    for (const bool for_good : { false, true }) {
        for (long n = -1; n < n_ops || n == -1; n++) {
            temp_dir dir;
            faulty_disk d;
            d.fail_at = n;
            d.for_good = for_good;
            struct kvt_array * a;
            struct kvt_store * s = open_faulty(dir, &d, &a);
            std::vector<int> version(12, -1);
            const size_t n_errors = workload(s, a, version);
            if (n < 0) {
                CHECK_EQ(n_errors, 0);
                CHECK_EQ(d.n_failed, 0);
                n_ops = d.n_ops;
                CHECK(n_ops > 30);
            } else if (for_good && n == 0) {
                CHECK(n_errors > 0);
            }
            check_all(&d, a, version);
            kvt_store_close(s);
            CHECK(dir.files().empty());
        }
    }
}

static void test_full_disk() {
    for (long slots = 0; slots <= 9; slots++) {
        temp_dir dir;
        faulty_disk d;
        d.space = slots * (long) (PAGE_F16 + 64);
        struct kvt_array * a;
        struct kvt_store * s = open_faulty(dir, &d, &a);
        std::vector<int> version(12, -1);
        size_t n_errors = 0;
        for (uint32_t i = 0; i < 12; i++) {
            const int r = write_page(a, i, i);
            if (r == KVT_ERR_OK) {
                version[i] = (int) i;
                continue;
            }
            n_errors++;
            CHECK_EQ(r, KVT_ERR_DISK_FULL);
            CHECK(names_page_and_tier(last_error(s)));
            CHECK(has(last_error(s), strerror(ENOSPC)));
        }
        CHECK_EQ(n_errors > 0, slots < 8); // four frames on the host beside two that pages pass through
        for (uint32_t i = 0; i < 12; i++) { CHECK(version[i] < 0 || check_page(a, i, i) == KVT_ERR_OK); }
        check_all(&d, a, version);
        kvt_store_close(s);
    }
}

static void test_disk_budget() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 5));
    struct kvt_array * a = add_array(s, array_params(6, 12));
    uint32_t n = 0;
    int r = KVT_ERR_OK;
    while (n < 12 && (r = write_page(a, n, n)) == KVT_ERR_OK) {
        n++;
        check_budgets(s);
    }
    CHECK_EQ(r, KVT_ERR_DISK_FULL);
    CHECK_EQ(n, 9);
    CHECK(names_page_and_tier(last_error(s)) && has(last_error(s), std::to_string(5 * SLOT_F16)));
    for (uint32_t i = 0; i < n; i++) { CHECK_EQ(check_page(a, i, i), KVT_ERR_OK); }
    // a slot comes free, and it goes on
    CHECK_EQ(kvt_array_discard(a, 0, 1), KVT_ERR_OK);
    CHECK_EQ(write_page(a, 9, 9), KVT_ERR_OK);
    check_budgets(s);
    kvt_store_close(s);
}

// Frames for passing pages keep their last ones for a while: take others through, so that the next read is one of the
// disk.
static void pass_through(struct kvt_array * a) {
    for (const uint32_t i : { 4u, 5u }) {
        CHECK_EQ(info_of(a, i).tier, KVT_TIER_DISK);
        CHECK_EQ(check_page(a, i, i), KVT_ERR_OK);
    }
}

// Some other process changes bytes in the file: whichever byte, the page is an error and stays one, others are fine.
static void test_changed_bytes() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    struct kvt_array * a = add_array(s, array_params(6, 12));
    for (uint32_t i = 0; i < 12; i++) {
        CHECK_EQ(write_page(a, i, i), KVT_ERR_OK);
        kvt_store_tick(s);
    }
    CHECK_EQ(kvt_store_flush(s), KVT_ERR_OK);
    CHECK_EQ(info_of(a, 1).tier, KVT_TIER_DISK);
    const std::string path = dir.files()[0];
    const int fd = open(path.c_str(), O_RDWR);
    CHECK(fd >= 0);
    for (const size_t at :
        { (size_t) 0, PAGE_F16 / 2, PAGE_F16 - 1, PAGE_F16, PAGE_F16 + 20, PAGE_F16 + 24, PAGE_F16 + 63 }) {
        uint8_t b;
        const off_t off = (off_t) (1 * SLOT_F16 + at);
        CHECK_EQ(pread(fd, &b, 1, off), 1);
        b ^= 0x10;
        CHECK_EQ(pwrite(fd, &b, 1, off), 1);
        struct kvt_page_ref ref = {};
        for (int again = 0; again < 2; again++) {
            CHECK_EQ(kvt_array_acquire(a, 1, KVT_READ, &ref), KVT_ERR_CHECKSUM);
            CHECK(names_page_and_tier(last_error(s)) && has(last_error(s), "page 1 ") && has(last_error(s), path));
            CHECK_EQ(info_of(a, 1).tier, KVT_TIER_DISK);
        }
        CHECK_EQ(check_page(a, 0, 0), KVT_ERR_OK);
        CHECK_EQ(check_page(a, 2, 2), KVT_ERR_OK);
        b ^= 0x10;
        CHECK_EQ(pwrite(fd, &b, 1, off), 1);
        CHECK_EQ(check_page(a, 1, 1), KVT_ERR_OK);
        pass_through(a);
    }
    // another page's slot, valid in itself, is no substitute; nor is an older copy of the same page
    std::vector<uint8_t> slot0(SLOT_F16), slot1(SLOT_F16);
    CHECK_EQ(pread(fd, slot0.data(), PAGE_F16 + 64, 0), PAGE_F16 + 64);
    CHECK_EQ(pread(fd, slot1.data(), PAGE_F16 + 64, SLOT_F16), PAGE_F16 + 64);
    CHECK_EQ(pwrite(fd, slot0.data(), PAGE_F16 + 64, SLOT_F16), PAGE_F16 + 64);
    CHECK_EQ(check_page(a, 1, 1), KVT_ERR_CHECKSUM);
    CHECK_EQ(pwrite(fd, slot1.data(), PAGE_F16 + 64, SLOT_F16), PAGE_F16 + 64);
    CHECK_EQ(write_page(a, 1, 77), KVT_ERR_OK);
    for (uint32_t i = 2; i < 12; i++) {
        CHECK_EQ(write_page(a, i, i), KVT_ERR_OK);
        kvt_store_tick(s);
    }
    CHECK_EQ(kvt_store_flush(s), KVT_ERR_OK);
    CHECK_EQ(info_of(a, 1).tier, KVT_TIER_DISK);
    CHECK_EQ(check_page(a, 1, 77), KVT_ERR_OK);
    pass_through(a);
    CHECK_EQ(pwrite(fd, slot1.data(), PAGE_F16 + 64, SLOT_F16), PAGE_F16 + 64);
    CHECK_EQ(check_page(a, 1, 77), KVT_ERR_CHECKSUM);
    struct kvt_page_ref ref = {};
    CHECK_EQ(kvt_array_acquire(a, 1, KVT_WRITE, &ref), KVT_ERR_CHECKSUM);
    CHECK(ref.data == nullptr);
    CHECK_EQ(info_of(a, 1).tier, KVT_TIER_DISK);
    // a cut file
    CHECK_EQ(ftruncate(fd, 100), 0);
    CHECK_EQ(check_page(a, 1, 77), KVT_ERR_IO);
    CHECK(names_page_and_tier(last_error(s)));
    close(fd);
    // the page can be given up
    CHECK_EQ(kvt_array_acquire(a, 1, KVT_RESET, &ref), KVT_ERR_OK);
    kvt_array_release(a, &ref);
    kvt_store_close(s);
}

// The system's own errors: a file size limit ends writes in the middle of a page, in a child process of its own.
static void test_file_size_limit() {
    temp_dir dir;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit limit = { 3 * SLOT_F16 + 1000, 3 * SLOT_F16 + 1000 };
        CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
        struct kvt_array * a = add_array(s, array_params(6, 12));
        std::vector<int> version(12, -1);
        size_t n_errors = 0;
        for (uint32_t i = 0; i < 12; i++) {
            const int r = write_page(a, i, i);
            CHECK(r == KVT_ERR_OK || r == KVT_ERR_DISK_FULL);
            n_errors += r != KVT_ERR_OK;
            version[i] = r == KVT_ERR_OK ? (int) i : -1;
            CHECK(r == KVT_ERR_OK || (names_page_and_tier(last_error(s)) && has(last_error(s), strerror(EFBIG))));
        }
        CHECK(n_errors > 0);
        for (uint32_t i = 0; i < 12; i++) { CHECK(version[i] < 0 || check_page(a, i, i) == KVT_ERR_OK); }
        kvt_store_close(s);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(dir.files().empty());
}

// Holes cannot be punched everywhere. What arrays that went have left there counts until others lie there, and once.
static void test_slots_that_cannot_be_freed() {
    temp_dir dir;
    faulty_disk d;
    const struct kvt_disk_ops ops = { &d, faulty_read, faulty_write, nullptr };
    struct kvt_store_params p = small_params(dir.path.c_str(), 6, 12);
    p.disk_ops = &ops;
    struct kvt_store * s = open_store(p);
    uint64_t held = 0;
    for (uint32_t round = 0; round < 6; round++) {
        struct kvt_array_params ap = array_params(
            6, round % 2 ? 18 : 12); // of other sizes, in the same bytes of the file
        ap.geo.d_k = ap.geo.d_v = round % 2 ? 32 : 64;
        struct kvt_array * a = add_array(s, ap);
        for (uint32_t i = 0; i < kvt_array_n_pages(a); i++) {
            CHECK_EQ(write_page(a, i, round), KVT_ERR_OK);
            check_budgets(s);
        }
        for (uint32_t i = 0; i < kvt_array_n_pages(a); i++) { CHECK_EQ(check_page(a, i, round), KVT_ERR_OK); }
        kvt_store_array_remove(a);
        check_budgets(s);
        CHECK_EQ(stats_of(s).tier[KVT_TIER_DISK].used_bytes, 0);
        CHECK(stats_of(s).tier[KVT_TIER_DISK].held_bytes >= held); // nothing was freed
        held = stats_of(s).tier[KVT_TIER_DISK].held_bytes;
    }
    CHECK(held >= 8 * SLOT_F16);
    kvt_store_close(s);
}

// --- memory that ends: one allocation of the thread that calls the store fails, each in its turn -----------------

static thread_local long t_until_failure = 0; // 0: none fails

// not inlined: a compiler that sees free() behind a new of its own calls them mismatched
#define KVT_NOINLINE __attribute__((noinline))

KVT_NOINLINE void * operator new(size_t n) {
    void * p = t_until_failure > 0 && --t_until_failure == 0 ? nullptr : malloc(n > 0 ? n : 1);
    if (!p) { throw std::bad_alloc(); }
    return p;
}

KVT_NOINLINE void operator delete(void * p) noexcept { free(p); }
KVT_NOINLINE void operator delete(void * p, size_t) noexcept { free(p); }

struct starved {
    struct kvt_store * s;
    long left; // allocations until one fails; the test's own do not count
    template <typename F> int call(F f) {
        t_until_failure = left;
        const int r = f();
        left = t_until_failure;
        t_until_failure = 0;
        check_budgets(s);
        return r;
    }
    bool ok(int r) {
        CHECK(r == KVT_ERR_OK || r == KVT_ERR_NOMEM);
        return r == KVT_ERR_OK;
    }
};

static struct kvt_array * add_starved(starved& w, const struct kvt_array_params& p) {
    struct kvt_array * a = nullptr;
    while (!w.ok(w.call([&] { return kvt_store_array_add(w.s, &p, &a); }))) { CHECK(a == nullptr); }
    return a;
}

static void use_starved(
    starved& w, struct kvt_array * a, uint32_t page, enum kvt_access access, int * version, uint32_t next) {
    struct kvt_page_ref ref;
    if (!w.ok(w.call([&] { return kvt_array_acquire(a, page, access, &ref); }))) { return; }
    if (access == KVT_WRITE) {
        fill(a, ref, next);
        *version = (int) next;
        CHECK_EQ(kvt_array_set_lost(a, page, 0, KVT_SUB, 0), KVT_ERR_OK);
    } else {
        CHECK(!ref.data || matches(a, ref, (uint32_t) *version));
    }
    w.call([&] {
        kvt_array_release(a, &ref);
        return 0;
    });
}

static void move_starved(starved& w, struct kvt_array * a, uint32_t first, uint32_t n, uint8_t tier, uint8_t fmt) {
    std::vector<struct kvt_move> moves;
    for (uint32_t i = first; i < first + n; i++) { moves.push_back({ { kvt_array_id(a), i }, tier, fmt, fmt }); }
    size_t n_done = 0;
    const int r = w.call([&] { return kvt_store_apply(w.s, moves.data(), n, &n_done); });
    CHECK(r == KVT_ERR_OK || r == KVT_ERR_NOMEM || r == KVT_ERR_INVALID ||
        r == KVT_ERR_BUDGET); // it has no content, or no room
}

static void budget_starved(starved& w) {
    w.ok(w.call([&] { return kvt_store_set_host_budget(w.s, 7 * SLAB_F16); }));
    if (w.ok(w.call([&] { return kvt_store_reserve(w.s, SLAB_F16); }))) {
        CHECK_EQ(w.call([&] { return kvt_store_reserve(w.s, -(int64_t) SLAB_F16); }), KVT_ERR_OK);
    }
    CHECK_EQ(stats_of(w.s).reserved_bytes, 0);
}

// False: no allocation is left that could fail.
static bool starve(long n, bool lossy) {
    temp_dir dir;
    struct kvt_store_params p = small_params(lossy ? nullptr : dir.path.c_str(), 7, lossy ? 0 : 64);
    p.lossy = lossy;
    p.n_io_threads = 1;
    starved w = { open_store(p), n };
    struct kvt_array * a = add_starved(w, array_params(6, 12));
    std::vector<int> version(12, 0);
    std::vector<uint32_t> all(12);
    const uint32_t n_rounds = lossy ? 2 : 6; // the queues of the disk tier ask for memory now and then only
    for (uint32_t round = 0; round < n_rounds; round++) {
        for (uint32_t i = 0; i < 12; i++) {
            use_starved(w, a, i, KVT_WRITE, &version[i], 100 * round + i);
            all[i] = i;
        }
        w.call([&] {
            kvt_array_prefetch(a, all.data(), all.size());
            return 0;
        });
        for (uint32_t i = 0; i < 12; i++) { use_starved(w, a, i, KVT_READ, &version[i], 0); }
        move_starved(w, a, 8, 2, lossy ? KVT_TIER_NONE : KVT_TIER_DISK, 255);
        move_starved(w, a, 8, 2, KVT_TIER_HOST, 255);
        struct kvt_array * b = add_starved(w, array_params(7, 3));
        int unused = 0;
        use_starved(w, b, 1, KVT_WRITE, &unused, 1);
        move_starved(w, b, 1, 1, KVT_TIER_HOST, KVT_FORMAT_Q8_0);
        budget_starved(w);
        kvt_store_tick(w.s);
        w.call([&] {
            kvt_store_array_remove(b);
            return 0;
        });
    }
    CHECK_EQ(kvt_store_flush(w.s), KVT_ERR_OK);
    for (uint32_t i = 0; i < 12; i++) { // no page is stuck
        struct kvt_page_ref ref;
        CHECK_EQ(kvt_array_acquire(a, i, KVT_READ, &ref), KVT_ERR_OK);
        CHECK(!ref.data || matches(a, ref, (uint32_t) version[i]));
        kvt_array_release(a, &ref);
    }
    kvt_store_array_remove(a);
    CHECK_EQ(stats_of(w.s).tier[KVT_TIER_HOST].held_bytes, 0);
    CHECK_EQ(stats_of(w.s).tier[KVT_TIER_DISK].held_bytes, 0);
    kvt_store_close(w.s);
    return w.left == 0;
}

static void test_every_allocation_fails_once() {
    for (const bool lossy : { false, true }) {
        long n = 1;
        while (starve(n, lossy)) { n++; }
        CHECK(n > 30);
    }
}

int main() {
    test_file_size_limit();
    test_slots_that_cannot_be_freed();
    test_every_allocation_fails_once();
    test_every_operation_fails_once();
    test_full_disk();
    test_disk_budget();
    test_changed_bytes();
    return 0;
}
