# Every tests/test_*.c is one program and one CTest, linked with the helpers,
# which are all other tests/*.c. The scripts check what C cannot.
set(attn_tests_dir "${PROJECT_SOURCE_DIR}/tests")
file(GLOB attn_test_sources CONFIGURE_DEPENDS "${attn_tests_dir}/test_*.c")
file(GLOB attn_helper_sources CONFIGURE_DEPENDS "${attn_tests_dir}/*.c")
list(REMOVE_ITEM attn_helper_sources ${attn_test_sources} "")

option(ATTN_FUZZ "Build the fuzz targets for libFuzzer (needs clang)" OFF)
if(ATTN_FUZZ)
    # With everything at once clang 14 takes ten minutes and more for the hot
    # loops (address alone: 17 s, with undefined: 95 s). Their paths are few, and
    # other builds have them under the undefined behaviour sanitizer.
    set_source_files_properties(${attn_kernel_sources} PROPERTIES
        COMPILE_OPTIONS "-fno-sanitize=undefined,fuzzer-no-link")
endif()
function(attn_fuzz_program name source)
    add_executable(attn_${name} "${source}")
    attn_own_target(attn_${name})
    set_target_properties(attn_${name} PROPERTIES
        OUTPUT_NAME ${name}
        RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
    target_link_libraries(attn_${name} PRIVATE ${attn_test_libraries})
endfunction()

find_path(ATTN_CMOCKA_INCLUDE_DIR cmocka.h)
find_library(ATTN_CMOCKA_LIBRARY cmocka)
mark_as_advanced(ATTN_CMOCKA_INCLUDE_DIR ATTN_CMOCKA_LIBRARY)

if(ATTN_CMOCKA_INCLUDE_DIR AND ATTN_CMOCKA_LIBRARY)
    add_library(attn_test_base INTERFACE)
    target_compile_definitions(attn_test_base INTERFACE
        ATTN_TEST_DIR="${attn_tests_dir}")
    target_include_directories(attn_test_base INTERFACE "${attn_tests_dir}")
    target_include_directories(attn_test_base SYSTEM INTERFACE
        "${ATTN_CMOCKA_INCLUDE_DIR}")
    target_link_libraries(attn_test_base INTERFACE
        attn_shared "${ATTN_CMOCKA_LIBRARY}" Threads::Threads m
        ${CMAKE_DL_LIBS})
    set(attn_test_libraries attn_test_base)
    if(attn_helper_sources)
        add_library(attn_test_helpers STATIC ${attn_helper_sources})
        attn_own_target(attn_test_helpers)
        target_link_libraries(attn_test_helpers PUBLIC attn_test_base)
        set(attn_test_libraries attn_test_helpers)
    endif()
    foreach(source IN LISTS attn_test_sources)
        get_filename_component(name "${source}" NAME_WE)
        add_executable(attn_${name} "${source}")
        attn_own_target(attn_${name})
        set_target_properties(attn_${name} PROPERTIES
            OUTPUT_NAME ${name}
            RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
        target_link_libraries(attn_${name} PRIVATE ${attn_test_libraries})
        string(REGEX REPLACE "^test_" "" short "${name}")
        add_test(NAME attn.${short} COMMAND attn_${name})
        set_tests_properties(attn.${short} PROPERTIES
            ENVIRONMENT "ATTN_MIN_WORK=0" # threads in small problems too
            LABELS unit TIMEOUT 900 SKIP_RETURN_CODE 77)
    endforeach()

    # The hot loops are hidden in the library, so their test is linked with them
    # once more. It runs at the level of this processor; here at the others, as
    # far as it can.
    target_sources(attn_test_kernels PRIVATE $<TARGET_OBJECTS:attn_kernels>)
    target_include_directories(attn_test_kernels PRIVATE
        "${PROJECT_SOURCE_DIR}/src")
    foreach(level IN ITEMS generic avx2 avx512 avx512-two)
        add_test(NAME attn.kernels.${level} COMMAND attn_test_kernels)
        set_tests_properties(attn.kernels.${level} PROPERTIES
            ENVIRONMENT "ATTN_CPU_LEVEL=${level}" LABELS unit TIMEOUT 900)
    endforeach()

    # Fuzz targets replay their corpus everywhere; with ATTN_FUZZ (clang, see
    # the preset fuzz) they are also what libFuzzer runs.
    file(GLOB attn_fuzz_sources CONFIGURE_DEPENDS
        "${attn_tests_dir}/fuzz/fuzz_*.c")
    file(GLOB attn_fuzz_corpus CONFIGURE_DEPENDS
        "${attn_tests_dir}/fuzz/corpus/*")
    foreach(source IN LISTS attn_fuzz_sources)
        get_filename_component(name "${source}" NAME_WE)
        attn_fuzz_program(${name} "${source}")
        target_compile_definitions(attn_${name} PRIVATE FUZZ_REPLAY)
        add_test(NAME attn.${name} COMMAND attn_${name} ${attn_fuzz_corpus})
        set_tests_properties(attn.${name} PROPERTIES
            LABELS unit TIMEOUT 900)
        if(ATTN_FUZZ)
            attn_fuzz_program(lib${name} "${source}")
            target_link_options(attn_lib${name} PRIVATE -fsanitize=fuzzer)
        endif()
    endforeach()
else()
    list(APPEND attn_left_out
        "the test programs (CMocka was not found, Debian has it as libcmocka-dev)")
endif()

# Each example checks what it computes and fails if that is wrong.
get_property(attn_all_targets DIRECTORY "${PROJECT_SOURCE_DIR}"
    PROPERTY BUILDSYSTEM_TARGETS)
foreach(target IN LISTS attn_all_targets)
    if(target MATCHES "^attn_example_(.*)$")
        add_test(NAME attn.example.${CMAKE_MATCH_1} COMMAND ${target})
        set_tests_properties(attn.example.${CMAKE_MATCH_1} PROPERTIES
            LABELS example TIMEOUT 900)
    endif()
endforeach()

# What is timed is compared with the formula first; speed decides nothing.
if(TARGET attn_bench)
    add_test(NAME attn.bench COMMAND attn_bench
        --quick --shape 2,4,2,33,33,16 --causal --compare)
    add_test(NAME attn.bench.backward COMMAND attn_bench
        --quick --backward --shape 2,4,2,33,33,16 --causal --compare)
    set_tests_properties(attn.bench attn.bench.backward PROPERTIES
        LABELS bench TIMEOUT 900)
endif()
# A sanitizer refuses libraries that are loaded apart from each other.
if(TARGET attn_compare AND TARGET attn_shared AND NOT ATTN_SANITIZE)
    add_test(NAME attn.compare COMMAND attn_compare --causal 1,2,1,5,7,8
        "$<TARGET_FILE:attn_shared>" "$<TARGET_FILE:attn_shared>")
    add_test(NAME attn.compare.backward COMMAND attn_compare --backward
        --causal 1,2,1,5,7,8
        "$<TARGET_FILE:attn_shared>" "$<TARGET_FILE:attn_shared>")
    set_tests_properties(attn.compare attn.compare.backward PROPERTIES
        LABELS bench TIMEOUT 900)
endif()

# attn_script_test(<name> <script> <arguments...>)
function(attn_script_test name script)
    add_test(NAME attn.${name}
        COMMAND sh "${attn_tests_dir}/${script}" ${ARGN})
    set_tests_properties(attn.${name} PROPERTIES
        LABELS tree TIMEOUT 900 SKIP_RETURN_CODE 77)
endfunction()

attn_script_test(includes check_includes.sh "${PROJECT_SOURCE_DIR}")
attn_script_test(header header/check.sh "${PROJECT_SOURCE_DIR}")
attn_script_test(format check_format.sh "${PROJECT_SOURCE_DIR}")
# The rest looks at the libraries as they are shipped: a sanitizer or the stub
# adds names and needs of its own.
if(NOT ATTN_SANITIZE AND NOT ATTN_STUB_BLAS)
    attn_script_test(symbols check_symbols.sh
        "${PROJECT_SOURCE_DIR}" $<TARGET_FILE:attn_shared>)
    attn_script_test(archive check_archive.sh $<TARGET_FILE:attn_static>)
    attn_script_test(oneline check_oneline.sh
        "${PROJECT_SOURCE_DIR}" "${CMAKE_C_COMPILER}")
    attn_script_test(readme test_readme.sh
        "${PROJECT_SOURCE_DIR}" $<TARGET_FILE_DIR:attn_shared>
        "${CMAKE_C_COMPILER}")
    if(ATTN_INSTALL)
        set(attn_blas_arguments "")
        foreach(name IN ITEMS
                BLA_VENDOR ATTN_CBLAS_LIBRARIES ATTN_CBLAS_INCLUDE_DIR)
            if(DEFINED CACHE{${name}} AND NOT "$CACHE{${name}}" STREQUAL "")
                list(APPEND attn_blas_arguments "-D${name}=$CACHE{${name}}")
            endif()
        endforeach()
        attn_script_test(consumers consumers/run.sh
            "${PROJECT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}" "${CMAKE_COMMAND}"
            "${CMAKE_C_COMPILER}" ${attn_blas_arguments})
    endif()
endif()
