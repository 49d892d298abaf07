// AArch64 NEON. Compiled with that instruction set's flags: nothing in here may run before the processor was asked.
#if defined(__aarch64__)
#    include "kernels-common.h"
#    include <arm_neon.h>

namespace {
#    include "simd-neon.h"
#    include "kernels-impl.h"
} // namespace

extern "C" const struct kvt_kernels kvt_kernels_neon = KVT_KERNELS_TABLE("neon");

#endif
