// Where the numbers of a cell lie inside a page, and moves of rows between pages and ggml rows.
//
// Everything here works on pieces: up to 32 adjacent channels of one cell and one head. A piece is one block of the
// quantized formats (their d is a multiple of 32), and up to 32 plain elements of the others.

#include "format.h"

#include "../include/kvtier-errors.h"

#include <cstring>

static const int32_t PIECE = 32;
static const size_t PIECE_BYTES_MAX = PIECE * sizeof(float);

static bool is_quantized(enum kvt_format fmt) {
    return fmt == KVT_FORMAT_Q8_0 || fmt == KVT_FORMAT_Q4_0 || fmt == KVT_FORMAT_Q4_1;
}

// bytes of one 32-channel, 32-token block group of a quantized sub-page
static size_t group_bytes(enum kvt_format fmt) { return KVT_SUB * kvt_row_bytes(fmt, PIECE); }

static size_t sub_bytes(enum kvt_format fmt, int32_t d) {
    return is_quantized(fmt) ? (size_t) (d / PIECE) * group_bytes(fmt) : KVT_SUB * kvt_row_bytes(fmt, d);
}

int kvt_page_layout_init(
    struct kvt_page_layout * out, const struct kvt_geometry * geo, enum kvt_format fmt_k, enum kvt_format fmt_v) {
    if (!out || !geo || geo->n_head_kv <= 0 || geo->d_k < 0 || geo->d_v < 0 || (geo->d_k == 0 && geo->d_v == 0) ||
        geo->page_tokens <= 0 || geo->page_tokens % KVT_SUB != 0) {
        return KVT_ERR_INVALID;
    }
    // with these limits no size below comes near 64 bits; a page must fit into 31
    if (geo->n_head_kv > 4096 || geo->d_k > 65536 || geo->d_v > 65536 || geo->page_tokens > 65536) {
        return KVT_ERR_INVALID;
    }
    if ((geo->d_k > 0 && !kvt_format_supports(fmt_k, geo->d_k)) ||
        (geo->d_v > 0 && !kvt_format_supports(fmt_v, geo->d_v))) {
        return KVT_ERR_UNSUPPORTED;
    }
    if (!kvt_format_name(fmt_k) || !kvt_format_name(fmt_v)) { return KVT_ERR_INVALID; }
    struct kvt_page_layout l = {};
    l.geo = *geo;
    l.fmt_k = fmt_k;
    l.fmt_v = fmt_v;
    l.d_v_pad = (geo->d_v + 15) / 16 * 16;
    l.k_sub_bytes = geo->d_k > 0 ? sub_bytes(fmt_k, geo->d_k) : 0;
    l.v_sub_bytes = geo->d_v > 0 ? sub_bytes(fmt_v, l.d_v_pad) : 0;
    l.head_bytes = ((size_t) (geo->page_tokens / KVT_SUB) * (l.k_sub_bytes + l.v_sub_bytes) + 63) / 64 * 64;
    l.page_bytes = (size_t) geo->n_head_kv * l.head_bytes;
    if (l.page_bytes > ((size_t) 1 << 31)) { return KVT_ERR_INVALID; }
    *out = l;
    return KVT_ERR_OK;
}

// --- pieces in the page's own format -----------------------------------------------------------------------------

static void k_put_piece(enum kvt_format fmt, uint8_t * sub, int32_t t, int32_t c0, int32_t n, const uint8_t * src) {
    if (!is_quantized(fmt)) {
        const size_t e = kvt_row_bytes(fmt, 1);
        uint8_t * p = sub + ((size_t) c0 * KVT_SUB + (size_t) t) * e;
        if (e == 2) {
            for (int32_t j = 0; j < n; j++) { memcpy(p + (size_t) j * KVT_SUB * 2, src + 2 * j, 2); }
        } else {
            for (int32_t j = 0; j < n; j++) { memcpy(p + (size_t) j * KVT_SUB * 4, src + 4 * j, 4); }
        }
        return;
    }
    uint8_t * b = sub + (size_t) (c0 / PIECE) * group_bytes(fmt);
    memcpy(b + 2 * t, src, 2);
    src += 2;
    b += 2 * KVT_SUB;
    if (fmt == KVT_FORMAT_Q4_1) {
        memcpy(b + 2 * t, src, 2);
        src += 2;
        b += 2 * KVT_SUB;
    }
    const int32_t n_quads = fmt == KVT_FORMAT_Q8_0 ? 8 : 4; // a quad: 4 bytes of one token that lie together
    for (int32_t g = 0; g < n_quads; g++) { memcpy(b + ((size_t) g * KVT_SUB + (size_t) t) * 4, src + 4 * g, 4); }
}

