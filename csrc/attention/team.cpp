#include "team.h"

#include <atomic>
#include <exception>
#include <future>
#include <thread>
#include <vector>

#include <dlfcn.h>

// Entry points of compiled OpenMP code. GCC's libgomp has them, and LLVM's libomp has the same for code that GCC
// compiled.
struct omp_runtime {
    void (*parallel)(void (*fn)(void *), void * data, unsigned n_threads, unsigned flags);
    int (*thread_num)(void);
    int (*num_threads)(void);

    bool is_whole() const { return parallel && thread_num && num_threads; }
};

struct team {
    kvt_team_fn fn;
    void * arg;
};

static std::atomic<kvt_team_lookup> g_lookup(nullptr);

void kvt_team_set_lookup(kvt_team_lookup lookup) { g_lookup = lookup; }

#if !defined(KVT_TEAM_STD_THREADS)

template <typename F> static omp_runtime find_in(F symbol) {
    omp_runtime found;
    found.parallel = reinterpret_cast<decltype(found.parallel)>(symbol("GOMP_parallel"));
    found.thread_num = reinterpret_cast<decltype(found.thread_num)>(symbol("omp_get_thread_num"));
    found.num_threads = reinterpret_cast<decltype(found.num_threads)>(symbol("omp_get_num_threads"));
    return found;
}

static omp_runtime find_runtime(void) {
    if (kvt_team_lookup lookup = g_lookup) {
        const omp_runtime found = find_in(lookup);
        if (found.is_whole()) { return found; }
    }
    // never closed: its threads live as long as the process
    if (void * library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL)) {
        return find_in([=](const char * name) { return dlsym(library, name); });
    }
    return {};
}

static const omp_runtime& runtime(void) {
    static const omp_runtime found = find_runtime();
    return found;
}

static void run_member(void * data) {
    const team * t = static_cast<const team *>(data);
    t->fn(t->arg, runtime().thread_num(), runtime().num_threads());
}

#endif

// They begin when it is known how many there are: where the system gives no more, the team is smaller.
static void run_plain_threads(int n_threads, const team& t) {
    std::promise<int> counted;
    const std::shared_future<int> n_team = counted.get_future();
    std::vector<std::thread> others;
    others.reserve((size_t) n_threads - 1);
    try {
        for (int i = 1; i < n_threads; i++) {
            others.emplace_back([&t, i, n_team] { t.fn(t.arg, i, n_team.get()); });
        }
    } catch (const std::exception&) {} // no thread, or no memory for one
    const int n_started = 1 + (int) others.size();
    counted.set_value(n_started);
    t.fn(t.arg, 0, n_started);
    for (std::thread& other : others) { other.join(); }
}

void kvt_team_run(int n_threads, kvt_team_fn fn, void * arg) {
    if (n_threads <= 1) {
        fn(arg, 0, 1);
        return;
    }
    team t = { fn, arg };
#if !defined(KVT_TEAM_STD_THREADS)
    if (runtime().is_whole()) {
        runtime().parallel(run_member, &t, (unsigned) n_threads, 0);
        return;
    }
#endif
    run_plain_threads(n_threads, t);
}
