#pragma once

// The one list of errors. The enum, the names and the messages all come from here, so they cannot drift.
// X(name, code, message): the message says what happened; the last-error text of the failing object adds
// the value, the tier and the page, and what to do about it.

#define KVT_ERROR_MAP(X)                                                                                               \
    X(OK, 0, "success")                                                                                                \
    X(AGAIN, -1, "the page is not resident yet")                                                                       \
    X(INVALID, -2, "invalid argument")                                                                                 \
    X(NOMEM, -3, "out of memory")                                                                                      \
    X(BUDGET, -4, "the tier budgets cannot hold another page")                                                         \
    X(DISK_FULL, -5, "the disk tier is full")                                                                          \
    X(IO, -6, "a read or write on the disk tier failed")                                                               \
    X(CHECKSUM, -7, "a page on the disk tier does not match its checksum")                                             \
    X(DIR, -8, "the directory of the disk tier cannot be used")                                                        \
    X(UNSUPPORTED, -9, "not supported")                                                                                \
    X(CONFIG, -10, "invalid setting")                                                                                  \
    X(VERSION, -11, "incompatible version")                                                                            \
    X(CANCELLED, -12, "cancelled")                                                                                     \
    X(BUSY, -13, "the page is in use")

enum kvt_error {
    KVT_OK = 0, // the short name of KVT_ERR_OK
#define KVT_ERROR_ENUM(name, code, message) KVT_ERR_##name = code,
    KVT_ERROR_MAP(KVT_ERROR_ENUM)
#undef KVT_ERROR_ENUM
};
