#pragma once

// Tiles: a sub unpacked once for many rows. Scores and sums over a tile have the bits of those over the sub itself: the
// numbers are the same, only not converted again for every few rows. Part of kernels-impl.h.

template <typename LD> static void load_float(const typename LD::elem * in, size_t n, float * out) {
    for (size_t i = 0; i < n; i += VW) vf_store(out + i, LD::load(in + i));
}
template <typename LD> static void tile_k_float(const void * k_sub, int d_k, float * out) {
    load_float<LD>((const typename LD::elem *) k_sub, (size_t) d_k * KVT_SUB, out);
}
template <typename LD> static void tile_v_float(const void * v_sub, int d_v_pad, float * out) {
    load_float<LD>((const typename LD::elem *) v_sub, (size_t) d_v_pad * KVT_SUB, out);
}

// blocks with their scales, and [16] pairs of channels of 32 tokens, in the order of the queries' pairs
template <typename Q> static void tile_k_quant(const void * k_sub, int d_k, float * out) {
    for (int b = 0; b < d_k / 32; b++) {
        const uint8_t * block = (const uint8_t *) k_sub + (size_t) b * k_block_bytes<Q>();
        uint8_t * to = (uint8_t *) out + (size_t) b * k_block_bytes<tile_of<Q>>();
        load_float<load_f16>((const uint16_t *) block, Q::N_SCALES * KVT_SUB, (float *) to);
        const uint8_t * qs = block + scales_bytes<Q>();
        to += scales_bytes<tile_of<Q>>();
        for (int g = 0; g < Q::GROUPS; g++, qs += 4 * KVT_SUB) {
            for (int j = 0; j < KVT_SUB; j += VW) {
                const vi x = vi_load(qs + 4 * j);
                uint8_t * pair = to + (size_t) (2 * g) * 4 * KVT_SUB + 4 * j;
                if (Q::NIBBLES != 0) {
                    vi_store(pair, vi_nibble16<0>(x));
                    vi_store(pair + 4 * KVT_SUB, vi_nibble16<8>(x));
                    vi_store(pair + 8 * 4 * KVT_SUB, vi_nibble16<4>(x));
                    vi_store(pair + 9 * 4 * KVT_SUB, vi_nibble16<12>(x));
                } else {
                    vi_store(pair, vi_even16(x));
                    vi_store(pair + 4 * KVT_SUB, vi_odd16(x));
                }
            }
        }
    }
}

// blocks with their scales, and [32 tokens][32 channels] of whole numbers in F32
template <typename Q> static void tile_v_quant(const void * v_sub, int d_v_pad, float * out) {
    for (int b = 0; b < d_v_pad / 32; b++) {
        const uint8_t * block = (const uint8_t *) v_sub + (size_t) b * v_block_bytes<Q>();
        uint8_t * to = (uint8_t *) out + (size_t) b * v_block_bytes<tile_of<Q>>();
        load_float<load_f16>((const uint16_t *) block, Q::N_SCALES * KVT_SUB, (float *) to);
        const uint8_t * qs = block + scales_bytes<Q>();
        float * row = (float *) (to + scales_bytes<tile_of<Q>>());
        for (int t = 0; t < KVT_SUB; t++, row += 32) {
            for (int i = 0; i < 16 / VW; i++) {
                vf lo, hi;
                load_quant_pair<Q>(qs + (size_t) t * Q::V_ROW, i, &lo, &hi);
                vf_store(row + i * VW, lo);
                vf_store(row + 16 + i * VW, hi);
            }
        }
    }
}

// ---- keys that are values too (MLA): in F32, turned token-major ----

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

static void transpose(const float * k_tile, int d, int d_pad, float * v_tile) {
    for (int c = 0; c < d_pad; c += 16) {
        for (int t = 0; t < KVT_SUB; t++) {
            float * out = v_tile + (size_t) t * d_pad + c;
            for (int i = 0; i < 16; i++) { out[i] = c + i < d ? k_tile[(size_t) (c + i) * KVT_SUB + t] : 0.0f; }
        }
    }
}
