#!/usr/bin/env bash
# The main job, end to end: train, sample, check exactness, measure. `make demo` sets up and runs it.
# CONFIG, RUN and BENCHMARK may be set to try it on something else.
set -euo pipefail
cd "$(dirname "$0")/.."
config=${CONFIG:-configs/quickstart.yaml}
run=${RUN:-runs/$(basename "$config" .yaml)}
read -ra benchmark <<< "${BENCHMARK:---exit-layers 2 --num-draft-tokens 3,4,6 --sampled --threads 1 --num-prompts 8 --repeats 1}"
export TOKENIZERS_PARALLELISM=false

step() { printf '\n\033[1m%s\033[0m\n%s\n' "$1" "\$ ${*:2}"; "${@:2}"; }

step "1/4  Train a small model whose early layers can draft" \
    accelerate launch train "$config" run.output_dir="$run"
step "2/4  A sample, streamed: drafted tokens that were accepted, and the model's own" \
    python -m infer generate "$run" "def read_lines(path):" --max-new-tokens 96 --temperature 0.6 --seed 1 --color
step "3/4  Is self-speculative output the whole model's? Greedy, float32, token for token" \
    python -m infer benchmark "$run" --check --max-new-tokens 64 "${benchmark[@]:0:2}"
step "4/4  Is it faster? Settings chosen on validation prompts, measured on test prompts" \
    python -m infer benchmark "$run" "${benchmark[@]}" --json "$run/benchmark.json"

# `make` puts the environment on this script's path only: what is typed afterwards needs it, too.
bin=$(dirname "$(command -v accelerate)") activate=
[ -n "${VIRTUAL_ENV:-}" ] || [ ! -f "$bin/activate" ] || activate="
  source ${bin#"$PWD/"}/activate                            once in a shell: the commands below need it"

cat <<EOF

Next:$activate
  python -m infer chat $run --color                      talk to it (a very small model of Python code)
  python -m infer generate $run "class Stack:"           continue your own text
  accelerate launch train $config optim.max_steps=5000   train longer: the run goes on from its checkpoint
  accelerate launch train configs/llama3.2-1b.yaml       the same recipe on a real model (needs a GPU)
  python -m infer push $run --repo OWNER/NAME --dry-run  what an upload to the Hub would send
EOF
