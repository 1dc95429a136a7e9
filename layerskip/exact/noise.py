"""Noise keyed by position, for the coupled rule: draft and target choose with the same random numbers.

choose(scores, noise) with Gumbel noise g is a draw from p = softmax(scores) (Gumbel 1954; Yellott 1977): with
E_x = exp(-g_x) independent exponentials of rate 1, argmax(log p_x + g_x) = argmin(E_x / p_x), the first of
exponential clocks of rates p_x, which is clock x with probability p_x / sum p = p_x.

Plain sampling with this noise says y_t = choose(scores after y_1 .. y_{t-1}, noise of position t). The noise of
different positions is independent, so y is a sample of the model. Speculation in coupled mode emits, with
acceptance.walk_chosen, what the target chooses with the noise of that position after the tokens emitted before: the
same function of the same numbers, so the same y, token for token, whatever was drafted. The draft may therefore use the
noise itself: choosing from q with the noise of the position it drafts for, it agrees with the target more often
than two independent draws, always where q = p.

Seeds of different rows must differ, or rows with the same prompt say the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the counter's stride


def choose(scores: Tensor, noise: Tensor) -> Tensor:
    """The token that Gumbel noise picks from softmax(scores): (..., vocab) both, to (...) int64.

    Argmax of scores + noise in exact arithmetic; normalised first, scores of any size leave float32 its digits for
    the noise. A score of -inf is never chosen while another is finite.
    """
    return (scores.log_softmax(dim=-1, dtype=torch.float32) + noise).argmax(dim=-1)


def gumbel(
    seeds: Sequence[int],
    positions: Sequence[Sequence[int]] | Tensor,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard Gumbel noise that is a function of (seed, position) and of nothing else.

    Args:
        seeds: B integers, one for each row.
        positions: (B, n) integers.
        vocab_size: numbers for each position; a longer vector begins with the same numbers.
        device: where the noise goes. It is always drawn on the CPU: a GPU's logarithm rounds otherwise.

    Returns:
        (B, n, vocab_size) float32, finite.
    """
    rows = positions.tolist() if isinstance(positions, Tensor) else positions
    drawn = [_draw(seed, position, vocab_size) for seed, row in zip(seeds, rows, strict=True) for position in row]
    if not drawn:
        return torch.empty(len(seeds), 0, vocab_size, device=device)
    return torch.stack(drawn).view(len(seeds), -1, vocab_size).to(device)


class Noise:
    """The noise of the rows of a batch, each position drawn once: draft and verify of a round share it.

    Holds vocab_size floats for every position asked for until `forget_before`.

    Args:
        seeds: one integer for each row.
        vocab_size: numbers for each position.
        device: where the noise is kept.
    """

    def __init__(self, seeds: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.seeds = tuple(seeds)
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._kept: list[dict[int, Tensor]] = [{} for _ in self.seeds]

    def at(self, row: int, position: int) -> Tensor:
        """Noise of one position of one row: (vocab_size,) float32. Shared: not to be written to."""
        kept = self._kept[row]
        if position not in kept:
            kept[position] = _draw(self.seeds[row], position, self.vocab_size).to(self.device)
        return kept[position]

    def forget_before(self, row: int, position: int) -> None:
        """Free what the row holds of earlier positions; asked for again, it is drawn again, the same."""
        self._kept[row] = {at: noise for at, noise in self._kept[row].items() if at >= position}


def _draw(seed: int, position: int, vocab_size: int) -> Tensor:
    """(vocab_size,) float32 on the CPU. 0.33 ms for 49,152 tokens on one core of a server CPU (AMD EPYC).

    Number x is SplitMix64 (Steele, Lea and Flood 2014) at place x of a stream that begins at a 64-bit hash of the
    key. Not a torch.Generator: on the CPU it looks at 32 bits of its seed, so that among 100,000 positions two would
    be expected to share their noise, and what it draws is not promised to stay the same from version to version.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    bits = _stride(vocab_size) + int.from_bytes(digest, "little", signed=True)  # int64, wraps around
    bits = _shift_xor(bits, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    bits = _shift_xor(bits, 27).mul_(_signed(0x94D049BB133111EB))
    bits = _shift_xor(bits, 31)
    # 40 bits to a uniform on (0, 1). Near 0, where the winners of small probability are decided, floats are dense;
    # near 1 it is held below, so that both logarithms are finite.
    uniform = _shift(bits, 24).to(torch.float32).add_(0.5).mul_(2.0**-40).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # -log(E), E = -log(1 - uniform) exponential


@functools.lru_cache(maxsize=4)
def _stride(vocab_size: int) -> Tensor:
    return torch.arange(vocab_size, device="cpu") * _signed(_GOLDEN)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right: torch's own copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _shift_xor(bits: Tensor, by: int) -> Tensor:
    return bits.bitwise_xor_(_shift(bits, by))


def _signed(word: int) -> int:
    """A 64-bit word as the int64 that torch holds."""
    return word - (1 << 64) if word >> 63 else word
