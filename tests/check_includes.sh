#!/bin/sh
# Who may include and call what. src/ is built in levels; a file includes its
# own header and those of lower levels, on levels 0 and 1 also its neighbours'.
# Each thing outside C (BLAS, threads, the heap) is known to one file only.
#   check_includes.sh <source folder>
set -eu
cd "$1"
status=0

complain()
{
    echo "$*" >&2
    status=1
}

# The level of a source or header, without folder and extension.
level_of()
{
    case $1 in
    attn_internal | half | real_f32 | real_f64 | real_undef) echo 0 ;;
    status | check | alloc | threads | cpu | kernels | view | context) echo 1 ;;
    gemm | softmax | mask | heads | weights | rotary | merge | alibi | convert)
        echo 2 ;;
    linear | sdpa) echo 3 ;;
    mha | cache) echo 4 ;;
    *) echo none ;;
    esac
}

# The module a file belongs to: softmax_tmpl.h is a part of softmax, sdpa_check.c
# of sdpa.
module_of()
{
    base=${1##*/}
    base=${base%.*}
    case $base in
    attn_internal | real_*) echo "$base" ;;
    *) echo "${base%%_*}" ;;
    esac
}

includes() # file: the names it includes with quotes
{
    sed -n 's/^ *# *include *"\([^"]*\)".*/\1/p' "$1"
}

for file in src/*.c src/*.h src/kernels/*; do
    [ -e "$file" ] || continue
    own=$(module_of "$file")
    level=$(level_of "$own")
    if [ "$level" = none ]; then
        complain "$file: give it a level in tests/check_includes.sh"
        continue
    fi
    for name in $(includes "$file"); do
        other=$(module_of "$name")
        other_level=$(level_of "$other")
        if [ "$other_level" = none ]; then
            complain "$file: includes $name, which has no level"
        elif [ "$other" = "$own" ] || [ "$other_level" -lt "$level" ]; then
            :
        elif [ "$level" -le 1 ] && [ "$other_level" -eq "$level" ]; then
            :
        else
            complain "$file (level $level): includes $name ($other_level)"
        fi
    done
    case $file in
    *.c)
        first=$(sed -n 's/^ *# *include *//p' "$file" | head -n 1)
        [ "$first" = '"attn_internal.h"' ] ||
            complain "$file: the first include must be attn_internal.h"
        ;;
    esac
done

# only <files, a case pattern> <regular expression> <what>
only()
{
    for hit in $(grep -lE "$2" src/*.c src/*.h src/kernels/* 2>/dev/null); do
        # shellcheck disable=SC2254
        case $hit in
        $1) ;;
        *) complain "$hit: $3 (belongs to $1)" ;;
        esac
    done
}
call='(^|[^A-Za-z0-9_>.])'
only 'src/gemm.c' '# *include *<cblas' 'includes a BLAS header'
only 'src/gemm.c' "${call}cblas_[a-z]+ *\(" 'calls the BLAS'
only 'src/threads.c' '# *include *<pthread\.h>' 'includes pthread.h'
only 'src/alloc.c' \
    "${call}(malloc|calloc|realloc|aligned_alloc|posix_memalign|free) *\(" \
    'uses the heap'
only 'none' "${call}(printf|puts|fprintf|perror|abort|exit|_exit|signal|setlocale) *\(" \
    'prints, ends or changes the process'
only 'none' "${call}(openblas_set_num_threads|omp_set_num_threads|bli_thread_set_num_threads) *\(" \
    'changes a setting of the BLAS'
only 'none' "${call}(alloca|gets|strcpy|strcat|sprintf) *\(" \
    'calls a function without bounds'

# Tests, bench and examples see what a user sees, but for the test of the hot
# loops.
for file in tests/*.c tests/*.h tests/*/*.c tests/*/*.h bench/*.c bench/*.h \
    examples/*.c examples/*.h examples/*/*.c examples/*/*.h; do
    [ -e "$file" ] || continue
    for name in $(includes "$file"); do
        here=${file%/*}
        [ -e "$here/$name" ] || [ -e "tests/$name" ] || [ "$name" = attn.h ] ||
            [ "$file $name" = "tests/test_kernels.c kernels/kernels.h" ] ||
            complain "$file: includes $name, not its own nor attn.h"
        case $name in
        *src/*) complain "$file: includes $name from src" ;;
        esac
    done
done
exit $status
