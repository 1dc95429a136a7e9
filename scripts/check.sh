#!/usr/bin/env bash
# What CI runs, and all it runs: formatting, lint, types, tests, and the library once more on the oldest
# transformers it promises. Arguments go to pytest: `scripts/check.sh -m "not slow"`.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=5.18.0

ruff format --check .
ruff check .
mypy
python -m pytest -m "not gpu" "$@"

# Laid over the environment, whose other packages both versions take.
overlay=$(python -c 'import sys; print(sys.prefix)')/transformers-$oldest
[ -d "$overlay" ] || python -m pip install --quiet --no-deps --target "$overlay" "transformers==$oldest"
PYTHONPATH=$overlay python -m pytest tests/test_layerskip_{stages,cache,decoding,generation,recipe,forecast}.py
