#!/bin/sh
# Breaks the interface on purpose, in a copy, in each way that matters, and
# demands that the gate notices; and that it passes the same copy unbroken.
#   abi/canary.sh <cc> [source folder]
set -eu
compiler=$1
source_dir=${2:-.}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
major=$(sed -n 's/^#define ATTN_VERSION_MAJOR //p' "$source_dir/include/attn.h")

flags='-std=c11 -g -O1 -w -fPIC -fvisibility=hidden -Iinclude -Isrc'
# The hot loops take most of a build and have no part in the interface.
(cd "$source_dir" && for file in src/kernels_*.c; do
    # shellcheck disable=SC2086
    $compiler $flags -c "$file" -o "$work/$(basename "$file").o"
done)

build() # copies the tree, edits a file of it with sed, builds tree/libattn.so
{
    rm -rf "$work/tree"
    mkdir "$work/tree"
    cp -R "$source_dir/include" "$source_dir/src" "$source_dir/abi" "$work/tree"
    sed -i "$2" "$work/tree/$1"
    if [ -n "$2" ] && cmp -s "$work/tree/$1" "$source_dir/$1"; then
        echo "the canary '$2' changes nothing in $1" >&2
        exit 1
    fi
    rm "$work"/tree/src/kernels_*.c
    # shellcheck disable=SC2086
    (cd "$work/tree" && $compiler $flags -shared src/*.c "$work"/*.o \
        -Wl,--version-script=src/attn.map -Wl,-soname,"libattn.so.$major" \
        -o libattn.so -lopenblas -lm -lpthread)
}
gate()
{
    result=0
    sh "$work/tree/abi/check.sh" "$work/tree/libattn.so" "$work/tree" \
        >"$work/log" 2>&1 || result=$?
}
noticed() # name, file, sed command
{
    build "$2" "$3"
    gate
    case $result in
    4 | 8 | 12) echo "noticed: $1 ($result)" ;;
    *)
        cat "$work/log"
        echo "the gate did not notice: $1 (result $result)" >&2
        exit 1
        ;;
    esac
}

build include/attn.h ''
gate
[ $result -eq 0 ] || {
    cat "$work/log"
    echo "the gate refuses the unbroken library (result $result)" >&2
    exit 1
}
strip "$work/tree/libattn.so"
gate
[ $result -eq 1 ] || {
    echo "the gate took a stripped library (result $result)" >&2
    exit 1
}
header=include/attn.h
noticed "a member inserted" $header \
    's/^ *attn_tensor view;$/    int64_t canary;\n&/'
noticed "a member appended" $header \
    's/^ *const attn_tensor \*entropy;.*$/&\n    int64_t canary;/'
noticed "a member of another type" $header \
    's/^ *int64_t q_offset;/    double q_offset;/'
noticed "a function removed" src/attn.map '/^ *attn_softmax;$/d'
