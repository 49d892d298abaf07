#pragma once

// Storage formats and the bytes of a page. Knows nothing of ggml's code (only the published block formats)
// and nothing of attention.
//
// A page holds `page_tokens` consecutive cells of one layer, K and V of all KV heads. page_tokens is a
// multiple of KVT_SUB (32); a page is a sequence of sections so that one KV head's bytes stay together:
//
//   page    := head[0] head[1] ... head[n_head_kv - 1]              each head padded to 64 bytes
//   head    := sub[0] sub[1] ... sub[page_tokens/32 - 1]
//   sub     := k_sub v_sub                                           (v_sub absent when d_v == 0)
//
// k_sub is channel-major: for each channel the values of the sub-page's 32 tokens are adjacent.
//   F32/F16/BF16: elem[d_k][32]
//   Q8_0: for each block of 32 channels { f16 d[32 tokens]; int8  qs[8][32 tokens][4] }   qs[g][t][j] = channel 4g+j
//   Q4_0: for each block of 32 channels { f16 d[32 tokens]; uint8 qs[4][32 tokens][4] }   low nibble of qs[g][t][j] =
//                                                              channel 4g+j, high nibble = channel 16+4g+j
//   Q4_1: for each block of 32 channels { f16 d[32 tokens]; f16 m[32 tokens]; uint8 qs[4][32 tokens][4] }  as Q4_0
// v_sub is token-major, rows padded with zeros to d_v_pad = round up of d_v to 16 elements:
//   F32/F16/BF16: elem[32 tokens][d_v_pad]
//   Q8_0: for each block of 32 channels { f16 d[32 tokens]; int8  qs[32 tokens][32] }
//   Q4_0: for each block of 32 channels { f16 d[32 tokens]; uint8 qs[32 tokens][16] }      nibbles as in ggml's Q4_0
//   Q4_1: for each block of 32 channels { f16 d[32 tokens]; f16 m[32 tokens]; uint8 qs[32 tokens][16] }
//
// The quantized numbers are ggml's own (value = d*q for Q8_0, d*(q-8) for Q4_0, d*q+m for Q4_1), so a row written
// as a ggml row of the same type comes back bit for bit. Quantized formats need d_k % 32 == 0 and d_v % 32 == 0.
// A zeroed page decodes to zeros in F32/F16/BF16/Q8_0/Q4_0/Q4_1 (d = m = 0).

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVT_SUB 32

enum kvt_format {
    KVT_FORMAT_F32 = 0,
    KVT_FORMAT_F16 = 1,
    KVT_FORMAT_BF16 = 2,
    KVT_FORMAT_Q8_0 = 3,
    KVT_FORMAT_Q4_0 = 4,
    KVT_FORMAT_Q4_1 = 5,
    KVT_FORMAT_COUNT
};

struct kvt_geometry {
    int32_t n_head_kv;   // KV heads
    int32_t d_k;         // channels of K per head; 0: the keys are kept apart (keys.h)
    int32_t d_v;         // channels of V per head; 0: V is the first channels of K (MLA), nothing stored for it
    int32_t page_tokens; // cells of a page, a multiple of KVT_SUB
};

enum kvt_part { KVT_PART_K = 0, KVT_PART_V = 1 };

const char * kvt_format_name(enum kvt_format fmt);              // "f16", "q8_0", ...; NULL if out of range
int kvt_format_parse(const char * name, enum kvt_format * out); // case-insensitive; KVT_ERR_INVALID
int kvt_format_supports(enum kvt_format fmt, int32_t d);        // 1 if d channels can be stored in fmt

// ggml-compatible rows: n elements (a multiple of 32 for quantized formats)
size_t kvt_row_bytes(enum kvt_format fmt, int64_t n);
void kvt_row_from_f32(
    enum kvt_format fmt, const float * src, void * dst, int64_t n); // as ggml's reference quantizers, bit for bit
void kvt_row_to_f32(enum kvt_format fmt, const void * src, float * dst, int64_t n);

// offsets and sizes in bytes; K and V of a page may have different formats
struct kvt_page_layout {
    struct kvt_geometry geo;
    enum kvt_format fmt_k, fmt_v;
    int32_t d_v_pad;
    size_t k_sub_bytes, v_sub_bytes; // one head's 32 tokens
    size_t head_bytes;               // one head of the page, padded to 64
    size_t page_bytes;
};
int kvt_page_layout_init(
    struct kvt_page_layout * out, const struct kvt_geometry * geo, enum kvt_format fmt_k, enum kvt_format fmt_v);

static inline size_t kvt_k_sub_off(const struct kvt_page_layout * l, int32_t head, int32_t sub) {
    return (size_t) head * l->head_bytes + (size_t) sub * (l->k_sub_bytes + l->v_sub_bytes);
}
static inline size_t kvt_v_sub_off(const struct kvt_page_layout * l, int32_t head, int32_t sub) {
    return kvt_k_sub_off(l, head, sub) + l->k_sub_bytes;
}

// one cell's row of K or V over all heads, as F32 [n_head_kv * d]
void kvt_page_put_f32(
    const struct kvt_page_layout * l, void * page, enum kvt_part part, int32_t cell, const float * row);
void kvt_page_get_f32(
    const struct kvt_page_layout * l, const void * page, enum kvt_part part, int32_t cell, float * row);
// the same as a ggml row of type fmt [n_head_kv * d]: bit-exact when fmt is the page's own, else through F32
void kvt_page_put_row(const struct kvt_page_layout * l, void * page, enum kvt_part part, int32_t cell,
    enum kvt_format fmt, const void * row);
void kvt_page_get_row(const struct kvt_page_layout * l, const void * page, enum kvt_part part, int32_t cell,
    enum kvt_format fmt, void * row);

// whole page from one pair of formats to another, same geometry; a plain copy when the formats agree
void kvt_page_transcode(
    const struct kvt_page_layout * src_l, const void * src, const struct kvt_page_layout * dst_l, void * dst);

#ifdef __cplusplus
}
#endif
