# Instruction sets. The binary is built for the oldest processor of its architecture; a kernel file that needs more gets
# its own flags by name and is entered only after a check at run time. Never -march=native: wheels travel.

set(kvt_flags_avx2       -mavx2 -mfma -mf16c)
set(kvt_flags_avx512     -mavx512f -mavx512bw -mavx512vl -mavx512dq ${kvt_flags_avx2})
set(kvt_flags_avx512vnni ${kvt_flags_avx512} -mavx512vnni)

# A multiply and an add stay two operations unless the code says fma: which of them a compiler would fuse depends on the
# code around them, and a row must have the same bits in every kernel (docs/architecture.md).
set(kvt_flags_arithmetic -ffp-contract=off)

# Drops the kernel files of other architectures from the list named `sources_var` and sets the flags of those that stay.
function(kvt_isa_sources sources_var)
    set(kept "")
    foreach(source IN LISTS ${sources_var})
        get_filename_component(name "${source}" NAME_WE)
        if(name MATCHES "^kernels-(avx2|avx512|avx512vnni)$")
            if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
                continue()
            endif()
            string(REGEX REPLACE "^kernels-" "" isa "${name}")
            set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${kvt_flags_${isa}}")
        elseif(name STREQUAL "kernels-neon")
            if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
                continue()
            endif()
        endif()
        set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS "${kvt_flags_arithmetic}")
        list(APPEND kept "${source}")
    endforeach()
    set(${sources_var} "${kept}" PARENT_SCOPE)
endfunction()
