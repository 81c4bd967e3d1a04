#!/bin/sh
# The library needs no build system: the compiler line of README.md, with this
# compiler, gives one that exports every function and answers.
#   check_oneline.sh <source folder> <cc>
set -eu
export LC_ALL=C
source_dir=$1
compiler=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

line=$(sed -n 's/^\(cc -std=c11 .*src\/\*\.c .*\)$/\1/p' "$source_dir/README.md")
if [ "$(printf '%s\n' "$line" | grep -c .)" -ne 1 ]; then
    echo "README.md has no single line 'cc -std=c11 ... src/*.c ...'" >&2
    exit 1
fi
ln -s "$source_dir/include" "$source_dir/src" "$work/"
cd "$work"
sh -ec "cc() { $compiler \"\$@\"; }; $line"
nm -D --defined-only -P libattn.so | awk '{ print $1 }' | grep '^attn_[^_]' |
    sort >exported
missing=$(comm -23 "$source_dir/tests/symbols.txt" exported)
if [ -n "$missing" ]; then
    echo "not exported: $missing" >&2
    exit 1
fi
cat >main.c <<'END'
#include <attn.h>
#include <stdio.h>
int main(void)
{
    return puts(attn_version()) < 0
        || attn_version_number() != ATTN_VERSION_NUMBER;
}
END
$compiler -Iinclude main.c -L. -lattn -Wl,-rpath,"$work" -o main
./main
