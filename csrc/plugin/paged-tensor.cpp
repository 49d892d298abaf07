#include "paged-tensor.h"

#include <algorithm>
#include <cstring>

namespace {

// Where a row of a cache tensor lives.
struct row_place {
    uint32_t page;
    int32_t cell;   // within the page
    int64_t n_left; // rows from this one to the page's (or the stream's) end
};

row_place place_of(const kvt_root * root, int32_t page_tokens, int64_t row) {
    const int64_t stream = row / root->n_cells;
    const int64_t cell = row % root->n_cells;
    const int64_t per = (root->n_cells + page_tokens - 1) / page_tokens;
    const int32_t inside = (int32_t) (cell % page_tokens);
    return { (uint32_t) (stream * per + cell / page_tokens), inside,
        std::min<int64_t>(page_tokens - inside, root->n_cells - cell) };
}

// One part of a page held for the time of a few rows: the page itself, or its stretch of the keys that are kept apart.
class held_page {
public:
    ~held_page() { drop(); }

    int take(kvt_layer * layer, kvt_part part, uint32_t page, kvt_access access) {
        drop();
        m_layer = layer;
        m_keys = part == KVT_PART_K ? layer->keys : nullptr;
        m_base = m_keys ? (int64_t) page * layer->geo.page_tokens : 0;
        if (m_keys) {
            m_ref = { m_keys->data, &m_keys->layout, page, 0, nullptr };
            return KVT_OK;
        }
        const int rc = kvt_array_acquire(layer->array, page, access, &m_ref);
        m_array = rc == KVT_OK ? layer->array : nullptr;
        return rc;
    }
    void drop() {
        if (m_array) {
            kvt_array_release(m_array, &m_ref);
            m_array = nullptr;
        }
    }
    const kvt_page_ref& ref() const { return m_ref; }
    int32_t at(int32_t cell) const { return (int32_t) (m_base + cell); } // where a cell of the page lies in ref

    // write a cell; keys that are kept apart note by themselves how far it may have been rounded
    void put(kvt_part part, int32_t cell, const float * values) const {
        if (m_keys) {
            kvt_keys_put(m_keys, (size_t) at(cell), values);
        } else {
            kvt_page_put_f32(m_ref.layout, m_ref.data, part, cell, values);
        }
    }
    void put_row(kvt_part part, int32_t cell, kvt_format fmt, const void * row) const {
        if (m_keys) {
            kvt_keys_put_row(m_keys, (size_t) at(cell), fmt, row);
        } else {
            kvt_page_put_row(m_ref.layout, m_ref.data, part, cell, fmt, row);
        }
    }
    // what was put had been rounded before, nobody knows how far
    void doubt(int32_t cell) const {
        if (m_keys) { kvt_keys_doubt(m_keys, (size_t) at(cell)); }
    }
    kvt_keys * keys() const { return m_keys; }

