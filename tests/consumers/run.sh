#!/bin/sh
# Installs libattn, moves the installed tree, and builds and runs the first
# program of README.md against it in every way README.md names.
#   run.sh <source folder> <build folder> <cmake> <cc> [cmake options...]
# The options choose the BLAS, as they did for the build folder.
set -eu
source_dir=$1
build_dir=$2
cmake=$3
compiler=$4
shift 4
here=$source_dir/tests/consumers
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset LD_LIBRARY_PATH_SAVED CMAKE_PREFIX_PATH || true

sh "$source_dir/tests/readme_block.sh" "$source_dir/README.md" c 1 \
    >"$work/first.c"
sh "$source_dir/tests/readme_block.sh" "$source_dir/README.md" text 1 \
    >"$work/expected"

fail()
{
    echo "FAILED: $*" >&2
    exit 1
}
# Runs a command quietly; shows what it said if it fails.
quietly()
{
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log"
        fail "$*"
    }
}
# The program prints what README.md says. Empty name: linked statically.
check() # name of the check, program
{
    "$2" >"$work/printed" || fail "$1: the program failed"
    diff -u "$work/expected" "$work/printed" || fail "$1: wrong output"
    echo "passed: $1"
}

quietly "$cmake" --install "$build_dir" --prefix "$work/stage"
mv "$work/stage" "$work/moved"
prefix=$work/moved
if grep -rnE "$work/stage|$build_dir|$source_dir" "$prefix" \
    --include='*.cmake' --include='*.pc'; then
    fail "the package names folders of the machine that built it"
fi
pc_dir=$(dirname "$(find "$prefix" -name attn.pc)")
lib_dir=$(dirname "$pc_dir")

find_package() # name, ASK, more options...
{
    name=$1
    ask=$2
    shift 2
    rm -rf "$work/$name"
    "$cmake" -S "$here/find_package" -B "$work/$name" \
        -DCMAKE_C_COMPILER="$compiler" -DCMAKE_PREFIX_PATH="$prefix" \
        -DPROGRAM="$work/first.c" "-DASK=$ask" "$@" >"$work/log" 2>&1
}
accepted() # name, ASK, more options...
{
    find_package "$@" || {
        cat "$work/log"
        fail "$1"
    }
    quietly "$cmake" --build "$work/$1"
    check "$1" "$work/$1/first"
}
refused() # name, ASK, what CMake must say
{
    if find_package "$1" "$2"; then
        fail "$1: accepted"
    fi
    tr -s ' \n' '  ' <"$work/log" | grep -q "$3" || {
        cat "$work/log"
        fail "$1: refused for another reason"
    }
    echo "passed: $1"
}
needs() { readelf -d "$1" | grep -q 'NEEDED.*libattn\.so\.0'; }

# Who uses the shared library is not asked for a BLAS.
no_blas=-DCMAKE_DISABLE_FIND_PACKAGE_BLAS=ON
accepted find_package "REQUIRED" $no_blas
accepted find_package_shared "0.1;REQUIRED;COMPONENTS;shared" $no_blas
needs "$work/find_package_shared/first" || fail "not linked with libattn.so.0"
accepted find_package_static "0.1;REQUIRED;COMPONENTS;static" "$@"
needs "$work/find_package_static/first" && fail "static, but needs libattn.so"
refused version_1 "1.0;REQUIRED" "version: 0\.[0-9.]*"
refused version_newer "0.99;REQUIRED" "version: 0\.[0-9.]*"
refused component_bogus "REQUIRED;COMPONENTS;bogus" "bogus"

accepted build_tree "REQUIRED" $no_blas -Dattn_DIR="$build_dir"

quietly "$cmake" -S "$here/subdirectory" -B "$work/subdirectory" \
    -DCMAKE_C_COMPILER="$compiler" -DATTN_SOURCE="$source_dir" \
    -DPROGRAM="$work/first.c" "$@"
quietly "$cmake" --build "$work/subdirectory" -j 2
check subdirectory "$work/subdirectory/first"
check subdirectory_static "$work/subdirectory/first_static"

quietly $compiler "$work/first.c" -I"$prefix/include" -L"$lib_dir" -lattn \
    -Wl,-rpath,"$lib_dir" -o "$work/by_cc"
check cc "$work/by_cc"

if ! command -v pkg-config >/dev/null; then
    echo "pkg-config is not installed: its checks are left out"
    exit 0
fi
pc() { PKG_CONFIG_PATH=$pc_dir pkg-config "$@" attn; }
pc --validate || fail "attn.pc is not valid"
case "$(pc --cflags --libs)" in
*blas*) fail "attn.pc shows the BLAS to users of the shared library" ;;
esac
# shellcheck disable=SC2046
quietly $compiler "$work/first.c" $(pc --cflags --libs) \
    -Wl,-rpath,"$lib_dir" -o "$work/by_pkg_config"
check pkg_config "$work/by_pkg_config"

# An installation that has the archive alone, as --static is meant for.
cp -R "$prefix" "$work/archive"
find "$work/archive" -name 'libattn.so*' -exec rm {} +
pc_dir=$work/archive/${pc_dir#"$prefix"/}
# shellcheck disable=SC2046
quietly $compiler "$work/first.c" $(pc --static --cflags --libs) \
    -o "$work/by_pkg_config_static"
needs "$work/by_pkg_config_static" && fail "static, but needs libattn.so"
check pkg_config_static "$work/by_pkg_config_static"

# From the build folder, without installing.
pc_dir=$build_dir
# shellcheck disable=SC2046
quietly $compiler "$work/first.c" $(pc --cflags --libs) \
    -Wl,-rpath,"$build_dir" -o "$work/by_uninstalled"
check pkg_config_uninstalled "$work/by_uninstalled"
