#pragma once

// Runs fn(arg, ith, nth) on n threads and waits. OpenMP, so that we share the pool that ggml's CPU backend spins on.
// KVT_TEAM_STD_THREADS takes plain threads instead: for the thread sanitizer, which cannot see inside libgomp.

#include <atomic>
#include <vector>

#if defined(KVT_TEAM_STD_THREADS)
#    include <thread>
#elif defined(_OPENMP)
#    include <omp.h>
#endif

typedef void (*kvt_team_fn)(void * arg, int ith, int nth);

static inline void kvt_team_run(int n_threads, kvt_team_fn fn, void * arg) {
    if (n_threads <= 1) {
        fn(arg, 0, 1);
        return;
    }
#if defined(KVT_TEAM_STD_THREADS)
    std::vector<std::thread> others;
    for (int i = 1; i < n_threads; i++) { others.emplace_back(fn, arg, i, n_threads); }
    fn(arg, 0, n_threads);
    for (std::thread& t : others) { t.join(); }
#elif defined(_OPENMP)
#    pragma omp parallel num_threads(n_threads)
    fn(arg, omp_get_thread_num(), omp_get_num_threads());
#else
    fn(arg, 0, 1);
#endif
}
