# Handed to the build of llama-cpp-python with -DCMAKE_PROJECT_INCLUDE: llama.cpp's many files of model graphs are
# compiled some at a time, since most of their time is spent in headers that all of them include. The source is
# unchanged, and so is what it computes.

if(NOT PROJECT_NAME STREQUAL "llama_cpp")
    return()
endif()

# Files with names of their own (static functions, macros) stay alone: two of them may use the same name.
function(kvt_group_models target)
    if(NOT TARGET ${target})
        return()
    endif()
    get_target_property(sources ${target} SOURCES)
    get_target_property(folder ${target} SOURCE_DIR)
    set(n 0)
    foreach(source IN LISTS sources)
        get_filename_component(source "${source}" ABSOLUTE BASE_DIR "${folder}")
        if(NOT source MATCHES "/models/[^/]*\\.cpp$")
            continue()
        endif()
        file(STRINGS "${source}" own_names
             REGEX "^(static|namespace|#define|using|const|constexpr|struct|class|inline)")
        if(own_names STREQUAL "")
            math(EXPR group "${n} / 12")
            set_source_files_properties("${source}" TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP "models-${group}")
            math(EXPR n "${n} + 1")
        endif()
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    message(STATUS "kvtier: ${n} model files of ${target} are compiled in groups")
endfunction()

cmake_language(DEFER CALL kvt_group_models llama)
cmake_language(DEFER CALL kvt_group_models mtmd)
