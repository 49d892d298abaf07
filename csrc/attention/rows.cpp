// What decode and prefill do to rows, in the same words: a sub's scores become weights, segments are joined, a row
// ends.

#include "attention-impl.h"

static void hide_lost(float * s, uint32_t lost) {
    for (int t = 0; lost; t++, lost >>= 1) {
        if (lost & 1) s[t] = -INFINITY;
    }
}

void kvt_weigh_sub(const struct kvt_job * j, float * s, size_t ld, int h, int64_t row0, int n_rows, size_t sub, int cls,
    uint32_t lost, const struct kvt_row_state * st) {
    const struct kvt_attention_op * op = j->op;
    if (op->softcap != 0.0f) j->k->softcap(s, ld, n_rows, op->softcap * KVT_LOG2E);
    if (cls == KVT_VIS_MIXED) {
        for (int r = 0; r < n_rows; r++) {
            const int head = h * j->n_group + (int) ((row0 + r) % j->n_group);
            const uint16_t * mask = kvt_job_mask(op, (row0 + r) / j->n_group, head);
            j->k->mask_add(
                s + r * ld, mask ? mask + sub * KVT_SUB : NULL, kvt_job_slope(op, head), kvt_job_n_valid(op, sub));
        }
    }
    for (int r = 0; lost && r < n_rows; r++) hide_lost(s + r * ld, lost);
    j->k->softmax(s, ld, n_rows, st);
}

void kvt_state_join(const struct kvt_job * j, const struct kvt_partial * part, float * m, float * l, float * o) {
    if (part->m[0] != -INFINITY) j->k->join(part->m[0], part->l, part->o, m, l, o, j->d_v_pad);
}

void kvt_row_begin(const struct kvt_job * j, struct kvt_row_sum * sum, float * o) {
    sum->m = -INFINITY;
    memset(sum->l, 0, sizeof(sum->l));
    memset(o, 0, (size_t) j->d_v_pad * sizeof(float));
    sum->o = o;
}

void kvt_row_end(
    const struct kvt_job * j, struct kvt_row_sum * sum, int head, int64_t query, float * out_m, float * out_f) {
    const struct kvt_attention_op * op = j->op;
    float l = 0.0f, m = sum->m, scale = 1.0f;
    for (int k = 0; k < KVT_SUM_LANES; k++) l += sum->l[k];
    if (m != -INFINITY && op->sinks) {
        const float sink = op->sinks[head] * KVT_LOG2E;
        if (sink > m) {
            scale = j->k->exp2_one(m - sink);
            l = l * scale + 1.0f;
            m = sink;
        } else {
            l += j->k->exp2_one(sink - m);
        }
    }
    const float f = m == -INFINITY || l == 0.0f ? 0.0f : 1.0f / l;
    j->k->scale(sum->o, j->d_v_pad, scale * f);
    memcpy(op->dst + (size_t) query * op->dst_nb_query + (size_t) head * op->dst_nb_head, sum->o,
        (size_t) op->d_v_out * sizeof(float));
    if (out_m) *out_m = m;
    if (out_f) *out_f = f;
}
