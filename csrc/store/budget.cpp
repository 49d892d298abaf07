// What the host budget can promise: transit frames, protected pages, and the smallest budget that works at all.

#include "bytes-text.h"
#include "store-internal.h"

#include <algorithm>

static const uint64_t TRANSIT_MAX_DEFAULT = 64;
static const uint64_t TRANSIT_MIN_DEFAULT = 4;
static const uint64_t TRANSIT_MIN = 2;

// Bytes of slabs that hold n pages of each stream of all arrays (n_pages_of), in their formats on the host.
template <typename F> static uint64_t slab_bytes_for(kvt_store * s, F n_pages_of) {
    std::vector<uint64_t> n(s->slabs.classes.size(), 0);
    for (const kvt_array * a : s->arrays) {
        if (a) {
            const uint32_t cls = kvt_slab_class(s->slabs, frame_stride(*a->layouts[LAYOUT_HOST]));
            n.resize(s->slabs.classes.size(), 0);
            n[cls] += n_pages_of(a);
        }
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < n.size(); i++) {
        const slab_class& c = s->slabs.classes[i];
        bytes += (n[i] + c.n_frames - 1) / c.n_frames * c.slab_bytes;
    }
    return bytes;
}

static uint64_t protected_bytes(kvt_store * s, int32_t first, int32_t last) {
    return slab_bytes_for(s, [first, last](const kvt_array * a) {
        const uint64_t n = std::min<uint64_t>((uint64_t) first + (uint64_t) last, a->pages_per_stream);
        return n * a->params.n_streams;
    });
}

struct frame_sizes {
    uint64_t transit, slab_max;
};

static frame_sizes largest(kvt_store * s) {
    frame_sizes z = { 0, 0 };
    for (const kvt_array * a : s->arrays) {
        for (size_t i = 0; a && i < a->layouts.size(); i++) {
            const uint64_t stride = frame_stride(*a->layouts[i]);
            z.transit = std::max<uint64_t>(z.transit, kvt_transit_bytes(stride));
            z.slab_max = std::max<uint64_t>(z.slab_max, kvt_slab_bytes(s->slabs, stride));
        }
    }
    return z;
}

static uint64_t wanted_transit(const kvt_store * s, uint64_t frame_bytes) {
    if (!s->has_disk || frame_bytes == 0) { return 0; }
    if (s->params.n_transit > 0) { return std::max<uint64_t>(TRANSIT_MIN, (uint64_t) s->params.n_transit); }
    const uint64_t n = s->params.host_bytes / 8 / frame_bytes;
    return std::min(TRANSIT_MAX_DEFAULT, std::max(TRANSIT_MIN_DEFAULT, n));
}

static void protect_what_fits(kvt_store * s, uint64_t limit, uint64_t spare) {
    int32_t first = s->params.n_protect_first;
    int32_t last = s->params.n_protect_last;
    while ((first > 0 || last > 0) && protected_bytes(s, first, last) + spare > limit) {
        if (last > 1) {
            last--;
        } else if (first > 0) {
            first--;
        } else {
            last--;
        }
    }
    s->protect_first = first;
    s->protect_last = last;
    for (kvt_array * a : s->arrays) {
        if (a) { store_trim_newest(a); }
    }
}

// Called when the arrays have changed. BUDGET: not even one page per array fits beside the least transit frames.
int store_plan_budget(kvt_store * s, std::string * err) {
    const uint64_t budget = s->params.host_bytes - std::min(s->params.host_bytes, s->reserved_bytes);
    const frame_sizes z = largest(s);
    uint64_t n = wanted_transit(s, z.transit);
    const uint64_t one_each = slab_bytes_for(s, [](const kvt_array *) { return (uint64_t) 1; });
    const uint64_t n_min = std::min(n, TRANSIT_MIN);
    // half of the budget at most passes through, and one page per array comes first
    while (n > n_min && (n * z.transit > budget / 2 || n * z.transit + one_each + z.slab_max > budget)) { n--; }
    store_trim_transit(s, n * z.transit);
    const uint64_t least = one_each +
        std::max(n_min * z.transit, s->transit.held_bytes); // frames in use are there for now
    if (least > budget) {
        const std::string reserved = s->reserved_bytes > 0
            ? " (" + kvt_bytes_text(s->reserved_bytes) + " of it are reserved for keys)"
            : std::string();
        *err = "the host budget of " + kvt_bytes_text(s->params.host_bytes) + reserved +
            " cannot hold one page per layer and the frames that "
            "reads of the disk tier need: so far that takes " +
            kvt_bytes_text(least) + ". Raise the host budget, use a smaller format, or smaller pages";
        return KVT_ERR_BUDGET;
    }
    if (s->params.lossy) { // nothing can be read back, so what is protected must be
        const uint64_t kept = protected_bytes(s, s->params.n_protect_first, s->params.n_protect_last) + z.slab_max;
        if (z.slab_max > 0 && kept > budget) {
            *err = "the host budget leaves " + kvt_bytes_text(budget) +
                " for pages, but the first and newest pages, which are never "
                "dropped, take " +
                kvt_bytes_text(kept) + " so far. Raise the host budget, protect fewer pages, or use a smaller format";
            return KVT_ERR_BUDGET;
        }
    }
    const uint64_t quota = std::max(n * z.transit, s->transit.held_bytes);
    s->transit.quota_bytes = quota;
    s->slabs.limit_bytes = budget - std::min(budget, quota);
    protect_what_fits(s, s->slabs.limit_bytes, (s->params.lossy ? 1 : 2) * z.slab_max);
    return KVT_ERR_OK;
}

