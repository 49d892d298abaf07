#include "log.h"

#include <cstdarg>
#include <cstdio>

#include <dlfcn.h>

#include "ggml-api.h"

// ggml-base exports its logger; a build that hides it gets the messages on stderr
typedef void (*log_fn)(enum ggml_log_level level, const char * fmt, ...);

static void log_text(enum ggml_log_level level, const char * text) {
    static const log_fn logger = reinterpret_cast<log_fn>(kvt_ggml_symbol("ggml_log_internal"));
    if (logger) {
        logger(level, "%s", text);
    } else {
        fputs(text, stderr);
    }
}

#define KVT_LOG_BODY(level)                                                                                            \
    char text[1024];                                                                                                   \
    va_list args;                                                                                                      \
    va_start(args, fmt);                                                                                               \
    vsnprintf(text, sizeof(text), fmt, args);                                                                          \
    va_end(args);                                                                                                      \
    log_text(level, text)

void kvt_log_error(const char * fmt, ...) { KVT_LOG_BODY(GGML_LOG_LEVEL_ERROR); }
