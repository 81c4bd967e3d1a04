#!/bin/sh
# Every C file is formatted as .clang-format says.
#   check_format.sh <source folder>
set -eu
# No name of a file in this tree has a space.
cd "$1"
formatter=
for name in clang-format-14 clang-format; do
    if command -v $name >/dev/null &&
        $name --version | grep -q 'version 14\.'; then
        formatter=$name
        break
    fi
done
if [ -z "$formatter" ]; then
    echo "clang-format 14 is not installed: not checked"
    exit 77
fi
status=0
for file in $(find include src tests bench examples -name '*.[ch]'); do
    if ! "$formatter" --dry-run -Werror "$file" 2>/dev/null; then
        echo "not formatted; run clang-format -i $file" >&2
        status=1
    fi
done
exit $status
