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
// how often to split a sum so that about eight are in flight, enough to hide the latency of a multiply-add
static constexpr int split_of(int n_acc) { return n_acc >= 8 ? 1 : n_acc >= 4 ? 2 : 4; }
// largest power of two of vectors, at most `most`, that leaves n_rows of them in registers
static constexpr int width_of(int n_rows, int most) {
    return most <= 1 || n_rows*most <= V_MAX_ACC ? most : width_of(n_rows, most/2);
}

enum { SUB_VECS = KVT_SUB/VW, MAX_ROWS = V_MAX_ACC >= 16 ? 8 : V_MAX_ACC >= 12 ? 6 : 4 };

// calls F<R>::run(args...) for the compile-time R equal to n
#define KVT_DISPATCH_ROWS(n, CALL)                            \
    switch (n) {                                              \
        case 1: CALL(1); break;                               \
        case 2: CALL(2); break;                               \
        case 3: CALL(3); break;                               \
        case 4: CALL(4); break;                               \
        case 5: CALL(min_i(5, MAX_ROWS)); break;              \
        case 6: CALL(min_i(6, MAX_ROWS)); break;              \
        case 7: CALL(min_i(7, MAX_ROWS)); break;              \
        default: CALL(min_i(8, MAX_ROWS)); break;             \
    }

struct load_f32  { typedef float    elem; static inline vf load(const elem * p) { return vf_load(p); } };
struct load_f16  { typedef uint16_t elem; static inline vf load(const elem * p) { return vf_load_f16(p); } };
struct load_bf16 { typedef uint16_t elem; static inline vf load(const elem * p) { return vf_load_bf16(p); } };

// What differs between the quantized formats: where a block's parts are, and the constant to subtract or add.
struct quant_q8_0 { enum { N_SCALES = 1, K_QS = 1024, V_ROW = 32, GROUPS = 8, NIBBLES = 0, OFFSET = 0 }; };
struct quant_q4_0 { enum { N_SCALES = 1, K_QS = 512,  V_ROW = 16, GROUPS = 4, NIBBLES = 1, OFFSET = 8 }; };
struct quant_q4_1 { enum { N_SCALES = 2, K_QS = 512,  V_ROW = 16, GROUPS = 4, NIBBLES = 1, OFFSET = 0 }; };
template <typename Q> static constexpr int k_block_bytes(void) { return Q::N_SCALES*2*KVT_SUB + Q::K_QS; }
template <typename Q> static constexpr int v_block_bytes(void) { return Q::N_SCALES*2*KVT_SUB + Q::V_ROW*KVT_SUB; }

// ---- decode: scores ----

template <typename LD, int R>
static void scores_float_rows(const struct kvt_q_rows * q, int r0, const typename LD::elem * k, float * s, size_t ld, const char * next) {
    enum { NV = width_of(R, SUB_VECS), U = split_of(R*NV), LINES = sizeof(typename LD::elem)*KVT_SUB/64 };
    const int d_k = q->d_k;
    const float * qf = q->f + (size_t) r0*d_k;
    for (int j = 0; j < KVT_SUB; j += NV*VW) {
        vf acc[U][R][NV];
        KVT_UNROLL for (int u = 0; u < U; u++) KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++) acc[u][r][v] = vf_zero();
        int c = 0;
        for (; c + U <= d_k; c += U) {
            KVT_UNROLL for (int u = 0; u < U; u++) {
                vf kv[NV];
                KVT_UNROLL for (int v = 0; v < NV; v++) kv[v] = LD::load(k + (size_t) (c + u)*KVT_SUB + j + v*VW);
                KVT_UNROLL for (int r = 0; r < R; r++) {
                    const vf x = vf_set1(qf[(size_t) r*d_k + c + u]);
                    KVT_UNROLL for (int v = 0; v < NV; v++) acc[u][r][v] = vf_fma(x, kv[v], acc[u][r][v]);
                }
                if (j == 0) {
                    KVT_UNROLL for (int i = 0; i < LINES; i++) prefetch(next + ((size_t) (c + u)*LINES + i)*64);
                }
            }
        }
        for (; c < d_k; c++) {
            KVT_UNROLL for (int v = 0; v < NV; v++) {
                const vf kv = LD::load(k + (size_t) c*KVT_SUB + j + v*VW);
                KVT_UNROLL for (int r = 0; r < R; r++) acc[0][r][v] = vf_fma(vf_set1(qf[(size_t) r*d_k + c]), kv, acc[0][r][v]);
            }
        }
        KVT_UNROLL for (int r = 0; r < R; r++) {
            KVT_UNROLL for (int v = 0; v < NV; v++) {
                vf x = acc[0][r][v];
                KVT_UNROLL for (int u = 1; u < U; u++) x = vf_add(x, acc[u][r][v]);
                vf_store(s + r*ld + j + v*VW, x);
            }
        }
    }
}

