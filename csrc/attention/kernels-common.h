#pragma once

// What every kernels-*.cpp includes before its instruction set: C headers only, so that no shared inline function is
// emitted with instructions that the processor may lack.

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

// 2^f on [-0.5, 0.5], relative error below 8e-8
#define KVT_EXP2_C0 1.00000007165457f
#define KVT_EXP2_C1 0.6931469670612078f
#define KVT_EXP2_C2 0.24022119724212376f
#define KVT_EXP2_C3 0.05550713279299298f
#define KVT_EXP2_C4 0.009675541319494177f
#define KVT_EXP2_C5 0.0013276470117138742f
