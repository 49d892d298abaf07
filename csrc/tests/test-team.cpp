// Teams of threads: every member runs once and knows how many there are, and the OpenMP runtime that they run on is the
// one that the lookup names; a lookup that has not all of it is not used.
//   test-team [whole | partial]      without an argument: no lookup, the runtime of the system or plain threads

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../attention/team.h"
#include "check.h"

// a runtime of our own that gives three threads, whatever it is asked for
static std::atomic<int> g_n_parallel(0), g_n_wanted(0);
static thread_local int t_number = -1;

static void three_threads(void (*fn)(void *), void * data, unsigned n_threads, unsigned) {
    g_n_parallel++;
    g_n_wanted = (int) n_threads;
    std::vector<std::thread> all;
    for (int i = 0; i < 3; i++) {
        all.emplace_back([=] {
            t_number = i;
            fn(data);
        });
    }
    for (std::thread& thread : all) { thread.join(); }
}
static int number(void) { return t_number; }
static int three(void) { return 3; }

static void * whole(const char * symbol) {
    if (strcmp(symbol, "GOMP_parallel") == 0) { return reinterpret_cast<void *>(three_threads); }
    if (strcmp(symbol, "omp_get_thread_num") == 0) { return reinterpret_cast<void *>(number); }
    if (strcmp(symbol, "omp_get_num_threads") == 0) { return reinterpret_cast<void *>(three); }
    return nullptr;
}
static void * partial(const char * symbol) {
    return strcmp(symbol, "omp_get_num_threads") == 0 ? nullptr : whole(symbol);
}

struct seen {
    std::atomic<int> times[8], team_size;
};

static void look(void * arg, int ith, int nth) {
    seen * s = static_cast<seen *>(arg);
    CHECK(ith >= 0 && ith < nth && nth <= 8);
    s->times[ith]++;
    s->team_size = nth;
}

static int team_of(int n_threads) {
    seen s = {};
    kvt_team_run(n_threads, look, &s);
    for (int i = 0; i < 8; i++) { CHECK_EQ(s.times[i], i < s.team_size ? 1 : 0); }
    return s.team_size;
}

int main(int argc, char ** argv) {
    const std::string lookup = argc > 1 ? argv[1] : "";
    if (!lookup.empty()) { kvt_team_set_lookup(lookup == "whole" ? whole : partial); }
    for (int times = 0; times < 100; times++) {
        CHECK_EQ(team_of(0), 1);
        CHECK_EQ(team_of(1), 1);
        const int size = team_of(5);
        CHECK(size > 1 && size <= 5);
#if !defined(KVT_TEAM_STD_THREADS)
        CHECK_EQ(g_n_parallel, lookup == "whole" ? times + 1 : 0);
        CHECK_EQ(g_n_wanted, lookup == "whole" ? 5 : 0);
        CHECK(lookup != "whole" || size == 3);
#endif
    }
    return 0;
}