    // cells [cell, cell + n) of `part` have been written
    void note_write(kvt_part part, int32_t cell, int32_t n) const {
        if (m_array && m_ref.lost) { kvt_array_set_lost(m_array, m_ref.page, cell, n, 0); }
        if (part == KVT_PART_V && m_layer->digests) {
            for (int32_t end = cell + n; cell < end;) { // sub by sub
                const int32_t stop = std::min(end, (cell / KVT_SUB + 1) * KVT_SUB);
                kvt_digests_note_write(m_layer->digests, &m_ref, cell, stop - cell);
                cell = stop;
            }
        }
    }

private:
    kvt_layer * m_layer = nullptr;
    kvt_array * m_array = nullptr;
    kvt_keys * m_keys = nullptr;
    int64_t m_base = 0;
    kvt_page_ref m_ref = {};
};

void get_row(const kvt_root * root, const kvt_page_ref& ref, int32_t cell, void * row) {
    if (!ref.data) {
        memset(row, 0, root->row_bytes);
    } else if (root->nominal >= 0) {
        kvt_page_get_row(ref.layout, ref.data, root->part, cell, (enum kvt_format) root->nominal, row);
    } else {
        std::vector<float> values(root->n_embd);
        kvt_page_get_f32(ref.layout, ref.data, root->part, cell, values.data());
        g_ggml.ggml_quantize_chunk(root->type, values.data(), row, 0, 1, root->n_embd, nullptr);
    }
}

void put_row(const kvt_root * root, const held_page& page, int32_t cell, const void * row) {
    if (root->nominal >= 0) {
        page.put_row(root->part, cell, (enum kvt_format) root->nominal, row);
    } else {
        std::vector<float> values(root->n_embd);
        g_ggml.ggml_get_type_traits(root->type)->to_float(row, values.data(), root->n_embd);
        page.put(root->part, cell, values.data());
        page.doubt(cell);
    }
}

int fail(const kvt_root * root, int rc, const char * what) {
    return rc == KVT_OK ? KVT_OK : root->buffer->domain->failures.fail(rc, what);
}

// Walks the rows that [off, off + size) touches, page by page. fn(page, cell, row_off, n_bytes, done) handles one row's
// bytes [row_off, row_off + n_bytes), which are the range's bytes from `done` on.
template <typename Row> int walk(kvt_root * root, size_t off, size_t size, kvt_access access, Row fn) {
    kvt_layer * layer = nullptr;
    int rc = kvt_cache_open(root->cache, &layer);
    if (rc != KVT_OK) { return rc; }
    const int32_t page_tokens = layer->params.geo.page_tokens;
    for (size_t done = 0; done < size;) {
        const int64_t row = (int64_t) ((off + done) / root->row_bytes);
        const row_place place = place_of(root, page_tokens, row);
        held_page page;
        rc = page.take(layer, root->part, place.page, access);
        if (rc != KVT_OK) { return fail(root, rc, "cannot reach a page of the cache"); }
        int32_t n = 0;
        for (; n < place.n_left && done < size; n++) {
            const size_t row_off = (off + done) % root->row_bytes;
            const size_t n_bytes = std::min(root->row_bytes - row_off, size - done);
            fn(page, place.cell + n, row_off, n_bytes, done);
            done += n_bytes;
        }
        if (access != KVT_READ) { page.note_write(root->part, place.cell, n); }
    }
    return KVT_OK;
}

bool is_lost(const kvt_page_ref& ref, int32_t cell) {
    return ref.lost && (ref.lost[cell / KVT_SUB] >> cell % KVT_SUB & 1);
}

} // namespace

int kvt_paged_read(kvt_root * root, size_t off, size_t size, void * dst, bool with_lost) {
    if (!root->cache->layer) {
        memset(dst, 0, size); // nothing was ever written
        return KVT_OK;
    }
    std::vector<char> row(root->row_bytes);
    bool found_lost = false;
    const int rc = walk(
        root, off, size, KVT_READ, [&](const held_page& page, int32_t cell, size_t row_off, size_t n, size_t done) {
            found_lost = found_lost || is_lost(page.ref(), cell);
            char * out = static_cast<char *>(dst) + done;
            if (n == root->row_bytes) {
                get_row(root, page.ref(), page.at(cell), out);
            } else {
                get_row(root, page.ref(), page.at(cell), row.data());
                memcpy(out, row.data() + row_off, n);
            }
        });
    return rc != KVT_OK || !found_lost || with_lost
        ? rc
        : fail(root, KVT_ERR_UNSUPPORTED,
              "the cache is lossy and has dropped some of its pages for good, so that its state can be neither saved "
              "nor copied out");
}

int kvt_paged_write(kvt_root * root, size_t off, size_t size, const void * src) {
    std::vector<char> row(root->row_bytes);
    return walk(
        root, off, size, KVT_WRITE, [&](const held_page& page, int32_t cell, size_t row_off, size_t n, size_t done) {
            const char * in = static_cast<const char *>(src) + done;
            if (n == root->row_bytes) {
                put_row(root, page, cell, in);
            } else {
                get_row(root, page.ref(), page.at(cell), row.data());
                memcpy(row.data() + row_off, in, n);
                put_row(root, page, cell, row.data());
                page.doubt(cell); // the rest of the row is rounded once more
            }
        });
}

// Whether `page` was never written: it reads as zeros, and writing zeros to it would only take memory.
static int is_absent(kvt_array * array, uint32_t page, bool * out) {
    kvt_page_info info;
    const int rc = kvt_array_info(array, page, &info);
    if (rc == KVT_OK) { *out = info.tier == KVT_TIER_NONE && !info.some_lost; }
    return rc;
}

