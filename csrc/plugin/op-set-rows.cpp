#include "op-set-rows.h"
#include "last-error.h"
#include "paged-tensor.h"

#include <cstring>

static bool is_index(ggml_type type) { return type == GGML_TYPE_I64 || type == GGML_TYPE_I32; }

static bool is_whole_rows(const kvt_root * root, const ggml_tensor * op) {
    return root && op->nb[1] == root->row_bytes && op->ne[0] == root->n_embd;
}

bool kvt_set_rows_supported(const ggml_tensor * op) {
    const ggml_tensor * src = op->src[0];
    const ggml_tensor * idx = op->src[1];
    if (!src || !idx || src->type != GGML_TYPE_F32 || !is_index(idx->type) || src->nb[0] != sizeof(float)) {
        return false;
    }
    if (is_whole_rows(kvt_root_of(op), op)) {
        return true; // whatever the nominal type: what is stored is for us to decide
    }
    const int fmt = kvt_format_of_type(op->type);
    return fmt >= 0 && kvt_format_supports((enum kvt_format) fmt, (int32_t) op->ne[0]);
}

static int64_t index_at(const ggml_tensor * idx, int64_t i0, int64_t i1, int64_t i2) {
    const char * p = (const char *) idx->data + i0 * idx->nb[0] + i1 * idx->nb[1] + i2 * idx->nb[2];
    return idx->type == GGML_TYPE_I64 ? *(const int64_t *) p : *(const int32_t *) p;
}

// fn(source row, destination byte offset from op->data) for every row, with the index checked against the destination
template <typename F> static int for_each_row(const ggml_tensor * op, F fn) {
    const ggml_tensor * src = op->src[0];
    const ggml_tensor * idx = op->src[1];
    for (int64_t i3 = 0; i3 < src->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < src->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < src->ne[1]; i1++) {
                const int64_t row = index_at(idx, i1, i2 % idx->ne[1], i3 % idx->ne[2]);
                if (row < 0 || row >= op->ne[1]) {
                    return kvt_fail(KVT_ERR_INVALID, "SET_ROWS into %s: row %lld is outside 0..%lld", op->name,
                        (long long) row, (long long) op->ne[1] - 1);
                }
                const float * from = (const float *) ((const char *) src->data + i1 * src->nb[1] + i2 * src->nb[2] +
                    i3 * src->nb[3]);
                const int rc = fn(from, (size_t) (row * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3]));
                if (rc != KVT_OK) { return rc; }
            }
        }
    }
    return KVT_OK;
}

// Whole rows of a cache, in the order of the batch: consecutive cells share one visit to their page.
static int to_pages(kvt_root * root, const ggml_tensor * op) {
    const size_t base = (char *) op->data - root->base;
    std::vector<int64_t> rows;
    std::vector<const float *> values;
    int rc = for_each_row(op, [&](const float * from, size_t off) {
        rows.push_back((int64_t) ((base + off) / root->row_bytes));
        values.push_back(from);
        return (int) KVT_OK;
    });
    return rc != KVT_OK ? rc : kvt_paged_put_rows(root, rows.data(), values.data(), rows.size());
}

// Pieces of rows (a transposed V cache writes single elements): through the nominal bytes.
static int to_bytes(kvt_root * root, const ggml_tensor * op) {
    const size_t base = (char *) op->data - root->base;
    std::vector<char> row(g_ggml.ggml_row_size(op->type, op->ne[0]));
    return for_each_row(op, [&](const float * from, size_t off) {
        kvt_row_from_f32((enum kvt_format) kvt_format_of_type(op->type), from, row.data(), op->ne[0]);
        return kvt_paged_write(root, base + off, row.size(), row.data());
    });
}

// A plain tensor takes the way of the caches: each row is put into a page of one head and read back as a nominal row.
static int to_plain(const ggml_tensor * op) {
    const enum kvt_format fmt = (enum kvt_format) kvt_format_of_type(op->type);
    const kvt_geometry geo = { 1, (int32_t) op->ne[0], (int32_t) op->ne[0], KVT_SUB };
    kvt_page_layout layout;
    int rc = kvt_page_layout_init(&layout, &geo, fmt, fmt);
    if (rc != KVT_OK) { return rc; }
    std::vector<char> page(layout.page_bytes);
    int64_t n = 0;
    return for_each_row(op, [&](const float * from, size_t off) {
        const kvt_part part = n % 2 ? KVT_PART_V : KVT_PART_K;
        const int32_t cell = (int32_t) (n++ % KVT_SUB);
        kvt_page_put_f32(&layout, page.data(), part, cell, from);
        kvt_page_get_row(&layout, page.data(), part, cell, fmt, (char *) op->data + off);
        return (int) KVT_OK;
    });
}

int kvt_set_rows(ggml_tensor * op) {
    kvt_root * root = kvt_root_of(op);
    if (!root) { return to_plain(op); }
    return is_whole_rows(root, op) ? to_pages(root, op) : to_bytes(root, op);
}
