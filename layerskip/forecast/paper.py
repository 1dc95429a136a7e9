"""A round on paper: from an acceptance and a few costs to a speed-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cycle:
    """A draft-then-verify round on paper.

    Attributes:
        tokens: expected tokens that it commits, the verification's own included.
        time: in the unit of the costs.
        speedup: over plain decoding; 1 is no gain.
    """

    tokens: float
    time: float
    speedup: float


def cycle(
    acceptance: float,
    num_draft_tokens: int,
    draft_cost: float,
    verify_cost: float,
    state_cost: float = 0.0,
    plain_cost: float = 1.0,
) -> Cycle:
    """A round if every draft is accepted with the same chance, whatever came before (Leviathan et al. 2023, 3.1).

        tokens  = 1 + a + ... + a^N = (1 - a^(N+1)) / (1 - a)
        time    = N draft + verify + state
        speedup = tokens plain / time

    Args:
        acceptance: a, 0 to 1.
        num_draft_tokens: N, 0 or more.
        draft_cost: of one drafted token: layers [0:E) and the head.
        verify_cost: of verifying N + 1 tokens: layers [E:L) and the head.
        state_cost: what a round takes besides: layers [0:E) for the last draft, the rule, the rollback.
        plain_cost: of a token of plain decoding.

    Raises:
        ValueError: if a value is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is no share: 0 to 1")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is out of range: 0 or more")
    if min(draft_cost, state_cost) < 0 or min(verify_cost, plain_cost) <= 0:
        raise ValueError("costs must be 0 or more, and those of verification and plain decoding above 0")
    tokens = float(sum(acceptance**n for n in range(num_draft_tokens + 1)))
    time = num_draft_tokens * draft_cost + verify_cost + state_cost
    return Cycle(tokens, time, tokens * plain_cost / time)
