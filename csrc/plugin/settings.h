#pragma once

// The settings of a domain, from "key=value" text (kvtier.h documents the keys).

#include "../store/store.h"

#include <string>

#define KVT_EPS_DEFAULT 0.07f // of "bounded" alone: about as near to exact as stock's f16 cache (docs/recall.md)

struct kvt_settings {
    uint64_t host_bytes = UINT64_MAX;
    uint64_t disk_bytes = 0;
    std::string dir;
    // -1: the nominal type of the cache tensor (host), the host's format (disk)
    int host_fmt_k = -1, host_fmt_v = -1;
    int disk_fmt_k = -1, disk_fmt_v = -1;
    int32_t page_tokens = 32;
    int32_t io_threads = 0;
    int32_t protect_first = 1;
    int32_t protect_last = 2;
    float mass_decay = 0.98f;
    float eps = 0.0f;        // bounded fidelity: most omitted mass of a row; 0: exact
    int64_t read_budget = 0; // bounded fidelity: most values read per KV head and step; 0: no limit
    bool lossy = false;      // what has to leave the host is dropped
};

// 0, or KVT_ERR_CONFIG with a text that names key, value and what is allowed. `text` may be NULL, empty or "@FILE".
int kvt_settings_parse(const char * text, kvt_settings * out);
