#include "disk-file.h"

#include "../include/kvtier-errors.h"
#include "crc32c.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <random>

static const uint32_t SLOT_MAGIC = 0x3150564bu; // "KVP1"

// --- plain file operations ---------------------------------------------------------------------------------------

static int code_of_errno(int e) { return e == ENOSPC || e == EDQUOT || e == EFBIG ? KVT_ERR_DISK_FULL : KVT_ERR_IO; }

static int file_read(void *, int fd, void * buf, size_t n_bytes, int64_t off_bytes, int * sys_errno) {
    uint8_t * p = (uint8_t *) buf;
    while (n_bytes > 0) {
        const ssize_t n = pread(fd, p, n_bytes, (off_t) off_bytes);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) {
            *sys_errno = n < 0 ? errno : 0; // 0: the file ends here, so it was cut
            return KVT_ERR_IO;
        }
        p += n;
        n_bytes -= (size_t) n;
        off_bytes += n;
    }
    return KVT_ERR_OK;
}

static int file_write(void *, int fd, const void * buf, size_t n_bytes, int64_t off_bytes, int * sys_errno) {
    const uint8_t * p = (const uint8_t *) buf;
    while (n_bytes > 0) {
        const ssize_t n = pwrite(fd, p, n_bytes, (off_t) off_bytes);
        if (n < 0 && errno == EINTR) { continue; }
        if (n <= 0) {
            *sys_errno = n < 0 ? errno : ENOSPC;
            return code_of_errno(*sys_errno);
        }
        p += n;
        n_bytes -= (size_t) n;
        off_bytes += n;
    }
    return KVT_ERR_OK;
}

#if defined(__linux__)
static int file_punch(void *, int fd, int64_t off_bytes, size_t n_bytes, int * sys_errno) {
    int r;
    do {
        r = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t) off_bytes, (off_t) n_bytes);
    } while (r != 0 && errno == EINTR);
    if (r != 0) {
        *sys_errno = errno;
        return KVT_ERR_IO;
    }
    return KVT_ERR_OK;
}
#endif

static struct kvt_disk_ops file_ops() {
    struct kvt_disk_ops ops = {};
    ops.read = file_read;
    ops.write = file_write;
#if defined(__linux__)
    ops.punch = file_punch;
#endif
    return ops;
}

// --- the file ----------------------------------------------------------------------------------------------------

static const char PREFIX[] = "kvtier-";
static const char SUFFIX[] = ".pages";

static bool is_ours(const char * name) {
    const size_t n = strlen(name), np = sizeof(PREFIX) - 1, ns = sizeof(SUFFIX) - 1;
    return n > np + ns && memcmp(name, PREFIX, np) == 0 && memcmp(name + n - ns, SUFFIX, ns) == 0;
}

// Some network file systems know no locks. Then nobody can tell an orphan there either, and nothing is swept.
static bool lock_now(int fd, bool * unsupported) {
    int r;
    do { r = flock(fd, LOCK_EX | LOCK_NB); } while (r != 0 && errno == EINTR);
    *unsupported = r != 0 && errno != EWOULDBLOCK;
    return r == 0;
}

// A file of a process that is gone has a free lock. Between creating a file and locking it a live file looks the same;
// its maker notices that the name is gone and takes another (see create_locked).
static void sweep_orphans(const std::string& dir) {
    DIR * d = opendir(dir.c_str());
    if (!d) { return; }
    while (struct dirent * e = readdir(d)) {
        if (!is_ours(e->d_name)) { continue; }
        const std::string path = dir + "/" + e->d_name;
        const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0) { continue; }
        struct stat st;
        bool unsupported;
        if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && lock_now(fd, &unsupported)) { unlink(path.c_str()); }
        close(fd);
    }
    closedir(d);
}

static bool still_named(int fd, const std::string& path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static int create_locked(disk_file * f, const std::string& dir, int * sys_errno) {
    std::random_device rd;
    for (int attempt = 0; attempt < 64; attempt++) {
        char name[64];
        snprintf(name, sizeof(name), "%s%ld-%08x%s", PREFIX, (long) getpid(), (unsigned) rd(), SUFFIX);
        const std::string path = dir + "/" + name;
        const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0) {
            *sys_errno = errno;
            if (errno == EEXIST || errno == EINTR) { continue; }
            return KVT_ERR_DIR;
        }
        bool unsupported;
        if ((lock_now(fd, &unsupported) || unsupported) && still_named(fd, path)) {
            f->fd = fd;
            f->path = path;
            return KVT_ERR_OK;
        }
        close(fd); // a sweeper took it for an orphan and removes it
        *sys_errno = EAGAIN;
    }
    return KVT_ERR_DIR;
}

