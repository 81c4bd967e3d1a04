# One program from bench/*.c, and `bench`, the target that runs it. Linked
# statically: no jump through the procedure linkage table in what is timed.
file(GLOB attn_bench_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/*.c")
if(attn_bench_sources)
    add_executable(attn_bench ${attn_bench_sources})
    attn_own_target(attn_bench)
    target_include_directories(attn_bench SYSTEM PRIVATE
        ${ATTN_CBLAS_INCLUDE_DIR})
    target_link_libraries(attn_bench PRIVATE
        attn_static ${ATTN_CBLAS_LIBRARIES} Threads::Threads m ${CMAKE_DL_LIBS})
    add_custom_target(bench
        COMMAND attn_bench
        WORKING_DIRECTORY "${PROJECT_BINARY_DIR}"
        USES_TERMINAL
        COMMENT "Timing libattn")
endif()

# attn_compare: builds of the library against each other; it loads them itself.
set(attn_compare_source "${PROJECT_SOURCE_DIR}/bench/compare/attn_compare.c")
if(EXISTS "${attn_compare_source}")
    add_executable(attn_compare "${attn_compare_source}")
    attn_own_target(attn_compare)
    target_include_directories(attn_compare PRIVATE
        "${PROJECT_SOURCE_DIR}/include")
    target_link_libraries(attn_compare PRIVATE m ${CMAKE_DL_LIBS})
endif()
