// A disk that fails: the n-th operation for every n, a full one, and one whose bytes change. The generation may end in
// an error that names tier and page, or go on; it never reads wrong bytes.

#include "store-fixture.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>

struct faulty_disk {
    std::atomic<long> n_ops{0};
    long fail_at = -1;          // this operation fails
    bool for_good = false;      // and all after it
    int  sys_errno = EIO;
    std::atomic<long> n_failed{0};
    std::atomic<long> space{1L << 60};   // bytes that may still be written
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
        CHECK_EQ(pwrite(fd, buf, n_bytes/2, off), n_bytes/2);
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

static bool names_page_and_tier(const std::string & text) {
    return has(text, "layer 6, page ") && has(text, "disk tier");
}

// Writes, scans and rewrites 12 pages over 4 host frames. Returns the number of errors seen; checks all that is read.
static size_t workload(struct kvt_store * s, struct kvt_array * a, std::vector<int> & version) {
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
            if (note(write_page(a, i, (uint32_t) (100*round + i)))) {
                version[i] = (int) (100*round + i);
            }
        }
        std::vector<uint32_t> all = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 };
        kvt_array_prefetch(a, all.data(), all.size());
        for (uint32_t i = 0; i < 12; i++) {
            if (version[i] >= 0) {
                note(check_page(a, i, (uint32_t) version[i]));
            }
        }
        kvt_store_tick(s);
    }
    if (kvt_store_flush(s) != KVT_ERR_OK) {
        CHECK(names_page_and_tier(last_error(s)));
    }
    return n_errors;
}

static struct kvt_store * open_faulty(const temp_dir & dir, faulty_disk * d, struct kvt_array ** a) {
    const struct kvt_disk_ops ops = { d, faulty_read, faulty_write, faulty_punch };
    struct kvt_store_params p = small_params(dir.path.c_str(), 6, 64);
    p.disk_ops = &ops;
    struct kvt_store * s = open_store(p);
    *a = add_array(s, array_params(6, 12));
    return s;
}

// After the faults are over, every page that was written is still there with what was last written to it.
static void check_all(faulty_disk * d, struct kvt_array * a, const std::vector<int> & version) {
    d->fail_at = -1;
    d->space   = 1L << 60;
    for (uint32_t i = 0; i < 12; i++) {
        if (version[i] >= 0) {
            CHECK_EQ(check_page(a, i, (uint32_t) version[i]), KVT_ERR_OK);
        }
    }
}

static void test_every_operation_fails_once() {
    long n_ops = 0;
    for (const bool for_good : { false, true }) {
        for (long n = -1; n < n_ops || n == -1; n++) {
            temp_dir dir;
            faulty_disk d;
            d.fail_at  = n;
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
        d.space = slots*(long) (PAGE_F16 + 64);
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
        for (uint32_t i = 0; i < 12; i++) {
            CHECK(version[i] < 0 || check_page(a, i, i) == KVT_ERR_OK);
        }
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
    CHECK(names_page_and_tier(last_error(s)) && has(last_error(s), std::to_string(5*SLOT_F16)));
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(check_page(a, i, i), KVT_ERR_OK);
    }
    // a slot comes free, and it goes on
    CHECK_EQ(kvt_array_discard(a, 0, 1), KVT_ERR_OK);
    CHECK_EQ(write_page(a, 9, 9), KVT_ERR_OK);
    check_budgets(s);
    kvt_store_close(s);
}

// Frames for passing pages keep their last ones for a while: take others through, so that the next read is one of the disk.
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
    for (const size_t at : { (size_t) 0, PAGE_F16/2, PAGE_F16 - 1, PAGE_F16, PAGE_F16 + 20, PAGE_F16 + 24, PAGE_F16 + 63 }) {
        uint8_t b;
        const off_t off = (off_t) (1*SLOT_F16 + at);
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
        struct rlimit limit = { 3*SLOT_F16 + 1000, 3*SLOT_F16 + 1000 };
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
        for (uint32_t i = 0; i < 12; i++) {
            CHECK(version[i] < 0 || check_page(a, i, i) == KVT_ERR_OK);
        }
        kvt_store_close(s);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(dir.files().empty());
}

int main() {
    test_file_size_limit();
    test_every_operation_fails_once();
    test_full_disk();
    test_disk_budget();
    test_changed_bytes();
    return 0;
}
