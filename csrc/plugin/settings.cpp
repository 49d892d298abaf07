#include "settings.h"
#include "last-error.h"

#include "../include/kvtier-errors.h"

#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

static const char * const KVT_SETTING_KEYS = "host disk dir host-k host-v disk-k disk-v page-tokens io-threads "
                                             "protect-first protect-last mass-decay fidelity read-budget";

static int bad_value(const std::string& key, const std::string& value, const char * allowed) {
    return kvt_fail(KVT_ERR_CONFIG, "setting '%s': '%s' is not %s", key.c_str(), value.c_str(), allowed);
}

// "2GiB", "512M", "1.5g", "4096": bytes, powers of 1024; not "2GB", which means two things
static bool parse_bytes(const std::string& text, uint64_t * out) {
    if (text.empty() || !isdigit((unsigned char) text[0])) { return false; }
    char * end = nullptr;
    errno = 0;
    const double number = strtod(text.c_str(), &end);
    if (errno != 0 || !std::isfinite(number)) { return false; }
    std::string unit;
    for (; *end; end++) { unit += (char) tolower((unsigned char) *end); }
    static const char * const names = "kmgt";
    double factor = 1;
    if (!unit.empty() && unit != "b") {
        const char * found = strchr(names, unit[0]);
        if (!found || !(unit.size() == 1 || unit.substr(1) == "ib")) { return false; }
        factor = std::pow(1024.0, (double) (found - names + 1));
    }
    const double bytes = number * factor;
    if (bytes >= 9.0e18) { return false; }
    *out = (uint64_t) bytes;
    return true;
}

static bool parse_int(const std::string& text, int32_t min, int32_t max, int32_t * out) {
    char * end = nullptr;
    errno = 0;
    const long value = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || errno != 0 || value < min || value > max) { return false; }
    *out = (int32_t) value;
    return true;
}

static int set_format(const std::string& key, const std::string& value, int * out) {
    enum kvt_format fmt;
    if (value == "auto") {
        *out = -1;
        return KVT_OK;
    }
    if (kvt_format_parse(value.c_str(), &fmt) != KVT_OK) {
        return bad_value(key, value, "a storage format (f32 f16 bf16 q8_0 q4_0 q4_1 auto)");
    }
    *out = fmt;
    return KVT_OK;
}

// "exact", "lossy", "bounded", or "bounded:EPS" with the most mass that a step may leave out
static int set_fidelity(const std::string& key, const std::string& value, kvt_settings * s) {
    static const char prefix[] = "bounded:";
    s->eps = 0.0f;
    s->lossy = value == "lossy";
    if (value == "exact" || value == "lossy") { return KVT_OK; }
    if (value == "bounded") {
        s->eps = KVT_EPS_DEFAULT;
        return KVT_OK;
    }
    const char * number = value.compare(0, sizeof(prefix) - 1, prefix) == 0 ? value.c_str() + sizeof(prefix) - 1 : "";
    char * end = nullptr;
    s->eps = strtof(number, &end);
    if (!*number || *end || !(s->eps > 0.0f && s->eps < 1.0f)) {
        return bad_value(
            key, value, "'exact', 'lossy', 'bounded' or 'bounded:EPS' with EPS between 0 and 1, such as bounded:0.05");
    }
    return KVT_OK;
}

