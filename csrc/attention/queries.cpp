// Queries, scaled, and in their 16-bit form where quantized keys are about.

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

static bool meets_quantized_keys(const struct kvt_job * j) {
    if (j->op->geo.d_k % 32 != 0) return false;
    if (j->op->keys) return j->op->keys->layout.fmt_k >= KVT_FORMAT_Q8_0;
    bool found = j->n_missing > 0;
    for (size_t i = 0; i < j->n_pages && !found; i++)
        found = j->refs[i].data && j->refs[i].layout->fmt_k >= KVT_FORMAT_Q8_0;
    return found;
}

struct queries {
    struct kvt_job * j;
    struct kvt_q_rows * q; // [n_head_kv]
    bool quantized;
};

// rows are taken in runs of one KV head
static void prepare_rows(void * arg, int ith, int nth) {
    (void) ith;
    (void) nth;
    const struct queries * w = (const struct queries *) arg;
    struct kvt_job * j = w->j;
    const struct kvt_attention_op * op = j->op;
    const size_t d_k = (size_t) op->geo.d_k, n_blocks = d_k / 32, run = 64;
    const size_t n_rows = (size_t) j->n_rows, n_runs = (n_rows + run - 1) / run;
    const float scale = kvt_job_q_scale(op);
    for (;;) {
        const size_t task = j->next.fetch_add(1, std::memory_order_relaxed);
        if (task >= n_runs * (size_t) op->geo.n_head_kv) return;
        const size_t h = task / n_runs, r0 = task % n_runs * run, r1 = r0 + run < n_rows ? r0 + run : n_rows;
        const struct kvt_q_rows * q = &w->q[h];
        for (size_t r = r0; r < r1; r++) {
            const float * src = kvt_job_q(op, (int64_t) (r / j->n_group), (int) (h * j->n_group + r % j->n_group));
            float * row = (float *) q->f + r * d_k;
            for (size_t c = 0; c < d_k; c++) row[c] = src[c] * scale;
            if (w->quantized)
                kvt_quantize_row(row, (int) n_blocks, (int32_t *) q->pair + r * (d_k / 2),
                    (float *) q->step + r * n_blocks, (int32_t *) q->sum + r * n_blocks);
        }
    }
}

int kvt_queries_prepare(struct kvt_job * j, struct kvt_q_rows ** out) {
    const struct kvt_attention_op * op = j->op;
    const int32_t d_k = op->geo.d_k, n_blocks = d_k / 32;
    const size_t n_rows = (size_t) j->n_rows, n_heads = (size_t) op->geo.n_head_kv;
    const size_t per_row = (size_t) d_k + d_k / 2 + 2 * n_blocks;
    const size_t q_bytes = kvt_round_up(n_heads * sizeof(struct kvt_q_rows), 64);
    char * p = (char *) kvt_buf_need(&j->a->q, q_bytes + n_heads * n_rows * per_row * sizeof(float));
    if (!p) return KVT_ERR_NOMEM;
    struct queries w = { j, (struct kvt_q_rows *) p, meets_quantized_keys(j) };
    float * f = (float *) (p + q_bytes);
    for (size_t h = 0; h < n_heads; h++, f += n_rows * per_row) {
        w.q[h].f = f;
        w.q[h].step = f + n_rows * d_k;
        w.q[h].pair = (int32_t *) (w.q[h].step + n_rows * n_blocks);
        w.q[h].sum = w.q[h].pair + n_rows * (d_k / 2);
        w.q[h].d_k = d_k;
    }
    j->next = 0;
    kvt_team_run(n_rows * n_heads < 256 ? 1 : j->n_threads, prepare_rows, &w);
    j->next = 0;
    *out = w.q;
    return 0;
}