static void k_get_piece(enum kvt_format fmt, const uint8_t * sub, int32_t t, int32_t c0, int32_t n, uint8_t * dst) {
    if (!is_quantized(fmt)) {
        const size_t e = kvt_row_bytes(fmt, 1);
        const uint8_t * p = sub + ((size_t) c0 * KVT_SUB + (size_t) t) * e;
        if (e == 2) {
            for (int32_t j = 0; j < n; j++) { memcpy(dst + 2 * j, p + (size_t) j * KVT_SUB * 2, 2); }
        } else {
            for (int32_t j = 0; j < n; j++) { memcpy(dst + 4 * j, p + (size_t) j * KVT_SUB * 4, 4); }
        }
        return;
    }
    const uint8_t * b = sub + (size_t) (c0 / PIECE) * group_bytes(fmt);
    memcpy(dst, b + 2 * t, 2);
    dst += 2;
    b += 2 * KVT_SUB;
    if (fmt == KVT_FORMAT_Q4_1) {
        memcpy(dst, b + 2 * t, 2);
        dst += 2;
        b += 2 * KVT_SUB;
    }
    const int32_t n_quads = fmt == KVT_FORMAT_Q8_0 ? 8 : 4;
    for (int32_t g = 0; g < n_quads; g++) { memcpy(dst + 4 * g, b + ((size_t) g * KVT_SUB + (size_t) t) * 4, 4); }
}

// offsets of the parts of a V block of token t inside its 32-channel group
struct v_block {
    size_t d_off, m_off, q_off, q_bytes;
    bool has_m;
};

static v_block v_block_at(enum kvt_format fmt, int32_t t) {
    v_block b = {};
    b.has_m = fmt == KVT_FORMAT_Q4_1;
    b.q_bytes = fmt == KVT_FORMAT_Q8_0 ? 32 : 16;
    b.d_off = 2 * (size_t) t;
    b.m_off = 2 * KVT_SUB + 2 * (size_t) t;
    b.q_off = (b.has_m ? 4 : 2) * KVT_SUB + (size_t) t * b.q_bytes;
    return b;
}

static void v_put_piece(
    enum kvt_format fmt, int32_t d_pad, uint8_t * sub, int32_t t, int32_t c0, int32_t n, const uint8_t * src) {
    if (!is_quantized(fmt)) {
        const size_t e = kvt_row_bytes(fmt, 1);
        memcpy(sub + ((size_t) t * (size_t) d_pad + (size_t) c0) * e, src, (size_t) n * e);
        return;
    }
    uint8_t * group = sub + (size_t) (c0 / PIECE) * group_bytes(fmt);
    const v_block b = v_block_at(fmt, t);
    memcpy(group + b.d_off, src, 2);
    if (b.has_m) { memcpy(group + b.m_off, src + 2, 2); }
    memcpy(group + b.q_off, src + (b.has_m ? 4 : 2), b.q_bytes);
}

static void v_get_piece(
    enum kvt_format fmt, int32_t d_pad, const uint8_t * sub, int32_t t, int32_t c0, int32_t n, uint8_t * dst) {
    if (!is_quantized(fmt)) {
        const size_t e = kvt_row_bytes(fmt, 1);
        memcpy(dst, sub + ((size_t) t * (size_t) d_pad + (size_t) c0) * e, (size_t) n * e);
        return;
    }
    const uint8_t * group = sub + (size_t) (c0 / PIECE) * group_bytes(fmt);
    const v_block b = v_block_at(fmt, t);
    memcpy(dst, group + b.d_off, 2);
    if (b.has_m) { memcpy(dst + 2, group + b.m_off, 2); }
    memcpy(dst + (b.has_m ? 4 : 2), group + b.q_off, b.q_bytes);
}

// --- cells -------------------------------------------------------------------------------------------------------

// One part (K or V) of one cell in one page.
struct cell_view {
    enum kvt_format fmt;
    int32_t d;
    int32_t d_pad;
    int32_t t;  // token inside the sub-page
    size_t off; // of the part's sub-page of head 0
    size_t head_bytes;
    bool is_k;
};

