// Reads and writes of the disk tier: the workers, and the two operations on a page that they and blocked callers share.

#include "store-internal.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <new>
#include <system_error>

#include <pthread.h>

// --- one read ----------------------------------------------------------------------------------------------------

int store_read_page(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    const kvt_page_layout& l = *a->layouts[p.slot_layout];
    const kvt_page_id id = { a->id, page };
    const bool admit = !is_transit(p);
    uint8_t * data = p.f.data;
    const uint32_t crc = p.crc;
    s->n_reading++;
    lk.unlock();

    std::string err;
    const auto t0 = std::chrono::steady_clock::now();
    const int r = store_guard([&] { return kvt_slot_read(s->file, id, l, data, slot_off(a, page), crc, &err); });
    const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count();

    lk.lock();
    if (r == KVT_ERR_OK && admit) { store_call_hook(s, lk, &kvt_offload_hooks::on_return, a, page, l, data); }
    s->read_us += (std::min(us, KVT_READ_US_SLOW) - s->read_us) / 16;
    s->n_reading--;
    p.io = IO_NONE;
    if (r != KVT_ERR_OK) {
        if (admit) {
            kvt_slab_free(s->slabs, p.f);
            p.f = frame();
        } else {
            store_free_transit(s, p);
        }
        p.read_ahead = false;
        store_notify(s);
        return store_fail(s, r, store_page_name(a, page) + " on the disk tier: " + err);
    }
    s->stats.disk_reads++;
    s->stats.disk_read_bytes += l.page_bytes;
    p.layout = p.slot_layout;
    if (admit) {
        p.place = PLACE_HOST;
        p.dirty = false;
        s->stats.n_recalled++;
        store_count_host(s, l, 1);
    } else {
        kvt_transit_set(s->transit, p.f.index, TRANSIT_READY);
    }
    store_notify(s);
    return KVT_ERR_OK;
}

// --- one write ---------------------------------------------------------------------------------------------------

int store_start_write(kvt_store * s, kvt_array * a, uint32_t page, uint8_t slot_layout) {
    page_entry& p = a->pages[page];
    const uint32_t need = (uint32_t) kvt_slot_bytes(a->layouts[slot_layout]->page_bytes);
    const uint32_t extra = need > p.slot_bytes ? need - p.slot_bytes : 0;
    kvt_tier_stats& disk = s->stats.tier[KVT_TIER_DISK];
    if (disk.held_bytes + extra > disk.budget_bytes) {
        return store_fail(s, KVT_ERR_DISK_FULL,
            store_page_name(a, page) + " cannot leave the host tier: the disk tier holds " +
                std::to_string(disk.held_bytes) + " of its budget of " + std::to_string(disk.budget_bytes) +
                " bytes and needs " + std::to_string(extra) +
                " more; raise the disk or the host budget, or use a smaller format");
    }
    s->writes.push_back({ a->id, page }); // may throw: before anything has changed
    disk.held_bytes += extra;
    p.slot_bytes += extra;
    if (p.has_copy) {
        store_count_disk(s, *a->layouts[p.slot_layout], -1);
        p.has_copy = false;
    }
    p.dirty = true;
    p.slot_layout = slot_layout;
    p.io = IO_WRITING;
    s->n_writing++;
    s->work.notify_one();
    return KVT_ERR_OK;
}

// A failed write may have left half a page in the slot: free it. What cannot be freed stays counted.
static bool punch_slot(kvt_store * s, int64_t off, uint32_t n_bytes) {
    int sys_errno = 0;
    const kvt_disk_ops& ops = s->file.ops;
    return ops.punch && ops.punch(ops.ctx, s->file.fd, off, n_bytes, &sys_errno) == KVT_ERR_OK;
}

void store_release_slot(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page) {
    page_entry& p = a->pages[page];
    if (p.has_copy) {
        store_count_disk(s, *a->layouts[p.slot_layout], -1);
        p.has_copy = false;
    }
    if (p.slot_bytes == 0) { return; }
    const uint32_t n = p.slot_bytes;
    lk.unlock();
    const bool freed = punch_slot(s, slot_off(a, page), n);
    lk.lock();
    if (freed) {
        s->stats.tier[KVT_TIER_DISK].held_bytes -= n;
        p.slot_bytes = 0;
    }
}

static void write_failed(kvt_store * s, kvt_array * a, uint32_t page, int code, const std::string& err) {
    a->pages[page].fail_seq = ++s->fail_seq;
    s->fail_code = code;
    const std::string text = store_page_name(a, page) +
        " could not be written to the disk tier and stays on the host: " + err +
        (code == KVT_ERR_DISK_FULL ? "; free space there, or lower the disk budget and raise the host budget" : "");
    s->fail_text = text;
    if (s->pending_error == KVT_ERR_OK) {
        s->pending_error = code;
        s->pending_text = text;
    }
    store_fail(s, code, text);
}

