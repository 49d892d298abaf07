# Toolchain file of the portable wheel (scripts/build-wheel.py): the clang of the package ziglang, which brings headers
# and link stubs of every glibc. The library then asks for no symbol newer than KVTIER_GLIBC, and libc++ and the
# unwinder are linked in and hidden (csrc/plugin/exports.map), so that it needs nothing but glibc. Instruction sets are
# named per file as ever (kvtier-isa.cmake); no file is compiled for the machine at hand.

# from the environment: CMake reads this file again, without the cache, for each of its checks
foreach(needed KVTIER_ZIG KVTIER_GLIBC)
    if(NOT DEFINED ENV{${needed}})
        message(FATAL_ERROR "kvtier: ${needed} is not set.\nFix: build with 'make wheel', which sets it.")
    endif()
endforeach()

set(CMAKE_CXX_COMPILER "$ENV{KVTIER_ZIG}" c++)
set(CMAKE_CXX_COMPILER_TARGET "${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu.$ENV{KVTIER_GLIBC}")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s")
