#pragma once

// The nominal bytes of a cache tensor, read from and written to its pages. All of llama.cpp's byte access (state save
// and restore, sequence copies, operations that run on the CPU backend) comes down to these.

#include "buffer.h"

// Bytes [off, off + size) of the root as the nominal type lays them out. Ranges may begin and end inside a row.
// Reading lost cells gives zeros, and UNSUPPORTED unless with_lost.
int kvt_paged_read(kvt_root * root, size_t off, size_t size, void * dst, bool with_lost);
int kvt_paged_write(kvt_root * root, size_t off, size_t size, const void * src);
// Every byte of the range becomes `value`.
int kvt_paged_fill(kvt_root * root, size_t off, size_t size, uint8_t value);
// Every page of the layer, K and V, becomes absent: it reads as zeros and takes no memory.
int kvt_paged_clear(kvt_cache_layer * cache);
// Rows from one cache to another of the same width, in the stored format (no rounding where the formats agree).
int kvt_paged_copy_rows(kvt_root * src, int64_t src_row, kvt_root * dst, int64_t dst_row, int64_t n_rows);

// Puts back the rows, from first_row on, that an operation in place has changed, as a shift of positions does: `before`
// are their bytes as they were read, `after` what the operation made of them, and `numbers` (NULL: not known) the same
// rows, [n][n_embd], before they were rounded to the nominal type. The others keep what is stored, and lost ones stay
// lost.
int kvt_paged_put_back(kvt_root * root, int64_t first_row, const std::vector<char>& before,
    const std::vector<char>& after, const float * numbers);

// Rows of F32 values to the cells `rows` (row = stream*n_cells + cell).
int kvt_paged_put_rows(kvt_root * root, const int64_t * rows, const float * const * values, size_t n);
