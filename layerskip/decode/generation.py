"""generate(): a drop-in for `model.generate()` that decodes by self-speculation, and steps()."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from layerskip.checkpoint.settings import Setting
from layerskip.decode.choice import Choice
from layerskip.decode.preparation import prepare_session
from layerskip.decode.session import Session
from layerskip.decode.stats import Statistics
from layerskip.decode.step import Step

if TYPE_CHECKING:
    from layerskip.grammar.processor import Grammar

Tuned = Literal["tuned"]
Auto = Literal["auto"]


@dataclass
class SelfSpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` (scores and logits are the target's; zeros where a row had ended) with the run's
    `statistics`, and those of each row."""

    statistics: Statistics | None = None
    row_statistics: tuple[Statistics, ...] | None = None


def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    exit_layer: int | Auto | Tuned | None = "tuned",
    num_draft_tokens: int | Auto | Tuned = "tuned",
    tree: str | Sequence[int] | Tuned | None = "tuned",
    lookup: str = "tuned",
    draft_stop: float | str | None = "tuned",
    draft_vocabulary: bool | Tuned = "tuned",
    acceptance: str = "rejection",
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    grammar: Grammar | None = None,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> Tensor | SelfSpeculativeOutput:
    """Generate as `model.generate(inputs, **kwargs)` does, drafting with layers [0:exit_layer).

    Greedy output is the model's own, token for token (in float32; in lower precision up to near-ties); sampled
    output has the model's own distribution. A row's output does not depend on the other rows, but for processors that
    count or penalise tokens: they find the padding before a prompt, as transformers' own do.

    Args:
        model: a decoder-only causal LM in eval mode.
        inputs: (B, length) prompt token ids; `input_ids=` and `attention_mask=` work too. What the mask hides is
            taken out of a prompt, wherever it stands.
        exit_layer: layers that draft, 1 .. L-1; "tuned" is what the checkpoint carries; None is plain decoding; "auto"
            chooses in every step, by what the ones before brought in what time.
        num_draft_tokens: most tokens drafted a step; "tuned" is what the checkpoint carries, else 4; "auto" chooses.
        tree: draft candidate trees of this shape instead of a chain: "s3_k2_d6" (steps, branches, tokens verified), or
            widths by depth, (3, 2, 1).
        lookup: draft by prompt lookup: "only", "hybrid", "branch" or "off"; see `Setting`.
        draft_stop: end a chain before a token of which the exit is less sure than this (0 to 1), or by "heuristic" or
            "cost"; see `Setting`.
        draft_vocabulary: whether the exit's head is cut to the checkpoint's draft vocabulary, where it has one.
        acceptance: rule of sampling: "rejection" accepts most; "block" judges a chain as a whole; "coupled" gives what
            plain decoding (`exit_layer=None`) gives with that `seed`, token for token, whatever is drafted.
        seed: of "coupled": one, or one for each row. The tokens of row i are those of seed + i alone.
        generator: source of randomness of the other rules: one, or one for each row; None is torch's global one.
        grammar: what the output must be, see `layerskip.Grammar`.
        streamer: as in transformers, for a single sequence; is put each step's tokens at once.
        **kwargs: anything else `model.generate` takes; `generation_config` may be a list, one for each row; and
            `cache=`, a `RollbackCache` holding the first positions of a single prompt (and, after the call, all but
            the last token).

    Returns:
        (B, length + new) token ids, rows that ended earlier filled up with the padding token; or with
        `return_dict_in_generate=True` a `SelfSpeculativeOutput`.

    Raises:
        UnsupportedModelError, ValueError: before anything is decoded.
    """
    given = locals()
    names = [field.name for field in (*fields(Setting), *fields(Choice)) if field.name in given]
    return run(prepare(model, inputs, streamer=streamer, **kwargs, **{name: given[name] for name in names}), streamer)


def prepare(
    model: nn.Module, inputs: Tensor | None = None, *, streamer: BaseStreamer | None = None, **arguments: Any
) -> Session:
    """What `generate` was asked for, checked: whatever it refuses is refused here, before anything is decoded.

    Args:
        **arguments: as of `generate`.

    Raises:
        UnsupportedModelError, ValueError: as `generate` does.
    """
    drafting = {field.name: arguments.pop(field.name, "tuned") for field in fields(Setting)}
    choice = Choice(**{field.name: arguments.pop(field.name) for field in fields(Choice) if field.name in arguments})
    session = prepare_session(model, inputs, drafting, choice, streamer=streamer, **arguments)
    if streamer is not None and len(session.input_ids) > 1:
        raise ValueError(f"a streamer takes one sequence, not {len(session.input_ids)}: use layerskip.stream")
    return session


def run(session: Session, streamer: BaseStreamer | None = None) -> Tensor | SelfSpeculativeOutput:
    """Decode what was prepared to its end; returns what `generate` does. An error comes from what the call was given:
    a logits processor, a criterion, the streamer."""
    steps: list[list[Step]] = [[] for _ in session.input_ids]
    for step in session.steps():
        steps[step.row].append(step)
        if streamer is not None:
            streamer.put(step.tokens[0].cpu())
    if streamer is not None:
        streamer.end()
    return _output(session, steps)


def _output(session: Session, steps: Sequence[Sequence[Step]]) -> Tensor | SelfSpeculativeOutput:
    config = session.config
    prompts = session.input_ids if session.shown is None else session.shown.to(session.input_ids.device)
    rows = [torch.cat([step.tokens for step in own], dim=1)[0] for own in steps]  # (new,) each
    longest = max(len(row) for row in rows)
    padding = config._pad_token_tensor if config._pad_token_tensor is not None else 0
    new = torch.full((len(rows), longest), int(padding), dtype=prompts.dtype, device=prompts.device)
    for i, row in enumerate(rows):
        new[i, : len(row)] = row
    sequences = torch.cat([prompts, new], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    total, each = Statistics(), []
    for own in steps:
        each.append(Statistics())
        for step in own:
            each[-1].add(step)
        total.merge(each[-1])
    return SelfSpeculativeOutput(
        sequences=sequences,
        scores=_by_token([[s.scores for s in own] for own in steps], longest) if config.output_scores else None,
        logits=_by_token([[s.logits for s in own] for own in steps], longest) if config.output_logits else None,
        statistics=total,
        row_statistics=tuple(each),
    )


def _by_token(outputs: list[list[Tensor | None]], longest: int) -> tuple[Tensor, ...]:
    """As transformers gives them: one (B, vocab) float32 a token."""
    rows = [torch.cat([part for part in row if part is not None], dim=1)[0].float() for row in outputs]  # (new, vocab)
    padded = [torch.nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows]
    return torch.stack(padded, dim=1).unbind(0)


def steps(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    acceptance: str = "rejection",
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    grammar: Grammar | None = None,
    **kwargs: Any,
) -> Iterator[Step]:
    """The same as `generate`, as a generator of `Step`s that may be abandoned at any point; a step for each row that
    is still going, round by round."""
    choice = {"acceptance": acceptance, "seed": seed, "generator": generator, "grammar": grammar}
    return prepare(model, inputs, **choice, **kwargs).steps()
