#pragma once

// What attention has read and left out, counted since the domain was opened; layers that are gone are included.
//
// Threads: any. Single counts are atomic; the mutex guards the sums of reports and every layer's last one.

#include "layer.h"

#include <atomic>
#include <mutex>

class kvt_counts {
public:
    std::atomic<uint64_t> n_attention{ 0 }, n_fallback{ 0 };
    std::atomic<uint64_t> k_bytes{ 0 }, v_bytes{ 0 }, pages_read{ 0 }, pages_skipped{ 0 };

    // adds what one operation of this layer reported
    void report(kvt_layer * layer, const kvt_recall_report& r);
    kvt_recall_report recall() const;
    kvt_recall_report last_of(const kvt_layer& layer) const;

private:
    mutable std::mutex m_mutex;
    kvt_recall_report m_recall = {};
};
