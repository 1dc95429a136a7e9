#!/usr/bin/env bash
# What CI runs, and all it runs: formatting, lint, types, tests, the library once more on the oldest
# transformers it promises, and training under DeepSpeed. Arguments go to pytest: `scripts/check.sh -m "not slow"`.
set -euo pipefail
cd "$(dirname "$0")/.."
oldest=5.18.0

ruff format --check .
ruff check .
mypy
# Two at a time: every test keeps to one core. A file stays together, for what its tests share.
python -m pytest -m "not gpu" -n 2 --dist loadfile "$@"

# Laid over the environment, whose other packages both versions take.
overlay=$(python -c 'import sys; print(sys.prefix)')/transformers-$oldest
[ -d "$overlay" ] || python -m pip install --quiet --no-deps --target "$overlay" "transformers==$oldest"
PYTHONPATH=$overlay python -m pytest -n 2 --dist loadfile \
  tests/test_layerskip_{stages,cache,decoding,generation,batch,recipe,forecast,adaptive,custom_generate}.py

# DeepSpeed likewise: in the environment itself it would add seconds to every import of transformers. It compiles
# an operator at its first start.
command -v g++ > /dev/null || { echo "no g++: ZeRO is not tested"; exit 0; }
zero=$(python -c 'import sys; print(sys.prefix)')/deepspeed
[ -d "$zero" ] || python -m pip install --quiet --no-deps --target "$zero" -c constraints.txt deepspeed hjson msgpack \
  py-cpuinfo einops ninja nvidia-ml-py pydantic pydantic-core annotated-types typing-inspection
PYTHONPATH=$zero PATH=$zero/bin:$PATH python -m pytest tests/test_train_distributed.py -k zero
