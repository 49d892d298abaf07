// AVX-512 with VNNI. Compiled with that instruction set's flags: nothing in here may run before the processor was
// asked.
#if defined(__x86_64__)
#    if defined(__GNUC__) && !defined(__clang__)
// the compiler's own header leaves don't-care inputs of intrinsics undefined
#        pragma GCC diagnostic ignored "-Wuninitialized"
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#    endif
#    include "kernels-common.h"
#    include <immintrin.h>

namespace {
#    define KVT_SIMD_VNNI
#    include "simd-avx512.h"
#    include "kernels-impl.h"
} // namespace

extern "C" const struct kvt_kernels kvt_kernels_avx512vnni = KVT_KERNELS_TABLE("avx512vnni");

#endif