template <typename LD>
static void scores_float(const struct kvt_q_rows * q, int r0, int n_rows, const void * k_sub, float * s, size_t ld, const char * next) {
    const typename LD::elem * k = (const typename LD::elem *) k_sub;
    for (int r = 0; r < n_rows; ) {
        const int n = min_i(n_rows - r, MAX_ROWS);
#define CALL(R) scores_float_rows<LD, R>(q, r0 + r, k, s + r*ld, ld, next)
        KVT_DISPATCH_ROWS(n, CALL)
#undef CALL
        r += n;
    }
}

// one group of a block: NV vectors of 4 bytes per token against each row's 16-bit pairs
template <typename Q, int R, int NV>
static inline void dot_group(vi acc[R][NV], const uint8_t * qs, const int32_t * pair, size_t ld_pair) {
    KVT_UNROLL for (int v = 0; v < NV; v++) {
        const vi x = vi_load(qs + 4*v*VW);
        if (Q::NIBBLES != 0) {
            const vi a = vi_nibble16<0>(x), b = vi_nibble16<8>(x), c = vi_nibble16<4>(x), d = vi_nibble16<12>(x);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const int32_t * p = pair + r*ld_pair;
                acc[r][v] = vi_dot16(vi_dot16(acc[r][v], a, vi_set1(p[0])), b, vi_set1(p[1]));
                acc[r][v] = vi_dot16(vi_dot16(acc[r][v], c, vi_set1(p[8])), d, vi_set1(p[9]));
            }
        } else {
            const vi a = vi_even16(x), b = vi_odd16(x);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const int32_t * p = pair + r*ld_pair;
                acc[r][v] = vi_dot16(vi_dot16(acc[r][v], a, vi_set1(p[0])), b, vi_set1(p[1]));
            }
        }
    }
}