int kvt_paged_fill(kvt_root * root, size_t off, size_t size, uint8_t value) {
    if (value == 0 && !root->cache->layer) {
        return KVT_OK; // nothing was ever written: it reads as zeros
    }
    kvt_layer * layer = nullptr;
    int rc = kvt_cache_open(root->cache, &layer);
    const std::vector<char> row(root->row_bytes, (char) value);
    for (size_t done = 0; rc == KVT_OK && done < size;) {
        const size_t row_off = (off + done) % root->row_bytes;
        const row_place place = place_of(
            root, layer->params.geo.page_tokens, (int64_t) ((off + done) / root->row_bytes));
        bool absent = false;
        if (value == 0 && (rc = is_absent(layer->array, place.page, &absent)) != KVT_OK) {
            return fail(root, rc, "cannot look at a page of the cache");
        }
        const size_t n = std::min(
            absent ? (size_t) place.n_left * root->row_bytes - row_off : root->row_bytes - row_off, size - done);
        rc = absent ? (int) KVT_OK : kvt_paged_write(root, off + done, n, row.data());
        done += n;
    }
    return rc;
}

int kvt_paged_clear(kvt_cache_layer * cache) {
    if (!cache->layer) { return KVT_OK; }
    kvt_root * root = cache->k ? cache->k : cache->v;
    kvt_array * array = cache->layer->array;
    const int rc = kvt_array_discard(array, 0, kvt_array_n_pages(array));
    if (rc != KVT_OK) { return fail(root, rc, "cannot clear the cache"); }
    kvt_mass_clear(cache->layer->mass, 0, cache->layer->mass->n_cells);
    if (cache->layer->keys) {
        kvt_keys_clear(cache->layer->keys);
        kvt_digests_clear(cache->layer->digests);
    }
    root->buffer->domain->forget(cache->layer);
    return KVT_OK;
}

// n cells from `cell` on, every one of them lost, in a page without content: there is nothing to copy but that.
static bool all_gone(const kvt_page_ref& ref, int32_t cell, int64_t n) {
    bool gone = !ref.data;
    for (int64_t j = 0; gone && j < n; j++) { gone = is_lost(ref, cell + (int32_t) j); }
    return gone;
}

// Rows within one page of each side, in the format that the source has stored.
static int copy_within_pages(kvt_root * src, kvt_layer * from, const row_place& a, kvt_root * dst, kvt_layer * to,
    const row_place& b, int64_t n) {
    held_page in, out;
    int rc;
    const bool is_same = from == to && a.page == b.page; // a page is never held for reading and writing at once
    if (!is_same && (rc = in.take(from, src->part, a.page, KVT_READ)) != KVT_OK) {
        return fail(src, rc, "cannot read a page to copy");
    }
    if (!is_same && all_gone(in.ref(), a.cell, n)) {
        return kvt_array_set_lost(to->array, b.page, b.cell, (int32_t) n, 1);
    }
    if ((rc = out.take(to, dst->part, b.page, KVT_WRITE)) != KVT_OK) {
        return fail(dst, rc, "cannot write a copied page");
    }
    const held_page& read = is_same ? out : in;
    const kvt_page_ref& rows = read.ref();
    std::vector<float> row(src->n_embd); // as large as any format's row
    std::vector<int32_t> lost;
    for (int32_t j = 0; rows.lost && j < n; j++) {
        if (is_lost(rows, a.cell + j)) { lost.push_back(b.cell + j); }
    }
    for (int64_t j = 0; j < n; j++) {
        const int32_t from_cell = read.at(a.cell + (int32_t) j), to_cell = b.cell + (int32_t) j;
        if (!rows.data) {
            out.put(dst->part, to_cell, row.data());
            continue;
        }
        if (read.keys() && out.keys()) {
            kvt_keys_copy(out.keys(), (size_t) out.at(to_cell), read.keys(), (size_t) from_cell);
            continue;
        }
        const enum kvt_format fmt = src->part == KVT_PART_K ? rows.layout->fmt_k : rows.layout->fmt_v;
        kvt_page_get_row(rows.layout, rows.data, src->part, from_cell, fmt, row.data());
        out.put_row(dst->part, to_cell, fmt, row.data());
    }
    out.note_write(dst->part, b.cell, (int32_t) n);
    for (const int32_t cell : lost) { kvt_array_set_lost(to->array, b.page, cell, 1, 1); }
    return KVT_OK;
}

