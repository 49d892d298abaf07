#pragma once

// Rows of queries against one sub in its own format: what decode and prefill are both made of. Part of kernels-impl.h.
//
// The bits of a row do not depend on the rows beside it. A score is one chain of multiply-adds over the channels, first
// to last (quantized keys: exact integer sums of a block of 32 channels, then one chain over the blocks); an output
// channel is one chain over the tokens of the sub, first to last. How many rows and vectors are in flight changes
// nothing.

// ---- scores ----

template <typename LD, int R>
static void scores_float_rows(
    const struct kvt_q_rows * q, int r0, const typename LD::elem * k, float * s, size_t ld, const char * next) {
    enum { NV = width_of(R, SUB_VECS), LINES = sizeof(typename LD::elem) * KVT_SUB / 64 };
    const int d_k = q->d_k;
    const float * qf = q->f + (size_t) r0 * d_k;
    for (int j = 0; j < KVT_SUB; j += NV * VW) {
        vf acc[R][NV];
        KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vf_zero();
        for (int c = 0; c < d_k; c++) {
            vf kv[NV];
            KVT_UNROLL for (int v = 0; v < NV; v++) kv[v] = LD::load(k + (size_t) c * KVT_SUB + j + v * VW);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const vf x = vf_set1(qf[(size_t) r * d_k + c]);
                KVT_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vf_fma(x, kv[v], acc[r][v]);
            }
            if (j == 0) { KVT_UNROLL for (int i = 0; i < LINES; i++) prefetch(next + ((size_t) c * LINES + i) * 64); }
        }
        KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++)
            vf_store(s + r * ld + j + v * VW, acc[r][v]);
    }
}

template <typename LD>
static void scores_float(
    const struct kvt_q_rows * q, int r0, int n_rows, const void * k_sub, float * s, size_t ld, const char * next) {
    const typename LD::elem * k = (const typename LD::elem *) k_sub;
    for (int r = 0; r < n_rows;) {
        const int n = rows_of_call<LD::TILE != 0>(n_rows - r);
#define CALL(R) scores_float_rows<LD, R>(q, r0 + r, k, s + r * ld, ld, next)
        KVT_DISPATCH_ROWS(LD::TILE != 0, n, CALL)
#undef CALL
        r += n;
    }
}

// one group of a block: NV vectors of 4 bytes per token against each row's 16-bit pairs
template <typename Q, int R, int NV>
static inline void dot_group(vi acc[R][NV], const uint8_t * qs, const int32_t * pair, size_t ld_pair) {
    if (Q::TILE != 0) { // two pairs of channels, one after the other: a query's broadcast serves all vectors
        KVT_UNROLL for (int i = 0; i < 2; i++) {
            vi x[NV];
            KVT_UNROLL for (int v = 0; v < NV; v++) x[v] = vi_load(qs + 4 * (i * KVT_SUB + v * VW));
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const vi p = vi_set1(pair[r * ld_pair + i]);
                KVT_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vi_dot16(acc[r][v], x[v], p);
            }
        }
        return;
    }
    KVT_UNROLL for (int v = 0; v < NV; v++) {
        const vi x = vi_load(qs + 4 * v * VW);
        if (Q::NIBBLES != 0) {
            const vi a = vi_nibble16<0>(x), b = vi_nibble16<8>(x), c = vi_nibble16<4>(x), d = vi_nibble16<12>(x);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const int32_t * p = pair + r * ld_pair;
                acc[r][v] = vi_dot16(vi_dot16(acc[r][v], a, vi_set1(p[0])), b, vi_set1(p[1]));
                acc[r][v] = vi_dot16(vi_dot16(acc[r][v], c, vi_set1(p[8])), d, vi_set1(p[9]));
            }
        } else {
            const vi a = vi_even16(x), b = vi_odd16(x);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const int32_t * p = pair + r * ld_pair;
                acc[r][v] = vi_dot16(vi_dot16(acc[r][v], a, vi_set1(p[0])), b, vi_set1(p[1]));
            }
        }
    }
}

