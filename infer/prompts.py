"""Prompts to measure on: a set to choose settings with, and another one to report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from infer.errors import InputError
from infer.prompt_file import Prompt, read_prompts

# For models that come without prompts of their own. Every other one is for choosing.
BUILT_IN = (
    "The history of the bicycle begins in the early nineteenth century, when",
    "def binary_search(items, target):\n    ",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "Photosynthesis is the process by which green plants",
    "import json\n\n\ndef load_config(path):\n    ",
    "Dear Sir or Madam,\n\nI am writing to you about",
    "The three laws of thermodynamics can be summarised as follows:",
    "class Stack:\n    def __init__(self):\n        ",
    "To make a simple tomato soup, first",
    "In computer science, a hash table is",
    "Question: What is the capital of France?\nAnswer:",
    "The ship had been at sea for forty days when the captain",
)


@dataclass(frozen=True)
class Prompts:
    """Prompts to decode from.

    Attributes:
        validation: those that settings are chosen with; may be empty.
        test: those whose numbers are reported; none of them is in `validation`.
        source: where they come from, in words.
        left_out: lines of the file that are not among them, and why.
    """

    validation: tuple[Prompt, ...]
    test: tuple[Prompt, ...]
    source: str
    left_out: tuple[str, ...] = ()

    def notes(self, num_prompts: int) -> list[str]:
        """What a person should know of the first `num_prompts` of them, a line each."""
        named = {prompt.category for prompt in self.test if prompt.category is not None}
        heard = {prompt.category for prompt in self.test[:num_prompts] if prompt.category is not None}
        few = (
            []
            if heard == named
            else [
                f"note: --num-prompts {num_prompts} takes prompts of {len(heard)} of {len(named)} categories: raise it"
            ]
        )
        return [*(f"note: {line}" for line in self.left_out), *few]


def find_prompts(file: str | None, model_folder: Path | None, need_validation: bool) -> Prompts:
    """The prompts of `file` if given, else those that training left beside the model, else the built-in ones.

    A single set is dealt out alternately where settings must be chosen, and all for reporting where not. Where there
    are categories, each is dealt out so, and they take turns.

    Raises:
        InputError: if a file cannot be read or holds too few prompts.
    """
    left_out: list[str] = []
    if file is None and model_folder is not None:
        paths = [model_folder / "prompts" / f"{split}.jsonl" for split in ("validation", "test")]
        if all(path.is_file() for path in paths):
            validation, test = (read_prompts(path, left_out) for path in paths)
            unseen = tuple(prompt for prompt in test if prompt not in set(validation))
            if not unseen:
                raise InputError(f"{paths[1]} holds no prompt that validation.jsonl has not: give --prompts")
            return Prompts(validation, unseen, "the model's prompts/", tuple(left_out))
    if file is None:
        found, source = tuple(Prompt(text) for text in BUILT_IN), "built in"
    else:
        found, source = read_prompts(Path(file), left_out), Path(file).name
    kinds = _by_category(found)
    if not need_validation:
        return Prompts((), _in_turn(kinds), source, tuple(left_out))
    if len(found) < 2:
        raise InputError(
            f"{file} holds one prompt, but several settings need one to choose with and another to report: "
            "add prompts, or give one setting"
        )
    halves = (found[::2], found[1::2])
    if len(kinds) > 1 and any(len(kind) > 1 for kind in kinds):
        halves = (_in_turn([kind[1::2] for kind in kinds]), _in_turn([kind[::2] for kind in kinds]))
    return Prompts(*halves, source, tuple(left_out))


def _by_category(prompts: Iterable[Prompt]) -> list[tuple[Prompt, ...]]:
    kinds: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    return [tuple(kind) for kind in kinds.values()]


def _in_turn(kinds: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    """One of each kind, then the next of each."""
    return tuple(prompt for prompt in chain.from_iterable(zip_longest(*kinds)) if prompt is not None)
