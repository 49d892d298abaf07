#pragma once

// Bytes for people, in the units that budgets are given in, never less than they are.

#include <cstdint>
#include <string>

static inline std::string kvt_bytes_text(uint64_t n) {
    const bool small = n < ((uint64_t) 10 << 20);
    const uint64_t unit = small ? 1 << 10 : 1 << 20;
    return std::to_string(n / unit + (n % unit != 0)) + (small ? " KiB" : " MiB");
}