// The page is IO_WRITING: nobody changes the frame. Its trailer space is the writer's; a page that changes its format
// on the way goes through the worker's own buffer.
static void write_page(kvt_store * s, store_lock& lk, kvt_array * a, uint32_t page, std::vector<uint8_t>& bounce) {
    page_entry& p = a->pages[page];
    const kvt_page_layout& from = *a->layouts[p.layout];
    const kvt_page_layout& to = *a->layouts[p.slot_layout];
    const bool same = p.layout == p.slot_layout;
    uint8_t * buf = p.f.data;
    const uint32_t held = p.slot_bytes;
    lk.unlock();

    uint32_t crc = 0;
    std::string err;
    const int r = store_guard([&] {
        if (!same) {
            bounce.resize(std::max(bounce.size(), frame_stride(to)));
            kvt_page_transcode(&from, buf, &to, bounce.data());
            buf = bounce.data();
        }
        return kvt_slot_write(s->file, { a->id, page }, to, buf, slot_off(a, page), &crc, &err);
    });
    if (r == KVT_ERR_NOMEM) { err = "no memory"; }
    const bool freed = r != KVT_ERR_OK && punch_slot(s, slot_off(a, page), held);

    lk.lock();
    p.io = IO_NONE;
    s->n_writing--;
    store_notify(s);
    if (r == KVT_ERR_OK) {
        p.crc = crc;
        p.has_copy = true;
        p.dirty = false;
        p.fail_seq = 0;
        s->stats.disk_writes++;
        s->stats.disk_write_bytes += to.page_bytes;
        store_count_disk(s, to, 1);
    } else {
        if (freed) {
            s->stats.tier[KVT_TIER_DISK].held_bytes -= held;
            p.slot_bytes = 0;
        }
        write_failed(s, a, page, r, err);
    }
}

// --- workers -----------------------------------------------------------------------------------------------------

void store_queue_read(kvt_store * s, kvt_page_id id) {
    s->reads.push_back(id);
    s->work.notify_one();
}

static void worker_main(kvt_store * s) {
    std::vector<uint8_t> bounce;
    bool write_next = false; // reads and writes take turns, so that neither starves
    store_lock lk(s->mutex);
    for (;;) {
        s->work.wait(lk, [s] { return s->stop || !s->reads.empty() || !s->writes.empty(); });
        if (s->stop) { return; }
        const bool write = !s->writes.empty() && (write_next || s->reads.empty());
        write_next = !write;
        if (!write) {
            const kvt_page_id id = s->reads.front();
            s->reads.pop_front();
            page_entry& p = page_of(s, id);
            if (p.io == IO_QUEUED) { // else somebody needed it at once, or called it off
                p.io = IO_READING;
                store_guard([&] { return store_read_page(s, lk, s->arrays[id.array], id.page); });
            }
            store_notify(s); // a flush waits for the queue to be empty
            continue;
        }
        const kvt_page_id id = s->writes.front();
        s->writes.pop_front();
        store_guard([&] {
            write_page(s, lk, s->arrays[id.array], id.page, bounce);
            return KVT_ERR_OK;
        });
    }
}

// Workers take no signals: those are for the program's own threads, and a write beyond the file size limit shall be an
// error, not the signal that ends the process.
int store_start_workers(kvt_store * s) {
    const int n = s->params.n_io_threads > 0 ? s->params.n_io_threads : 2;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 0; i < n; i++) { s->workers.emplace_back(worker_main, s); }
    } catch (const std::exception&) {
        // fewer do as well
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return s->workers.empty() ? KVT_ERR_NOMEM : KVT_ERR_OK;
}

void store_stop_workers(kvt_store * s, store_lock& lk) {
    s->stop = true;
    s->work.notify_all();
    lk.unlock();
    for (std::thread& t : s->workers) { t.join(); }
    lk.lock();
    s->workers.clear();
}

void store_unqueue(kvt_store * s, uint32_t array) {
    const auto of_array = [array](const kvt_page_id& id) { return id.array == array; };
    s->reads.erase(std::remove_if(s->reads.begin(), s->reads.end(), of_array), s->reads.end());
    s->ahead.erase(std::remove_if(s->ahead.begin(), s->ahead.end(), of_array), s->ahead.end());
    s->victims.erase(
        std::remove_if(s->victims.begin(), s->victims.end(), [array](const victim& v) { return v.id.array == array; }),
        s->victims.end());
}
