#pragma once

// Kernels of bounded recall: thresholds over rows of weights, and values of single tokens. Part of kernels-impl.h.

static float row_max(const float * s, size_t n) {
    vf a = vf_load(s), b = vf_load(s + VW);
    for (size_t i = 2 * VW; i + 2 * VW <= n; i += 2 * VW) {
        a = vf_max(a, vf_load(s + i));
        b = vf_max(b, vf_load(s + i + VW));
    }
    return vf_hmax(vf_max(a, b));
}

static void weigh_sub(float * s, size_t ld, int n_rows, const float * m, float * sums) {
    const vf least = vf_set1(-126.0f);
    for (int r = 0; r < n_rows; r++, s += ld) {
        const vf ref = vf_set1(m[r]);
        vf sum = vf_zero();
        KVT_UNROLL for (int v = 0; v < SUB_VECS; v++) {
            const vf x = vf_exp2(
                vf_sub(vf_zero(), vf_max(least, vf_sub(ref, vf_load(s + v * VW))))); // 2^min(s - m, 126); 0 for NaN
            vf_store(s + v * VW, x);
            sum = vf_add(sum, x);
        }
        sums[r] = vf_hsum(sum);
    }
}

struct below {
    vf t[4], sum[4];
};

static inline void below_start(struct below * b, const float * t) {
    KVT_UNROLL for (int i = 0; i < 4; i++) {
        b->t[i] = vf_set1(t[i]);
        b->sum[i] = vf_zero();
    }
}
static inline void below_take(struct below * b, vf x) {
    KVT_UNROLL for (int i = 0; i < 4; i++) b->sum[i] = vf_add(b->sum[i], vf_keep_lt(x, b->t[i]));
}
static inline void below_end(const struct below * b, float * out) {
    KVT_UNROLL for (int i = 0; i < 4; i++) out[i] += vf_hsum(b->sum[i]);
}

static void sums_below(const float * p, size_t n, const float * t, float * out) {
    struct below b;
    below_start(&b, t);
    for (size_t i = 0; i < n; i += VW) below_take(&b, vf_load(p + i));
    below_end(&b, out);
}

static void sums_below_subs(
    const float * p, const uint32_t * subs, size_t n, size_t stride, const float * t, float * out) {
    struct below b;
    below_start(&b, t);
    for (size_t i = 0; i < n; i += stride) {
        const float * sub = p + (size_t) subs[i] * KVT_SUB;
        KVT_UNROLL for (int v = 0; v < SUB_VECS; v++) below_take(&b, vf_load(sub + v * VW));
    }
    below_end(&b, out);
}

static uint32_t pick(const float * p, size_t ld, int n_rows, const float * thresholds) {
    uint32_t bits = 0;
    for (int r = 0; r < n_rows; r++) {
        const vf t = vf_set1(thresholds[r]);
        KVT_UNROLL for (int i = 0; i < SUB_VECS; i++) bits |= vf_bits_ge(vf_load(p + r * ld + i * VW), t) << (i * VW);
    }
    return bits;
}

static void sums_unpicked(const float * p, size_t ld, int n_rows, uint32_t picked, float * out) {
    float keep[KVT_SUB];
    for (int t = 0; t < KVT_SUB; t++) keep[t] = picked >> t & 1 ? 0.0f : 1.0f;
    for (int r = 0; r < n_rows; r++) {
        vf sum = vf_zero();
        KVT_UNROLL for (int i = 0; i < SUB_VECS; i++)
            sum = vf_fma(vf_load(p + r * ld + i * VW), vf_load(keep + i * VW), sum);
        out[r] = vf_hsum(sum);
    }
}

static void bound_sums(const float * weight, const float * left, size_t n, const float * errors, size_t ld,
    const float * q_norm, int n_blocks, float * most, float * least) {
    const vf limit = vf_set1(120.0f);
    vf high = vf_zero(), low = vf_zero();
    for (size_t s = 0; s < n; s += VW) {
        vf e = vf_zero();
        for (int b = 0; b < n_blocks; b++) e = vf_fma(vf_set1(q_norm[b]), vf_load(errors + (size_t) b * ld + s), e);
        const vf whole = vf_mul(vf_set1(q_norm[n_blocks]), vf_load(errors + (size_t) n_blocks * ld + s));
        e = vf_sub(vf_zero(), vf_max(vf_sub(vf_zero(), e), vf_sub(vf_zero(), whole))); // the lesser
        const vf down = vf_exp2(
            vf_sub(vf_zero(), vf_sub(limit, vf_max(vf_sub(limit, e), vf_zero())))); // 2^-min(e, 120)
        const vf out = vf_load(left + s);
        high = vf_add(high, vf_div(out, down));
        low = vf_fma(vf_sub(vf_load(weight + s), out), down, low);
    }
    *most = vf_hsum(high);
    *least = vf_hsum(low);
}

static inline int list_bits(uint32_t bits, uint8_t * out) {
    int n = 0;
    for (; bits; bits &= bits - 1) out[n++] = (uint8_t) __builtin_ctz(bits);
    return n;
}

