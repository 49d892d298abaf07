#pragma once

// The text of this thread's last failure: what kvt_last_error returns.

#if defined(__GNUC__)
#    define KVT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#    define KVT_PRINTF(fmt, args)
#endif

// keeps the text and returns `code`, so that a failing function can end with `return kvt_fail(...)`
int kvt_fail(int code, const char * fmt, ...) KVT_PRINTF(2, 3);
const char * kvt_fail_text(void); // never NULL
