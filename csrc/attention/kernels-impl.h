#pragma once

// The kernels of one instruction set, over the vector type of simd-*.h. Included once by each kernels-*.cpp, inside an
// unnamed namespace: with external linkage the linker could keep the copy compiled for a processor we are not on.
// For the same reason nothing of the C++ library is used here.

#define KVT_LN2_INV 1.44269504088896341f

#if defined(__clang__)
#    define KVT_UNROLL _Pragma("unroll")
#else
#    define KVT_UNROLL _Pragma("GCC unroll 32")
#endif

static inline void prefetch(const char * p) { __builtin_prefetch(p, 0, 3); }

static constexpr int min_i(int a, int b) { return a < b ? a : b; }
// largest power of two of vectors, at most `most`, that leaves n_rows of them in registers
static constexpr int width_of(int n_rows, int most) {
    return most <= 1 || n_rows * most <= V_MAX_ACC ? most : width_of(n_rows, most / 2);
}

// rows of one kernel call: a group of prefill's rows is a whole number of calls
enum { SUB_VECS = KVT_SUB / VW, MAX_ROWS = V_MAX_ACC >= 24 ? 12 : V_MAX_ACC >= 12 ? 6 : 4 };

// How many of n rows a call takes: any number of them gives the same bits, so there are no more than pay. A tile meets
// groups of MAX_ROWS rows, and once some that are left over.
template <bool TILE> static inline int rows_of_call(int n) {
    if (n >= MAX_ROWS) return MAX_ROWS;
    return TILE ? (n >= 4 ? 4 : n >= 2 ? 2 : 1) : min_i(n, 8);
}

// CALL(R) for the compile-time R equal to n, an answer of rows_of_call
#define KVT_DISPATCH_ROWS(TILE, n, CALL)                                                                               \
    if constexpr (TILE) {                                                                                              \
        switch (n) {                                                                                                   \
            case 1: CALL(1); break;                                                                                    \
            case 2: CALL(2); break;                                                                                    \
            case 4: CALL(4); break;                                                                                    \
            default: CALL(MAX_ROWS); break;                                                                            \
        }                                                                                                              \
    } else {                                                                                                           \
        switch (n) {                                                                                                   \
            case 1: CALL(1); break;                                                                                    \
            case 2: CALL(2); break;                                                                                    \
            case 3: CALL(3); break;                                                                                    \
            case 4: CALL(4); break;                                                                                    \
            case 5: CALL(min_i(5, MAX_ROWS)); break;                                                                   \
            case 6: CALL(min_i(6, MAX_ROWS)); break;                                                                   \
            case 7: CALL(min_i(7, MAX_ROWS)); break;                                                                   \
            case 8: CALL(min_i(8, MAX_ROWS)); break;                                                                   \
            default: CALL(MAX_ROWS); break;                                                                            \
        }                                                                                                              \
    }

struct load_f32 {
    typedef float elem;
    enum { TILE = 0 };
    static inline vf load(const elem * p) { return vf_load(p); }
};
struct load_f16 {
    typedef uint16_t elem;
    enum { TILE = 0 };
    static inline vf load(const elem * p) { return vf_load_f16(p); }
};
struct load_bf16 {
    typedef uint16_t elem;
    enum { TILE = 0 };
    static inline vf load(const elem * p) { return vf_load_bf16(p); }
};
struct load_tile {
    typedef float elem;
    enum { TILE = 1 };
    static inline vf load(const elem * p) { return vf_load(p); }
};

// What differs between the quantized formats: where a block's parts are, and the constant to subtract or add. TILE: the
// format of a tile (kernels-tile.h), the same numbers unpacked.
struct quant_q8_0 {
    enum { N_SCALES = 1, K_QS = 1024, V_ROW = 32, GROUPS = 8, NIBBLES = 0, OFFSET = 0, TILE = 0 };
};
struct quant_q4_0 {
    enum { N_SCALES = 1, K_QS = 512, V_ROW = 16, GROUPS = 4, NIBBLES = 1, OFFSET = 8, TILE = 0 };
};
struct quant_q4_1 {
    enum { N_SCALES = 2, K_QS = 512, V_ROW = 16, GROUPS = 4, NIBBLES = 1, OFFSET = 0, TILE = 0 };
};
template <typename Q> struct tile_of {
    enum {
        N_SCALES = Q::N_SCALES,
        K_QS = 2048,
        V_ROW = 128,
        GROUPS = 8,
        NIBBLES = Q::NIBBLES,
        OFFSET = Q::OFFSET,
        TILE = 1
    };
};
// a block begins with its scales, and its minima where it has them: F16, in a tile F32
template <typename Q> static constexpr int scales_bytes(void) { return Q::N_SCALES * (Q::TILE ? 4 : 2) * KVT_SUB; }
template <typename Q> static constexpr int k_block_bytes(void) { return scales_bytes<Q>() + Q::K_QS; }
template <typename Q> static constexpr int v_block_bytes(void) { return scales_bytes<Q>() + Q::V_ROW * KVT_SUB; }
template <typename Q> static inline vf load_scales(const uint8_t * block, int t) {
    return Q::TILE ? vf_load((const float *) block + t) : vf_load_f16((const uint16_t *) block + t);
}