template <typename Q, int R>
static void scores_quant_rows(const struct kvt_q_rows * q, int r0, const uint8_t * k, float * s, size_t ld, const char * next) {
    enum { NV = width_of(2*R, SUB_VECS) };
    const int n_blocks = q->d_k/32;
    const size_t ld_pair = (size_t) q->d_k/2;
    const int32_t * pair = q->pair + r0*ld_pair;
    const float   * step = q->step + (size_t) r0*n_blocks;
    const int32_t * sum  = q->sum  + (size_t) r0*n_blocks;
    for (int j = 0; j < KVT_SUB; j += NV*VW) {
        vf total[R][NV];
        KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++) total[r][v] = vf_zero();
        for (int b = 0; b < n_blocks; b++) {
            const uint8_t  * block = k + (size_t) b*k_block_bytes<Q>();
            const uint16_t * d  = (const uint16_t *) block + j;
            const uint8_t  * qs = block + Q::N_SCALES*2*KVT_SUB + 4*j;
            vi acc[R][NV];
            KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vi_set1(-Q::OFFSET*sum[r*n_blocks + b]);
            for (int g = 0; g < Q::GROUPS; g++) {
                dot_group<Q, R, NV>(acc, qs + g*4*KVT_SUB, pair + b*16 + 2*g, ld_pair);
                if (j == 0) {
                    prefetch(next + (size_t) b*k_block_bytes<Q>() + g*128);
                    prefetch(next + (size_t) b*k_block_bytes<Q>() + g*128 + 64);
                }
            }
            KVT_UNROLL for (int v = 0; v < NV; v++) {
                const vf dv = vf_load_f16(d + v*VW);
                KVT_UNROLL for (int r = 0; r < R; r++) {
                    const float f = step[r*n_blocks + b];
                    total[r][v] = vf_fma(vf_mul(vi_to_vf(acc[r][v]), vf_set1(f)), dv, total[r][v]);
                    if (Q::N_SCALES == 2) {
                        total[r][v] = vf_fma(vf_load_f16(d + KVT_SUB + v*VW), vf_set1(f*(float) sum[r*n_blocks + b]), total[r][v]);
                    }
                }
            }
        }
        KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < NV; v++) vf_store(s + r*ld + j + v*VW, total[r][v]);
    }
}

template <typename Q>
static void scores_quant(const struct kvt_q_rows * q, int r0, int n_rows, const void * k_sub, float * s, size_t ld, const char * next) {
    const uint8_t * k = (const uint8_t *) k_sub;
    for (int r = 0; r < n_rows; ) {
        const int n = min_i(n_rows - r, MAX_ROWS);
#define CALL(R) scores_quant_rows<Q, R>(q, r0 + r, k, s + r*ld, ld, next)
        KVT_DISPATCH_ROWS(n, CALL)
#undef CALL
        r += n;
    }
}

// ---- decode: values ----

template <typename LD, int R, int NV>
static inline void accumulate_columns(const float * p, size_t ld, const typename LD::elem * v, int d_v_pad, float * o, const char * next, int lines) {
    enum { U = split_of(R*NV) };
    vf acc[U][R][NV];
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NV; i++) {
            acc[0][r][i] = vf_load(o + (size_t) r*d_v_pad + i*VW);
            KVT_UNROLL for (int u = 1; u < U; u++) acc[u][r][i] = vf_zero();
        }
    }
    for (int t = 0; t < KVT_SUB; t += U) {
        KVT_UNROLL for (int u = 0; u < U; u++) {
            vf x[NV];
            KVT_UNROLL for (int i = 0; i < NV; i++) x[i] = LD::load(v + (size_t) (t + u)*d_v_pad + i*VW);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const vf w = vf_set1(p[r*ld + t + u]);
                KVT_UNROLL for (int i = 0; i < NV; i++) acc[u][r][i] = vf_fma(w, x[i], acc[u][r][i]);
            }
        }
        for (int i = 0; i < lines*U; i++) {
            prefetch(next + ((size_t) t*lines + i)*64);
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NV; i++) {
            vf x = acc[0][r][i];
            KVT_UNROLL for (int u = 1; u < U; u++) x = vf_add(x, acc[u][r][i]);
            vf_store(o + (size_t) r*d_v_pad + i*VW, x);
        }
    }
}

