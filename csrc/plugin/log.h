#pragma once

// Messages to llama.cpp's log, so that its callback (and its level) decides what becomes of them.

#include "last-error.h"

void kvt_log_error(const char * fmt, ...) KVT_PRINTF(1, 2);
