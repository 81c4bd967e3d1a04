#!/bin/sh
# attn.h compiles alone in every language version from C89 and C++98 on, and its
# constants and structs are what they have always been (layout.c).
#   check.sh <source folder>
set -eu
source_dir=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '#include <attn.h>\n' >"$work/alone.c"
cp "$source_dir/tests/header/layout.c" "$work/layout.c"
# Twice, because of the include guard.
printf '#include <attn.h>\n#include <attn.h>\nextern int x;\n' >"$work/twice.c"

compiled=0
failed=0
try() # compiler options...
{
    for file in alone layout twice; do
        if "$@" -pedantic-errors -Wall -Wextra -Wundef -Werror \
            -I"$source_dir/include" -fsyntax-only "$work/$file.c"; then
            compiled=$((compiled + 1))
        else
            echo "failed: $* $file.c" >&2
            failed=$((failed + 1))
        fi
    done
}

for compiler in gcc clang; do
    if ! command -v $compiler >/dev/null; then
        echo "$compiler is not installed: left out"
        continue
    fi
    # An empty translation unit is an error of -pedantic; the header is not.
    for standard in c89 gnu89 c99 c11 c17 c2x; do
        try $compiler -x c -std=$standard -Wno-empty-translation-unit
    done
done
for compiler in g++ clang++; do
    if ! command -v $compiler >/dev/null; then
        echo "$compiler is not installed: left out"
        continue
    fi
    for standard in c++98 c++11 c++14 c++17 c++20; do
        nullptr=
        [ $standard = c++98 ] || nullptr=-Wzero-as-null-pointer-constant
        try $compiler -x c++ -std=$standard -Wold-style-cast $nullptr
    done
done
echo "$compiled compilations passed, $failed failed"
[ $compiled -gt 0 ] && [ $failed -eq 0 ]
