#!/bin/sh
# README.md keeps its word: its first program has at most 25 lines, compiles
# without a warning and prints what the text says; the two commands at the top
# are one line each; every file and folder it names exists.
#   test_readme.sh <source folder> <build folder> <cc> [compiler flags...]
set -eu
source_dir=$1
build_dir=$2
compiler=$3
shift 3
readme=$source_dir/README.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
block() { sh "$source_dir/tests/readme_block.sh" "$readme" "$@"; }

for number in 1 2; do
    lines=$(block sh $number | wc -l)
    [ "$lines" -eq 1 ] || {
        echo "command $number of README.md has $lines lines" >&2
        exit 1
    }
done

block c 1 >"$work/first.c"
block text 1 >"$work/expected"
diff -u "$source_dir/examples/first.c" "$work/first.c" || {
    echo "examples/first.c is not the program of README.md" >&2
    exit 1
}
lines=$(wc -l <"$work/first.c")
[ "$lines" -le 25 ] || {
    echo "the first program has $lines lines" >&2
    exit 1
}
$compiler -std=c99 -pedantic -Wall -Wextra -Werror "$@" \
    -I"$source_dir/include" "$work/first.c" -o "$work/first" \
    -L"$build_dir" -lattn -Wl,-rpath,"$build_dir"
"$work/first" >"$work/printed"
diff -u "$work/expected" "$work/printed"

# Inline code that looks like a path of this tree.
status=0
for path in $(grep -o '`[a-z.][A-Za-z0-9_./-]*`' "$readme" | tr -d '`' |
    grep -E '^(include|src|tests|bench|examples|cmake|docs|abi|\.ci)/|\.md$'); do
    [ -e "$source_dir/$path" ] || {
        echo "README.md names $path, which does not exist" >&2
        status=1
    }
done
exit $status
