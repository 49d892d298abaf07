#pragma once

// How much each page is wanted, as a policy in the host program has said: the store's eviction policy. Also what
// becomes of the attention mass of pages that are dropped.

#include "../attention/attention.h"
#include "../store/store.h"

#include <map>
#include <mutex>
#include <vector>

class kvt_keep {
public:
    void add(uint32_t array, kvt_mass * mass);
    void remove(uint32_t array);
    void set(uint32_t array, std::vector<float> scores); // of all its pages; empty: none is scored
    double mass_lost() const;

    // lowest score first, then the least recently used; `this` must outlive the store that has it
    kvt_evict_policy policy();
    static void on_gone(void * self, kvt_page_id id);

private:
    struct entry {
        kvt_mass * mass;
        std::vector<float> scores;
    };

    static size_t choose(void * self, const kvt_page_info * pages, size_t n_pages, size_t bytes_needed,
        uint32_t * victims, size_t n_max);
    float score(const kvt_page_id& id) const; // the mutex is held

    mutable std::mutex m_mutex; // taken with the store's lock held: nothing is called under it
    std::map<uint32_t, entry> m_arrays;
    double m_mass_lost = 0.0;
};