static int set_one(kvt_settings * s, const std::string& key, const std::string& value) {
    const char * const bytes = "a number of bytes such as 4096, 512MiB or 2GiB";
    if (key == "host") {
        return parse_bytes(value, &s->host_bytes) && s->host_bytes > 0 ? KVT_OK : bad_value(key, value, bytes);
    }
    if (key == "disk") { return parse_bytes(value, &s->disk_bytes) ? KVT_OK : bad_value(key, value, bytes); }
    if (key == "dir") {
        s->dir = value;
        return KVT_OK;
    }
    if (key == "host-k") { return set_format(key, value, &s->host_fmt_k); }
    if (key == "host-v") { return set_format(key, value, &s->host_fmt_v); }
    if (key == "disk-k") { return set_format(key, value, &s->disk_fmt_k); }
    if (key == "disk-v") { return set_format(key, value, &s->disk_fmt_v); }
    if (key == "page-tokens") {
        return parse_int(value, KVT_SUB, 4096, &s->page_tokens) && s->page_tokens % KVT_SUB == 0
            ? KVT_OK
            : bad_value(key, value, "a multiple of 32 from 32 to 4096");
    }
    if (key == "io-threads") {
        return parse_int(value, 0, 64, &s->io_threads) ? KVT_OK : bad_value(key, value, "a number from 0 to 64");
    }
    if (key == "protect-first") {
        return parse_int(value, 0, 1 << 20, &s->protect_first) ? KVT_OK : bad_value(key, value, "a number of pages");
    }
    if (key == "protect-last") {
        return parse_int(value, 1, 1 << 20, &s->protect_last) ? KVT_OK
                                                              : bad_value(key, value, "a number of pages, at least 1");
    }
    if (key == "mass-decay") {
        char * end = nullptr;
        s->mass_decay = strtof(value.c_str(), &end);
        return !value.empty() && !*end && s->mass_decay >= 0.0f && s->mass_decay < 1.0f
            ? KVT_OK
            : bad_value(key, value, "a number in [0, 1)");
    }
    if (key == "fidelity") { return set_fidelity(key, value, s); }
    if (key == "read-budget") {
        int32_t tokens = 0;
        if (!parse_int(value, 0, INT32_MAX, &tokens)) {
            return bad_value(key, value, "a number of tokens, or 0 for no limit");
        }
        s->read_budget = tokens;
        return KVT_OK;
    }
    return kvt_fail(KVT_ERR_CONFIG, "unknown setting '%s'; known are: %s", key.c_str(), KVT_SETTING_KEYS);
}

static std::string trim(const std::string& text) {
    const size_t a = text.find_first_not_of(" \t\r");
    const size_t b = text.find_last_not_of(" \t\r");
    return a == std::string::npos ? std::string() : text.substr(a, b - a + 1);
}

int kvt_settings_parse(const char * text, kvt_settings * out) {
    std::string all = text ? text : "";
    if (!all.empty() && all[0] == '@') {
        std::ifstream file(all.substr(1));
        if (!file) {
            return kvt_fail(KVT_ERR_CONFIG, "cannot read the settings file '%s': %s", all.c_str() + 1, strerror(errno));
        }
        std::stringstream ss;
        file.peek(); // a directory opens, but cannot be read
        if (file.bad() || (file.fail() && !file.eof())) {
            return kvt_fail(KVT_ERR_CONFIG, "cannot read the settings file '%s': is it a file?", all.c_str() + 1);
        }
        if (!file.eof()) { ss << file.rdbuf(); }
        all = ss.str();
    }
    // a text of several lines is split at its lines only, so that a directory's name may hold a comma
    const char separator = all.find('\n') == std::string::npos ? ',' : '\n';

    kvt_settings parsed;
    std::string item;
    std::stringstream items(all);
    while (std::getline(items, item, separator)) {
        item = trim(item);
        if (item.empty() || item[0] == '#') { continue; }
        const size_t eq = item.find('=');
        if (eq == std::string::npos) {
            return kvt_fail(
                KVT_ERR_CONFIG, "'%s' is not key=value; known keys are: %s", item.c_str(), KVT_SETTING_KEYS);
        }
        const int err = set_one(&parsed, trim(item.substr(0, eq)), trim(item.substr(eq + 1)));
        if (err != KVT_OK) { return err; }
    }
    if (parsed.disk_bytes > 0 && parsed.dir.empty()) {
        return kvt_fail(KVT_ERR_CONFIG, "setting 'disk' needs 'dir': the directory in which the pages' file is kept");
    }
    const int64_t whole = ((int64_t) parsed.protect_first + parsed.protect_last) * parsed.page_tokens;
    if (parsed.read_budget > 0 && parsed.read_budget < whole) {
        return kvt_fail(KVT_ERR_CONFIG,
            "setting 'read-budget': %lld tokens cannot hold the %lld of the first and newest pages, which are "
            "always read; give at least that, or lower protect-first or protect-last",
            (long long) parsed.read_budget, (long long) whole);
    }
    if (parsed.lossy && parsed.disk_bytes > 0) {
        return kvt_fail(KVT_ERR_CONFIG, "setting 'fidelity=lossy' drops what has to leave RAM, so it takes no 'disk'");
    }
    if (parsed.read_budget > 0 && parsed.eps == 0.0f) {
        return kvt_fail(
            KVT_ERR_CONFIG, "setting 'read-budget' needs fidelity=bounded:EPS: an exact step reads everything");
    }
    *out = parsed;
    return KVT_OK;
}
