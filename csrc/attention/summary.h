#pragma once

// What stands in for cells that were dropped: cells that sum up several keys (centre, mean value, count), and groups of
// cells whose keys and values are kept in few dimensions. They take part in the softmax of every query, as cells that
// every query sees: use them for tokens that come before all that is asked (not with windows, and never with ALiBi,
// whose bias they lack).
//
// Everything is held in the page layout of format.h, so that the kernels of pages serve. A group's "page" holds
// coordinates; a second one holds its basis: token j's key is the j-th direction of keys, its value the j-th direction
// of values. So
//   q' = scores of q against the basis, scores = q.mean + q' against the coordinates,
//   output = weights over coordinates, these as weights over the basis, plus the sum of weights times the mean.

#include "../include/kvtier.h"
#include "../store/format.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_summary_set;

// Copies what `in` (kvtier.h) points to; groups that stay are shared with `before`, which may be NULL. Errors: INVALID
// with a text in err, NOMEM.
int kvt_summary_create(struct kvt_summary_set ** out, const struct kvt_geometry * geo, const kvt_summary * in,
    const struct kvt_summary_set * before, char * err, size_t err_size);
void kvt_summary_free(struct kvt_summary_set * s);
size_t kvt_summary_bytes(const struct kvt_summary_set * s);
size_t kvt_summary_shared(const struct kvt_summary_set * s); // of these, what `before` had already
// Decayed mean attention mass per part, as kvt_mass has it of pages: the cells, if there are any, then the groups. How
// many.
size_t kvt_summary_mass(const struct kvt_summary_set * s, float * out, size_t n_max);

#ifdef __cplusplus
}
#endif
