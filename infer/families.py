"""The families of arms: what --arms names, and the settings that each one's best is chosen from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from infer.arms import Arm, coupled, plain, plain_loop, self_speculative
from infer.benchmark import BenchmarkOptions
from infer.errors import InputError
from infer.loading import Loaded, check_tree, choose_setting, load
from infer.options import ModelOptions
from infer.rivals import assistant_early_exit
from layerskip.settings import Setting

DEFAULT_TREE = "s4_k2_d6"


@dataclass(frozen=True)
class Family:
    """Arms of one kind, a setting each.

    Attributes:
        arms: to choose the fastest from.
        sampled_only: whether it decodes like another family when greedy.
        batches: whether it decodes several prompts together.
    """

    name: str
    arms: tuple[Arm, ...]
    sampled_only: bool = False
    batches: bool = True


@dataclass(frozen=True)
class Grid:
    """The settings that are asked for, by kind of draft."""

    tuned: tuple[Setting, ...]  # of the arm "chain": what the checkpoint is tuned to, where nothing else is asked for
    chains: tuple[Setting, ...]
    trees: tuple[Setting, ...]


def load_families(model: ModelOptions, options: BenchmarkOptions) -> tuple[Loaded, list[Family]]:
    """The model, and the families that `options.arms` names, in that order.

    Raises:
        InputError: if the model cannot be used, or there is no exit layer where one is needed.
    """
    for tree in options.trees:
        check_tree(tree)
    loaded = load(model, options.exit_layers or ())
    grid = grid_of(loaded, options)
    return loaded, [_family(name, grid) for name in options.arms]


def _family(name: str, grid: Grid) -> Family:
    ours: dict[str, tuple[Sequence[Setting], Callable[[Setting], Arm]]] = {
        "chain": (grid.tuned, self_speculative),
        "tree": (grid.trees, lambda setting: self_speculative(setting, "tree")),
        "hybrid": (grid.chains, lambda s: self_speculative(replace(s, lookup="hybrid"), "lookup hybrid")),
        "branch": (grid.chains, lambda s: self_speculative(replace(s, lookup="branch"), "lookup branch")),
        "block": (grid.chains, lambda setting: self_speculative(setting, "block", acceptance="block")),
        "coupled": (grid.chains, coupled),
        "early-exit": (grid.chains, assistant_early_exit),
    }
    if name == "plain":
        return Family(name, (plain(),))
    if name == "loop":
        return Family(name, (plain_loop(),))
    if name == "lookup":
        return Family(name, (self_speculative(Setting(None, 0, lookup="only"), "lookup only"),))
    settings, make = ours[name]
    arms = tuple(make(setting) for setting in settings)
    return Family(name, arms, sampled_only=name in ("block", "coupled"), batches=name != "early-exit")


def grid_of(loaded: Loaded, options: BenchmarkOptions) -> Grid:
    """All settings that are asked for.

    Raises:
        InputError: if there is no exit layer where one is needed.
    """
    tuned = choose_setting(loaded, "tuned", "tuned", draft_vocabulary=options.draft_vocabulary, lookup="tuned")
    exit_layers = options.exit_layers or ((tuned.exit_layer,) if tuned else ())
    if not exit_layers or None in exit_layers:
        if options.needs_exit:
            raise InputError(
                f"{loaded.name} carries no tuned exit layer to measure: give --exit-layers, for instance "
                f"--exit-layers 2,3 --num-draft-tokens 3,4 to choose from"
            )
        return Grid((), (), ())
    lengths: Sequence[int] = options.num_draft_tokens or (tuned.num_draft_tokens if tuned else 4,)
    cut = options.draft_vocabulary is not False
    stop = options.draft_stop if options.draft_stop != "tuned" else tuned.draft_stop if tuned else None
    chains = tuple(Setting(*pair, draft_stop=stop, draft_vocabulary=cut) for pair in product(exit_layers, lengths))
    named = tuned.tree if tuned and tuned.tree is not None else DEFAULT_TREE
    shapes = options.trees or (named,)
    trees = tuple(Setting(e, lengths[0], tree=shape, draft_vocabulary=cut) for e, shape in product(exit_layers, shapes))
    asked = options.exit_layers or options.num_draft_tokens or options.draft_stop != "tuned"
    return Grid(chains if asked or tuned is None else (tuned,), chains, trees)
