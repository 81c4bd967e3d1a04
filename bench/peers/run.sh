#!/bin/sh
# Runs peers.py with the options given, in the Python of $PYTHON if that is set,
# else in a virtual environment that it makes in build-peers/ of this tree.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../build-peers/venv
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$venv/bin/python
    if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
        python3 -m venv "$venv"
        "$PYTHON" -m pip install --quiet -r "$here/requirements.txt"
        cp "$here/requirements.txt" "$venv/requirements.txt"
    fi
fi
# libattn has threads of its own; see "Threads" in README.md.
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
exec "$PYTHON" "$here/peers.py" "$@"
