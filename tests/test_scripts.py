"""The measuring scripts: what they set is what the program reads, and a table comes of what runs leave behind."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.documents import run
from train.command import load_config

ROOT = Path(__file__).resolve().parents[1]


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for what their annotations name
    spec.loader.exec_module(module)
    return module


def test_every_arm_of_the_ablation_is_a_run_that_can_start(tmp_path):
    ablation = script("ablation")
    config = ablation.recipe_left_out(tmp_path)
    recipes = {arm: load_config(config, settings).recipe for arm, settings in ablation.ARMS.items()}
    assert len(set(recipes.values())) == len(recipes) - 1  # own text is a matter of the data
    assert recipes["plain"].max_dropout == recipes["plain"].exit_loss_scale == 0
    assert recipes["paper recipe"].trained_exits(24) == tuple(range(1, 24))
    assert recipes["self-distill"].trained_exits(24) == (2, 3)
    for recipe in recipes.values():
        recipe.check(24)


def test_the_ablations_table_is_the_mean_over_seeds(tmp_path):
    ablation = script("ablation")
    for seed, loss in ((0, 4.0), (1, 5.0)):
        run = ablation.folder(tmp_path, "paper recipe", seed)
        run.mkdir()
        exits = {
            str(e): {"agreement": 0.5, "overlap": 0.6, "forecast": {"greedy": {"speedup": speed}}}
            for e, speed in ((2, 1.0), (3, 1.5))
        }
        record = {"after": {"test": {"last": {"loss": loss}, "exits": exits}}}
        (run / "evaluation.json").write_text(json.dumps(record))
        arms = [{"arm": "plain", "speedup": 1.0}, {"arm": "self-speculative", "speedup": 1.2 + seed}]
        (run / "benchmark.json").write_text(json.dumps({"greedy": arms, "sampled": arms}))
    [row] = ablation.rows(tmp_path, [0, 1, 2])
    assert row == ["paper recipe", "2", "3", "4.500 ±0.500", "0.500 ±0.000", "0.600 ±0.000", "1.500 ±0.000",
                   "1.700 ±0.500", "1.700 ±0.500"]  # fmt: skip


def test_what_a_recipe_costs_is_measured_on_recipes_that_fit():
    cost = script("recipe_cost")
    for recipe in cost.ARMS.values():
        if recipe is not None:
            recipe.check(30)
    assert len(cost.FIVE_EXITS.trained_exits(30)) == 5
    assert cost.ARMS["plain"] is None


SAYING = ["ablation", "adaptive", "forecast_grid", "outside_domain", "overhead", "recipe_cost", "results", "smollm2"]


@pytest.mark.parametrize("name", SAYING)
def test_scripts_say_how_they_are_run(name):
    assert f"python scripts/{name}.py" in script(name).__doc__


def test_every_budget_shows_its_chain_and_the_fastest_tree_beside_it():
    shapes = ["plain -", "chain 4", "tree s2_k2_d4", "chain 6", "tree s3_k2_d6", "tree s4_k2_d6"]
    speeds = [1.0, 1.2, 1.3, 1.1, 1.5, 1.4]
    arms = [
        {"arm": f"{kind}, {drafts[-1]} verified", "drafts": drafts, "error": None}
        | dict.fromkeys(("tokens_per_second", "speedup", "mean_acceptance_length", "draft_acceptance_rate"), speed)
        for (kind, drafts), speed in zip((shape.split() for shape in shapes), speeds, strict=True)
    ]
    rows = script("results").budget({"greedy": arms})[2:]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| chain", "4", "1.20"],
        ["| the fastest of 1 trees", "s2_k2_d4", "1.30"],
        ["| chain", "6", "1.10"],
        ["| the fastest of 2 trees", "s3_k2_d6", "1.50"],
    ]


@pytest.mark.slow
def test_results_are_measured_once_and_shown(tiny_run, tmp_path):
    """Each table is a benchmark; a second call measures nothing more and shows the same."""
    asked = (
        f"python scripts/results.py {tiny_run} --records {tmp_path} --only budget sampled --max-new-tokens 6 --print"
    )
    text = run(asked)
    assert {path.stem for path in tmp_path.iterdir()} == {"budget", "sampled"}
    for said in ("the fastest of", "| coupled | 2 / 4 |", "temperature 0.8", "transformers"):
        assert said in text
    record = json.loads((tmp_path / "sampled.json").read_text())
    shown = next(line for line in text.splitlines() if line.startswith("| coupled"))
    arm = next(arm for arm in record["sampled"] if arm["arm"] == "coupled")
    assert f"| {arm['speedup']:.2f} |" in shown
    assert run(asked) == text