static cell_view cell_at(const struct kvt_page_layout * l, enum kvt_part part, int32_t cell) {
    cell_view v;
    v.is_k = part == KVT_PART_K;
    v.fmt = v.is_k ? l->fmt_k : l->fmt_v;
    v.d = v.is_k ? l->geo.d_k : l->geo.d_v;
    v.d_pad = l->d_v_pad;
    v.t = cell % KVT_SUB;
    v.off = v.is_k ? kvt_k_sub_off(l, 0, cell / KVT_SUB) : kvt_v_sub_off(l, 0, cell / KVT_SUB);
    v.head_bytes = l->head_bytes;
    return v;
}

static void put_piece(const cell_view& v, uint8_t * page, int32_t head, int32_t c0, int32_t n, const uint8_t * src) {
    uint8_t * sub = page + v.off + (size_t) head * v.head_bytes;
    if (v.is_k) {
        k_put_piece(v.fmt, sub, v.t, c0, n, src);
    } else {
        v_put_piece(v.fmt, v.d_pad, sub, v.t, c0, n, src);
    }
}

static void get_piece(const cell_view& v, const uint8_t * page, int32_t head, int32_t c0, int32_t n, uint8_t * dst) {
    const uint8_t * sub = page + v.off + (size_t) head * v.head_bytes;
    if (v.is_k) {
        k_get_piece(v.fmt, sub, v.t, c0, n, dst);
    } else {
        v_get_piece(v.fmt, v.d_pad, sub, v.t, c0, n, dst);
    }
}

static int32_t piece_len(int32_t d, int32_t c0) { return d - c0 < PIECE ? d - c0 : PIECE; }

void kvt_page_put_f32(
    const struct kvt_page_layout * l, void * page, enum kvt_part part, int32_t cell, const float * row) {
    const cell_view v = cell_at(l, part, cell);
    alignas(16) uint8_t tmp[PIECE_BYTES_MAX];
    for (int32_t h = 0; h < l->geo.n_head_kv; h++) {
        for (int32_t c = 0; c < v.d; c += PIECE) {
            const int32_t n = piece_len(v.d, c);
            kvt_row_from_f32(v.fmt, row + (size_t) h * (size_t) v.d + c, tmp, n);
            put_piece(v, (uint8_t *) page, h, c, n, tmp);
        }
    }
}

void kvt_page_get_f32(
    const struct kvt_page_layout * l, const void * page, enum kvt_part part, int32_t cell, float * row) {
    const cell_view v = cell_at(l, part, cell);
    alignas(16) uint8_t tmp[PIECE_BYTES_MAX];
    for (int32_t h = 0; h < l->geo.n_head_kv; h++) {
        for (int32_t c = 0; c < v.d; c += PIECE) {
            const int32_t n = piece_len(v.d, c);
            get_piece(v, (const uint8_t *) page, h, c, n, tmp);
            kvt_row_to_f32(v.fmt, tmp, row + (size_t) h * (size_t) v.d + c, n);
        }
    }
}

// Elements [first, first + n) of a ggml row as F32, n <= 32. When the heads are no multiple of 32 channels wide, a
// piece of a quantized row lies in up to two of its blocks.
static void row_range_to_f32(
    enum kvt_format fmt, const uint8_t * row, int64_t first, int32_t n, int64_t n_row, float * dst) {
    if (!is_quantized(fmt)) {
        kvt_row_to_f32(fmt, row + kvt_row_bytes(fmt, first), dst, n);
        return;
    }
    float tmp[2 * PIECE];
    const int64_t b0 = first / PIECE * PIECE;
    const int64_t nb = b0 + 2 * PIECE <= n_row && first + n > b0 + PIECE ? 2 * PIECE : PIECE;
    kvt_row_to_f32(fmt, row + kvt_row_bytes(fmt, b0), tmp, nb);
    memcpy(dst, tmp + (first - b0), (size_t) n * sizeof(float));
}