#include "kernels-sub.h"
#include "kernels-tile.h"
#include "kernels-recall.h"

// ---- softmax and mass ----

// tanh(x) = 1 - 2/(e^2x + 1): an absolute error of a few 1e-8, which is what counts in an exponent
static void softcap(float * s, size_t ld, int n_rows, float cap) {
    const vf one = vf_set1(1.0f), two = vf_set1(2.0f), f = vf_set1(2 * KVT_LN2_INV), most = vf_set1(60.0f);
    for (int r = 0; r < n_rows; r++) {
        for (int t = 0; t < KVT_SUB; t += VW) {
            const vf x = vf_mul(vf_load(s + r * ld + t), f);
            const vf e = vf_exp2(vf_sub(most, vf_max(vf_sub(most, x), vf_zero()))); // min(x, 60)
            vf_store(s + r * ld + t, vf_mul(vf_set1(cap), vf_sub(one, vf_div(two, vf_add(e, one)))));
        }
    }
}

static void mask_add(float * s, const uint16_t * mask, float slope, int n_valid) {
    uint16_t tail[KVT_SUB];
    if (n_valid < KVT_SUB) {
        for (int t = 0; t < KVT_SUB; t++) tail[t] = t >= n_valid ? 0xfc00 : mask ? mask[t] : 0;
        mask = tail;
    }
    if (!mask) return;
    const vf f = vf_set1(slope);
    KVT_UNROLL for (int t = 0; t < KVT_SUB; t += VW) {
        vf_store(s + t, vf_mask_add(vf_load(s + t), f, vf_load_f16(mask + t)));
    }
}

static void scale(float * x, int n, float f) {
    for (int i = 0; i < n; i += VW) vf_store(x + i, vf_mul(vf_load(x + i), vf_set1(f)));
}

static void add_scaled(float * x, const float * y, int n, float f) {
    for (int i = 0; i < n; i += VW) vf_store(x + i, vf_fma(vf_load(y + i), vf_set1(f), vf_load(x + i)));
}

static float exp2_one(float x) {
    float out[VW];
    vf_store(out, vf_exp2(vf_set1(x)));
    return out[0];
}

static void join(float part_m, const float * part_l, const float * part_o, float * m, float * l, float * o, int d) {
    if (part_m > *m) {
        const vf f = vf_set1(*m == -INFINITY ? 0.0f : exp2_one(*m - part_m));
        for (int i = 0; i < KVT_SUM_LANES; i += VW) vf_store(l + i, vf_fma(vf_load(l + i), f, vf_load(part_l + i)));
        for (int i = 0; i < d; i += VW) vf_store(o + i, vf_fma(vf_load(o + i), f, vf_load(part_o + i)));
        *m = part_m;
    } else {
        const vf f = vf_set1(exp2_one(part_m - *m));
        for (int i = 0; i < KVT_SUM_LANES; i += VW) vf_store(l + i, vf_fma(vf_load(part_l + i), f, vf_load(l + i)));
        for (int i = 0; i < d; i += VW) vf_store(o + i, vf_fma(vf_load(part_o + i), f, vf_load(o + i)));
    }
}

// The reference exponent moves only when a score exceeds it by more than 2^8: the weights stay far from overflow, the
// output is rarely rescaled, and most calls need no horizontal maximum.
static void move_reference(const float * s, const struct kvt_row_state * st, int r) {
    vf mx = vf_load(s);
    for (int t = VW; t < KVT_SUB; t += VW) mx = vf_max(mx, vf_load(s + t));
    const float most = vf_hmax(mx), m = st->m[r];
    if (m != -INFINITY) {
        const float f = exp2_one(m - most);
        scale(st->l + (size_t) r * KVT_SUM_LANES, KVT_SUM_LANES, f);
        scale(st->o + (size_t) r * st->d_v_pad, st->d_v_pad, f);
    }
    st->m[r] = most;
}

