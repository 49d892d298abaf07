// Linked beside test-llama-archs' unchanged source, for two things that it leaves out. It looks only at the backends
// that are linked in: this loads the one named by GGML_BACKEND_PATH before main runs, as ggml_backend_load_all would.
// And it ends without waiting for llama.cpp's logger, whose thread then takes the last rows with it: this waits.

#include "ggml-backend.h"
#include "log.h"

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
        std::atexit([] { common_log_flush(common_log_main()); });
    }
};

const backend_preloader preloader;

} // namespace
