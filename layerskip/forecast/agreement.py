"""Every exit against the model, from one teacher-forced pass over text: how often it would be believed.

A greedy draft goes on for as long as exit and model agree, a sampled one with the chance that their distributions
share, so one pass tells how every exit would do with drafts of any length, and which places its trees would cover.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.forecast.cost_model import DraftShape
from layerskip.forecast.target_text import TargetText, runs, warper
from layerskip.forecast.walk import Acceptance, acceptance, dynamic_ends, level_ends
from layerskip.model.anatomy import num_layers, unwrap
from layerskip.model.exit_reader import ExitReader
from layerskip.model.tree import parse_shape


@dataclass
class ExitMeasurement:
    """One exit against the model, over held-out text.

    Attributes:
        loss: nats a token, cross-entropy to the text; nan for a cut head, which leaves tokens out.
        agreement: share of positions whose most probable token is the model's.
        overlap: mean of 1 - TV(p, q), the chance that a token sampled from q is accepted.
        num_tokens: predicted positions.
        cut: the same with the head cut to the draft vocabulary, where one was given.
    """

    loss: float = 0.0
    agreement: float = 0.0
    overlap: float = 0.0
    num_tokens: int = 0
    cut: ExitMeasurement | None = None
    # By run of counted tokens, (length,) or (length, k) each:
    _agrees: list[Tensor] = field(default_factory=list, repr=False)
    _overlaps: list[Tensor] = field(default_factory=list, repr=False)
    _tops: list[Tensor] = field(default_factory=list, repr=False)  # log probabilities of the k most probable tokens
    _ranks: list[Tensor] = field(default_factory=list, repr=False)  # which of them is right; k: none
    _siblings: list[Tensor] = field(default_factory=list, repr=False)  # chance that one of the first 1 .. k is accepted

    def _add(self, logits: Tensor, text: TargetText, token_ids: Tensor | None = None, branches: int = 0) -> None:
        """Count the exit's logits (batch, length, vocab), or those of the tokens (n,) alone that its head has."""
        q = text.of(logits)  # (number, vocab)
        if not len(q):
            return
        p, loss = text.target, float("nan")
        if token_ids is None:
            loss = F.cross_entropy(q, text.token_ids).item()
            agrees = q.argmax(-1) == text.chosen
        else:
            q, p = q[:, token_ids], p[:, token_ids]  # (number, n) each
            agrees = token_ids[q.argmax(-1)] == text.chosen
        log_q = text.warp(q).log_softmax(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1)
        share = len(q) / (self.num_tokens + len(q))  # running means
        self.loss += share * (loss - self.loss)
        self.agreement += share * (agrees.float().mean().item() - self.agreement)
        self.overlap += share * (overlap.mean().item() - self.overlap)
        self.num_tokens += len(q)
        self._agrees.extend(runs(agrees, text.counted))
        self._overlaps.extend(runs(overlap, text.counted))
        if branches:
            self._add_branches(p, log_q, text, token_ids, min(branches, log_q.shape[1]))

    def _add_branches(self, p: Tensor, log_q: Tensor, text: TargetText, token_ids: Tensor | None, k: int) -> None:
        tops, tokens = log_q.topk(k, dim=-1)  # (number, k)
        tokens = tokens if token_ids is None else token_ids[tokens]
        hits = tokens == (text.token_ids if text.sampled else text.chosen)[:, None]
        ranks = torch.where(hits.any(1), hits.to(torch.uint8).argmax(1), k)  # (number,)
        self._tops.extend(runs(tops, text.counted))
        self._ranks.extend(runs(ranks, text.counted))
        if text.sampled:
            self._siblings.extend(runs(sibling_chances(p, log_q.exp(), k), text.counted))

    def acceptance(self, draft: DraftShape, sampled: bool = False) -> Acceptance:
        """What rounds of such drafts would commit, greedily or sampled: the texts are walked as decoding would.

        Chains and static trees are exact where the texts are what decoding writes (greedy), or in the mean over them
        (sampled, where what was accepted is taken to say nothing of what comes). Of dynamic trees the branches that
        leave the text are a guess: see `walk.dynamic_ends`.

        Raises:
            ValueError: for a tree wider than the branches that were measured.
        """
        if isinstance(draft, int):
            chances = self._overlaps if sampled else self._agrees
            return acceptance([level_ends([run] * draft) for run in chances])
        shape, widest = parse_shape(draft), self._tops[0].shape[-1] if self._tops else 0
        if max(shape.widths) > widest:
            raise ValueError(f"tree={draft!r} has more branches than the {widest} that were measured: give branches=")
        if shape.is_dynamic:
            return acceptance([dynamic_ends(*run, shape) for run in zip(self._tops, self._ranks, strict=True)])
        if sampled:
            return acceptance([level_ends([run[:, width - 1] for width in shape.widths]) for run in self._siblings])
        return acceptance([level_ends([run < width for width in shape.widths]) for run in self._ranks])

    def mean_acceptance_length(self, draft: DraftShape, sampled: bool = False) -> float:
        """Tokens a verify step commits, see `acceptance`; nan if no text is as long as a round."""
        return self.acceptance(draft, sampled).length if self.num_tokens else float("nan")