// N vectors of each of R rows at a time, so that the rows' chains of dependent instructions overlap
template <int R, int N> static inline void softmax_rows(float * s, size_t ld, const struct kvt_row_state * st, int r0) {
    vf ref[R], sum[R];
    KVT_UNROLL for (int r = 0; r < R; r++) {
        float * row = s + r * ld;
        const vf limit = vf_set1(st->m[r0 + r] + 8.0f);
        vf mx = vf_load(row);
        for (int t = VW; t < KVT_SUB; t += VW) mx = vf_max(mx, vf_load(row + t));
        if (vf_any_gt(mx, limit)) move_reference(row, st, r0 + r);
        ref[r] = vf_set1(st->m[r0 + r] == -INFINITY ? 0.0f : st->m[r0 + r]);
        sum[r] = vf_load(st->l + (size_t) (r0 + r) * KVT_SUM_LANES);
    }
    for (int t = 0; t < KVT_SUB; t += N * VW) {
        KVT_UNROLL for (int r = 0; r < R; r++) {
            KVT_UNROLL for (int v = 0; v < N; v++) {
                const vf p = vf_exp2(vf_sub(vf_load(s + r * ld + t + v * VW), ref[r]));
                vf_store(s + r * ld + t + v * VW, p);
                sum[r] = vf_add(sum[r], p);
            }
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) vf_store(st->l + (size_t) (r0 + r) * KVT_SUM_LANES, sum[r]);
}

static void softmax(float * s, size_t ld, int n_rows, const struct kvt_row_state * st) {
    int r = 0;
    for (; r + 3 <= n_rows; r += 3) softmax_rows<3, 2>(s + r * ld, ld, st, r);
    for (; r < n_rows; r++) softmax_rows<1, 2>(s + r * ld, ld, st, r);
}

static void mass_factors(float * m, size_t n, float last_m, float f) {
    const vf last = vf_set1(last_m), x = vf_set1(f);
    for (size_t i = 0; i < n; i += VW) vf_store(m + i, vf_mul(vf_exp2(vf_sub(vf_load(m + i), last)), x));
}

static void mass_sub(const float * p, size_t ld, int n_rows, const float * f, float * out) {
    KVT_UNROLL for (int t = 0; t < KVT_SUB; t += VW) {
        vf acc = vf_zero();
        for (int r = 0; r < n_rows; r++) acc = vf_fma(vf_set1(f[r]), vf_load(p + r * ld + t), acc);
        vf_store(out + t, vf_add(vf_load(out + t), acc));
    }
}

static float mass_update(float * mean, float * max, const float * x, size_t n, float decay) {
    const vf keep = vf_set1(decay), take = vf_set1(1.0f - decay);
    vf sum = vf_zero();
    size_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf v = vf_load(x + i);
        vf_store(mean + i, vf_fma(keep, vf_load(mean + i), vf_mul(take, v)));
        vf_store(max + i, vf_max(vf_load(max + i), v));
        sum = vf_add(sum, v);
    }
    float total = vf_hsum(sum);
    for (; i < n; i++) {
        mean[i] = decay * mean[i] + (1.0f - decay) * x[i];
        max[i] = x[i] > max[i] ? x[i] : max[i];
        total += x[i];
    }
    return total;
}

#define KVT_KERNELS_TABLE(isa)                                                                                         \
    {                                                                                                                  \
        isa,                                                                                                           \
        { scores_float<load_f32>, scores_float<load_f16>, scores_float<load_bf16>, scores_quant<quant_q8_0>,           \
            scores_quant<quant_q4_0>, scores_quant<quant_q4_1> },                                                      \
        { accumulate_float<load_f32>, accumulate_float<load_f16>, accumulate_float<load_bf16>,                         \
            accumulate_quant<quant_q8_0>, accumulate_quant<quant_q4_0>, accumulate_quant<quant_q4_1> },                \
        { scores_float<load_tile>, scores_float<load_tile>, scores_float<load_tile>,                                   \
            scores_quant<tile_of<quant_q8_0>>, scores_quant<tile_of<quant_q4_0>>, scores_quant<tile_of<quant_q4_1>> }, \
        { accumulate_float<load_tile>, accumulate_float<load_tile>, accumulate_float<load_tile>,                       \
            accumulate_quant<tile_of<quant_q8_0>>, accumulate_quant<tile_of<quant_q4_0>>,                              \
            accumulate_quant<tile_of<quant_q4_1>> },                                                                   \
        { tile_k_float<load_f32>, tile_k_float<load_f16>, tile_k_float<load_bf16>, tile_k_quant<quant_q8_0>,           \
            tile_k_quant<quant_q4_0>, tile_k_quant<quant_q4_1> },                                                      \
        { tile_v_float<load_f32>, tile_v_float<load_f16>, tile_v_float<load_bf16>, tile_v_quant<quant_q8_0>,           \
            tile_v_quant<quant_q4_0>, tile_v_quant<quant_q4_1> },                                                      \
        { tile_k_float<load_f32>, tile_k_float<load_f16>, tile_k_float<load_bf16>, load_k_quant<quant_q8_0>,           \
            load_k_quant<quant_q4_0>, load_k_quant<quant_q4_1> },                                                      \
        transpose,                                                                                                     \
        softcap,                                                                                                       \
        mask_add,                                                                                                      \
        softmax,                                                                                                       \
        exp2_one,                                                                                                      \
        join,                                                                                                          \
        scale,                                                                                                         \
        add_scaled,                                                                                                    \
        mass_factors,                                                                                                  \
        mass_sub,                                                                                                      \
        mass_update,                                                                                                   \
        row_max,                                                                                                       \
        weigh_sub,                                                                                                     \
        sums_below,                                                                                                    \
        sums_below_subs,                                                                                               \
        pick,                                                                                                          \
        sums_unpicked,                                                                                                 \
        bound_sums,                                                                                                    \
        { accumulate_some_float<load_f32>, accumulate_some_float<load_f16>, accumulate_some_float<load_bf16>,          \
            accumulate_some_quant<quant_q8_0>, accumulate_some_quant<quant_q4_0>, accumulate_some_quant<quant_q4_1> }, \
    }