// Slabs grow with the budget, so what is needed does, too: the first budget that is not below its own need.
uint64_t kvt_store_least_host(
    struct kvt_store * s, const struct kvt_array_params * p, size_t n_arrays, uint64_t reserved_bytes) {
    struct kvt_page_layout layout;
    if (!s || !p || kvt_page_layout_init(&layout, &p->geo, p->fmt_k, p->fmt_v) != KVT_ERR_OK) { return 0; }
    const uint64_t stride = frame_stride(layout);
    const uint64_t stream = (p->cells_per_stream + (uint64_t) p->geo.page_tokens - 1) / (uint64_t) p->geo.page_tokens;
    const uint64_t kept = std::min<uint64_t>(
                              (uint64_t) s->params.n_protect_first + (uint64_t) s->params.n_protect_last, stream) *
        p->n_streams;
    const uint64_t n_pages = n_arrays * (s->params.lossy ? kept : 1);
    const uint64_t transit = s->has_disk ? TRANSIT_MIN * kvt_transit_bytes(stride) : 0;
    slab_pool pool;
    for (uint64_t least = 0;;) {
        pool.budget_bytes = least;
        const uint64_t slab = kvt_slab_bytes(pool, stride), n_frames = slab / stride;
        const uint64_t need = reserved_bytes + transit + (n_pages + n_frames - 1) / n_frames * slab +
            (s->params.lossy ? slab : 0);
        if (need <= least) { return least; }
        least = need;
    }
}

// Pages that stay move together before one more has to leave.
static int shrink_to_limit(kvt_store * s, store_lock& lk) {
    const uint64_t seq0 = s->fail_seq;
    while (s->slabs.held_bytes > s->slabs.limit_bytes) {
        if (store_compact(s, lk) > 0) { continue; }
        const int r = store_make_room(s, lk, 0, seq0);
        if (r != KVT_ERR_OK) { return r; }
    }
    return KVT_ERR_OK;
}

// While pages leave for the change, others may change the budget too: if it fails, only what is ours is undone.
static int rebudget(kvt_store * s, store_lock& lk, uint64_t host_bytes, int64_t more_reserved) {
    const uint64_t more = (uint64_t) more_reserved; // adding it takes away where it was negative
    const uint64_t before_host = s->params.host_bytes, before_reserved = s->reserved_bytes,
                   reserved_bytes = before_reserved + more;
    if (reserved_bytes > before_reserved && reserved_bytes >= host_bytes) {
        return store_fail(s, KVT_ERR_BUDGET,
            kvt_bytes_text(reserved_bytes) + " cannot be set aside of a host budget of " + kvt_bytes_text(host_bytes));
    }
    const auto set = [s](uint64_t host, uint64_t reserved, std::string * err) {
        s->params.host_bytes = host;
        s->reserved_bytes = reserved;
        s->stats.tier[KVT_TIER_HOST].budget_bytes = host;
        return store_guard([s, err] { return store_plan_budget(s, err); });
    };
    std::string err;
    int r = set(host_bytes, reserved_bytes, &err);
    if (reserved_bytes < before_reserved) {
        return KVT_ERR_OK; // less is always fine
    }
    r = store_guard([&] { return r == KVT_ERR_OK ? shrink_to_limit(s, lk) : store_fail(s, r, err); });
    if (r != KVT_ERR_OK) {
        const uint64_t host = s->params.host_bytes;
        set(host == host_bytes ? before_host : host, s->reserved_bytes - more, &err); // as it was, so it fits
    }
    store_note_peak(s);
    return r;
}

int kvt_store_reserve(struct kvt_store * s, int64_t n_bytes) {
    if (!s) { return KVT_ERR_INVALID; }
    store_lock lk(s->mutex);
    return store_guard([&] { return rebudget(s, lk, s->params.host_bytes, n_bytes); });
}

int kvt_store_set_host_budget(struct kvt_store * s, uint64_t n_bytes) {
    if (!s) { return KVT_ERR_INVALID; }
    store_lock lk(s->mutex);
    return store_guard([&] { return rebudget(s, lk, n_bytes, 0); });
}

// --- protected pages ---------------------------------------------------------------------------------------------

bool store_is_protected(const kvt_array * a, uint32_t page) {
    return a->pages[page].newest || (int64_t) (page % a->pages_per_stream) < a->store->protect_first;
}

void store_trim_newest(kvt_array * a) {
    for (std::vector<uint32_t>& list : a->newest) {
        while (list.size() > (size_t) a->store->protect_last) {
            a->pages[list.back()].newest = false;
            list.pop_back();
        }
    }
}

void store_note_write(kvt_array * a, uint32_t page) {
    std::vector<uint32_t>& list = a->newest[page / a->pages_per_stream];
    if (a->store->protect_last == 0 || (!list.empty() && list.front() == page)) { return; }
    list.erase(std::remove(list.begin(), list.end(), page), list.end());
    list.insert(list.begin(), page);
    a->pages[page].newest = true;
    store_trim_newest(a);
}
