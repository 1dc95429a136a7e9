"""How tokens are chosen in a call: what is asked for, and the samplers it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList

from layerskip.exact.sampling import Sampler

if TYPE_CHECKING:
    from layerskip.grammar.processor import Grammar

MAX_SEED = 2**63


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen where transformers has no word for it.

    Attributes:
        acceptance: rule of sampling: "rejection", "block" or "coupled".
        seed: of "coupled": one, or one for each row.
        generator: source of randomness of the other rules: one, or one for each row; None is torch's global one.
        grammar: what the output must be.
    """

    acceptance: str = "rejection"
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for generator in self.generator if isinstance(self.generator, list | tuple) else (self.generator,):
            if generator is not None and not isinstance(generator, torch.Generator):
                raise ValueError(f"generator={self.generator!r} is no torch.Generator, nor a list of one for each row")
        if self.grammar is not None and not hasattr(self.grammar, "processor"):
            raise ValueError(f"grammar={self.grammar!r} is no layerskip.Grammar: make one with Grammar.from_regex(...)")
        if isinstance(self.seed, torch.Tensor):
            object.__setattr__(self, "seed", self.seed.tolist())
        for seed in self.seed if isinstance(self.seed, list | tuple) else (self.seed,):
            if seed is None and self.seed is None:
                continue
            if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < MAX_SEED:
                raise ValueError(f"seed={self.seed!r}: a whole number from 0 to 2**63 - 1, or a list, one for each row")

    def of_row(self, row: int, batch: int) -> Choice:
        """What holds for one row of a batch, prepared by itself."""
        seeds = seeds_of(self, batch)
        own = None if seeds is None else seeds[row]
        return Choice(self.acceptance, own, generators_of(self, batch)[row], self.grammar)


def generators_of(choice: Choice, batch: int) -> list[torch.Generator | None]:
    """One for each row."""
    if not isinstance(choice.generator, Sequence):
        return [choice.generator] * batch
    if len(choice.generator) != batch:
        raise ValueError(f"got {len(choice.generator)} generators for {batch} rows: give one, or one for each")
    return list(choice.generator)


def seeds_of(choice: Choice, batch: int) -> tuple[int, ...] | None:
    """One for each row: rows with the same prompt and the same noise would say the same."""
    if choice.seed is None:
        return None
    if not isinstance(choice.seed, Sequence):
        return tuple(int(choice.seed) + row for row in range(batch))
    if len(choice.seed) != batch:
        raise ValueError(f"got {len(choice.seed)} seeds for {batch} rows: give one, or one for each")
    return tuple(int(seed) for seed in choice.seed)


def samplers_of(processors: LogitsProcessorList, do_sample: bool, choice: Choice, batch: int) -> list[Sampler]:
    """One for all rows, or one for each where each has its own generator."""
    seeds = seeds_of(choice, batch)
    generators = generators_of(choice, batch) if isinstance(choice.generator, Sequence) else [choice.generator]
    return [Sampler(processors, do_sample, generator, choice.acceptance, seeds) for generator in generators]
