#include "digests.h"

#include "attention-impl.h"

#include <algorithm>
#include <cmath>
#include <vector>

static int make_layout(int32_t n_head_kv, int32_t d_v, size_t n_subs, struct kvt_page_layout * out) {
    struct kvt_geometry geo = { n_head_kv, 0, d_v, KVT_SUB };
    const int err = kvt_page_layout_init(
        out, &geo, KVT_FORMAT_F16, kvt_format_supports(KVT_FORMAT_Q8_0, d_v) ? KVT_FORMAT_Q8_0 : KVT_FORMAT_F16);
    if (err) return err;
    const size_t n_groups = (n_subs + KVT_SUB - 1) / KVT_SUB + 1;
    if (n_subs == 0 || n_groups > INT32_MAX / KVT_SUB) return KVT_ERR_INVALID;
    out->geo.page_tokens = (int32_t) (n_groups * KVT_SUB);
    out->head_bytes = kvt_round_up(n_groups * out->v_sub_bytes, 64);
    out->page_bytes = (size_t) n_head_kv * out->head_bytes;
    return 0;
}

extern "C" size_t kvt_digests_bytes(int32_t n_head_kv, int32_t d_v, size_t n_subs) {
    struct kvt_page_layout l;
    return make_layout(n_head_kv, d_v, n_subs, &l) == 0 ? l.page_bytes + n_subs : 0;
}

extern "C" int kvt_digests_create(struct kvt_digests ** out, int32_t n_head_kv, int32_t d_v, size_t n_subs) {
    struct kvt_page_layout l;
    const int err = make_layout(n_head_kv, d_v, n_subs, &l);
    if (err) return err;
    struct kvt_digests * d = (struct kvt_digests *) calloc(1, sizeof(*d));
    if (!d) return KVT_ERR_NOMEM;
    d->layout = l;
    d->n_subs = n_subs;
    d->n_bytes = l.page_bytes + n_subs;
    d->data = (uint8_t *) aligned_alloc(64, l.page_bytes);
    d->valid = (uint8_t *) calloc(n_subs, 1);
    if (!d->data || !d->valid) {
        kvt_digests_free(d);
        return KVT_ERR_NOMEM;
    }
    memset(d->data, 0, l.page_bytes);
    *out = d;
    return 0;
}

extern "C" void kvt_digests_free(struct kvt_digests * d) {
    if (!d) return;
    free(d->data);
    free(d->valid);
    free(d);
}

extern "C" void kvt_digests_clear(struct kvt_digests * d) {
    memset(d->valid, 0, d->n_subs);
    memset(d->data, 0, d->layout.page_bytes);
}

// A mean that is no number would spoil steps that leave nothing of its sub out: nothing times it is no number either.
static bool take_mean(struct kvt_digests * d, const struct kvt_page_ref * page, int32_t i_sub, size_t sub) {
    const struct kvt_geometry * g = &d->layout.geo;
    const size_t n = (size_t) g->n_head_kv * g->d_v;
    std::vector<float> row(n), sum(n, 0.0f); // row: all heads of one cell
    for (int32_t t = 0; t < KVT_SUB; t++) {
        kvt_page_get_f32(page->layout, page->data, KVT_PART_V, i_sub * KVT_SUB + t, row.data());
        for (size_t c = 0; c < n; c++) sum[c] += row[c];
    }
    for (float& x : sum) x *= 1.0f / KVT_SUB;
    kvt_page_put_f32(&d->layout, d->data, KVT_PART_V, (int32_t) sub, sum.data());
    kvt_page_get_f32(&d->layout, d->data, KVT_PART_V, (int32_t) sub, row.data()); // what rounding to F16 has made of it
    if (std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) return true;
    std::fill(sum.begin(), sum.end(), 0.0f);
    kvt_page_put_f32(&d->layout, d->data, KVT_PART_V, (int32_t) sub, sum.data());
    return false;
}

extern "C" void kvt_digests_note_write(
    struct kvt_digests * d, const struct kvt_page_ref * page, int32_t cell, int32_t n) {
    const int32_t subs_per_page = page->layout->geo.page_tokens / KVT_SUB;
    const int32_t i_sub = cell / KVT_SUB;
    const size_t sub = (size_t) page->page * subs_per_page + i_sub;
    const bool full = (cell + n) % KVT_SUB == 0;
    d->valid[sub] = 0; // it stays so where there is no memory for the mean
    d->valid[sub] = full && take_mean(d, page, i_sub, sub);
}
