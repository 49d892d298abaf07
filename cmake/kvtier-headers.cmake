# The pinned ggml headers, as the interface target kvtier-ggml-headers. Only headers are used, nothing is linked. Where
# the tree is missing it is fetched, checked by hash, so that 'pip install .' needs no step before it.

set(kvt_headers ggml/include/ggml.h ggml/include/ggml-backend.h ggml/src/ggml-backend-impl.h)

function(kvt_find_missing_header result)
    set(${result} "" PARENT_SCOPE)
    foreach(header IN LISTS kvt_headers)
        if(NOT EXISTS "${KVTIER_LLAMA_DIR}/${header}")
            set(${result} "${header}" PARENT_SCOPE)
            return()
        endif()
    endforeach()
endfunction()

kvt_find_missing_header(kvt_missing)
set(kvt_fetch "${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch-llama.py")
set(kvt_own_tree "${CMAKE_CURRENT_SOURCE_DIR}/third_party/llama.cpp")
if(kvt_missing AND KVTIER_LLAMA_DIR STREQUAL kvt_own_tree AND EXISTS "${kvt_fetch}")
    find_package(Python3 COMPONENTS Interpreter)
    if(Python3_FOUND)
        message(STATUS "kvtier: fetching the pinned llama.cpp source, for its headers (73 MiB)")
        execute_process(COMMAND "${Python3_EXECUTABLE}" "${kvt_fetch}")
        kvt_find_missing_header(kvt_missing)
    endif()
endif()
if(kvt_missing)
    message(FATAL_ERROR
        "kvtier: missing ${KVTIER_LLAMA_DIR}/${kvt_missing}\n"
        "Fix: run 'python3 scripts/fetch-llama.py' in ${CMAKE_CURRENT_SOURCE_DIR} (it gets the pinned source),\n"
        "or point to a tree of the same version with -DKVTIER_LLAMA_DIR=PATH.")
endif()

add_library(kvtier-ggml-headers INTERFACE)
target_include_directories(kvtier-ggml-headers SYSTEM INTERFACE
    "${KVTIER_LLAMA_DIR}/ggml/include" "${KVTIER_LLAMA_DIR}/ggml/src")