def sibling_chances(p: Tensor, q: Tensor, k: int) -> Tensor:
    """(number, k): the chance that one of the first 1 .. k children is accepted, by `acceptance.walk_sampled`.

    The first child stays with chance Σ min(p, q); one that is refused is distributed as (q - p)_+, and the next one is
    tried with q without it against (p - q)_+. One refused child is drawn for each row: right in the mean.

    Args:
        p, q: (number, n) of target and draft; of p, what lies outside a draft vocabulary may be left out.
    """
    generator = torch.Generator(p.device).manual_seed(0)  # the same text gives the same numbers
    refused_all, chances = p.new_ones(len(p)), []
    tiny = torch.finfo(p.dtype).tiny
    for _ in range(k):
        stays = torch.minimum(p, q).sum(-1).clamp(max=1)  # (number,)
        refused_all = refused_all * (1 - stays)
        chances.append(1 - refused_all)
        noise = torch.empty_like(q).exponential_(generator=generator).clamp_(min=tiny)
        child = ((q - p).clamp(min=0) / noise).argmax(-1, keepdim=True)  # (number, 1)
        p = (p - q).clamp(min=0) / (1 - stays).clamp(min=tiny)[:, None]
        q = q.scatter(1, child, 0.0)
        q = q / q.sum(-1, keepdim=True).clamp(min=tiny)
    return torch.stack(chances, 1)


def measure_exits(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Tensor]],
    exits: Sequence[int] | None = None,
    start: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    draft_vocabulary: Tensor | None = None,
    branches: int = 0,
    sampled: bool = False,
) -> dict[int, ExitMeasurement]:
    """Compare exits with the model over text, teacher-forced. Over the model's own continuations this is what
    decoding will see; over other text acceptance comes out too high or too low.

    Args:
        model: a causal LM; put in eval mode for the moment.
        batches: (batch, length) token ids without padding, at least one; or mappings with `input_ids` and, where
            some tokens do not count or several documents share a row, `labels` (-100: not counted) and
            `position_ids` (from 0 in each document), all (batch, length).
        exits: exit layers; None is all of 1 .. L-1.
        start: the first token that is counted, at least 1; those before it are the prompt.
        temperature: above 0, of the sampling that `overlap` is about; loss and agreement do not depend on it.
        top_p: the same: only the most probable tokens that make up this share.
        draft_vocabulary: (n,) ascending token ids; exits are then measured with a head cut to them as well.
        branches: of the widest tree whose acceptance will be asked for; 0: chains only.
        sampled: whether trees are asked for by sampling, the text having been sampled so; else by greedy decoding.

    Returns:
        A measurement for each exit, and one under key L for the model itself.

    Raises:
        ValueError: if there is no batch.
    """
    inner = unwrap(model)
    last = num_layers(inner)
    exits = range(1, last) if exits is None else exits
    measured = {exit_layer: ExitMeasurement() for exit_layer in (*sorted(set(exits)), last)}
    warp, kept = warper(temperature, top_p), None if draft_vocabulary is None else draft_vocabulary.to(inner.device)
    for exit_layer in exits if kept is not None else ():
        measured[exit_layer].cut = ExitMeasurement()
    training = inner.training
    inner.eval()
    try:
        reader = ExitReader(inner, exits)
        for batch in batches:
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            token_ids, labels = inputs["input_ids"], inputs.get("labels")
            logits, exit_logits = reader.read(token_ids, inputs.get("position_ids"))
            text = TargetText.read(logits, token_ids, start, labels, warp, sampled)
            measured[last]._add(logits, text)
            for exit_layer, early in exit_logits:
                own = measured[exit_layer]
                own._add(early, text, None, branches)
                if own.cut is not None:
                    own.cut._add(early, text, kept, branches)
    finally:
        inner.train(training)
    if not measured[last].num_tokens:
        raise ValueError("no text to measure exits on: give at least one batch of two tokens or more")
    return measured
