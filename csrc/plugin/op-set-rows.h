#pragma once

// SET_ROWS: new rows of K or V (F32) go to the cells that an index tensor names.

#include "buffer.h"

// whether rows go straight to pages (a cache) or through temporary ones (a plain tensor)
bool kvt_set_rows_supported(const ggml_tensor * op);
int kvt_set_rows(ggml_tensor * op); // 0 or a negative kvt_error
