"""Exits on text: loss, perplexity, agreement and overlap, in one pass over windows of it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infer.benchmarking.questions import encode
from infer.errors import InputError
from infer.evaluation import MODEL_WINDOW, EvaluateOptions
from infer.loading import Loaded
from infer.terminal import Terminal
from infer.tune import TuneOptions
from infer.tuning.evidence import continuations
from layerskip.checkpoint.vocabulary import draft_vocabulary_of
from layerskip.forecast import ExitMeasurement, measure_exits
from layerskip.model.adapters import adapter_at
from layerskip.model.anatomy import num_layers
from layerskip.training.objective import IGNORE_INDEX


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first counted) of the windows over a text: every token but the first is counted once.

    From the second window on, a counted token has at least `window` - `stride` tokens before it. The last window ends
    with the text and reaches back as far as the others.
    """
    counted, stop = 1, min(window, num_tokens)
    while counted < num_tokens:
        yield max(0, stop - window), stop, counted
        counted, stop = stop, min(stop + stride, num_tokens)


def text_inputs(
    loaded: Loaded, texts: Sequence[str], options: EvaluateOptions
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Inputs of `measure_exits`, (1, length) each, and how the texts were read, for JSON.

    Raises:
        InputError: if a window does not fit the model, or no text has two tokens.
    """
    window, limit = options.window, loaded.max_positions
    if window is not None and limit is not None and window > limit:
        raise InputError(f"--window {window} is more than the model's {limit} positions: give {limit} or less")
    window = window or min(MODEL_WINDOW, limit or MODEL_WINDOW)
    stride = options.stride or max(1, window // 2)
    if stride >= window:
        raise InputError(f"--stride {stride} must be below the window of {window} tokens")
    left = options.max_tokens or math.inf
    inputs, num_texts = [], 0
    for text in texts:
        ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        ids = ids[: int(min(left, len(ids)))]
        left -= len(ids)
        num_texts += len(ids) > 1
        for start, stop, counted in windows(len(ids), window, stride):
            part = torch.tensor([ids[start:stop]], device=loaded.model.device)  # (1, length)
            labels = part.clone()
            labels[:, : counted - start] = IGNORE_INDEX
            inputs.append({"input_ids": part, "labels": labels})
    if not inputs:
        raise InputError("no text has two tokens, so there is nothing to predict: give --text FILE")
    return inputs, {"num_texts": num_texts, "window": window, "stride": stride}


def own_inputs(loaded: Loaded, texts: Sequence[str], options: EvaluateOptions) -> list[dict[str, Tensor]]:
    """The same for what the model itself writes, greedily, after the prompts."""
    decoding = TuneOptions(max_new_tokens=options.max_new_tokens, max_draft_tokens=0)
    return continuations(loaded, decoding, encode(loaded, texts, options))


def measure_text(
    loaded: Loaded, texts: Sequence[str], options: EvaluateOptions, exits: Sequence[int], terminal: Terminal
) -> dict[str, Any]:
    """For JSON: {"conditions": of the text, "exits": a record for each exit and head, the model itself last}.

    Raises:
        InputError: if the texts cannot be used.
    """
    if options.own_text:
        with terminal.progress(1) as advance:
            inputs = own_inputs(loaded, texts, options)
            advance("continued the prompts")
        scope: dict[str, Any] = {"num_texts": len(inputs), "max_new_tokens": options.max_new_tokens}
    else:
        inputs, scope = text_inputs(loaded, texts, options)
    vocabulary = draft_vocabulary_of(loaded.model)
    with terminal.progress(len(inputs)) as advance:

        def told() -> Iterator[dict[str, Tensor]]:
            for each in inputs:
                yield each
                advance("comparing the exits")

        try:
            measured = measure_exits(loaded.model, told(), exits, draft_vocabulary=vocabulary)
        except ValueError as error:  # a model that ends its texts at once, or that cannot be cut
            raise InputError(str(error)) from None
    records = [record for exit_layer, found in measured.items() for record in _records(loaded, exit_layer, found)]
    last = measured[num_layers(loaded.model)]
    scope |= {"own_text": options.own_text, "num_tokens": last.num_tokens}
    return {"conditions": scope, "exits": records}


def _records(loaded: Loaded, exit_layer: int, found: ExitMeasurement) -> Iterator[dict[str, Any]]:
    is_model = exit_layer == num_layers(loaded.model)
    heads = [("whole", found), *([("cut", found.cut)] if found.cut is not None else [])]
    for head, measured in heads:
        loss = measured.loss if math.isfinite(measured.loss) else None
        yield {
            "exit_layer": exit_layer,
            "head": head,
            "adapter": not is_model and adapter_at(loaded.model, exit_layer) is not None,
            "loss": None if loss is None else round(loss, 6),
            "perplexity": None if loss is None or loss > 700 else round(math.exp(loss), 4),  # beyond, it overflows
            "agreement": round(measured.agreement, 6),
            "overlap": round(min(1.0, measured.overlap), 6),
            "num_tokens": measured.num_tokens,
        }
