// Upstream's test-llama-archs looks only at the backends that are linked in. Linked beside its unchanged source, this
// loads the one named by GGML_BACKEND_PATH before main runs, as ggml_backend_load_all would.

#include "ggml-backend.h"

#include <cstdio>
#include <cstdlib>

namespace {

struct backend_preloader {
    backend_preloader() {
        const char * path = std::getenv("GGML_BACKEND_PATH");
        if (path == nullptr || ggml_backend_load(path) == nullptr) {
            std::fprintf(stderr, "preload-backend: cannot load GGML_BACKEND_PATH=%s\n", path ? path : "(unset)");
            std::exit(2);
        }
    }
};

const backend_preloader preloader;

} // namespace
