#pragma once

#include <cstddef>
#include <cstdint>

// CRC-32C (Castagnoli), reflected, initial value and final xor 0xffffffff. The processor's instruction where it has
// one.
uint32_t kvt_crc32c(const void * data, size_t n_bytes);
uint32_t kvt_crc32c_table(const void * data, size_t n_bytes); // the portable one, for tests