template <typename LD, int R, int NV>
static inline void some_columns(
    const float * p, size_t ld, const uint8_t * tokens, int n, const typename LD::elem * v, int d_v_pad, float * o) {
    vf acc[R][NV];
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < NV; i++)
        acc[r][i] = vf_load(o + (size_t) r * d_v_pad + i * VW);
    for (int j = 0; j < n; j++) {
        const typename LD::elem * row = v + (size_t) tokens[j] * d_v_pad;
        vf x[NV];
        KVT_UNROLL for (int i = 0; i < NV; i++) x[i] = LD::load(row + i * VW);
        KVT_UNROLL for (int r = 0; r < R; r++) {
            const vf w = vf_set1(p[r * ld + tokens[j]]);
            KVT_UNROLL for (int i = 0; i < NV; i++) acc[r][i] = vf_fma(w, x[i], acc[r][i]);
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) KVT_UNROLL for (int i = 0; i < NV; i++)
        vf_store(o + (size_t) r * d_v_pad + i * VW, acc[r][i]);
}

template <typename LD, int R>
static void some_float_rows(
    const float * p, size_t ld, const uint8_t * tokens, int n, const typename LD::elem * v, int d_v_pad, float * o) {
    enum { N = width_of(R, 8), N2 = N >= 2 ? N / 2 : 1 };
    int c = 0;
    for (; c + N * VW <= d_v_pad; c += N * VW) some_columns<LD, R, N>(p, ld, tokens, n, v + c, d_v_pad, o + c);
    for (; c + N2 * VW <= d_v_pad; c += N2 * VW) some_columns<LD, R, N2>(p, ld, tokens, n, v + c, d_v_pad, o + c);
    for (; c < d_v_pad; c += VW) some_columns<LD, R, 1>(p, ld, tokens, n, v + c, d_v_pad, o + c);
}

template <typename LD>
static void accumulate_some_float(
    const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, uint32_t picked, float * o) {
    const typename LD::elem * v = (const typename LD::elem *) v_sub;
    uint8_t tokens[KVT_SUB];
    const int n_tokens = list_bits(picked, tokens);
    for (int r = 0; r < n_rows;) {
        const int n = rows_of_call<false>(n_rows - r);
#define CALL(R) some_float_rows<LD, R>(p + r * ld, ld, tokens, n_tokens, v, d_v_pad, o + (size_t) r * d_v_pad)
        KVT_DISPATCH_ROWS(false, n, CALL)
#undef CALL
        r += n;
    }
}

// NP pairs of vectors of one block of 32 channels, dequantized once for all rows
template <typename Q, int R, int NP>
static inline void some_block_pairs(const float * p, size_t ld, const uint8_t * tokens, int n, const float * d,
    const uint8_t * qs, int first, int d_v_pad, float * o) {
    vf acc[R][NP][2];
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            acc[r][i][0] = vf_load(o + (size_t) r * d_v_pad + (first + i) * VW);
            acc[r][i][1] = vf_load(o + (size_t) r * d_v_pad + 16 + (first + i) * VW);
        }
    }
    for (int j = 0; j < n; j++) {
        const int t = tokens[j];
        const vf step = vf_set1(d[t]),
                 base = vf_set1(Q::OFFSET != 0 ? -(float) Q::OFFSET * d[t]
                         : Q::N_SCALES == 2    ? d[KVT_SUB + t]
                                               : 0.0f);
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            vf lo, hi;
            load_quant_pair<Q>(qs + (size_t) t * Q::V_ROW, first + i, &lo, &hi);
            lo = vf_fma(lo, step, base);
            hi = vf_fma(hi, step, base);
            KVT_UNROLL for (int r = 0; r < R; r++) {
                const vf w = vf_set1(p[r * ld + t]);
                acc[r][i][0] = vf_fma(w, lo, acc[r][i][0]);
                acc[r][i][1] = vf_fma(w, hi, acc[r][i][1]);
            }
        }
    }
    KVT_UNROLL for (int r = 0; r < R; r++) {
        KVT_UNROLL for (int i = 0; i < NP; i++) {
            vf_store(o + (size_t) r * d_v_pad + (first + i) * VW, acc[r][i][0]);
            vf_store(o + (size_t) r * d_v_pad + 16 + (first + i) * VW, acc[r][i][1]);
        }
    }
}

template <typename Q, int R>
static void some_quant_rows(
    const float * p, size_t ld, const uint8_t * tokens, int n, const uint8_t * v, int d_v_pad, float * o) {
    enum { PAIRS = 16 / VW, NP = width_of(2 * R, PAIRS) };
    for (int b = 0; b < d_v_pad / 32; b++) {
        const uint8_t *block = v + (size_t) b * v_block_bytes<Q>(), *qs = block + Q::N_SCALES * 2 * KVT_SUB;
        float d[Q::N_SCALES * KVT_SUB];
        for (int j = 0; j < Q::N_SCALES * KVT_SUB; j += VW) vf_store(d + j, vf_load_f16((const uint16_t *) block + j));
        for (int i = 0; i < PAIRS; i += NP) some_block_pairs<Q, R, NP>(p, ld, tokens, n, d, qs, i, d_v_pad, o + b * 32);
    }
}

template <typename Q>
static void accumulate_some_quant(
    const float * p, size_t ld, int n_rows, int d_v_pad, const void * v_sub, uint32_t picked, float * o) {
    const uint8_t * v = (const uint8_t *) v_sub;
    uint8_t tokens[KVT_SUB];
    const int n_tokens = list_bits(picked, tokens);
    for (int r = 0; r < n_rows;) {
        const int n = rows_of_call<false>(n_rows - r);
#define CALL(R) some_quant_rows<Q, R>(p + r * ld, ld, tokens, n_tokens, v, d_v_pad, o + (size_t) r * d_v_pad)
        KVT_DISPATCH_ROWS(false, n, CALL)
#undef CALL
        r += n;
    }
}