int kvt_paged_copy_rows(kvt_root * src, int64_t src_row, kvt_root * dst, int64_t dst_row, int64_t n_rows) {
    kvt_layer * from = src->cache->layer;
    kvt_layer * to = nullptr;
    if (!from) { return kvt_paged_fill(dst, dst_row * dst->row_bytes, n_rows * dst->row_bytes, 0); }
    int rc = kvt_cache_open(dst->cache, &to);
    for (int64_t i = 0; rc == KVT_OK && i < n_rows;) {
        const row_place a = place_of(src, from->params.geo.page_tokens, src_row + i);
        const row_place b = place_of(dst, to->params.geo.page_tokens, dst_row + i);
        const int64_t n = std::min({ a.n_left, b.n_left, n_rows - i });
        bool from_nothing = false, to_nothing = false;
        rc = is_absent(from->array, a.page, &from_nothing);
        rc = rc == KVT_OK ? is_absent(to->array, b.page, &to_nothing) : rc;
        if (rc == KVT_OK && !(from_nothing && to_nothing)) { rc = copy_within_pages(src, from, a, dst, to, b, n); }
        i += n;
    }
    return rc;
}

// Whether the cell of a row is lost and `bytes`, a whole row, holds only zeros of either sign: what an operation on the
// whole cache, such as a shift of positions, makes of the zeros that it found there. Such a row is not to be written.
static bool stays_lost(kvt_root * root, int64_t row, const void * bytes) {
    kvt_layer * layer = root->cache->layer;
    if (!layer || root->nominal < 0) { return false; }
    const row_place place = place_of(root, layer->params.geo.page_tokens, row);
    kvt_page_info info;
    held_page page;
    if (kvt_array_info(layer->array, place.page, &info) != KVT_OK || !info.some_lost ||
        page.take(layer, root->part, place.page, KVT_READ) != KVT_OK || !is_lost(page.ref(), place.cell)) {
        return false;
    }
    std::vector<float> values(root->n_embd);
    kvt_row_to_f32((enum kvt_format) root->nominal, bytes, values.data(), root->n_embd);
    return std::all_of(values.begin(), values.end(), [](float x) { return x == 0.0f; });
}

int kvt_paged_put_back(kvt_root * root, int64_t first_row, const std::vector<char>& before,
    const std::vector<char>& after, const float * numbers) {
    if (before == after) { return KVT_OK; }
    const kvt_layer * layer = root->cache->layer; // none yet: then there are no errors either
    kvt_keys * keys = layer && root->part == KVT_PART_K && root->nominal >= 0 ? layer->keys : nullptr;
    std::vector<float> noted; // before the first row is changed: errors are kept for 32 cells together
    if (keys) { noted.assign(kvt_keys_errors(keys, 0, 0), kvt_keys_errors(keys, keys->layout.geo.n_head_kv, 0)); }
    int rc = KVT_OK;
    for (size_t at = 0; rc == KVT_OK && at < after.size(); at += root->row_bytes) {
        const int64_t i = (int64_t) (at / root->row_bytes), row = first_row + i;
        const char *was = before.data() + at, *now = after.data() + at;
        if (memcmp(was, now, root->row_bytes) == 0 || stays_lost(root, row, now)) { continue; }
        if (keys) {
            const row_place place = place_of(root, layer->geo.page_tokens, row);
            kvt_keys_change(keys, (size_t) place.page * layer->geo.page_tokens + place.cell,
                (enum kvt_format) root->nominal, was, now, numbers ? numbers + i * root->n_embd : nullptr,
                noted.data());
        } else {
            rc = kvt_paged_write(root, (size_t) row * root->row_bytes, root->row_bytes, now);
        }
    }
    return rc;
}

int kvt_paged_put_rows(kvt_root * root, const int64_t * rows, const float * const * values, size_t n) {
    kvt_layer * layer = nullptr;
    int rc = kvt_cache_open(root->cache, &layer);
    if (rc != KVT_OK) { return rc; }
    const int32_t page_tokens = layer->params.geo.page_tokens;
    held_page page;
    uint32_t current = UINT32_MAX;
    for (size_t i = 0; i < n;) {
        const row_place place = place_of(root, page_tokens, rows[i]);
        if (place.page != current) {
            current = UINT32_MAX;
            rc = page.take(layer, root->part, place.page, KVT_WRITE);
            if (rc != KVT_OK) { return fail(root, rc, "cannot write a page of the cache"); }
            current = place.page;
        }
        int32_t n_run = 0; // rows of the batch that lie side by side
        for (; i < n && n_run < place.n_left && rows[i] == rows[i - n_run] + n_run; i++, n_run++) {
            page.put(root->part, place.cell + n_run, values[i]);
        }
        page.note_write(root->part, place.cell, n_run);
        if (root->part == KVT_PART_K) {
            kvt_mass_clear(layer->mass, (size_t) place.page * page_tokens + place.cell, (size_t) n_run);
        }
    }
    return KVT_OK;
}
