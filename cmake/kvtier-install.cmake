# What a wheel holds beside the Python files. Paths are relative to the package folder: scikit-build-core sets the
# prefix to the root of site-packages, so that the library is kvtier/lib/libkvtier.so beside the modules that load it.

if(DEFINED ENV{KVTIER_PREBUILT})
    if(NOT EXISTS "$ENV{KVTIER_PREBUILT}")
        message(FATAL_ERROR
            "kvtier: KVTIER_PREBUILT=$ENV{KVTIER_PREBUILT}: no such file.\n"
            "Fix: unset it, and the library is compiled, or build it first ('make build/libkvtier.so').")
    endif()
    install(PROGRAMS "$ENV{KVTIER_PREBUILT}" DESTINATION kvtier/lib)
else()
    install(TARGETS kvtier LIBRARY DESTINATION kvtier/lib)
endif()
install(FILES
    "${CMAKE_CURRENT_SOURCE_DIR}/csrc/include/kvtier.h"
    "${CMAKE_CURRENT_SOURCE_DIR}/csrc/include/kvtier-errors.h"
    DESTINATION kvtier/include)
