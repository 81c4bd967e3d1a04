#!/bin/sh
# Hidden visibility does nothing inside an archive, so there every external
# name must carry the prefix: attn_ if public, attn__ if not.
#   check_archive.sh <libattn.a>
set -eu
names=$(nm --defined-only -g -P "$1" | awk 'NF >= 2 && $2 != "" { print $1 }' |
    grep -v ':$')
[ -n "$names" ] || { echo "$1 defines nothing" >&2; exit 1; }
if printf '%s\n' "$names" | grep -v '^attn_'; then
    echo "names without the prefix attn_ in $1" >&2
    exit 1
fi
