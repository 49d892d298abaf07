#include "counts.h"

#include <algorithm>

static void add_report(kvt_recall_report * to, const kvt_recall_report& r) {
    to->n_rows += r.n_rows;
    to->tokens_seen += r.tokens_seen;
    to->tokens_read += r.tokens_read;
    to->pages_wanted += r.pages_wanted;
    to->pages_missing += r.pages_missing;
    to->omitted_sum += r.omitted_sum;
    to->bound_sum += r.bound_sum;
    to->omitted_max = std::max(to->omitted_max, r.omitted_max);
    to->bound_max = std::max(to->bound_max, r.bound_max);
}

void kvt_counts::report(kvt_layer * layer, const kvt_recall_report& r) {
    std::lock_guard<std::mutex> lock(m_mutex);
    layer->last = r;
    add_report(&m_recall, r);
}

kvt_recall_report kvt_counts::recall() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_recall;
}

kvt_recall_report kvt_counts::last_of(const kvt_layer& layer) const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return layer.last;
}
