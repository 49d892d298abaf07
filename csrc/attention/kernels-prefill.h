#pragma once

// Prefill kernels: subs to F32 tiles, and register-blocked products. Part of kernels-impl.h.

// ---- prefill: tiles ----

template <typename LD> static void load_float(const typename LD::elem * in, size_t n, float * out) {
    for (size_t i = 0; i < n; i += VW) vf_store(out + i, LD::load(in + i));
}
template <typename LD> static void load_k_float(const void * k_sub, int d_k, float * out) {
    load_float<LD>((const typename LD::elem *) k_sub, (size_t) d_k * KVT_SUB, out);
}
template <typename LD> static void load_v_float(const void * v_sub, int d_v_pad, float * out) {
    load_float<LD>((const typename LD::elem *) v_sub, (size_t) d_v_pad * KVT_SUB, out);
}

template <typename Q, int J> static inline void load_k_channel(vi x, vf d, vf m, float * out, int g) {
    if (Q::NIBBLES != 0) {
        const vf lo = vf_sub(vi_to_vf(vi_nibble32<8 * J>(x)), vf_set1((float) Q::OFFSET));
        const vf hi = vf_sub(vi_to_vf(vi_nibble32<8 * J + 4>(x)), vf_set1((float) Q::OFFSET));
        vf_store(out + (4 * g + J) * KVT_SUB, vf_fma(lo, d, m));
        vf_store(out + (16 + 4 * g + J) * KVT_SUB, vf_fma(hi, d, m));
    } else {
        vf_store(out + (4 * g + J) * KVT_SUB, vf_mul(vi_to_vf(vi_byte<J>(x)), d));
    }
}

template <typename Q> static void load_k_quant(const void * k_sub, int d_k, float * out) {
    for (int b = 0; b < d_k / 32; b++, out += 32 * KVT_SUB) {
        const uint8_t * block = (const uint8_t *) k_sub + (size_t) b * k_block_bytes<Q>();
        const uint16_t * dm = (const uint16_t *) block;
        const uint8_t * qs = block + Q::N_SCALES * 2 * KVT_SUB;
        for (int j = 0; j < KVT_SUB; j += VW) {
            const vf d = vf_load_f16(dm + j);
            const vf m = Q::N_SCALES == 2 ? vf_load_f16(dm + KVT_SUB + j) : vf_zero();
            for (int g = 0; g < Q::GROUPS; g++) {
                const vi x = vi_load(qs + g * 4 * KVT_SUB + 4 * j);
                load_k_channel<Q, 0>(x, d, m, out + j, g);
                load_k_channel<Q, 1>(x, d, m, out + j, g);
                load_k_channel<Q, 2>(x, d, m, out + j, g);
                load_k_channel<Q, 3>(x, d, m, out + j, g);
            }
        }
    }
}

template <typename Q> static void load_v_quant(const void * v_sub, int d_v_pad, float * out) {
    for (int b = 0; b < d_v_pad / 32; b++) {
        const uint8_t * block = (const uint8_t *) v_sub + (size_t) b * v_block_bytes<Q>();
        const uint8_t * qs = block + Q::N_SCALES * 2 * KVT_SUB;
        float d[KVT_SUB], m[KVT_SUB];
        for (int j = 0; j < KVT_SUB; j += VW) {
            vf_store(d + j, vf_load_f16((const uint16_t *) block + j));
            vf_store(m + j, Q::N_SCALES == 2 ? vf_load_f16((const uint16_t *) block + KVT_SUB + j) : vf_zero());
        }
        for (int t = 0; t < KVT_SUB; t++) {
            float * row = out + (size_t) t * d_v_pad + b * 32;
            for (int i = 0; i < 16 / VW; i++) {
                vf lo, hi;
                load_quant_pair<Q>(qs + t * Q::V_ROW, i, &lo, &hi);
                vf_store(row + i * VW, vf_fma(vf_sub(lo, vf_set1((float) Q::OFFSET)), vf_set1(d[t]), vf_set1(m[t])));
                vf_store(
                    row + 16 + i * VW, vf_fma(vf_sub(hi, vf_set1((float) Q::OFFSET)), vf_set1(d[t]), vf_set1(m[t])));
            }
        }
    }
}

