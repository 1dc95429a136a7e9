"""Chains against trees at an equal budget: as many tokens verified a round, so as much work in the late layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infer.benchmark import BenchmarkOptions
from infer.benchmarking.arms import Arm, plain, self_speculative
from infer.benchmarking.comparison import measure_arms
from infer.benchmarking.families import grid_of, load_families
from infer.benchmarking.measurement import Protocol
from infer.benchmarking.output import modes, name_of, scope, show, write
from infer.benchmarking.questions import encode
from infer.conditions import conditions
from infer.errors import InputError
from infer.loading import Loaded
from infer.options import ModelOptions
from infer.prompts import Prompts
from infer.terminal import Terminal
from layerskip.checkpoint.settings import Setting


def compare_budgets(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Measure chains and trees of which as many tokens are verified a round; otherwise as `compare`."""
    loaded, _ = load_families(model, replace(options, arms=("plain",)))
    test, budgets = encode(loaded, prompts.test, options), budget_arms(loaded, options)
    all_arms = [plain(), *(arm for _, arms in budgets for arm in arms)]
    result: dict[str, Any] = {
        "model": name_of(loaded),
        "conditions": conditions(loaded.model) | scope(options, prompts, test),
    }
    for name, decoding in modes(options).items():
        protocol = Protocol(test, decoding.generate_arguments(), options.repeats, options.seed, options.timeout)
        result[name] = measure_arms(loaded, all_arms, protocol, terminal)
    for name in modes(options):
        show(result, name, terminal, options.verbose)
        for number, arms in budgets:
            first = next(i for i, record in enumerate(result[name]) if record["arm"] == arms[0].name)
            print(budget_sentence(number, result[name][first : first + len(arms)]))
    write(result, options, terminal)
    return 0


def budget_sentence(num_verified: int, records: Sequence[dict[str, Any]]) -> str:
    """Which shape is the fastest of a chain and the trees after it that verify as many tokens."""
    running = [record for record in records[1:] if record["error"] is None]
    if records[0]["error"] is not None or not running:
        return f"{num_verified} tokens verified a round: nothing to compare"
    fastest = max(running, key=lambda record: record["tokens_per_second"])
    ratio = fastest["tokens_per_second"] / records[0]["tokens_per_second"]
    return (
        f"{num_verified} tokens verified a round: the fastest tree, {fastest['drafts']}, has {ratio:.2f} times the "
        f"chain's speed (mean_acceptance_length {fastest['mean_acceptance_length']:.2f}, the chain's "
        f"{records[0]['mean_acceptance_length']:.2f})"
    )


def budget_arms(loaded: Loaded, options: BenchmarkOptions) -> list[tuple[int, list[Arm]]]:
    """For each number of tokens verified a round: a chain of as many, and trees of which as many are verified.

    Raises:
        InputError: if there are several exit layers, or a tree of none of the numbers.
    """
    chains = grid_of(loaded, options).chains
    if len({setting.exit_layer for setting in chains}) > 1:
        raise InputError("--equal-budget compares shapes at one exit layer: give one in --exit-layers")
    found = []
    for chain in chains:
        n = chain.num_draft_tokens
        assert isinstance(n, int)  # grid_of names numbers
        shapes = [tree for tree in options.trees if _budget(tree) == n] if options.trees else budget_trees(n)
        grown = [replace(chain, tree=shape, draft_stop=None) for shape in shapes]
        trees = [self_speculative(setting, f"tree, {n} verified") for setting in grown]
        found.append((n, [self_speculative(replace(chain, draft_stop=None), f"chain, {n} verified"), *trees]))
    known = {n for n, _ in found}
    lost = [tree for tree in options.trees if _budget(tree) not in known]
    if lost:
        raise InputError(
            f"--tree {lost[0]} verifies {_budget(lost[0])} tokens a round, and --num-draft-tokens gives chains of "
            f"{', '.join(map(str, sorted(known)))}: make them equal"
        )
    return found


def budget_trees(n: int) -> list[str]:
    """Shapes of which `n` tokens are verified, from broad to deep: two branches, and three of the broadest."""
    broad = [(-(-n // k), k) for k in (3, 2)]
    deep = [(steps, 2) for steps in range(-(-n // 2) + 1, n + 1)]
    return [f"s{steps}_k{k}_d{n}" for steps, k in dict.fromkeys([*broad, *deep])]


def _budget(tree: str | tuple[int, ...]) -> int:
    shape = Setting(1, 0, tree=tree).shape
    return shape.num_tree_tokens or shape.num_nodes
