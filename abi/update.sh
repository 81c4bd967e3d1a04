#!/bin/sh
# Writes the baseline of the ABI gate anew. Before 1.0 that is allowed, each
# time with a line in NEWS.md that tells users what changed:
#   cmake --preset abi && cmake --build build-abi
#   abi/update.sh build-abi/libattn.so
# From 1.0 on only for a new minor version, and only to add.
set -eu
library=$1
cd "$(dirname "$0")/.."
major=$(sed -n 's/^#define ATTN_VERSION_MAJOR //p' include/attn.h)
# Never --no-show-locs: abidiff 2.2 then passes real breaks.
abidw --headers-dir include --drop-private-types --no-corpus-path \
    --no-comp-dir-path --out-file "abi/libattn.so.$major.$(uname -m).abi" \
    "$library"
