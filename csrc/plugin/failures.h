#pragma once

// What failed last in a domain, for llama.cpp, which only reports that something did: kvt_domain_last_error returns it.
//
// Threads: any. One mutex guards the text and its code; nothing is called with it held.

#include "../store/store.h"

#include <mutex>
#include <string>

class kvt_failures {
public:
    explicit kvt_failures(kvt_store * store) : m_store(store) {}

    // Keeps the text of a failure (the store's own, if the store failed just now) until the next one or clear(), here
    // and as this thread's. Returns code.
    int fail(int code, const char * what);
    // The same for a failure that the caller learns of at once: only as this thread's text.
    int refuse(int code, const char * what) const;
    void clear(); // the store's as well
    std::string text() const;
    int code() const;

private:
    kvt_store * m_store;
    mutable std::mutex m_mutex; // guards what follows
    std::string m_text;
    int m_code = 0;
};
