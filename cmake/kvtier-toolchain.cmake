# Build type, language level, warnings, sanitizers and threads: one interface target, kvtier-flags, carries them. No
# OpenMP: its runtime is found where ggml is running (csrc/attention/team.h).

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(CMAKE_SYSTEM_NAME STREQUAL "Windows")
    message(FATAL_ERROR "kvtier: Windows is not supported yet; use WSL 2, where the Linux build works")
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(kvtier-flags INTERFACE)
target_link_libraries(kvtier-flags INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
target_compile_options(kvtier-flags INTERFACE -Wall -Wextra)
target_compile_definitions(kvtier-flags INTERFACE _GNU_SOURCE)
# -O3 in every optimised build type, RelWithDebInfo included, so that profiles show the code that ships.
# With sanitizers -O1, their authors' advice: the kernels compile five times as fast, and reports keep their lines.
if(KVTIER_SANITIZE)
    set(kvt_optimise -O1)
else()
    set(kvt_optimise -O3)
endif()
target_compile_options(kvtier-flags INTERFACE $<$<NOT:$<CONFIG:Debug>>:${kvt_optimise}>)

if(KVTIER_SANITIZE)
    if(NOT KVTIER_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
        message(FATAL_ERROR "kvtier: KVTIER_SANITIZE='${KVTIER_SANITIZE}' is not known.\n"
            "Fix: use 'address,undefined' or 'thread'.")
    endif()
    set(kvt_sanitize_flags -fsanitize=${KVTIER_SANITIZE} -fno-omit-frame-pointer -g1)
    if(KVTIER_SANITIZE MATCHES "undefined")
        list(APPEND kvt_sanitize_flags -fno-sanitize-recover=undefined)
    endif()
    target_compile_options(kvtier-flags INTERFACE ${kvt_sanitize_flags})
    if(KVTIER_SANITIZE STREQUAL "thread")
        # the thread sanitizer cannot see the synchronisation inside libgomp: plain threads take its place
        target_compile_definitions(kvtier-flags INTERFACE KVT_TEAM_STD_THREADS)
    endif()
    target_link_options(kvtier-flags INTERFACE -fsanitize=${KVTIER_SANITIZE})
endif()