static int dir_error(std::string * err, const std::string& dir, const char * what, int sys_errno, const char * fix) {
    *err = "the directory of the disk tier '" + dir + "' " + what;
    if (sys_errno) { *err += std::string(": ") + strerror(sys_errno); }
    *err += std::string("; ") + fix;
    return KVT_ERR_DIR;
}

int kvt_disk_open(disk_file * f, const char * dir_in, const struct kvt_disk_ops * ops, std::string * err) {
    std::string dir = dir_in;
    while (dir.size() > 1 && dir.back() == '/') { dir.pop_back(); }
    struct stat st;
    if (stat(dir.c_str(), &st) != 0) {
        return dir_error(err, dir, "cannot be used", errno, "create it or choose another one");
    }
    if (!S_ISDIR(st.st_mode)) { return dir_error(err, dir, "is not a directory", 0, "choose another one"); }
    sweep_orphans(dir);
    int sys_errno = 0;
    if (create_locked(f, dir, &sys_errno) != KVT_ERR_OK) {
        return dir_error(err, dir, "does not let a file be created", sys_errno,
            "make it writable, free space on it, or choose another one");
    }
    f->ops = ops ? *ops : file_ops();
    return KVT_ERR_OK;
}

void kvt_disk_close(disk_file * f) {
    if (f->fd >= 0) {
        unlink(f->path.c_str()); // before the lock goes with the descriptor, or a sweeper could be faster
        close(f->fd);
        f->fd = -1;
    }
}

// --- slots -------------------------------------------------------------------------------------------------------

static slot_trailer make_trailer(struct kvt_page_id id, const struct kvt_page_layout& l, uint32_t crc) {
    slot_trailer t = {};
    t.magic = SLOT_MAGIC;
    t.array = id.array;
    t.page = id.page;
    t.n_bytes = (uint32_t) l.page_bytes;
    t.fmt_k = (uint32_t) l.fmt_k;
    t.fmt_v = (uint32_t) l.fmt_v;
    t.crc = crc;
    t.crc_trailer = kvt_crc32c(&t, offsetof(slot_trailer, crc_trailer));
    return t;
}

static std::string op_failed(const disk_file& f, const char * what, size_t n_bytes, int64_t off, int sys_errno) {
    return std::string(what) + " " + std::to_string(n_bytes) + " bytes at offset " + std::to_string(off) + " of '" +
        f.path + "' failed: " + (sys_errno ? strerror(sys_errno) : "the file is shorter than it was");
}

int kvt_slot_write(const disk_file& f, struct kvt_page_id id, const struct kvt_page_layout& l, uint8_t * buf,
    int64_t off, uint32_t * crc, std::string * err) {
    const uint32_t c = kvt_crc32c(buf, l.page_bytes);
    const slot_trailer t = make_trailer(id, l, c);
    memcpy(buf + l.page_bytes, &t, sizeof(t));
    const size_t n = l.page_bytes + sizeof(t);
    int sys_errno = 0;
    const int r = f.ops.write(f.ops.ctx, f.fd, buf, n, off, &sys_errno);
    if (r != KVT_ERR_OK) {
        *err = op_failed(f, "writing", n, off, sys_errno);
        return r == KVT_ERR_DISK_FULL || sys_errno == ENOSPC || sys_errno == EDQUOT ? KVT_ERR_DISK_FULL : KVT_ERR_IO;
    }
    *crc = c;
    return KVT_ERR_OK;
}

int kvt_slot_read(const disk_file& f, struct kvt_page_id id, const struct kvt_page_layout& l, uint8_t * buf,
    int64_t off, uint32_t crc, std::string * err) {
    const size_t n = l.page_bytes + sizeof(slot_trailer);
    int sys_errno = 0;
    if (f.ops.read(f.ops.ctx, f.fd, buf, n, off, &sys_errno) != KVT_ERR_OK) {
        *err = op_failed(f, "reading", n, off, sys_errno);
        return KVT_ERR_IO;
    }
    const slot_trailer want = make_trailer(id, l, crc);
    if (memcmp(buf + l.page_bytes, &want, sizeof(want)) != 0 || kvt_crc32c(buf, l.page_bytes) != crc) {
        *err = "the bytes at offset " + std::to_string(off) + " of '" + f.path + "' are not those that were written";
        return KVT_ERR_CHECKSUM;
    }
    return KVT_ERR_OK;
}
