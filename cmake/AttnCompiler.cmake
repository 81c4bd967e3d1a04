# How libattn's own files are compiled and linked. Nothing here reaches a
# program that uses libattn.
include(CheckCCompilerFlag)
include(CheckLinkerFlag)

# A compiler that is newer or older than those of .ci/run may warn of something
# else, and a user's build must not fail for that.
set(attn_werror_default OFF)
if(PROJECT_IS_TOP_LEVEL
   AND ((CMAKE_C_COMPILER_ID STREQUAL "GNU"
         AND CMAKE_C_COMPILER_VERSION MATCHES "^12\\.")
        OR (CMAKE_C_COMPILER_ID STREQUAL "Clang"
            AND CMAKE_C_COMPILER_VERSION MATCHES "^14\\.")))
    set(attn_werror_default ON)
endif()
option(ATTN_WERROR "Warnings in libattn's own files are errors"
       ${attn_werror_default})
set(ATTN_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them")

set(attn_warnings
    -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow
    -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition -Wvla
    -Wdouble-promotion -Wundef -Wwrite-strings -Wpointer-arith -Wformat=2
    -Wcast-align)

# Let loops with floating point vectorise without changing any value: errno of
# libm and the FP exception flags are not read. Never -ffast-math: softmax
# lives on inf and NaN, and linking with it changes the process.
set(attn_float_flags -fno-math-errno -fno-trapping-math)

# attn_own_target(<target>): the language level, warnings and sanitizers of this
# project.
function(attn_own_target target)
    set_target_properties(${target} PROPERTIES
        C_STANDARD 11
        C_STANDARD_REQUIRED ON
        C_EXTENSIONS OFF)
    if(CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
        target_compile_options(${target} PRIVATE ${attn_float_flags})
        if(PROJECT_IS_TOP_LEVEL)
            target_compile_options(${target} PRIVATE ${attn_warnings})
        endif()
    endif()
    if(ATTN_WERROR)
        target_compile_options(${target} PRIVATE -Werror)
    endif()
    if(ATTN_SANITIZE)
        target_compile_options(${target} PRIVATE
            -fsanitize=${ATTN_SANITIZE} -fno-sanitize-recover=all
            -fno-omit-frame-pointer -g)
        target_link_options(${target} PRIVATE -fsanitize=${ATTN_SANITIZE})
        # Warnings that follow values or loops are misled by the added code.
        if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
            target_compile_options(${target} PRIVATE
                -Wno-format-truncation -Wno-maybe-uninitialized)
        else()
            target_compile_options(${target} PRIVATE -Wno-pass-failed)
        endif()
    endif()
endfunction()

# attn_shared_link_options(<target> <map>): exports exactly what the map names,
# and leaves nothing unresolved or writable after start.
function(attn_shared_link_options target map)
    if(ATTN_SANITIZE)
        target_link_options(${target} PRIVATE -fsanitize=${ATTN_SANITIZE})
    endif()
    # nodelete: threads, and those of an OpenMP BLAS, must not lose their code
    # when a plugin host closes the library.
    set(flags -z,relro -z,now -z,nodelete -z,noexecstack --as-needed)
    # A clang sanitizer's runtime is in the program, not in the library.
    if(NOT ATTN_SANITIZE AND NOT CMAKE_C_FLAGS MATCHES "-fsanitize")
        list(APPEND flags -z,defs)
    endif()
    foreach(flag IN LISTS flags)
        string(MAKE_C_IDENTIFIER "attn_has${flag}" has)
        check_linker_flag(C "-Wl,${flag}" ${has})
        if(${has})
            target_link_options(${target} PRIVATE "-Wl,${flag}")
        endif()
    endforeach()
    check_linker_flag(C "-Wl,--version-script=${map}" attn_has_version_script)
    if(attn_has_version_script)
        target_link_options(${target} PRIVATE "-Wl,--version-script=${map}")
    endif()
endfunction()
