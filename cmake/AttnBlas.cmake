# attn_find_cblas(): a library with cblas_sgemm and its header. Sets, in the
# caller's scope and where not yet given,
#   ATTN_CBLAS_LIBRARIES     what to link here: files or linker names
#   ATTN_CBLAS_INCLUDE_DIR   where cblas.h is
#   ATTN_CBLAS_EXPORTED      what an installed libattn.a is linked with
#   ATTN_CBLAS_PC            the same as a compiler line, for attn.pc
include(CheckCSourceCompiles)
include(CMakePushCheckState)

set(ATTN_CBLAS_LIBRARIES "" CACHE STRING "Libraries that hold cblas_sgemm")
set(ATTN_CBLAS_INCLUDE_DIR "" CACHE PATH "Folder of cblas.h")
option(ATTN_STUB_BLAS "Link the checking CBLAS of tests/stub" OFF)

function(attn_check_cblas result)
    cmake_push_check_state(RESET)
    set(CMAKE_REQUIRED_INCLUDES ${ATTN_CBLAS_INCLUDE_DIR})
    set(CMAKE_REQUIRED_LIBRARIES ${ARGN} m)
    set(CMAKE_REQUIRED_QUIET ON)
    # The answer depends on what was found, so it is asked anew each time.
    unset(attn_cblas_compiles CACHE)
    check_c_source_compiles("
        #include <cblas.h>
        int main(void)
        {
            float a[1] = {1.0F}, c[1] = {0.0F};
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1,
                        1.0F, a, 1, a, 1, 0.0F, c, 1);
            return (int)c[0] - 1;
        }" attn_cblas_compiles)
    cmake_pop_check_state()
    set(${result} "${attn_cblas_compiles}" PARENT_SCOPE)
    unset(attn_cblas_compiles CACHE)
endfunction()

# A library file as a compiler's argument: -lname where the linker looks anyway.
function(attn_pc_libraries result)
    set(words "")
    foreach(item IN LISTS ARGN)
        get_filename_component(folder "${item}" DIRECTORY)
        get_filename_component(file "${item}" NAME)
        if(item MATCHES "^-")
            list(APPEND words "${item}")
        elseif(NOT IS_ABSOLUTE "${item}")
            list(APPEND words "-l${item}")
        elseif(file MATCHES "^lib(.+)\\.(so|dylib)$")
            if(NOT folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
                list(APPEND words "-L${folder}")
            endif()
            list(APPEND words "-l${CMAKE_MATCH_1}")
        else()
            list(APPEND words "${item}")
        endif()
    endforeach()
    list(JOIN words " " words)
    set(${result} "${words}" PARENT_SCOPE)
endfunction()

macro(attn_find_cblas)
    if(ATTN_STUB_BLAS)
        file(GLOB attn_stub_sources CONFIGURE_DEPENDS
             "${PROJECT_SOURCE_DIR}/tests/stub/*.c")
        # Shared, so that the library finds out at run time which BLAS it is.
        add_library(attn_stub_blas SHARED ${attn_stub_sources})
        attn_own_target(attn_stub_blas)
        # Most of the tests' time under sanitizers, whatever those want.
        target_compile_options(attn_stub_blas PRIVATE -O3)
        target_link_libraries(attn_stub_blas PRIVATE Threads::Threads m)
        set(ATTN_CBLAS_LIBRARIES attn_stub_blas)
        set(ATTN_CBLAS_EXPORTED attn_stub_blas)
        set(ATTN_INSTALL OFF)
    elseif(ATTN_CBLAS_LIBRARIES)
        set(ATTN_CBLAS_EXPORTED "${ATTN_CBLAS_LIBRARIES}")
    else()
        if(NOT BLA_VENDOR)
            set(BLA_VENDOR OpenBLAS)
        endif()
        find_package(BLAS QUIET)
        if(NOT BLAS_FOUND)
            message(FATAL_ERROR
                "No BLAS found (BLA_VENDOR=${BLA_VENDOR}). Install OpenBLAS "
                "(Debian, Ubuntu: libopenblas-dev; Fedora: openblas-devel), "
                "or choose another with -DBLA_VENDOR=..., or give "
                "-DATTN_CBLAS_LIBRARIES=... -DATTN_CBLAS_INCLUDE_DIR=...")
        endif()
        set(ATTN_CBLAS_LIBRARIES ${BLAS_LIBRARIES} ${BLAS_LINKER_FLAGS})
        set(ATTN_CBLAS_EXPORTED BLAS::BLAS)
    endif()

    if(NOT ATTN_CBLAS_INCLUDE_DIR)
        find_path(attn_cblas_h cblas.h
            PATH_SUFFIXES openblas openblas-pthread flexiblas mkl blis)
        mark_as_advanced(attn_cblas_h)
        if(NOT attn_cblas_h)
            message(FATAL_ERROR "cblas.h was not found; install the header of "
                "the BLAS or give -DATTN_CBLAS_INCLUDE_DIR=...")
        endif()
        set(ATTN_CBLAS_INCLUDE_DIR "${attn_cblas_h}")
    endif()

    if(NOT ATTN_STUB_BLAS)
        attn_check_cblas(attn_cblas_works ${ATTN_CBLAS_LIBRARIES})
        if(NOT attn_cblas_works)
            # Reference BLAS of some systems: the C part is a second library.
            find_library(attn_cblas_library cblas)
            mark_as_advanced(attn_cblas_library)
            if(attn_cblas_library)
                list(PREPEND ATTN_CBLAS_LIBRARIES "${attn_cblas_library}")
                list(PREPEND ATTN_CBLAS_EXPORTED cblas)
                attn_check_cblas(attn_cblas_works ${ATTN_CBLAS_LIBRARIES})
            endif()
        endif()
        if(NOT attn_cblas_works)
            message(FATAL_ERROR "cblas_sgemm does not compile and link with "
                "${ATTN_CBLAS_INCLUDE_DIR}/cblas.h and "
                "${ATTN_CBLAS_LIBRARIES}; see -DATTN_CBLAS_LIBRARIES=...")
        endif()
    endif()
    attn_pc_libraries(ATTN_CBLAS_PC ${ATTN_CBLAS_LIBRARIES})
endmacro()
