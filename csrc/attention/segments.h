#pragma once

// Segments: the fixed pieces of a stream within which a row keeps one running softmax. Where they begin depends on the
// position in the stream alone, so whoever computes a row, in whatever company, cuts its sums at the same places.
//
// The first 4,096 tokens have segments of 256; behind that they grow with the position, eight to each doubling. So a
// segment's own cost stays small beside its tokens, and the last one is at most an eighth of what is before it: enough
// pieces for several threads at every length.

#include "kernels.h"

#define KVT_SEGMENT_SUBS 8

// subs of the segment that holds `sub`
static inline size_t kvt_segment_subs(size_t sub) {
    size_t n = KVT_SEGMENT_SUBS;
    while (n * 16 <= sub) n *= 2;
    return n;
}
// the first sub behind the segment that holds `sub`
static inline size_t kvt_segment_end(size_t sub) {
    const size_t n = kvt_segment_subs(sub);
    return (sub / n + 1) * n;
}