void kvt_page_put_row(const struct kvt_page_layout * l, void * page, enum kvt_part part, int32_t cell,
    enum kvt_format fmt, const void * row) {
    const cell_view v = cell_at(l, part, cell);
    const uint8_t * src = (const uint8_t *) row;
    const int64_t n_row = (int64_t) l->geo.n_head_kv * v.d;
    float f[PIECE];
    alignas(16) uint8_t tmp[PIECE_BYTES_MAX];
    for (int32_t h = 0; h < l->geo.n_head_kv; h++) {
        for (int32_t c = 0; c < v.d; c += PIECE) {
            const int32_t n = piece_len(v.d, c);
            const int64_t at = (int64_t) h * v.d + c;
            if (fmt == v.fmt) {
                put_piece(v, (uint8_t *) page, h, c, n, src + kvt_row_bytes(fmt, at));
                continue;
            }
            row_range_to_f32(fmt, src, at, n, n_row, f);
            kvt_row_from_f32(v.fmt, f, tmp, n);
            put_piece(v, (uint8_t *) page, h, c, n, tmp);
        }
    }
}

// Elements [first, first + n) of a cell's row as F32, n <= 32, across heads where needed (only unquantized pages have
// heads that are no multiple of 32 channels wide, so a piece never splits a block).
static void cell_range_to_f32(const cell_view& v, const uint8_t * page, int64_t first, int32_t n, float * dst) {
    alignas(16) uint8_t tmp[PIECE_BYTES_MAX];
    while (n > 0) {
        const int32_t head = (int32_t) (first / v.d);
        const int32_t c = (int32_t) (first % v.d);
        const int32_t m = v.d - c < n ? v.d - c : n;
        get_piece(v, page, head, c, m, tmp);
        kvt_row_to_f32(v.fmt, tmp, dst, m);
        dst += m;
        first += m;
        n -= m;
    }
}

void kvt_page_get_row(const struct kvt_page_layout * l, const void * page, enum kvt_part part, int32_t cell,
    enum kvt_format fmt, void * row) {
    const cell_view v = cell_at(l, part, cell);
    uint8_t * dst = (uint8_t *) row;
    const int64_t n_row = (int64_t) l->geo.n_head_kv * v.d;
    if (fmt == v.fmt) {
        for (int32_t h = 0; h < l->geo.n_head_kv; h++) {
            for (int32_t c = 0; c < v.d; c += PIECE) {
                get_piece(v, (const uint8_t *) page, h, c, piece_len(v.d, c),
                    dst + kvt_row_bytes(fmt, (int64_t) h * v.d + c));
            }
        }
        return;
    }
    float f[PIECE];
    for (int64_t at = 0; at < n_row; at += PIECE) {
        const int32_t n = (int32_t) (n_row - at < PIECE ? n_row - at : PIECE);
        cell_range_to_f32(v, (const uint8_t *) page, at, n, f);
        kvt_row_from_f32(fmt, f, dst + kvt_row_bytes(fmt, at), n);
    }
}

// --- whole pages -------------------------------------------------------------------------------------------------

static void transcode_part(const struct kvt_page_layout * src_l, const uint8_t * src,
    const struct kvt_page_layout * dst_l, uint8_t * dst, enum kvt_part part) {
    float f[PIECE];
    alignas(16) uint8_t tmp[PIECE_BYTES_MAX];
    for (int32_t cell = 0; cell < src_l->geo.page_tokens; cell++) {
        const cell_view a = cell_at(src_l, part, cell);
        const cell_view b = cell_at(dst_l, part, cell);
        for (int32_t h = 0; h < src_l->geo.n_head_kv; h++) {
            for (int32_t c = 0; c < a.d; c += PIECE) {
                const int32_t n = piece_len(a.d, c);
                get_piece(a, src, h, c, n, tmp);
                if (a.fmt != b.fmt) {
                    kvt_row_to_f32(a.fmt, tmp, f, n);
                    kvt_row_from_f32(b.fmt, f, tmp, n);
                }
                put_piece(b, dst, h, c, n, tmp);
            }
        }
    }
}

void kvt_page_transcode(
    const struct kvt_page_layout * src_l, const void * src, const struct kvt_page_layout * dst_l, void * dst) {
    const bool has_k = src_l->geo.d_k > 0, has_v = src_l->geo.d_v > 0;
    if ((!has_k || src_l->fmt_k == dst_l->fmt_k) && (!has_v || src_l->fmt_v == dst_l->fmt_v)) {
        memcpy(dst, src, dst_l->page_bytes);
        return;
    }
    memset(dst, 0, dst_l->page_bytes); // the padding
    if (has_k) { transcode_part(src_l, (const uint8_t *) src, dst_l, (uint8_t *) dst, KVT_PART_K); }
    if (has_v) { transcode_part(src_l, (const uint8_t *) src, dst_l, (uint8_t *) dst, KVT_PART_V); }
}
