// Cuts the visible pages into pieces at segments' ends.

#include "attention-impl.h"

static size_t first_sub(const struct kvt_job * j, size_t i) {
    return (size_t) (j->pages[i] - j->op->page_first) * j->subs_per_page;
}

int kvt_pieces_cut(struct kvt_job * j, struct kvt_piece ** out, size_t * out_n, size_t * out_n_states) {
    struct kvt_piece * all = (struct kvt_piece *) kvt_buf_need(&j->a->pieces, (j->n_pages + 1) * sizeof(*all));
    if (!all) return KVT_ERR_NOMEM;
    size_t n = 0, n_states = 0, end = 0; // end: first sub behind the last segment that the piece touches
    for (size_t i = 0; i < j->n_pages; i++) {
        const size_t sub = first_sub(j, i), last = sub + j->subs_per_page - 1;
        if (sub >= end) {
            all[n++] = { i, i, n_states, 0, sub, 0 };
            end = sub;
        }
        struct kvt_piece * p = &all[n - 1];
        while (end <= last) {
            end = kvt_segment_end(end);
            p->n_states++;
            n_states++;
        }
        p->end = i + 1;
        p->n_missing += j->is_missing[i];
    }
    *out = all;
    *out_n = n;
    *out_n_states = n_states;
    return 0;
}
