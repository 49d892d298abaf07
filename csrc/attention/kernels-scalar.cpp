// Plain C++. Compiled with that instruction set's flags: nothing in here may run before the processor was asked.

#include "kernels-common.h"

namespace {
#include "simd-scalar.h"
#include "kernels-impl.h"
} // namespace

extern "C" const struct kvt_kernels kvt_kernels_scalar = KVT_KERNELS_TABLE("scalar");
