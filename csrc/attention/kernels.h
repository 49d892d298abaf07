#pragma once

// The table of kernels of one instruction set, and what the drivers share. Scores are in base 2 throughout: the driver
// folds log2(e) into q, slopes and sinks, so that the softmax is 2^(s - m). Everything accumulates in F32.
//
// One set of kernels serves decode and prefill, so that a row gets the same bits in both: docs/architecture.md has the
// contract. "Rows" are the queries of one KV head: row r = query*G + g for the G query heads that share the KV head.
// A "sub" is 32 tokens of one KV head (format.h).

#include "attention.h"

#define KVT_ROW_GROUP   12 // rows of prefill that meet a sub together
#define KVT_DECODE_ROWS 16 // up to so many rows per KV head take the decode path

// Rows of one KV head, scaled. The 16-bit form serves quantized keys: per block of 32 channels q = step*q16, stored as
// pairs for a dot product over int32 lanes: pair[2g] = channels (4g, 4g+2), pair[2g+1] = channels (4g+1, 4g+3) of the
// block. |q16| <= 32767, so a block's dot product with int8 fits in int32.
struct kvt_q_rows {
    const float * f;      // [n_rows][d_k]
    const int32_t * pair; // [n_rows][d_k/2]
    const float * step;   // [n_rows][d_k/32]
    const int32_t * sum;  // [n_rows][d_k/32] sum of q16
    int32_t d_k;
};

#define KVT_SUM_LANES 16 // a row's running sum is kept in lanes and added up at the end
// Running softmax of some rows: reference exponent, sum and unnormalised output relative to it.
struct kvt_row_state {
    float * m; // [n_rows], -INFINITY before the first visible token
    float * l; // [n_rows][KVT_SUM_LANES]
    float * o; // [n_rows][d_v_pad]
    int32_t d_v_pad;
};

static inline size_t kvt_tile_k_floats(int d_k) { return (size_t) d_k * KVT_SUB; }
static inline size_t kvt_tile_v_floats(int d_v_pad) { return (size_t) d_v_pad * (KVT_SUB + 2); } // with scales

struct kvt_kernels {
    const char * name;

    // per format: s[r*ld + t] = q_r . K_t, rows r0 .. r0+n_rows-1, as many as there are.
    // `next` is memory to prefetch while reading (as long as what is read); any readable address.
    void (*scores[KVT_FORMAT_COUNT])(
        const struct kvt_q_rows * q, int r0, int n_rows, const void * k_sub, float * s, size_t ld, const char * next);
    // o[r*d_v_pad + c] += sum over the sub's tokens of p[r*ld + t] * V[t][c]
    void (*accumulate[KVT_FORMAT_COUNT])(
        const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, float * o, const char * next);

    // A tile is a sub unpacked for many rows: kvt_tile_k_floats and kvt_tile_v_floats of them. Scores and sums over it
    // are those over the sub, bit for bit.
    void (*scores_tile[KVT_FORMAT_COUNT])(
        const struct kvt_q_rows * q, int r0, int n_rows, const void * k_tile, float * s, size_t ld, const char * next);
    void (*accumulate_tile[KVT_FORMAT_COUNT])(
        const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_tile, float * o, const char * next);
    void (*tile_k[KVT_FORMAT_COUNT])(const void * k_sub, int d_k, float * tile);
    void (*tile_v[KVT_FORMAT_COUNT])(const void * v_sub, int d_v_pad, float * tile);

    // keys that are values too, to F32: k is [d_k][32]
    void (*load_k[KVT_FORMAT_COUNT])(const void * k_sub, int d_k, float * out);
    void (*transpose)(const float * k_tile, int d, int d_pad, float * v_tile); // [d][32] to [32][d_pad], zeros behind d

    // one sub: s = cap*tanh(s)
    void (*softcap)(float * s, size_t ld, int n_rows, float cap);
    // one row of one sub: s[t] += slope*mask[t]; -inf where the mask is -inf and from n_valid on. mask may be NULL
    void (*mask_add)(float * s, const uint16_t * mask, float slope, int n_valid);
    // one sub: s becomes 2^(s - m) with the rows' (possibly moved) reference exponents, l and o are brought up to date
    void (*softmax)(float * s, size_t ld, int n_rows, const struct kvt_row_state * st);
    float (*exp2_one)(float x); // 2^x for x <= 127, as softmax has it
    // a row's sums so far, relative to *m, take in the part's, which is relative to part_m > -INFINITY. d: of o
    void (*join)(float part_m, const float * part_l, const float * part_o, float * m, float * l, float * o, int d);
    // x[i] *= f
    void (*scale)(float * x, int n, float f);
    // x[i] += f*y[i]
    void (*add_scaled)(float * x, const float * y, int n, float f);
    // m[i] = 2^(m[i] - last_m)*f: what makes weights relative to m probabilities. n is a multiple of 16
    void (*mass_factors)(float * m, size_t n, float last_m, float f);
    // mass of 32 tokens: out[t] += sum over rows of f[r]*p[r*ld + t]
    void (*mass_sub)(const float * p, size_t ld, int n_rows, const float * f, float * out);
    // mean = decay*mean + (1 - decay)*x, max = max(max, x) over n; returns the sum of x
    float (*mass_update)(float * mean, float * max, const float * x, size_t n, float decay);

    // bounded recall: rows of scores or weights, n a multiple of 32
    float (*row_max)(const float * s, size_t n);
    // one sub: row r's scores become 2^min(s - m[r], 126), sums[r] their sum
    void (*weigh_sub)(float * s, size_t ld, int n_rows, const float * m, float * sums);
    void (*sums_below)(
        const float * p, size_t n, const float * t, float * out); // out[i] += sum of the p < t[i], 4 of them
    // the same over subs[0], subs[stride], ...: sub s has the weights p[32*s] ..
    void (*sums_below_subs)(
        const float * p, const uint32_t * subs, size_t n, size_t stride, const float * t, float * out);
    // one sub: bit t is set where some row's weight reaches its threshold
    uint32_t (*pick)(const float * p, size_t ld, int n_rows, const float * thresholds);
    // one sub: out[r] = what row r weighs where picked has no bit
    void (*sums_unpicked)(const float * p, size_t ld, int n_rows, uint32_t picked, float * out);
    // over n subs, n a multiple of 32, of which a row weighs weight[s] and leaves out left[s]: each weight can be off
    // by up to the factor 2^e, e = sum over n_blocks of q_norm[b]*errors[b*ld + s], or the term of b = n_blocks alone,
    // of all channels together, where that is less. *most: of what is left out; *least: of what is not
    void (*bound_sums)(const float * weight, const float * left, size_t n, const float * errors, size_t ld,
        const float * q_norm, int n_blocks, float * most, float * least);
    // as accumulate, of the picked tokens only
    void (*accumulate_some[KVT_FORMAT_COUNT])(
        const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, uint32_t picked, float * o);
};

#ifdef __cplusplus
extern "C" {
#endif

extern const struct kvt_kernels kvt_kernels_scalar;
#if defined(__x86_64__)
extern const struct kvt_kernels kvt_kernels_avx2;
extern const struct kvt_kernels kvt_kernels_avx512;
extern const struct kvt_kernels kvt_kernels_avx512vnni;
#elif defined(__aarch64__)
extern const struct kvt_kernels kvt_kernels_neon;
#endif

const struct kvt_kernels * kvt_kernels_active(void);

#ifdef __cplusplus
}
#endif