static void transpose(const float * k_tile, int d, int d_pad, float * v_tile) {
    for (int c = 0; c < d_pad; c += 16) {
        for (int t = 0; t < KVT_SUB; t++) {
            float * out = v_tile + (size_t) t * d_pad + c;
            for (int i = 0; i < 16; i++) { out[i] = c + i < d ? k_tile[(size_t) (c + i) * KVT_SUB + t] : 0.0f; }
        }
    }
}

// ---- prefill: products ----

// rows and vectors of one block of accumulators
enum {
    GEMM_S_ROWS = VW == 16 ? 12
        : VW == 8          ? 6
        : V_MAX_ACC >= 24  ? 6
                           : 4,
    GEMM_S_VECS = V_MAX_ACC / GEMM_S_ROWS,
    GEMM_O_ROWS = V_MAX_ACC >= 12 ? 6 : 4,
    GEMM_O_VECS = V_MAX_ACC / GEMM_O_ROWS
};

static void gemm_scores(const float * q_pack, const float * k_tile, int d_k, float * s, size_t ld) {
    enum { R = GEMM_S_ROWS, N = GEMM_S_VECS };
    for (int r0 = 0; r0 < KVT_ROW_GROUP; r0 += R) {
        for (int j = 0; j < KVT_SUB; j += N * VW) {
            vf acc[R][N];
            KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < N; v++) acc[r][v] = vf_zero();
            const float * k = k_tile + j;
            const float * q = q_pack + r0;
            for (int c = 0; c < d_k; c++, k += KVT_SUB, q += KVT_ROW_GROUP) {
                vf kv[N];
                KVT_UNROLL for (int v = 0; v < N; v++) kv[v] = vf_load(k + v * VW);
                KVT_UNROLL for (int r = 0; r < R; r++) {
                    const vf x = vf_set1(q[r]);
                    KVT_UNROLL for (int v = 0; v < N; v++) acc[r][v] = vf_fma(x, kv[v], acc[r][v]);
                }
            }
            KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int v = 0; v < N; v++)
                vf_store(s + (r0 + r) * ld + j + v * VW, acc[r][v]);
        }
    }
}

template <int R, int N>
static inline void gemm_accumulate_columns(
    const float * p, size_t ld, int n_tokens, const float * v, int d_v_pad, float * o) {
    vf acc[R][N];
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < N; i++)
        acc[r][i] = vf_load(o + (size_t) r * d_v_pad + i * VW);
    for (int t = 0; t < n_tokens; t++, v += d_v_pad) {
        vf x[N];
        KVT_UNROLL for (int i = 0; i < N; i++) x[i] = vf_load(v + i * VW);
        KVT_UNROLL for (int r = 0; r < R; r++) {
            const vf w = vf_set1(p[r * ld + t]);
            KVT_UNROLL for (int i = 0; i < N; i++) acc[r][i] = vf_fma(w, x[i], acc[r][i]);
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < N; i++)
        vf_store(o + (size_t) r * d_v_pad + i * VW, acc[r][i]);
}

static void gemm_accumulate(const float * p, size_t ld, int n_tokens, const float * v_tile, int d_v_pad, float * o) {
    enum { R = GEMM_O_ROWS, N = GEMM_O_VECS };
    int c = 0;
    for (; c + N * VW <= d_v_pad; c += N * VW) {
        for (int r = 0; r < KVT_ROW_GROUP; r += R) {
            gemm_accumulate_columns<R, N>(p + r * ld, ld, n_tokens, v_tile + c, d_v_pad, o + (size_t) r * d_v_pad + c);
        }
    }
    for (; c < d_v_pad; c += VW) {
        for (int r = 0; r < KVT_ROW_GROUP; r += R) {
            gemm_accumulate_columns<R, 1>(p + r * ld, ld, n_tokens, v_tile + c, d_v_pad, o + (size_t) r * d_v_pad + c);
        }
    }
}
