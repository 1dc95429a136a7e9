#!/usr/bin/env bash
# What CI runs, and all it runs: formatting, lint, types, tests.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff format --check .
ruff check .
mypy
python -m pytest -m "not gpu" "$@"
