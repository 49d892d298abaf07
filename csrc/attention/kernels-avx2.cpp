// AVX2, FMA and F16C. Compiled with that instruction set's flags: nothing in here may run before the processor was
// asked.
#if defined(__x86_64__)
#    include "kernels-common.h"
#    include <immintrin.h>

namespace {
#    include "simd-avx2.h"
#    include "kernels-impl.h"
} // namespace

extern "C" const struct kvt_kernels kvt_kernels_avx2 = KVT_KERNELS_TABLE("avx2");

#endif
