"""How good the forecasts of `python -m infer tune` are: every cell of the grid is decoded, and compared with its own.

    python scripts/forecast_grid.py MODEL [--exits 1,2,3] [--lengths 1,2,4] [--tree s4_k2_d6] [--threads 1]

Forecasts come from validation prompts, as in `tune`; then plain decoding and all cells decode test prompts, in turn, in
the same process. Times are the decoding thread's processor time on a CPU, so take --threads 1: wall time also counts
whatever else the machine does. They begin after the prompt's first round, since prompts cost all cells the same, and
leave out a last round that the end cut short. Speed-ups are over this kit's own loop without drafts, as forecasts are.

Printed besides: what the forecast would be with the acceptance that was measured (so what is left is the costs'), the
acceptance of the same prompts teacher-forced (so what is left are other prompts), tune's regret (what its choice loses
against the best cell measured), and the share of the ideal that was reached: layers and head alone, nothing else.
One line of JSON ends the output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from torch import Tensor

    from infer.loading import Loaded
    from infer.terminal import Terminal
    from infer.tune import TuneOptions
    from infer.tuning.evidence import Evidence
    from scripts.forecast_grid_page import Cell

_PLAIN_EVERY = 8  # cells between two runs of plain decoding, which all are compared with


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Forecast, decode, compare, show; returns what is printed as JSON."""
    options = read_arguments(argv)

    from infer.benchmarking.output import name_of
    from infer.benchmarking.questions import encode
    from infer.conditions import conditions
    from infer.loading import load
    from infer.options import ModelOptions
    from infer.prompts import find_prompts
    from infer.source import local_folder
    from infer.terminal import Terminal
    from infer.tuning.evidence import continuations, look, measure_texts, trees_of
    from scripts.forecast_grid_page import compare, show

    terminal, tuning = Terminal(), tune_options(options)
    loaded = load(ModelOptions(options.model, options.dtype, None, options.threads), tuning.exit_layers or ())
    prompts = find_prompts(options.prompts, local_folder(options.model), need_validation=True)
    validation, test = (encode(loaded, texts, tuning) for texts in (prompts.validation, prompts.test))
    start = perf_counter()
    evidence = look(loaded, tuning, validation, terminal)
    seconds = perf_counter() - start
    test, cells = test[: options.num_measured], cells_of(evidence, options.lengths)
    plain = measure(loaded, tuning, cells, test, terminal)
    texts = continuations(loaded, tuning, test)
    same = measure_texts(loaded, tuning, [*evidence.costs.draft], trees_of(loaded, tuning), texts)
    result = {"model": name_of(loaded), "seconds_to_forecast": round(seconds, 1)}
    result |= compare(evidence, same, cells, plain, options.temperature > 0)
    counts = {"num_prompts": len(validation), "num_measured": len(test), "max_new_tokens": options.max_new_tokens}
    result["conditions"] = conditions(loaded.model) | counts | {"temperature": options.temperature}
    show(result, terminal)
    print(json.dumps(result, allow_nan=False))
    return result


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    from infer.speculation import tree

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL", help="local folder or Hub id")
    add("--exits", type=numbers, metavar="E,...", help="exit layers (default: as tune)")
    add("--lengths", type=numbers, default=[1, 2, 3, 4, 6, 8], metavar="K,...", help="drafted tokens of chains")
    add("--tree", type=tree, action="append", default=[], metavar="SHAPE", help="a tree besides; may be given again")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads (default %(default)s)")
    add("--dtype", default="auto", help="of the weights and the arithmetic (default: the checkpoint's)")
    add("--prompts", metavar="FILE", help="JSON lines; every other one is measured (default: as tune)")
    add("--num-prompts", type=int, default=24, metavar="N", help="prompts to forecast with (default %(default)s)")
    add("--num-measured", type=int, default=24, metavar="N", help="test prompts that are decoded (default %(default)s)")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="tokens of each output (default %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    return parser.parse_args(argv)


def tune_options(options: argparse.Namespace) -> TuneOptions:
    """What `tune` would be asked for."""
    from infer.tune import TuneOptions

    return TuneOptions(
        exit_layers=tuple(options.exits) if options.exits else None,
        max_draft_tokens=max(options.lengths),
        trees=tuple(options.tree),
        num_prompts=options.num_prompts,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
    )


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return sorted({int(part) for part in text.split(",")})


def cells_of(evidence: Evidence, lengths: Sequence[int]) -> list[Cell]:
    """A cell for every forecast of these chains and of the trees."""
    from infer.tuning.run import setting_of
    from scripts.forecast_grid_page import Cell

    chosen = [f for f in evidence.forecasts if f.tree is not None or f.num_draft_tokens in lengths]
    order = sorted(chosen, key=lambda f: (f.exit_layer, f.draft_vocabulary, f.tree is not None, f.num_draft_tokens))
    return [Cell(setting_of(forecast), forecast) for forecast in order]


def measure(
    loaded: Loaded, tuning: TuneOptions, cells: Sequence[Cell], prompts: Sequence[Tensor], terminal: Terminal
) -> Cell:
    """Decode all prompts with all cells, and plainly in between; returns the plain cell."""
    from layerskip.checkpoint.settings import Setting
    from scripts.forecast_grid_page import Cell

    plain, warm = Cell(Setting(None, 0)), [Cell(cell.setting) for cell in cells]
    for cell in (Cell(plain.setting), *warm):
        decode(loaded, tuning, cell, prompts[0], 16)
    with terminal.progress(len(prompts) * len(cells)) as advance:
        for number, prompt in enumerate(prompts):
            turn = number * len(cells) // len(prompts)  # who goes first changes
            for place, cell in enumerate([*cells[turn:], *cells[:turn]]):
                if place % _PLAIN_EVERY == 0:
                    decode(loaded, tuning, plain, prompt, tuning.max_new_tokens)
                decode(loaded, tuning, cell, prompt, tuning.max_new_tokens)
                advance(f"prompt {number + 1}")
    return plain


def decode(loaded: Loaded, tuning: TuneOptions, cell: Cell, prompt: Tensor, max_new_tokens: int) -> None:
    """Decode a (1, length) prompt; count all rounds but the first, and the last where it was cut short."""
    import torch

    import layerskip

    arguments = {**tuning.decoding().generate_arguments(), "max_new_tokens": max_new_tokens}
    clock = thread_time if prompt.device.type == "cpu" else perf_counter
    steps = layerskip.steps(
        loaded.model, prompt, attention_mask=torch.ones_like(prompt), **arguments, **vars(cell.setting)
    )
    full = next(steps).num_levels
    start = clock()
    for step in steps:
        seconds = clock() - start
        if step.num_levels == full:
            cell.seconds, cell.rounds = cell.seconds + seconds, cell.rounds + 1
            cell.tokens += step.tokens.numel()
        start = clock()


if __name__ == "__main__":
    main()
