#!/bin/sh
# The functions of attn.h, those the library exports and tests/symbols.txt are
# the same, and every name begins with attn_.
#   check_symbols.sh <source folder> <libattn.so>
set -eu
export LC_ALL=C
source_dir=$1
library=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --defined-only -P "$library" | awk '$2 != "A" { sub(/@.*/, "", $1)
    print $1 }' | sort >"$work/exported"
# A declaration: from ATTN_API to the semicolon; its name stands before "(".
sed -e '/^#/d' "$source_dir/include/attn.h" | tr '\n' ' ' | tr ';' '\n' |
    sed -n 's/^.*ATTN_API [^(]*[ *]\([a-z0-9_]*\)(.*$/\1/p' |
    sort >"$work/declared"

status=0
for list in exported declared; do
    if ! diff -u "$source_dir/tests/symbols.txt" "$work/$list"; then
        echo "tests/symbols.txt and what is $list differ" >&2
        status=1
    fi
done
if grep -v '^attn_' "$work/exported"; then
    echo "exported without the prefix attn_" >&2
    status=1
fi
if [ ! -s "$work/exported" ]; then
    echo "$library exports nothing" >&2
    status=1
fi
# Each exported name belongs to a version node, so that a program built with a
# newer library fails on an older one when it starts, not in the middle.
if nm -D --defined-only -P "$library" | awk '$2 != "A" { print $1 }' |
    grep -v '@@ATTN_[0-9]*\.[0-9]*$'; then
    echo "exported without a version" >&2
    status=1
fi
exit $status
