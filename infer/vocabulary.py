"""`vocabulary`: choose the tokens that the draft's head has rows for, from text like the model's output."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from infer.errors import InputError
from infer.files import check_folder
from infer.options import ModelOptions, add_model_flags, positive
from infer.prompt_file import read_texts
from infer.source import local_folder
from infer.terminal import Terminal

if TYPE_CHECKING:
    from torch import Tensor

    from infer.loading import Loaded

_PIECE = 4096  # characters of plain text that are counted together, cut at a line's end
# covered: share of the text's tokens; unseen: the same on every other piece, of a vocabulary chosen on the rest;
# of head: rows kept; of draft: the head's share of the weights that one drafted token reads.
COLUMNS = ("tokens", "covered", "unseen", "of head", "of draft")


@dataclass(frozen=True)
class Candidate:
    """A draft vocabulary of one size, and what it costs; shares are 0 to 1."""

    size: int  # tokens
    coverage: float  # share of the text's tokens that are in it
    unseen_coverage: float | None  # the same on half the text, chosen on the other half; None: only one piece
    head_share: float  # rows of the whole head that it keeps
    draft_share: float | None  # of the weights of layers [0:E) and this head, the head's; None: no exit layer is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_flags(parser)
    add = parser.add_argument_group("draft vocabulary").add_argument
    add(
        "--text",
        nargs="+",
        required=True,
        type=Path,
        metavar="FILE",
        help='text like what the model writes: plain, or .jsonl with {"text": ...} or {"prompt": ...} lines',
    )
    add("--size", type=positive, default=8192, metavar="N", help="tokens (default: %(default)s)")
    add(
        "--exit-layer",
        type=positive,
        metavar="E",
        help="layers that draft, for the head's share of the draft (default: what the checkpoint carries)",
    )
    add("--write", action="store_true", help="put the vocabulary of --size tokens beside the weights in MODEL")


def run(arguments: argparse.Namespace) -> int:
    """Check, load, count, show, and write if asked; returns the exit code."""
    folder = local_folder(arguments.model, [arguments.exit_layer])
    if arguments.write and folder is None:
        raise InputError(
            f"--write needs a folder, and {arguments.model} is on the Hub: download it (hf download {arguments.model} "
            "--local-dir FOLDER) and give FOLDER"
        )
    if arguments.write and folder is not None:
        check_folder("--write", folder)
    pieces = [list(read_pieces(path)) for path in arguments.text]  # before seconds of imports and loading

    from infer.loading import load
    from layerskip.checkpoint.vocabulary import most_frequent, store_draft_vocabulary
    from layerskip.model.anatomy import UnsupportedModelError
    from layerskip.model.draft_head import with_draft_head

    loaded = load(ModelOptions.read(arguments), [arguments.exit_layer], needs_vocabulary=False)
    vocab_size = len(loaded.tokenizer)
    if arguments.size >= vocab_size:
        raise InputError(
            f"--size {arguments.size} is not below the model's vocabulary of {vocab_size} tokens: give a smaller one, "
            "or draft with the whole head"
        )
    halves = count_halves(loaded, list(chain.from_iterable(pieces)))
    always = always_in(loaded)
    try:
        token_ids = most_frequent(halves[0] + halves[1], arguments.size, always)
        with_draft_head(loaded.model, loaded.model, token_ids)
    except UnsupportedModelError as error:
        raise InputError(str(error)) from None
    except ValueError as error:
        raise InputError(f"--{error}") from None
    found = candidates(loaded, halves, sizes_around(arguments.size, len(always), vocab_size), arguments.exit_layer)
    show(arguments.model, arguments.size, vocab_size, found)
    if folder is not None and arguments.write:
        Terminal().note(f"wrote {store_draft_vocabulary(folder, token_ids)}, and its mention in config.json")
    else:
        Terminal().note("nothing is written: --write puts the vocabulary of --size tokens beside the weights")
    return 0


def read_pieces(path: Path) -> Iterator[str]:
    """The texts of a .jsonl file, or some lines at a time of any other.

    Raises:
        InputError: if the file cannot be read or holds nothing.
    """
    texts = read_texts(path, "give text like what the model writes")
    if path.suffix == ".jsonl":
        yield from texts
        return
    piece = ""
    for line in texts[0].splitlines(keepends=True):
        piece += line
        if len(piece) >= _PIECE:
            yield piece
            piece = ""
    if piece:
        yield piece


def count_halves(loaded: "Loaded", pieces: Sequence[str]) -> tuple["Tensor", "Tensor"]:
    """Counts (vocab,) of every other piece, and of the rest."""
    from layerskip.checkpoint.vocabulary import count_tokens

    return count_tokens(loaded.tokenizer, pieces[::2]), count_tokens(loaded.tokenizer, pieces[1::2])


def always_in(loaded: "Loaded") -> list[int]:
    """Special tokens, and those that end the output: plain text has none, but the model says them."""
    ends = loaded.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return sorted({*loaded.tokenizer.all_special_ids, *ends})


def sizes_around(size: int, least: int, vocab_size: int) -> list[int]:
    """The size asked for, its halves and doubles, and the whole vocabulary."""
    near = {size // 4, size // 2, size, size * 2, size * 4}
    return [*sorted(each for each in near if max(1, least) <= each < vocab_size), vocab_size]


def candidates(
    loaded: "Loaded", halves: tuple["Tensor", "Tensor"], sizes: Sequence[int], exit_layer: int | None
) -> list[Candidate]:
    """What each size covers and costs."""
    from infer.setting import choose_setting
    from layerskip.checkpoint.vocabulary import coverage, most_frequent
    from layerskip.draft.exits import first_exit
    from layerskip.model.anatomy import decoder_layers

    always = always_in(loaded)
    setting = choose_setting(loaded, exit_layer or "tuned", "tuned")
    exit_layer = None if setting is None else first_exit(loaded.model, setting)
    layers = decoder_layers(loaded.model)[:exit_layer]
    layer_weights = sum(weight.numel() for layer in layers for weight in layer.parameters())
    rows, hidden_size = loaded.model.get_output_embeddings().weight.shape
    found = []
    for size in sizes:
        token_ids = most_frequent(halves[0] + halves[1], size, always)
        unseen = coverage(halves[1], most_frequent(halves[0], size, always)) if halves[1].any() else None
        kept = rows if size == sizes[-1] else size  # the whole head may have more rows than there are tokens
        head_weights = kept * hidden_size
        draft_share = head_weights / (head_weights + layer_weights) if exit_layer else None
        found.append(Candidate(size, coverage(halves[0] + halves[1], token_ids), unseen, kept / rows, draft_share))
    return found


def show(name: str, size: int, vocab_size: int, found: Sequence[Candidate]) -> None:
    """A table for people, then the same as a line of JSON."""
    rows = [
        [
            f"{each.size:,}" + (" (--size)" if each.size == size else " (all)" if each.size == vocab_size else ""),
            f"{each.coverage:.2%}",
            "-" if each.unseen_coverage is None else f"{each.unseen_coverage:.2%}",
            f"{each.head_share:.1%}",
            "-" if each.draft_share is None else f"{each.draft_share:.1%}",
        ]
        for each in found
    ]
    caption = (
        "covered: share of the text's tokens; unseen: the same on text it was not chosen on. of head: rows kept; "
        "of draft: the head's share of the weights a drafted token reads."
    )
    Terminal().table(f"{name}: draft vocabularies", COLUMNS, rows, caption)
    records = [
        {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(each).items()}
        for each in found
    ]
    print(json.dumps({"model": name, "size": size, "candidates": records}))
