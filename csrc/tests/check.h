#pragma once

// CHECK prints where a test failed and ends it: each test is a process of its own.

#include <cstdio>
#include <cstdlib>

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #cond);                                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_EQ(a, b)                                                                                                 \
    do {                                                                                                               \
        const long long check_a = (long long) (a), check_b = (long long) (b);                                          \
        if (check_a != check_b) {                                                                                      \
            fprintf(                                                                                                   \
                stderr, "%s:%d: CHECK_EQ(%s, %s) failed: %lld, %lld\n", __FILE__, __LINE__, #a, #b, check_a, check_b); \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
