// Queries of a decode, scaled, and in their 16-bit form where quantized keys are about.

#include "attention-impl.h"

// One row's 16-bit form. A row that holds something not finite gives not-finite scores through its step.
void kvt_quantize_row(const float * row, int n_blocks, int32_t * pair, float * step, int32_t * sum) {
    for (int b = 0; b < n_blocks; b++, row += 32, pair += 16) {
        int32_t bits[32], most_bits = 0; // the order of magnitudes is the order of their bits
        memcpy(bits, row, sizeof(bits));
        for (int i = 0; i < 32; i++) {
            const int32_t x = bits[i] & 0x7fffffff;
            most_bits = x > most_bits ? x : most_bits;
        }
        float most;
        memcpy(&most, &most_bits, sizeof(most));
        step[b] = most / 32767.0f;
        const float inv = step[b] > FLT_MIN && most <= FLT_MAX ? 32767.0f / most : 0.0f;
        int32_t x[32], total = 0;
        for (int i = 0; i < 32; i++) {
            const float v = inv != 0.0f ? row[i] * inv : 0.0f;
            x[i] = (int32_t) (v + (v < 0.0f ? -0.5f : 0.5f));
            total += x[i];
        }
        for (int g = 0; g < 8; g++) {
            pair[2 * g] = (int32_t) ((uint32_t) x[4 * g + 2] << 16 | (uint16_t) x[4 * g]);
            pair[2 * g + 1] = (int32_t) ((uint32_t) x[4 * g + 3] << 16 | (uint16_t) x[4 * g + 1]);
        }
        sum[b] = total;
    }
}

int kvt_queries_prepare(struct kvt_job * j, bool quantized, struct kvt_q_rows ** out) {
    const struct kvt_attention_op * op = j->op;
    const int32_t d_k = op->geo.d_k, n_blocks = d_k / 32;
    const size_t n_rows = (size_t) j->n_rows, n_heads = (size_t) op->geo.n_head_kv;
    const size_t per_row = (size_t) d_k + d_k / 2 + 2 * n_blocks;
    const size_t q_bytes = kvt_round_up(n_heads * sizeof(struct kvt_q_rows), 64);
    char * p = (char *) kvt_buf_need(&j->a->q, q_bytes + n_heads * n_rows * per_row * sizeof(float));
    if (!p) return KVT_ERR_NOMEM;
    struct kvt_q_rows * q = (struct kvt_q_rows *) p;
    float * f = (float *) (p + q_bytes);
    const float scale = kvt_job_q_scale(op);
    for (size_t h = 0; h < n_heads; h++, f += n_rows * per_row) {
        float * step = f + n_rows * d_k;
        int32_t * pair = (int32_t *) (step + n_rows * n_blocks);
        int32_t * sum = pair + n_rows * (d_k / 2);
        q[h].f = f;
        q[h].step = step;
        q[h].pair = pair;
        q[h].sum = sum;
        q[h].d_k = d_k;
        for (size_t r = 0; r < n_rows; r++) {
            const float * src = kvt_job_q(op, (int64_t) (r / j->n_group), (int) (h * j->n_group + r % j->n_group));
            float * row = f + r * d_k;
            for (int c = 0; c < d_k; c++) row[c] = src[c] * scale;
            if (quantized && d_k % 32 == 0)
                kvt_quantize_row(row, n_blocks, pair + r * (d_k / 2), step + r * n_blocks, sum + r * n_blocks);
        }
    }
    *out = q;
    return 0;
}
