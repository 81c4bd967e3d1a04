#!/bin/sh
# Prints a fenced code block of README.md, so that what is written there is what
# is tested.
#   readme_block.sh <README.md> <language> <number, from 1>
set -eu
awk -v language="$2" -v number="$3" '
    inside && /^```/ { exit }
    inside { print; lines++ }
    $0 == "```" language && ++seen == number { inside = 1 }
    END { exit lines == 0 }' "$1"
