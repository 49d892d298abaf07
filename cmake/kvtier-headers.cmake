# The pinned ggml headers, as the interface target kvtier-ggml-headers. Only headers are used, nothing is linked.

foreach(kvt_header ggml/include/ggml.h ggml/include/ggml-backend.h ggml/src/ggml-backend-impl.h)
    if(NOT EXISTS "${KVTIER_LLAMA_DIR}/${kvt_header}")
        message(FATAL_ERROR
            "kvtier: missing ${KVTIER_LLAMA_DIR}/${kvt_header}\n"
            "Fix: run 'python3 scripts/fetch-llama.py' in ${CMAKE_CURRENT_SOURCE_DIR} (it gets the pinned source),\n"
            "or point to a tree of the same version with -DKVTIER_LLAMA_DIR=PATH.")
    endif()
endforeach()

add_library(kvtier-ggml-headers INTERFACE)
target_include_directories(kvtier-ggml-headers SYSTEM INTERFACE
    "${KVTIER_LLAMA_DIR}/ggml/include" "${KVTIER_LLAMA_DIR}/ggml/src")
