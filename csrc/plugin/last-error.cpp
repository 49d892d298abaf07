#include "last-error.h"

#include <cstdarg>
#include <cstdio>

static thread_local char t_text[1024];

int kvt_fail(int code, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(t_text, sizeof(t_text), fmt, args);
    va_end(args);
    return code;
}

const char * kvt_fail_text(void) { return t_text; }
