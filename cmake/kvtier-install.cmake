# What a wheel holds beside the Python files. Paths are relative to the package folder: scikit-build-core sets the
# prefix to the root of site-packages, so that the library is kvtier/lib/libkvtier.so beside the modules that load it.

install(TARGETS kvtier LIBRARY DESTINATION kvtier/lib)
install(FILES
    "${CMAKE_CURRENT_SOURCE_DIR}/csrc/include/kvtier.h"
    "${CMAKE_CURRENT_SOURCE_DIR}/csrc/include/kvtier-errors.h"
    DESTINATION kvtier/include)
