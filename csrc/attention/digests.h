#pragma once

// What stays in memory of every sub-page (32 cells) of an array: the mean value of each KV head. Attention that leaves
// values out counts them with it.

#include "../store/store.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_digests {
    struct kvt_page_layout
        layout; // values only, in Q8_0 (F16 where its blocks do not fit); "token" i is the mean of sub i of the array
    uint8_t * data;
    uint8_t * valid; // [n_subs]: the mean is that of the cells as they are. Any other is some finite number too
    size_t n_subs, n_bytes;
};

// what the digests of so many subs take; 0: impossible
size_t kvt_digests_bytes(int32_t n_head_kv, int32_t d_v, size_t n_subs);
// Errors: NOMEM, INVALID
int kvt_digests_create(struct kvt_digests ** out, int32_t n_head_kv, int32_t d_v, size_t n_subs);
void kvt_digests_free(struct kvt_digests * d);
void kvt_digests_clear(struct kvt_digests * d);

// Values of cells [cell, cell + n) of the page (those of one sub) were written. A sub whose last cell has been written
// gets its mean, if that is finite as it is stored; any other is not valid any more.
void kvt_digests_note_write(struct kvt_digests * d, const struct kvt_page_ref * page, int32_t cell, int32_t n);

// the means of subs 32*group .. 32*group + 31, as the values of one sub
static inline const uint8_t * kvt_digests_group(const struct kvt_digests * d, int32_t head, size_t group) {
    return d->data + (size_t) head * d->layout.head_bytes + group * d->layout.v_sub_bytes;
}

#ifdef __cplusplus
}
#endif
