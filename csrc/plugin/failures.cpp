#include "failures.h"

#include "../include/kvtier-errors.h"
#include "../include/kvtier.h"
#include "last-error.h"

// The store's own text if it has just failed this way, else `what`. The general message comes first: a host program
// that only has the text tells the kinds of failures apart by it.
static std::string failure_text(kvt_store * store, int code, const char * what) {
    char text[768];
    kvt_store_take_error(store, code, text, sizeof(text));
    const std::string detail = text[0] ? text : what;
    const std::string general = kvt_error_message(code);
    return detail.find(general) != std::string::npos ? detail : general + ": " + detail;
}

int kvt_failures::fail(int code, const char * what) {
    std::string message = failure_text(m_store, code, what);
    kvt_fail(code, "%s", message.c_str());
    std::lock_guard<std::mutex> lock(m_mutex);
    m_text = std::move(message);
    m_code = code;
    return code;
}

int kvt_failures::refuse(int code, const char * what) const {
    return kvt_fail(code, "%s", failure_text(m_store, code, what).c_str());
}

void kvt_failures::clear() {
    kvt_store_clear_error(m_store);
    std::lock_guard<std::mutex> lock(m_mutex);
    m_text.clear();
    m_code = KVT_OK;
}

std::string kvt_failures::text() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_text;
}

int kvt_failures::code() const {
    std::lock_guard<std::mutex> lock(m_mutex);
    return m_code;
}
