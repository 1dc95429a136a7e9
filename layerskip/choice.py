"""How tokens are chosen in a call: what is asked for, and the samplers it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList

from layerskip.sampling import Sampler

if TYPE_CHECKING:
    from layerskip.grammar import Grammar


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


def generators_of(choice: Choice, batch: int) -> list[torch.Generator | None]:
    if not isinstance(choice.generator, Sequence):
        return [choice.generator] * batch
    if len(choice.generator) != batch:
        raise ValueError(f"got {len(choice.generator)} generators for {batch} rows: give one, or one for each")
    return list(choice.generator)


def seeds_of(choice: Choice, batch: int) -> tuple[int, ...] | None:
    """One for each row: rows with the same prompt and the same noise would say the same."""
    if choice.seed is None:
        return None
    if isinstance(choice.seed, int):
        return tuple(choice.seed + row for row in range(batch))
    if len(choice.seed) != batch:
        raise ValueError(f"got {len(choice.seed)} seeds for {batch} rows: give one, or one for each")
    return tuple(choice.seed)


def samplers_of(processors: LogitsProcessorList, do_sample: bool, choice: Choice, batch: int) -> list[Sampler]:
    """One for all rows, or one for each where each has its own generator."""
    seeds = seeds_of(choice, batch) if isinstance(choice.seed, int) else choice.seed
    if seeds is not None and not batch <= len(seeds):
        raise ValueError(f"got {len(seeds)} seeds for {batch} rows: give one, or one for each")
    seeds = None if seeds is None else tuple(seeds)
    generators = generators_of(choice, batch) if isinstance(choice.generator, Sequence) else [choice.generator]
    return [Sampler(processors, do_sample, generator, choice.acceptance, seeds) for generator in generators]
