"""The families of arms: what --arms names, and the settings that each one's best is chosen from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from infer.benchmark import BenchmarkOptions
from infer.benchmarking.arms import Arm, coupled, plain, plain_loop, self_speculative
from infer.benchmarking.rivals import assistant_early_exit, assistant_model, cache_bytes, compiled, prompt_lookup
from infer.errors import InputError
from infer.loading import Loaded, load
from infer.options import ModelOptions
from infer.setting import check_tree, choose_setting
from infer.speculation import in_flags
from layerskip.checkpoint.settings import AUTO, DEFAULT_NUM_DRAFT_TOKENS, Setting
from layerskip.draft.exits import first_exit

DEFAULT_TREE = "s4_k2_d6"


@dataclass(frozen=True)
class Family:
    """Arms of one kind, a setting each.

    Attributes:
        arms: to choose the fastest from.
        sampled_only: whether it decodes like another family when greedy.
        batches: whether it decodes several prompts together.
        drafts: whether it is a way of this kit to draft.
    """

    name: str
    arms: tuple[Arm, ...]
    sampled_only: bool = False
    batches: bool = True
    drafts: bool = True


@dataclass(frozen=True)
class Grid:
    """The settings that are asked for, by kind of draft."""

    tuned: tuple[Setting, ...]  # of the arm "chain": what the checkpoint is tuned to, where nothing else is asked for
    chains: tuple[Setting, ...]
    trees: tuple[Setting, ...]


def load_families(model: ModelOptions, options: BenchmarkOptions) -> tuple[Loaded, list[Family]]:
    """The model, and the families that `options.arms` names, in that order.

    Raises:
        InputError: if the model or its assistant cannot be used, or there is no exit layer where one is needed.
    """
    for tree in options.trees:
        check_tree(tree)
    loaded = load(model, options.exit_layers or ())
    grid = grid_of(loaded, options)
    assistants = _assistants(loaded, model, options) if "assistant" in options.arms else ()
    return loaded, [_family(name, grid, assistants) for name in options.arms]


def _family(name: str, grid: Grid, assistants: tuple[Arm, ...]) -> Family:
    others: dict[str, Family] = {
        "plain": Family(name, (plain(),), drafts=False),
        "loop": Family(name, (plain_loop(),), drafts=False),
        "compiled": Family(name, (compiled(),), batches=False, drafts=False),
        "lookup": Family(name, (self_speculative(Setting(None, 0, lookup="only"), "lookup only"),)),
        # As many tokens as our own lookup.
        "transformers-lookup": Family(name, (prompt_lookup(Setting.num_lookup_tokens),), batches=False, drafts=False),
        "assistant": Family(name, assistants, batches=False, drafts=False),
        "auto": Family(name, (self_speculative(Setting(AUTO, AUTO), "auto"),)),
    }
    if name in others:
        return others[name]
    ours: dict[str, tuple[Sequence[Setting], Callable[[Setting], Arm]]] = {
        "chain": (grid.tuned, self_speculative),
        "tree": (grid.trees, lambda setting: self_speculative(setting, "tree")),
        "hybrid": (grid.chains, lambda s: self_speculative(replace(s, lookup="hybrid"), "lookup hybrid")),
        "branch": (grid.chains, lambda s: self_speculative(replace(s, lookup="branch"), "lookup branch")),
        "block": (grid.chains, lambda setting: self_speculative(setting, "block", acceptance="block")),
        "coupled": (grid.chains, coupled),
        "early-exit": (grid.chains, assistant_early_exit),
    }
    settings, make = ours[name]
    arms, foreign = tuple(make(setting) for setting in settings), name == "early-exit"
    return Family(name, arms, sampled_only=name in ("block", "coupled"), batches=not foreign, drafts=not foreign)


def _assistants(loaded: Loaded, model: ModelOptions, options: BenchmarkOptions) -> tuple[Arm, ...]:
    """The arms of the second model, one for each number of drafted tokens that is asked for.

    transformers takes two tokenizers exactly where the models' vocabularies have different sizes.

    Raises:
        InputError: if the assistant cannot be loaded, or transformers cannot draft with it.
    """
    assert options.assistant is not None
    other = load(replace(model, model=options.assistant), needs_vocabulary=False)
    sizes = [one.model.config.get_text_config(decoder=True).vocab_size for one in (loaded, other)]
    same = loaded.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    if sizes[0] == sizes[1] and not same:
        raise InputError(
            f"--assistant {options.assistant} has other tokens than {loaded.name} but as many ({sizes[0]}), and "
            "transformers then takes them for the same: choose an assistant with the model's tokenizer"
        )
    tokenizers = None if sizes[0] == sizes[1] else (loaded.tokenizer, other.tokenizer)
    position_bytes = cache_bytes(other.model)
    lengths: Sequence[int | None] = options.num_draft_tokens or (None,)
    return tuple(assistant_model(other.model, tokenizers, length, position_bytes) for length in lengths)


def grid_of(loaded: Loaded, options: BenchmarkOptions) -> Grid:
    """All settings that are asked for. Where the checkpoint is tuned to "auto", the arm chain does that, and the others
    draft by an exit that it chooses from.

    Raises:
        InputError: if there is no exit layer where one is needed.
    """
    tuned = choose_setting(loaded, "tuned", "tuned", draft_vocabulary=options.draft_vocabulary, lookup="tuned")
    named = first_exit(loaded.model, tuned) if tuned else None
    exit_layers = options.exit_layers or (() if named is None else (named,))
    if not exit_layers:
        if options.needs_exit:
            raise InputError(
                f"{loaded.name} {'carries no tuned exit layer' if tuned is None else 'is tuned to no exit layer'} "
                f"to measure: give --exit-layers, for instance "
                f"--exit-layers 2,3 --num-draft-tokens 3,4 to choose from"
            )
        return Grid((), (), ())
    known = tuned.num_draft_tokens if tuned is not None and tuned.exit_layer is not None else AUTO  # "off" has 0
    usual = known if isinstance(known, int) else DEFAULT_NUM_DRAFT_TOKENS
    lengths: Sequence[int] = options.num_draft_tokens or (usual,)
    cut = options.draft_vocabulary is not False
    stop = options.draft_stop if options.draft_stop != "tuned" else tuned.draft_stop if tuned else None
    shapes = options.trees or (tuned.tree if tuned and tuned.tree is not None else DEFAULT_TREE,)
    try:
        chains = tuple(Setting(e, n, draft_stop=stop, draft_vocabulary=cut) for e, n in product(exit_layers, lengths))
        trees = tuple(Setting(e, lengths[0], tree=t, draft_vocabulary=cut) for e, t in product(exit_layers, shapes))
    except ValueError as error:
        raise InputError(in_flags(error)) from None
    asked = options.exit_layers or options.num_draft_tokens or options.draft_stop != "tuned"
    return Grid(chains if asked or tuned is None else (tuned,), chains, trees)