template <typename LD, int R>
static void accumulate_float_rows(const float * p, size_t ld, int d_v_pad, const typename LD::elem * v, float * o, const char * next) {
    enum { N = width_of(R, 8), N2 = N >= 2 ? N/2 : 1, N4 = N >= 4 ? N/4 : 1 };
    int lines = (int) (d_v_pad*sizeof(typename LD::elem)/64);    // prefetched by the first columns only
    int c = 0;
    for (; c + N*VW <= d_v_pad; c += N*VW, lines = 0) {
        accumulate_columns<LD, R, N>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
    for (; c + N2*VW <= d_v_pad; c += N2*VW, lines = 0) {
        accumulate_columns<LD, R, N2>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
    for (; c + N4*VW <= d_v_pad; c += N4*VW, lines = 0) {
        accumulate_columns<LD, R, N4>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
    for (; c < d_v_pad; c += VW, lines = 0) {
        accumulate_columns<LD, R, 1>(p, ld, v + c, d_v_pad, o + c, next, lines);
    }
}

template <typename LD>
static void accumulate_float(const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, float * o, const char * next) {
    const typename LD::elem * v = (const typename LD::elem *) v_sub;
    for (int r = 0; r < n_rows; ) {
        const int n = min_i(n_rows - r, MAX_ROWS);
#define CALL(R) accumulate_float_rows<LD, R>(p + r*ld, ld, d_v_pad, v, o + (size_t) r*d_v_pad, next)
        KVT_DISPATCH_ROWS(n, CALL)
#undef CALL
        r += n;
    }
}

// channels VW*i.. and 16 + VW*i.. of a token's block of 32, without the scale
template <typename Q>
static inline void load_quant_pair(const uint8_t * row, int i, vf * lo, vf * hi) {
    if (Q::NIBBLES != 0) {
        vf_load_nibbles(row + i*VW, lo, hi);
    } else {
        *lo = vf_load_i8((const int8_t *) row + i*VW);
        *hi = vf_load_i8((const int8_t *) row + 16 + i*VW);
    }
}

template <typename Q, int R, int NP>
static inline void accumulate_block_pairs(const float pd[R][KVT_SUB], const float * constant, const uint8_t * qs, int first, int d_v_pad, float * o, const char * next) {
    enum { U = split_of(2*R*NP) };
    vf acc[U][R][NP][2];
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            const vf c = vf_set1(constant[r]);
            acc[0][r][i][0] = vf_add(vf_load(o + (size_t) r*d_v_pad + (first + i)*VW), c);
            acc[0][r][i][1] = vf_add(vf_load(o + (size_t) r*d_v_pad + 16 + (first + i)*VW), c);
            KVT_UNROLL for (int u = 1; u < U; u++) acc[u][r][i][0] = acc[u][r][i][1] = vf_zero();
        }
    }
    for (int t = 0; t < KVT_SUB; t += U) {
        KVT_UNROLL for (int u = 0; u < U; u++) {
            KVT_UNROLL for (int i = 0; i < NP; i++) {
                vf lo, hi;
                load_quant_pair<Q>(qs + (size_t) (t + u)*Q::V_ROW, first + i, &lo, &hi);
                KVT_UNROLL for (int r = 0; r < R; r++) {
                    const vf w = vf_set1(pd[r][t + u]);
                    acc[u][r][i][0] = vf_fma(w, lo, acc[u][r][i][0]);
                    acc[u][r][i][1] = vf_fma(w, hi, acc[u][r][i][1]);
                }
            }
        }
        if (first == 0 && t*Q::V_ROW % 64 == 0) {
            prefetch(next + t*Q::V_ROW);
            if (U*Q::V_ROW > 64) prefetch(next + t*Q::V_ROW + 64);
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            KVT_UNROLL for (int u = 1; u < U; u++) {
                acc[0][r][i][0] = vf_add(acc[0][r][i][0], acc[u][r][i][0]);
                acc[0][r][i][1] = vf_add(acc[0][r][i][1], acc[u][r][i][1]);
            }
            vf_store(o + (size_t) r*d_v_pad + (first + i)*VW, acc[0][r][i][0]);
            vf_store(o + (size_t) r*d_v_pad + 16 + (first + i)*VW, acc[0][r][i][1]);
        }
    }
}

template <typename Q, int R>
static void accumulate_quant_rows(const float * p, size_t ld, int d_v_pad, const uint8_t * v, float * o, const char * next) {
    enum { PAIRS = 16/VW, NP = width_of(2*R, PAIRS) };
    for (int b = 0; b < d_v_pad/32; b++) {
        const uint8_t  * block = v + (size_t) b*v_block_bytes<Q>();
        const uint16_t * d  = (const uint16_t *) block;
        const uint8_t  * qs = block + Q::N_SCALES*2*KVT_SUB;
        float pd[R][KVT_SUB], constant[R];
        KVT_UNROLL for (int r = 0; r < R; r++) {
            vf sum = vf_zero();
            KVT_UNROLL for (int j = 0; j < KVT_SUB; j += VW) {
                const vf w = vf_load(p + r*ld + j);
                const vf x = vf_mul(w, vf_load_f16(d + j));
                vf_store(pd[r] + j, x);
                if (Q::OFFSET != 0)    sum = vf_add(sum, x);
                if (Q::N_SCALES == 2) sum = vf_fma(w, vf_load_f16(d + KVT_SUB + j), sum);
            }
            constant[r] = Q::OFFSET != 0 ? -(float) Q::OFFSET*vf_hsum(sum) : Q::N_SCALES == 2 ? vf_hsum(sum) : 0.0f;
        }
        for (int i = 0; i < PAIRS; i += NP) {
            accumulate_block_pairs<Q, R, NP>(pd, constant, qs, i, d_v_pad, o + b*32, next + (size_t) b*v_block_bytes<Q>());
        }
    }
}

template <typename Q>
static void accumulate_quant(const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, float * o, const char * next) {
    const uint8_t * v = (const uint8_t *) v_sub;
    for (int r = 0; r < n_rows; ) {
        const int n = min_i(n_rows - r, MAX_ROWS);
#define CALL(R) accumulate_quant_rows<Q, R>(p + r*ld, ld, d_v_pad, v, o + (size_t) r*d_v_pad, next)
        KVT_DISPATCH_ROWS(n, CALL)
#undef CALL
        r += n;
    }
}

// ---- prefill: tiles ----

template <typename LD>
static void load_float(const typename LD::elem * in, size_t n, float * out) {
    for (size_t i = 0; i < n; i += VW) vf_store(out + i, LD::load(in + i));
}
template <typename LD> static void load_k_float(const void * k_sub, int d_k, float * out)     { load_float<LD>((const typename LD::elem *) k_sub, (size_t) d_k*KVT_SUB, out); }
template <typename LD> static void load_v_float(const void * v_sub, int d_v_pad, float * out) { load_float<LD>((const typename LD::elem *) v_sub, (size_t) d_v_pad*KVT_SUB, out); }

template <typename Q, int J>
static inline void load_k_channel(vi x, vf d, vf m, float * out, int g) {
    if (Q::NIBBLES != 0) {
        const vf lo = vf_sub(vi_to_vf(vi_nibble32<8*J>(x)),     vf_set1((float) Q::OFFSET));
        const vf hi = vf_sub(vi_to_vf(vi_nibble32<8*J + 4>(x)), vf_set1((float) Q::OFFSET));
        vf_store(out + (4*g + J)*KVT_SUB,      vf_fma(lo, d, m));
        vf_store(out + (16 + 4*g + J)*KVT_SUB, vf_fma(hi, d, m));
    } else {
        vf_store(out + (4*g + J)*KVT_SUB, vf_mul(vi_to_vf(vi_byte<J>(x)), d));
    }
}

template <typename Q>
static void load_k_quant(const void * k_sub, int d_k, float * out) {
    for (int b = 0; b < d_k/32; b++, out += 32*KVT_SUB) {
        const uint8_t  * block = (const uint8_t *) k_sub + (size_t) b*k_block_bytes<Q>();
        const uint16_t * dm = (const uint16_t *) block;
        const uint8_t  * qs = block + Q::N_SCALES*2*KVT_SUB;
        for (int j = 0; j < KVT_SUB; j += VW) {
            const vf d = vf_load_f16(dm + j);
            const vf m = Q::N_SCALES == 2 ? vf_load_f16(dm + KVT_SUB + j) : vf_zero();
            for (int g = 0; g < Q::GROUPS; g++) {
                const vi x = vi_load(qs + g*4*KVT_SUB + 4*j);
                load_k_channel<Q, 0>(x, d, m, out + j, g);
                load_k_channel<Q, 1>(x, d, m, out + j, g);
                load_k_channel<Q, 2>(x, d, m, out + j, g);
                load_k_channel<Q, 3>(x, d, m, out + j, g);
            }
        }
    }
}

template <typename Q>
static void load_v_quant(const void * v_sub, int d_v_pad, float * out) {
    for (int b = 0; b < d_v_pad/32; b++) {
        const uint8_t  * block = (const uint8_t *) v_sub + (size_t) b*v_block_bytes<Q>();
        const uint8_t  * qs = block + Q::N_SCALES*2*KVT_SUB;
        float d[KVT_SUB], m[KVT_SUB];
        for (int j = 0; j < KVT_SUB; j += VW) {
            vf_store(d + j, vf_load_f16((const uint16_t *) block + j));
            vf_store(m + j, Q::N_SCALES == 2 ? vf_load_f16((const uint16_t *) block + KVT_SUB + j) : vf_zero());
        }
        for (int t = 0; t < KVT_SUB; t++) {
            float * row = out + (size_t) t*d_v_pad + b*32;
            for (int i = 0; i < 16/VW; i++) {
                vf lo, hi;
                load_quant_pair<Q>(qs + t*Q::V_ROW, i, &lo, &hi);
                vf_store(row + i*VW,      vf_fma(vf_sub(lo, vf_set1((float) Q::OFFSET)), vf_set1(d[t]), vf_set1(m[t])));
                vf_store(row + 16 + i*VW, vf_fma(vf_sub(hi, vf_set1((float) Q::OFFSET)), vf_set1(d[t]), vf_set1(m[t])));
            }
        }
    }
}

static void transpose(const float * k_tile, int d, int d_pad, float * v_tile) {
    for (int c = 0; c < d_pad; c += 16) {
        for (int t = 0; t < KVT_SUB; t++) {
            float * out = v_tile + (size_t) t*d_pad + c;
            for (int i = 0; i < 16; i++) {
                out[i] = c + i < d ? k_tile[(size_t) (c + i)*KVT_SUB + t] : 0.0f;
            }
        }
    }
}

// ---- prefill: products ----

// rows and vectors of one block of accumulators
enum { GEMM_S_ROWS = VW == 16 ? 12 : VW == 8 ? 6 : V_MAX_ACC >= 24 ? 6 : 4, GEMM_S_VECS = V_MAX_ACC/GEMM_S_ROWS,
       GEMM_O_ROWS = V_MAX_ACC >= 12 ? 6 : 4,                               GEMM_O_VECS = V_MAX_ACC/GEMM_O_ROWS };

static void gemm_scores(const float * q_pack, const float * k_tile, int d_k, float * s, size_t ld) {
    enum { R = GEMM_S_ROWS, N = GEMM_S_VECS };
    for (int r0 = 0; r0 < KVT_ROW_GROUP; r0 += R) {
        for (int j = 0; j < KVT_SUB; j += N*VW) {
            vf acc[R][N];
            KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < N; v++) acc[r][v] = vf_zero();
            const float * k = k_tile + j;
            const float * q = q_pack + r0;
            for (int c = 0; c < d_k; c++, k += KVT_SUB, q += KVT_ROW_GROUP) {
                vf kv[N];
                KVT_UNROLL for (int v = 0; v < N; v++) kv[v] = vf_load(k + v*VW);
                KVT_UNROLL for (int r = 0; r < R; r++) {
                    const vf x = vf_set1(q[r]);
                    KVT_UNROLL for (int v = 0; v < N; v++) acc[r][v] = vf_fma(x, kv[v], acc[r][v]);
                }
            }
            KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < N; v++) vf_store(s + (r0 + r)*ld + j + v*VW, acc[r][v]);
        }
    }
}

