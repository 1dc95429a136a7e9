"""Text as it is committed, and who proposed which part of it."""

from collections.abc import Generator
from dataclasses import dataclass

import torch

import layerskip
from infer.errors import InputError
from infer.loading import Loaded
from infer.options import DecodingOptions
from infer.speculation import in_flags
from layerskip.checkpoint.settings import Setting
from layerskip.decode.streaming import Detokenizer


def stream(
    loaded: Loaded,
    input_ids: list[int],
    setting: Setting,
    options: DecodingOptions,
    cache: layerskip.RollbackCache | None = None,
) -> Generator[layerskip.Piece, None, None]:
    """`layerskip.stream` with the options of a command line.

    Args:
        input_ids: the prompt, at least one token.
        cache: holds the first positions of the prompt, or nothing.

    Raises:
        InputError: if the prompt is empty or does not fit the model with what is to follow, or the library
            refuses the call (a checkpoint may ask for beam search, for one).
    """
    check_room(loaded, len(input_ids), options.max_new_tokens)
    prompt = torch.tensor([input_ids], device=loaded.model.device)
    pieces = layerskip.stream(
        loaded.model,
        loaded.tokenizer,
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        **vars(setting),
        **options.generate_arguments(),
    )
    try:
        first = next(pieces)
    except ValueError as error:  # refused before anything was decoded
        raise InputError(in_flags(error)) from error
    yield first
    yield from pieces


def check_room(loaded: Loaded, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise `InputError` if a prompt is empty, or does not fit the model with what is to follow."""
    if num_prompt_tokens == 0:
        raise InputError("the prompt is empty: give at least one token of text")
    limit = loaded.max_positions
    if limit is not None and num_prompt_tokens + max_new_tokens > limit:
        raise InputError(
            f"the prompt has {num_prompt_tokens} tokens and --max-new-tokens is {max_new_tokens}, but the "
            f"model has {limit} positions: shorten the prompt, or lower --max-new-tokens"
        )


@dataclass(frozen=True)
class Span:
    """Part of a step's text: accepted from the draft, or the model's own (a correction or a bonus token)."""

    text: str
    drafted: bool


class Splitter:
    """Cuts pieces where their steps' accepted tokens end; the spans' texts joined are the pieces' texts.

    A character whose bytes two tokens share belongs to the one that completes it.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._detokenizer = Detokenizer(loaded.tokenizer)

    def split(self, piece: layerskip.Piece) -> list[Span]:
        """The spans of the next piece, one or two."""
        if piece.step is None:
            return [Span(piece.text, drafted=False)]
        tokens = piece.step.tokens[0].tolist()
        accepted, own = tokens[: piece.step.num_accepted], tokens[piece.step.num_accepted :]
        end = len(self._detokenizer.push(accepted)) if accepted else 0
        self._detokenizer.push(own)
        spans = [Span(piece.text[:end], drafted=True), Span(piece.text[end:], drafted=False)]
        return [span for span in spans if span.text]