template <typename Q, int R>
static void scores_quant_rows(
    const struct kvt_q_rows * q, int r0, const uint8_t * k, float * s, size_t ld, const char * next) {
    // over a tile the sums of blocks lie in s meanwhile, which leaves registers for more vectors
    enum { NV = width_of(Q::TILE ? R : 2 * R, SUB_VECS), GROUP_BYTES = (Q::TILE ? 8 : 4) * KVT_SUB };
    const int n_blocks = q->d_k / 32;
    const size_t ld_pair = (size_t) q->d_k / 2;
    const int32_t * pair = q->pair + r0 * ld_pair;
    const float * step = q->step + (size_t) r0 * n_blocks;
    const int32_t * sum = q->sum + (size_t) r0 * n_blocks;
    for (int j = 0; j < KVT_SUB; j += NV * VW) {
        vf total[R][NV];
        KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++) total[r][v] = vf_zero();
        for (int b = 0; b < n_blocks; b++) {
            const uint8_t * block = k + (size_t) b * k_block_bytes<Q>();
            const uint8_t * qs = block + scales_bytes<Q>() + 4 * j;
            vi acc[R][NV];
            KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++)
                acc[r][v] = vi_set1(-Q::OFFSET * sum[r * n_blocks + b]);
            for (int g = 0; g < Q::GROUPS; g++) {
                dot_group<Q, R, NV>(acc, qs + g * GROUP_BYTES, pair + b * 16 + 2 * g, ld_pair);
                if (j == 0 && !Q::TILE) {
                    prefetch(next + (size_t) b * k_block_bytes<Q>() + g * 128);
                    prefetch(next + (size_t) b * k_block_bytes<Q>() + g * 128 + 64);
                }
            }
            KVT_UNROLL for (int v = 0; v < NV; v++) {
                const vf dv = load_scales<Q>(block, j + v * VW);
                KVT_UNROLL for (int r = 0; r < R; r++) {
                    const float f = step[r * n_blocks + b];
                    float * at = s + r * ld + j + v * VW;
                    vf x = Q::TILE == 0 ? total[r][v] : b == 0 ? vf_zero() : vf_load(at);
                    x = vf_fma(vf_mul(vi_to_vf(acc[r][v]), vf_set1(f)), dv, x);
                    if (Q::N_SCALES == 2) {
                        const vf m = load_scales<Q>(block, KVT_SUB + j + v * VW);
                        x = vf_fma(m, vf_set1(f * (float) sum[r * n_blocks + b]), x);
                    }
                    if (Q::TILE)
                        vf_store(at, x);
                    else
                        total[r][v] = x;
                }
            }
        }
        if (Q::TILE) continue;
        KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++)
            vf_store(s + r * ld + j + v * VW, total[r][v]);
    }
}

template <typename Q>
static void scores_quant(
    const struct kvt_q_rows * q, int r0, int n_rows, const void * k_sub, float * s, size_t ld, const char * next) {
    const uint8_t * k = (const uint8_t *) k_sub;
    for (int r = 0; r < n_rows;) {
        const int n = rows_of_call<Q::TILE != 0>(n_rows - r);
#define CALL(R) scores_quant_rows<Q, R>(q, r0 + r, k, s + r * ld, ld, next)
        KVT_DISPATCH_ROWS(Q::TILE != 0, n, CALL)
#undef CALL
        r += n;
    }
}

// ---- values ----

template <typename LD, int R, int NV>
static inline void accumulate_columns(
    const float * p, size_t ld, const typename LD::elem * v, int d_v_pad, float * o, const char * next, int lines) {
    vf acc[R][NV];
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < NV; i++)
        acc[r][i] = vf_load(o + (size_t) r * d_v_pad + i * VW);
    for (int t = 0; t < KVT_SUB; t++) {
        vf x[NV];
        KVT_UNROLL for (int i = 0; i < NV; i++) x[i] = LD::load(v + (size_t) t * d_v_pad + i * VW);
        KVT_UNROLL for (int r = 0; r < R; r++) {
            const vf w = vf_set1(p[r * ld + t]);
            KVT_UNROLL for (int i = 0; i < NV; i++) acc[r][i] = vf_fma(w, x[i], acc[r][i]);
        }
        for (int i = 0; i < lines; i++) { prefetch(next + ((size_t) t * lines + i) * 64); }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < NV; i++)
        vf_store(o + (size_t) r * d_v_pad + i * VW, acc[r][i]);
}