template <int R, int N>
static inline void gemm_accumulate_columns(const float * p, size_t ld, int n_tokens, const float * v, int d_v_pad, float * o) {
    vf acc[R][N];
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < N; i++) acc[r][i] = vf_load(o + (size_t) r*d_v_pad + i*VW);
    for (int t = 0; t < n_tokens; t++, v += d_v_pad) {
        vf x[N];
        KVT_UNROLL for (int i = 0; i < N; i++) x[i] = vf_load(v + i*VW);
        KVT_UNROLL for (int r = 0; r < R; r++) {
            const vf w = vf_set1(p[r*ld + t]);
            KVT_UNROLL for (int i = 0; i < N; i++) acc[r][i] = vf_fma(w, x[i], acc[r][i]);
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < N; i++) vf_store(o + (size_t) r*d_v_pad + i*VW, acc[r][i]);
}

static void gemm_accumulate(const float * p, size_t ld, int n_tokens, const float * v_tile, int d_v_pad, float * o) {
    enum { R = GEMM_O_ROWS, N = GEMM_O_VECS };
    int c = 0;
    for (; c + N*VW <= d_v_pad; c += N*VW) {
        for (int r = 0; r < KVT_ROW_GROUP; r += R) {
            gemm_accumulate_columns<R, N>(p + r*ld, ld, n_tokens, v_tile + c, d_v_pad, o + (size_t) r*d_v_pad + c);
        }
    }
    for (; c < d_v_pad; c += VW) {
        for (int r = 0; r < KVT_ROW_GROUP; r += R) {
            gemm_accumulate_columns<R, 1>(p + r*ld, ld, n_tokens, v_tile + c, d_v_pad, o + (size_t) r*d_v_pad + c);
        }
    }
}

