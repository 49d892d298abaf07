// The directory of the disk tier: what cannot be used is refused with a reason, orphans are swept, processes share it.

#include "store-fixture.h"

#include <csignal>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <cerrno>

static std::string open_error(const struct kvt_store_params& p, int code) {
    struct kvt_store * s = nullptr;
    char err[512] = "";
    CHECK_EQ(kvt_store_open(&p, &s, err, sizeof(err)), code);
    CHECK(s == nullptr);
    return err;
}

static void test_unusable() {
    temp_dir dir;
    const std::string missing = dir.path + "/nowhere";
    std::string e = open_error(small_params(missing.c_str(), 8, 8), KVT_ERR_DIR);
    CHECK(has(e, missing) && has(e, strerror(ENOENT)));

    const std::string file = dir.path + "/file";
    const int fd = open(file.c_str(), O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0);
    close(fd);
    e = open_error(small_params(file.c_str(), 8, 8), KVT_ERR_DIR);
    CHECK(has(e, file) && has(e, "not a directory"));

    if (geteuid() != 0) { // root may write anywhere
        CHECK_EQ(chmod(dir.path.c_str(), 0500), 0);
        e = open_error(small_params(dir.path.c_str(), 8, 8), KVT_ERR_DIR);
        CHECK(has(e, dir.path) && has(e, strerror(EACCES)));
        CHECK_EQ(chmod(dir.path.c_str(), 0700), 0);
    }
    e = open_error(small_params("/proc", 8, 8), KVT_ERR_DIR);
    CHECK(has(e, "/proc"));
    CHECK_EQ(dir.files().size(), 1);
}

static void test_settings() {
    temp_dir dir;
    struct kvt_store_params p = small_params(dir.path.c_str(), 8, 8);
    p.page_tokens = 33;
    CHECK(has(open_error(p, KVT_ERR_CONFIG), "page_tokens is 33"));
    p = small_params(dir.path.c_str(), 0, 8);
    CHECK(has(open_error(p, KVT_ERR_CONFIG), "host budget"));
    p = small_params(dir.path.c_str(), 8, 8);
    p.n_io_threads = -1;
    CHECK(has(open_error(p, KVT_ERR_CONFIG), "n_io_threads"));
    p = small_params(dir.path.c_str(), 8, 8);
    p.n_protect_last = -1;
    CHECK(has(open_error(p, KVT_ERR_CONFIG), "n_protect_last"));
    const struct kvt_disk_ops none = {};
    p = small_params(dir.path.c_str(), 8, 8);
    p.disk_ops = &none;
    CHECK(has(open_error(p, KVT_ERR_CONFIG), "disk_ops"));
    struct kvt_store * s = nullptr;
    CHECK_EQ(kvt_store_open(nullptr, &s, nullptr, 0), KVT_ERR_INVALID);
    CHECK(dir.files().empty());
}

// A child that is killed leaves its file; the next start removes it, and only it.
static void test_orphans_and_neighbours() {
    temp_dir dir;
    const std::string other = dir.path + "/kvtier-notes.txt";
    close(open(other.c_str(), O_CREAT | O_WRONLY, 0600));
    int ready[2];
    CHECK_EQ(pipe(ready), 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
        struct kvt_array * a = add_array(s, array_params(0, 12));
        for (uint32_t i = 0; i < 12; i++) { CHECK_EQ(write_page(a, i, i), KVT_ERR_OK); }
        CHECK_EQ(write(ready[1], "x", 1), 1);
        for (;;) { pause(); }
    }
    char c;
    CHECK_EQ(read(ready[0], &c, 1), 1);
    CHECK_EQ(dir.files().size(), 2);

    // while it lives, a second process in the same directory leaves it alone
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    CHECK_EQ(dir.files().size(), 3);
    struct kvt_array * a = add_array(s, array_params(0, 12));
    for (uint32_t i = 0; i < 12; i++) { CHECK_EQ(write_page(a, i, 50 + i), KVT_ERR_OK); }
    for (uint32_t i = 0; i < 12; i++) { CHECK_EQ(check_page(a, i, 50 + i), KVT_ERR_OK); }
    kvt_store_close(s);
    CHECK_EQ(dir.files().size(), 2);

    CHECK_EQ(kill(child, SIGKILL), 0);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(dir.files().size(), 2);
    s = open_store(small_params(dir.path.c_str(), 6, 64));
    CHECK_EQ(dir.files().size(), 2); // the orphan went, ours came
    kvt_store_close(s);
    CHECK(dir.files() == std::vector<std::string>({ other }));
    close(ready[0]);
    close(ready[1]);
}

// Ours is not inherited by programs that the process starts, and is private.
static void test_file_is_private() {
    temp_dir dir;
    struct kvt_store * s = open_store(small_params(dir.path.c_str(), 6, 64));
    struct stat st;
    CHECK_EQ(stat(dir.files()[0].c_str(), &st), 0);
    CHECK_EQ(st.st_mode & 0777, 0600);
    int fd = open(dir.files()[0].c_str(), O_RDWR);
    CHECK(flock(fd, LOCK_EX | LOCK_NB) != 0);
    close(fd);
    // a trailing slash is the same directory
    struct kvt_store * s2 = open_store(small_params((dir.path + "//").c_str(), 6, 64));
    CHECK_EQ(dir.files().size(), 2);
    kvt_store_close(s2);
    kvt_store_close(s);
    kvt_store_close(nullptr);
    CHECK(dir.files().empty());
}

int main() {
    test_unusable();
    test_settings();
    test_orphans_and_neighbours();
    test_file_is_private();
    return 0;
}
