// Which instruction sets this processor (and its operating system) can run, and the one in use.

#include <atomic>
#include <stdlib.h>
#include <string.h>

#include "attention-impl.h"

#if defined(__x86_64__)
#    include <cpuid.h>

struct cpu_features {
    bool avx2, avx512, avx512vnni;
};

static uint64_t saved_by_os(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t) hi << 32 | lo;
}

static struct cpu_features detect(void) {
    struct cpu_features f = { false, false, false };
    unsigned a, b, c, d, c1;
    if (!__get_cpuid(1, &a, &b, &c1, &d)) return f;
    const bool osxsave = c1 >> 27 & 1, avx = c1 >> 28 & 1, fma = c1 >> 12 & 1, f16c = c1 >> 29 & 1;
    if (!osxsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
    const uint64_t xcr0 = saved_by_os();
    f.avx2 = avx && fma && f16c && (b >> 5 & 1) && (xcr0 & 0x6) == 0x6;
    f.avx512 = f.avx2 && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (xcr0 & 0xe6) == 0xe6;
    f.avx512vnni = f.avx512 && (c >> 11 & 1);
    return f;
}
#endif

enum { N_ISA_MAX = 4 };

// best first
static size_t usable(const struct kvt_kernels ** out) {
    size_t n = 0;
#if defined(__x86_64__)
    static const struct cpu_features f = detect();
    if (f.avx512vnni) out[n++] = &kvt_kernels_avx512vnni;
    if (f.avx512) out[n++] = &kvt_kernels_avx512;
    if (f.avx2) out[n++] = &kvt_kernels_avx2;
#elif defined(__aarch64__)
    out[n++] = &kvt_kernels_neon;
#endif
    out[n++] = &kvt_kernels_scalar;
    return n;
}

static const struct kvt_kernels * find(const char * name) {
    const struct kvt_kernels * all[N_ISA_MAX];
    const size_t n = usable(all);
    for (size_t i = 0; i < n; i++) {
        if (strcmp(all[i]->name, name) == 0) return all[i];
    }
    return NULL;
}

static std::atomic<const struct kvt_kernels *> g_active{ NULL };

// NULL when KVTIER_ISA names nothing that runs here
extern "C" const struct kvt_kernels * kvt_kernels_active(void) {
    const struct kvt_kernels * k = g_active.load(std::memory_order_acquire);
    if (k) return k;
    const char * env = getenv("KVTIER_ISA");
    if (env && *env) {
        k = find(env);
    } else {
        const struct kvt_kernels * all[N_ISA_MAX];
        usable(all);
        k = all[0];
    }
    const struct kvt_kernels * none = NULL;
    if (k && !g_active.compare_exchange_strong(none, k)) k = none;
    return k;
}

extern "C" const char * kvt_isa_active(void) {
    const struct kvt_kernels * k = kvt_kernels_active();
    return k ? k->name : "";
}

extern "C" int kvt_isa_select(const char * name) {
    const struct kvt_kernels * k = name ? find(name) : NULL;
    if (!k) return KVT_ERR_UNSUPPORTED;
    g_active.store(k, std::memory_order_release);
    return 0;
}

extern "C" size_t kvt_isa_list(const char ** out, size_t n_max) {
    const struct kvt_kernels * all[N_ISA_MAX];
    const size_t n = usable(all);
    for (size_t i = 0; i < n && i < n_max; i++) out[i] = all[i]->name;
    return n;
}
