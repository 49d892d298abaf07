#pragma once

// Teams of threads, on the OpenMP runtime that ggml's CPU backend runs on, so that both share one pool of threads that
// spin. The runtime is found when it is first needed and never linked to: where llama.cpp brings a copy of its own, as
// repaired wheels do, a linked one would be a second pool. Where there is none, plain threads take its place.
//
// KVT_TEAM_STD_THREADS takes plain threads always: for the thread sanitizer, which cannot see inside libgomp.

typedef void (*kvt_team_fn)(void * arg, int ith, int nth);
typedef void * (*kvt_team_lookup)(const char * symbol); // NULL: there is no such function

// Names where the functions of the OpenMP runtime are looked up first. Counts before the first team runs.
void kvt_team_set_lookup(kvt_team_lookup lookup);

// Runs fn(arg, ith, nth) on n threads, or fewer if the runtime gives no more, and waits. fn must not throw.
void kvt_team_run(int n_threads, kvt_team_fn fn, void * arg);
