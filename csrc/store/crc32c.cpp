#include "crc32c.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#    include <nmmintrin.h>
#    define KVT_HAVE_CRC32_X86 1
#endif

struct crc_tables {
    uint32_t t[8][256];
    crc_tables() {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) { c = (c >> 1) ^ ((c & 1u) ? 0x82f63b78u : 0u); }
            t[0][i] = c;
        }
        for (int k = 1; k < 8; k++) {
            for (uint32_t i = 0; i < 256; i++) { t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xffu]; }
        }
    }
};

// slicing by 8
uint32_t kvt_crc32c_table(const void * data, size_t n_bytes) {
    static const crc_tables tab;
    const uint8_t * p = (const uint8_t *) data;
    uint32_t c = 0xffffffffu;
    for (; n_bytes >= 8; n_bytes -= 8, p += 8) {
        const uint32_t lo = c ^
            ((uint32_t) p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24);
        c = tab.t[7][lo & 0xffu] ^ tab.t[6][(lo >> 8) & 0xffu] ^ tab.t[5][(lo >> 16) & 0xffu] ^ tab.t[4][lo >> 24] ^
            tab.t[3][p[4]] ^ tab.t[2][p[5]] ^ tab.t[1][p[6]] ^ tab.t[0][p[7]];
    }
    for (; n_bytes > 0; n_bytes--, p++) { c = (c >> 8) ^ tab.t[0][(c ^ *p) & 0xffu]; }
    return c ^ 0xffffffffu;
}

#ifdef KVT_HAVE_CRC32_X86
#    if defined(__clang__) // has a switch for this instruction alone, which may be off while SSE4.2 is on
#        define KVT_TARGET_CRC32 "sse4.2,crc32"
#    else
#        define KVT_TARGET_CRC32 "sse4.2"
#    endif
__attribute__((target(KVT_TARGET_CRC32))) static uint32_t crc32c_sse42(const void * data, size_t n_bytes) {
    const uint8_t * p = (const uint8_t *) data;
    uint64_t c = 0xffffffffu;
    for (; n_bytes >= 8; n_bytes -= 8, p += 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        c = _mm_crc32_u64(c, v);
    }
    uint32_t c32 = (uint32_t) c;
    for (; n_bytes > 0; n_bytes--, p++) { c32 = _mm_crc32_u8(c32, *p); }
    return c32 ^ 0xffffffffu;
}
#endif

uint32_t kvt_crc32c(const void * data, size_t n_bytes) {
#ifdef KVT_HAVE_CRC32_X86
    static const bool have = [] {
        __builtin_cpu_init();
        return (bool) __builtin_cpu_supports("sse4.2");
    }();
    if (have) { return crc32c_sse42(data, n_bytes); }
#endif
    return kvt_crc32c_table(data, n_bytes);
}
