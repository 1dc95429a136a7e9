#!/usr/bin/env bash
# Create a virtual environment with everything the programs and the tests need: setup.sh PYTHON FOLDER.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3} venv=${2:-.venv}

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python {sys.version.split()[0]} is too old, 3.11 or newer is needed: make PYTHON=/path/to/python3.11")
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing into $venv (one or two minutes the first time)"
# torch first and alone: with it there, nothing below asks for the CUDA build.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
