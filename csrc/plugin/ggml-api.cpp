#include "ggml-api.h"
#include "ggml-versions.h"
#include "last-error.h"

#include "../attention/team.h"
#include "../include/kvtier-errors.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <link.h>

kvt_ggml_api g_ggml;

// the releases of ggml whose interface structs are those of our headers (docs/compatibility.md)
static const int KVT_GGML_MINOR_MIN = KVT_GGML_VERSION_MINOR_MIN;
static const int KVT_GGML_MINOR_MAX = KVT_GGML_VERSION_MINOR_MAX;

// Loaded libraries in which to look: those beside the caller first, since a process may hold more than one ggml.
static int collect_library(struct dl_phdr_info * info, size_t, void * data) {
    const char * name = info->dlpi_name;
    if (name && strstr(name, "ggml")) { static_cast<std::vector<std::string> *>(data)->push_back(name); }
    return 0;
}

static std::string directory_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

static std::vector<void *> ggml_libraries(const void * caller) {
    std::vector<std::string> names;
    dl_iterate_phdr(collect_library, &names);

    Dl_info info = {};
    std::string home;
    if (caller && dladdr(caller, &info) && info.dli_fname) { home = directory_of(info.dli_fname); }
    std::vector<void *> handles;
    for (int pass = 0; pass < 2; pass++) {
        for (const std::string& name : names) {
            if ((directory_of(name) == home) == (pass == 0)) {
                if (void * handle = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY)) {
                    handles.push_back(handle); // a reference that is never given back: we live as long as ggml does
                }
            }
        }
    }
    return handles;
}

static void * find_symbol(const std::vector<void *>& libraries, const char * name) {
    for (void * handle : libraries) {
        if (void * sym = dlsym(handle, name)) { return sym; }
    }
    return dlsym(RTLD_DEFAULT, name);
}

static int check_layout(const kvt_ggml_api& api) {
    // a context's object header: two sizes, a link and a type
    const size_t object_size = 2 * sizeof(size_t) + sizeof(void *) + 8;
    if (api.ggml_tensor_overhead() != object_size + sizeof(ggml_tensor)) {
        return kvt_fail(KVT_ERR_VERSION, "the loaded ggml %s lays tensors out in another way (%zu bytes, %zu known)",
            api.ggml_version(), api.ggml_tensor_overhead(), object_size + sizeof(ggml_tensor));
    }
    const struct {
        enum ggml_op op;
        const char * name;
    } ops[] = {
        { GGML_OP_SET_ROWS, "SET_ROWS" },
        { GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT" },
        { GGML_OP_VIEW, "VIEW" },
        { GGML_OP_PERMUTE, "PERMUTE" },
    };
    for (const auto& it : ops) {
        if (strcmp(api.ggml_op_name(it.op), it.name) != 0) {
            return kvt_fail(KVT_ERR_VERSION,
                "the loaded ggml %s numbers its operations in another way (%d is %s, not %s)", api.ggml_version(),
                (int) it.op, api.ggml_op_name(it.op), it.name);
        }
    }
    const struct {
        enum ggml_type type;
        const char * name;
    } types[] = {
        { GGML_TYPE_F32, "f32" },
        { GGML_TYPE_F16, "f16" },
        { GGML_TYPE_BF16, "bf16" },
        { GGML_TYPE_Q8_0, "q8_0" },
        { GGML_TYPE_Q4_0, "q4_0" },
        { GGML_TYPE_Q4_1, "q4_1" },
        { GGML_TYPE_I32, "i32" },
        { GGML_TYPE_I64, "i64" },
    };
    for (const auto& it : types) {
        if (strcmp(api.ggml_type_name(it.type), it.name) != 0) {
            return kvt_fail(KVT_ERR_VERSION, "the loaded ggml %s numbers its types in another way (%d is %s, not %s)",
                api.ggml_version(), (int) it.type, api.ggml_type_name(it.type), it.name);
        }
    }
    int major = 0, minor = 0;
    if (sscanf(api.ggml_version(), "%d.%d", &major, &minor) != 2 || major != 0 || minor < KVT_GGML_MINOR_MIN ||
        minor > KVT_GGML_MINOR_MAX) {
        return kvt_fail(KVT_ERR_VERSION,
            "ggml %s is not one of the versions this build knows (0.%d to 0.%d); "
            "install a llama-cpp-python of the range in docs/compatibility.md",
            api.ggml_version(), KVT_GGML_MINOR_MIN, KVT_GGML_MINOR_MAX);
    }
    return KVT_OK;
}

static std::vector<void *> g_libraries;

void * kvt_ggml_symbol(const char * name) { return find_symbol(g_libraries, name); }

// Everything is looked up and checked before it takes effect: another ggml that comes to load us later, and does not
// fit, must not take the table from under the one that is running.
int kvt_ggml_resolve(const void * caller) {
    const std::vector<void *> libraries = ggml_libraries(caller);
    kvt_ggml_api api = {};
#define KVT_GGML_FIND(fn)                                                                                              \
    api.fn = reinterpret_cast<decltype(api.fn)>(find_symbol(libraries, #fn));                                          \
    if (!api.fn) {                                                                                                     \
        return kvt_fail(KVT_ERR_VERSION,                                                                               \
            "the loaded ggml has no function %s: it is older or newer than the "                                       \
            "versions this build knows (0.%d to 0.%d)",                                                                \
            #fn, KVT_GGML_MINOR_MIN, KVT_GGML_MINOR_MAX);                                                              \
    }
    KVT_GGML_FUNCTIONS(KVT_GGML_FIND)
    KVT_GGML_REGISTRY_FUNCTIONS(KVT_GGML_FIND)
#undef KVT_GGML_FIND
    const int rc = check_layout(api);
    if (rc != KVT_OK) { return rc; }
    if (g_ggml.ggml_version && memcmp(&g_ggml, &api, sizeof(api)) != 0) {
        return kvt_fail(
            KVT_ERR_VERSION, "another ggml (%s) of this process uses the library already", g_ggml.ggml_version());
    }
    g_ggml = api;
    g_libraries = libraries;
    kvt_team_set_lookup(kvt_ggml_symbol); // what ggml depends on is found by it too: its OpenMP runtime
    return KVT_OK;
}