template <typename LD, int R>
static void accumulate_float_rows(
    const float * p, size_t ld, int d_v_pad, const typename LD::elem * v, float * o, const char * next) {
    enum { N = width_of(R, 8), N2 = N >= 2 ? N / 2 : 1, N4 = N >= 4 ? N / 4 : 1 };
    // prefetched by the first columns only
    int lines = LD::TILE ? 0 : (int) (d_v_pad * sizeof(typename LD::elem) / 64);
    int c = 0;
    for (; c + N * VW <= d_v_pad; c += N * VW, lines = 0) {
        accumulate_columns<LD, R, N>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
    for (; c + N2 * VW <= d_v_pad; c += N2 * VW, lines = 0) {
        accumulate_columns<LD, R, N2>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
    for (; c + N4 * VW <= d_v_pad; c += N4 * VW, lines = 0) {
        accumulate_columns<LD, R, N4>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
    for (; c < d_v_pad; c += VW, lines = 0) { accumulate_columns<LD, R, 1>(p, ld, v + c, d_v_pad, o + c, next, lines); }
}

template <typename LD>
static void accumulate_float(
    const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, float * o, const char * next) {
    const typename LD::elem * v = (const typename LD::elem *) v_sub;
    for (int r = 0; r < n_rows;) {
        const int n = rows_of_call<LD::TILE != 0>(n_rows - r);
#define CALL(R) accumulate_float_rows<LD, R>(p + r * ld, ld, d_v_pad, v, o + (size_t) r * d_v_pad, next)
        KVT_DISPATCH_ROWS(LD::TILE != 0, n, CALL)
#undef CALL
        r += n;
    }
}

// channels VW*i.. and 16 + VW*i.. of a token's block of 32, without the scale
template <typename Q> static inline void load_quant_pair(const uint8_t * row, int i, vf * lo, vf * hi) {
    if (Q::TILE != 0) {
        *lo = vf_load((const float *) row + i * VW);
        *hi = vf_load((const float *) row + 16 + i * VW);
    } else if (Q::NIBBLES != 0) {
        vf_load_nibbles(row + i * VW, lo, hi);
    } else {
        *lo = vf_load_i8((const int8_t *) row + i * VW);
        *hi = vf_load_i8((const int8_t *) row + 16 + i * VW);
    }
}

template <typename Q, int R, int NP>
static inline void accumulate_block_pairs(const float pd[R][KVT_SUB], const float * constant, const uint8_t * qs,
    int first, int d_v_pad, float * o, const char * next) {
    vf acc[R][NP][2];
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            const vf c = vf_set1(constant[r]);
            acc[r][i][0] = vf_add(vf_load(o + (size_t) r * d_v_pad + (first + i) * VW), c);
            acc[r][i][1] = vf_add(vf_load(o + (size_t) r * d_v_pad + 16 + (first + i) * VW), c);
        }
    }
    for (int t = 0; t < KVT_SUB; t++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            vf lo, hi;
            load_quant_pair<Q>(qs + (size_t) t * Q::V_ROW, first + i, &lo, &hi);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const vf w = vf_set1(pd[r][t]);
                acc[r][i][0] = vf_fma(w, lo, acc[r][i][0]);
                acc[r][i][1] = vf_fma(w, hi, acc[r][i][1]);
            }
        }
        if (Q::TILE == 0 && first == 0 && t * Q::V_ROW % 64 == 0) prefetch(next + t * Q::V_ROW);
    }
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            vf_store(o + (size_t) r * d_v_pad + (first + i) * VW, acc[r][i][0]);
            vf_store(o + (size_t) r * d_v_pad + 16 + (first + i) * VW, acc[r][i][1]);
        }
    }
}

template <typename Q, int R>
static void accumulate_quant_rows(
    const float * p, size_t ld, int d_v_pad, const uint8_t * v, float * o, const char * next) {
    enum { PAIRS = 16 / VW, NP = width_of(2 * R, PAIRS) };
    for (int b = 0; b < d_v_pad / 32; b++) {
        const uint8_t * block = v + (size_t) b * v_block_bytes<Q>();
        const uint8_t * qs = block + scales_bytes<Q>();
        float pd[R][KVT_SUB], constant[R];
        KVT_UNROLL for (int r = 0; r < R; r++) {
            vf sum = vf_zero();
            KVT_UNROLL for (int j = 0; j < KVT_SUB; j += VW) {
                const vf w = vf_load(p + r * ld + j);
                const vf x = vf_mul(w, load_scales<Q>(block, j));
                vf_store(pd[r] + j, x);
                if (Q::OFFSET != 0) sum = vf_add(sum, x);
                if (Q::N_SCALES == 2) sum = vf_fma(w, load_scales<Q>(block, KVT_SUB + j), sum);
            }
            constant[r] = Q::OFFSET != 0 ? -(float) Q::OFFSET * vf_hsum(sum) : Q::N_SCALES == 2 ? vf_hsum(sum) : 0.0f;
        }
        for (int i = 0; i < PAIRS; i += NP) {
            accumulate_block_pairs<Q, R, NP>(
                pd, constant, qs, i, d_v_pad, o + b * 32, next + (size_t) b * v_block_bytes<Q>());
        }
    }
}

template <typename Q>
static void accumulate_quant(
    const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, float * o, const char * next) {
    const uint8_t * v = (const uint8_t *) v_sub;
    for (int r = 0; r < n_rows;) {
        const int n = rows_of_call<Q::TILE != 0>(n_rows - r);
#define CALL(R) accumulate_quant_rows<Q, R>(p + r * ld, ld, d_v_pad, v, o + (size_t) r * d_v_pad, next)
        KVT_DISPATCH_ROWS(Q::TILE != 0, n, CALL)
#undef CALL
        r += n;
    }
}
