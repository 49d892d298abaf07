#include "temporary-pages.h"
#include "buffer.h"

#include <cstring>
#include <new>

// A type of ours keeps its numbers (bit for bit where they are quantized); any other is taken as F32.
static enum kvt_format page_format(const ggml_tensor * t) {
    const int fmt = kvt_format_of_type(t->type);
    return fmt >= 0 && kvt_format_supports((enum kvt_format) fmt, (int32_t) t->ne[0]) ? (enum kvt_format) fmt
                                                                                      : KVT_FORMAT_F32;
}

bool kvt_temporary_pages_can_hold(const ggml_tensor * t) {
    return kvt_format_of_type(t->type) >= 0 || g_ggml.ggml_get_type_traits(t->type)->to_float != nullptr;
}

int kvt_temporary_pages::fill(const ggml_tensor * k, const ggml_tensor * v) {
    const kvt_geometry geo = { (int32_t) k->ne[2], (int32_t) k->ne[0], (int32_t) v->ne[0], KVT_SUB };
    const int rc = kvt_page_layout_init(&m_layout, &geo, page_format(k), page_format(v));
    if (rc != KVT_OK) { return rc; }
    m_per_stream = (uint32_t) ((k->ne[1] + KVT_SUB - 1) / KVT_SUB);
    try {
        m_bytes.assign((size_t) m_per_stream * k->ne[3] * m_layout.page_bytes + 64, 0);
    } catch (const std::bad_alloc&) { return KVT_ERR_NOMEM; }
    m_first = m_bytes.data() + (64 - (uintptr_t) m_bytes.data() % 64) % 64;
    m_source = { this, acquire_resident, acquire, release_many, nullptr, nullptr };
    put(k, KVT_PART_K);
    put(v, KVT_PART_V);
    return KVT_OK;
}

// Rows of all heads are brought together (they may lie anywhere in the tensor), then put as one cell.
void kvt_temporary_pages::put(const ggml_tensor * t, kvt_part part) {
    const enum kvt_format fmt = part == KVT_PART_K ? m_layout.fmt_k : m_layout.fmt_v;
    const bool is_ours = kvt_format_of_type(t->type) == (int) fmt;
    const size_t in_bytes = g_ggml.ggml_row_size(t->type, t->ne[0]);
    const auto to_float = g_ggml.ggml_get_type_traits(t->type)->to_float;
    std::vector<char> row(in_bytes * t->ne[2]);
    std::vector<float> values(is_ours ? 0 : t->ne[0] * t->ne[2]);
    for (int64_t s = 0; s < t->ne[3]; s++) {
        for (int64_t cell = 0; cell < t->ne[1]; cell++) {
            for (int64_t h = 0; h < t->ne[2]; h++) {
                const char * from = (const char *) t->data + cell * t->nb[1] + h * t->nb[2] + s * t->nb[3];
                if (is_ours) {
                    memcpy(row.data() + h * in_bytes, from, in_bytes);
                } else if (t->type == GGML_TYPE_F32) {
                    memcpy(values.data() + h * t->ne[0], from, in_bytes);
                } else {
                    to_float(from, values.data() + h * t->ne[0], t->ne[0]);
                }
            }
            uint8_t * page = m_first + ((size_t) s * m_per_stream + cell / KVT_SUB) * m_layout.page_bytes;
            if (is_ours) {
                kvt_page_put_row(&m_layout, page, part, (int32_t) (cell % KVT_SUB), fmt, row.data());
            } else {
                kvt_page_put_f32(&m_layout, page, part, (int32_t) (cell % KVT_SUB), values.data());
            }
        }
    }
}

int kvt_temporary_pages::acquire(void * ctx, uint32_t page, kvt_page_ref * out) {
    kvt_temporary_pages * self = static_cast<kvt_temporary_pages *>(ctx);
    *out = { self->m_first + (size_t) page * self->m_layout.page_bytes, &self->m_layout, page, 0, nullptr };
    return KVT_OK;
}

int kvt_temporary_pages::acquire_resident(
    void * ctx, const uint32_t * pages, size_t n, kvt_page_ref * refs, uint32_t * missing, size_t * n_missing) {
    (void) missing;
    for (size_t i = 0; i < n; i++) { acquire(ctx, pages[i], &refs[i]); }
    *n_missing = 0;
    return KVT_OK;
}

void kvt_temporary_pages::release_many(void *, const kvt_page_ref *, size_t) {}
