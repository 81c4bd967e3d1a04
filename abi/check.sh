#!/bin/sh
# The ABI gate: is this libattn.so what programs built before expect? Compares
# it with abi/libattn.so.<major>.<machine>.abi; anything but "no change" fails,
# except new functions.
#   abi/check.sh <libattn.so with debugging information> [source folder]
#
# Layout breaks are only bit 4 of abidiff's result, so 0 is demanded. A stripped
# library would pass, hence the test for debugging information. There is no
# suppression file: abidiff 2.2 lets real breaks through under one. canary.sh
# shows that the gate does fail.
set -eu
library=$1
source_dir=${2:-.}
[ -f "$library" ] || { echo "no library $library" >&2; exit 1; }
major=$(sed -n 's/^#define ATTN_VERSION_MAJOR //p' "$source_dir/include/attn.h")
baseline=$source_dir/abi/libattn.so.$major.$(uname -m).abi
[ -f "$baseline" ] || { echo "there is no baseline $baseline" >&2; exit 77; }
readelf -S "$library" | grep -q '\.debug_info' || {
    echo "$library has no debugging information" >&2
    exit 1
}
abidiff --headers-dir1 "$source_dir/include" \
    --headers-dir2 "$source_dir/include" --no-added-syms \
    "$baseline" "$library"
