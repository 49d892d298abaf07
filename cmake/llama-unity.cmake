# Handed to llama.cpp's own build with -DCMAKE_PROJECT_INCLUDE: its 150 files of model graphs are compiled some at a
# time.
# Most of their time is spent in headers that all of them include. The source is unchanged, and so is what it computes.

if(NOT PROJECT_NAME STREQUAL "llama.cpp")
    return()
endif()

# Files with names of their own (static functions, macros) stay alone: two of them may use the same name.
function(kvt_group_models)
    get_target_property(sources llama SOURCES)
    set(n 0)
    foreach(source IN LISTS sources)
        if(NOT source MATCHES "/models/[^/]*\\.cpp$" OR NOT EXISTS "${source}")
            continue()
        endif()
        file(STRINGS "${source}" own_names
             REGEX "^(static|namespace|#define|using|const|constexpr|struct|class|inline)")
        if(own_names STREQUAL "")
            math(EXPR group "${n} / 12")
            set_source_files_properties("${source}" TARGET_DIRECTORY llama PROPERTIES UNITY_GROUP "models-${group}")
            math(EXPR n "${n} + 1")
        endif()
    endforeach()
    set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    message(STATUS "kvtier: ${n} model files of llama.cpp are compiled in groups")
endfunction()

cmake_language(DEFER CALL kvt_group_models)
