"""How far speculation would get on a text, told from the chance that each of its tokens is accepted as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.model.tree import Shape

_RESAMPLES = 1000


@dataclass(frozen=True)
class Acceptance:
    """What decoding would commit, text by text.

    Attributes:
        committed: (texts,) expected tokens of all rounds that fit whole.
        rounds: (texts,) expected number of those rounds; 0 for a text shorter than one.
    """

    committed: Tensor
    rounds: Tensor

    @property
    def length(self) -> float:
        """Tokens a verify step commits, bonus included; nan if no text is as long as one round."""
        rounds = float(self.rounds.sum())
        return float(self.committed.sum()) / rounds if rounds else float("nan")

    def interval(self, level: float = 0.9) -> tuple[float, float] | None:
        """Where `length` would lie with other texts of the kind: the percentile bootstrap over texts.

        With a handful of texts it is somewhat too narrow. None for fewer than two.
        """
        known = self.rounds > 0
        committed, rounds = self.committed[known], self.rounds[known]
        if len(rounds) < 2:
            return None
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(rounds), (_RESAMPLES, len(rounds)), generator=generator)
        lengths = committed[drawn].sum(1) / rounds[drawn].sum(1)  # (resamples,)
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=lengths.dtype)
        low, high = lengths.quantile(ends).tolist()
        return low, high


def acceptance(ends: Sequence[Tensor]) -> Acceptance:
    """Decoding walks the texts as if it had written them.

    A round that starts before token t commits j + 1 tokens if just j drafts are accepted; the next round starts
    behind them:

        starts_{t+j+1} += starts_t P_t(just j),    committed = Σ_t starts_t Σ_j P_t(just j) (j + 1)

    Only rounds that fit whole count, or the end of a text would look like rejections.

    Args:
        ends: (length - N, N + 1) of each text: P_t(just j), by the token t that a round starts before.
    """
    depth = ends[0].shape[1] - 1
    padded = pad_sequence([text.double() for text in ends], batch_first=True)  # (texts, longest, N + 1)
    texts, longest = padded.shape[:2]
    starts = padded.new_zeros(texts, longest + depth + 1)
    starts[:, 0] = 1
    for t in range(longest):
        starts[:, t + 1 : t + depth + 2] += starts[:, t : t + 1] * padded[:, t]
    fits = torch.arange(longest) < torch.tensor([len(text) for text in ends])[:, None]
    starts = starts[:, :longest] * fits
    tokens = padded @ torch.arange(1, depth + 2, dtype=padded.dtype)  # (texts, longest) that a round commits
    return Acceptance((starts * tokens).sum(1), starts.sum(1))


def mean_acceptance_length(chances: Sequence[Tensor], num_draft_tokens: int) -> float:
    """Tokens committed per verify step, bonus included, by chains.

    Greedy decoding has chances 0 and 1, and this is its walk. Sampling accepts with chance a_t = 1 - TV(p, q); the
    texts stand for those that would be sampled, and what was accepted before is taken to say nothing about what comes.

    Args:
        chances: (length,) each, of any lengths: for every token of a text the chance that it is accepted as a draft,
            given those before it.
        num_draft_tokens: N, at least 1.

    Returns:
        1 to N + 1; nan if no text is as long as one round.
    """
    if not chances:
        return float("nan")
    return acceptance([level_ends([text] * num_draft_tokens) for text in chances]).length


def level_ends(chances: Sequence[Tensor]) -> Tensor:
    """P_t(just j) of drafts whose every level is accepted by itself, given the one above: chains and static trees.

    Args:
        chances: (length,) for each of the N levels: the chance that one of a node's children is accepted, if the node
            stands before that token.

    Returns:
        (max(0, length - N), N + 1)
    """
    depth, length = len(chances), len(chances[0])
    starts = max(0, length - depth)  # a round takes N + 1 tokens
    levels = torch.stack([level.double()[j : j + starts] for j, level in enumerate(chances)], 1)  # (starts, N)
    reached = torch.cat([levels.new_ones(starts, 1), levels.cumprod(1)], 1)  # P(the first j are accepted)
    return reached - F.pad(reached[:, 1:], (0, 1))


def dynamic_ends(log_probabilities: Tensor, ranks: Tensor, shape: Shape) -> Tensor:
    """P_t(just j), 0 or 1, of a dynamic tree that grows over the text, by the draft's own choice of nodes.

    What the draft would say below a node that is not on the text is not known. It is taken to be what it says on the
    text at that depth, with the same log probabilities: what matters is how sure the draft is there, not of what.

    Args:
        log_probabilities: (length, k) of the draft's most probable tokens, before each token of the text.
        ranks: (length,) which of them the text goes on with; k or more: none.

    Returns:
        (max(0, length - N), N + 1)
    """
    depth = len(shape.widths)
    starts = max(0, len(ranks) - depth)
    weights = log_probabilities.new_zeros(starts, 1)  # (starts, nodes) of the paths
    on_text = torch.ones(starts, 1, dtype=torch.bool)
    all_weights, all_on_text = [], []
    for level, width in enumerate(shape.widths):
        own = log_probabilities[level : level + starts, :width]  # (starts, k)
        hit = ranks[level : level + starts, None] == torch.arange(own.shape[1])  # (starts, k)
        weights = (weights[..., None] + own[:, None]).flatten(1)
        on_text = (on_text[..., None] & hit[:, None]).flatten(1) & (weights > -torch.inf)
        if weights.shape[1] > width:
            weights, kept = weights.topk(width, dim=1)
            on_text = on_text.gather(1, kept)
        all_weights.append(weights)
        all_on_text.append(on_text)
    nodes, on_text = torch.cat(all_weights, 1), torch.cat(all_on_text, 1)  # by depth, as a tree numbers them
    best = nodes.sort(dim=1, descending=True, stable=True).indices[:, : shape.num_tree_tokens]
    accepted = on_text.gather(1, best).sum(1)  # a path is never kept without what is above it
    return F.one_hot(accepted, depth + 1).double()