// ---- softmax and mass ----

// tanh(x) = 1 - 2/(e^2x + 1): an absolute error of a few 1e-8, which is what counts in an exponent
static void softcap(float * s, size_t ld, int n_rows, int n_tokens, float cap) {
    const vf one = vf_set1(1.0f), two = vf_set1(2.0f), f = vf_set1(2*KVT_LN2_INV), most = vf_set1(60.0f);
    for (int r = 0; r < n_rows; r++) {
        for (int t = 0; t < n_tokens; t += VW) {
            const vf x = vf_mul(vf_load(s + r*ld + t), f);
            const vf e = vf_exp2(vf_sub(most, vf_max(vf_sub(most, x), vf_zero())));   // min(x, 60)
            vf_store(s + r*ld + t, vf_mul(vf_set1(cap), vf_sub(one, vf_div(two, vf_add(e, one)))));
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

static float exp2_scalar(float x) {
    float out[VW];
    vf_store(out, vf_exp2(vf_set1(x)));
    return out[0];
}

// The reference exponent moves only when a score exceeds it by more than 2^8: the weights stay far from overflow, the
// output is rarely rescaled, and most calls need no horizontal maximum.
static void move_reference(const float * s, int n_tokens, const struct kvt_row_state * st, int r) {
    vf mx = vf_load(s);
    for (int t = VW; t < n_tokens; t += VW) mx = vf_max(mx, vf_load(s + t));
    const float most = vf_hmax(mx), m = st->m[r];
    if (m != -INFINITY) {
        const float f = exp2_scalar(m - most);
        scale(st->l + (size_t) r*KVT_SUM_LANES, KVT_SUM_LANES, f);
        scale(st->o + (size_t) r*st->d_v_pad, st->d_v_pad, f);
    }
    st->m[r] = most;
}

// N vectors of each of R rows at a time, so that the rows' chains of dependent instructions overlap
template <int R, int N>
static inline void softmax_rows(float * s, size_t ld, int n_tokens, const struct kvt_row_state * st, int r0) {
    vf ref[R], sum[R];
    KVT_UNROLL for (int r = 0; r < R; r++) {
        float * row = s + r*ld;
        const vf limit = vf_set1(st->m[r0 + r] + 8.0f);
        vf mx = vf_load(row);
        for (int t = VW; t < n_tokens; t += VW) mx = vf_max(mx, vf_load(row + t));
        if (vf_any_gt(mx, limit)) move_reference(row, n_tokens, st, r0 + r);
        ref[r] = vf_set1(st->m[r0 + r] == -INFINITY ? 0.0f : st->m[r0 + r]);
        sum[r] = vf_load(st->l + (size_t) (r0 + r)*KVT_SUM_LANES);
    }
    for (int t = 0; t < n_tokens; t += N*VW) {
        KVT_UNROLL for (int r = 0; r < R; r++) {
            KVT_UNROLL for (int v = 0; v < N; v++) {
                const vf p = vf_exp2(vf_sub(vf_load(s + r*ld + t + v*VW), ref[r]));
                vf_store(s + r*ld + t + v*VW, p);
                sum[r] = vf_add(sum[r], p);
            }
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) vf_store(st->l + (size_t) (r0 + r)*KVT_SUM_LANES, sum[r]);
}

static void softmax(float * s, size_t ld, int n_rows, int n_tokens, const struct kvt_row_state * st) {
    int r = 0;
    for (; r + 3 <= n_rows; r += 3) softmax_rows<3, 2>(s + r*ld, ld, n_tokens, st, r);
    for (; r < n_rows; r++)         softmax_rows<1, 2>(s + r*ld, ld, n_tokens, st, r);
}

static void mass_factors(float * m, size_t n, float last_m, float f) {
    const vf last = vf_set1(last_m), x = vf_set1(f);
    for (size_t i = 0; i < n; i += VW) vf_store(m + i, vf_mul(vf_exp2(vf_sub(vf_load(m + i), last)), x));
}

static void mass_sub(const float * p, size_t ld, int n_rows, const float * f, float * out) {
    KVT_UNROLL for (int t = 0; t < KVT_SUB; t += VW) {
        vf acc = vf_zero();
        for (int r = 0; r < n_rows; r++) acc = vf_fma(vf_set1(f[r]), vf_load(p + r*ld + t), acc);
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
        mean[i] = decay*mean[i] + (1.0f - decay)*x[i];
        max[i]  = x[i] > max[i] ? x[i] : max[i];
        total  += x[i];
    }
    return total;
}

#define KVT_KERNELS_TABLE(isa)                                                                                          \
    {                                                                                                                   \
        isa,                                                                                                            \
        { scores_float<load_f32>, scores_float<load_f16>, scores_float<load_bf16>,                                      \
          scores_quant<quant_q8_0>, scores_quant<quant_q4_0>, scores_quant<quant_q4_1> },                               \
        { accumulate_float<load_f32>, accumulate_float<load_f16>, accumulate_float<load_bf16>,                          \
          accumulate_quant<quant_q8_0>, accumulate_quant<quant_q4_0>, accumulate_quant<quant_q4_1> },                   \
        { load_k_float<load_f32>, load_k_float<load_f16>, load_k_float<load_bf16>,                                      \
          load_k_quant<quant_q8_0>, load_k_quant<quant_q4_0>, load_k_quant<quant_q4_1> },                               \
        { load_v_float<load_f32>, load_v_float<load_f16>, load_v_float<load_bf16>,                                      \
          load_v_quant<quant_q8_0>, load_v_quant<quant_q4_0>, load_v_quant<quant_q4_1> },                               \
        transpose, gemm_scores, gemm_accumulate, softcap, mask_add, softmax, scale, add_scaled, mass_factors, mass_sub,          \
        mass_update,                                                                                                     \
    }
