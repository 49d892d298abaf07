# Every csrc/tests/test-*.cpp is one executable and one ctest test, in its own process; every bench-*.cpp is an
# executable.

file(GLOB kvt_test_sources  CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/test-*.cpp")
file(GLOB kvt_bench_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/bench-*.cpp")

add_custom_target(kvtier-tests)

foreach(source IN LISTS kvt_test_sources kvt_bench_sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    target_include_directories(${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
    target_link_libraries(${name} PRIVATE kvtier-core kvtier-ggml-headers)
    if(name MATCHES "plugin")  # loads the finished library instead of linking the core
        target_compile_definitions(${name} PRIVATE KVTIER_LIBRARY="$<TARGET_FILE:kvtier>")
        add_dependencies(${name} kvtier)
    endif()
    if(name MATCHES "^test-")
        add_dependencies(kvtier-tests ${name})
        # Under the sanitizers the matrices take minutes: every fourth case of them. Threading is the same for all
        # instruction sets: one of them under the thread sanitizer.
        set(arguments "")
        if(KVTIER_SANITIZE AND name MATCHES "^test-(attention|recall|summary|invariance)$")
            set(arguments all 4)
            if(KVTIER_SANITIZE STREQUAL "thread" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
                set(arguments avx2 4)
            endif()
        endif()
        add_test(NAME ${name} COMMAND ${name} ${arguments})
        # Several run side by side: threads that wait must leave the processor to the others' work.
        set_tests_properties(${name} PROPERTIES TIMEOUT 1200 ENVIRONMENT OMP_WAIT_POLICY=passive)
        if(name MATCHES "^test-(attention|recall|store-faults|summary|invariance|keys)$")
            # the long ones begin, so that none is left alone at the end
            set_tests_properties(${name} PROPERTIES COST 100)
        endif()
    endif()
endforeach()

# a lookup of the OpenMP runtime counts before the first team runs, so each case has its process
foreach(lookup whole partial)
    add_test(NAME test-team-${lookup} COMMAND test-team ${lookup})
endforeach()

# The NEON kernels, cross-compiled and run by qemu-user; skipped where those tools are missing.
if(NOT KVTIER_SANITIZE AND NOT CMAKE_CROSSCOMPILING AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    add_test(NAME test-attention-neon COMMAND
        "${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/run-neon.sh" "${CMAKE_CURRENT_BINARY_DIR}/neon")
    set_tests_properties(test-attention-neon PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 COST 200)
endif()
