"""Rows that join a running batch: each is continued as it is alone, whenever it came and whoever was there."""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

from layerskip.checkpoint.resolving import resolve_setting
from layerskip.decode.decoding import decode
from layerskip.decode.joining import Newcomer, join
from layerskip.decode.stopping import StopRule
from layerskip.draft.drafters import drafter_for
from layerskip.draft.remembered import adaptive_for
from layerskip.exact.sampling import Sampler
from layerskip.model.adapters import attach_adapters
from layerskip.model.rows import Rows
from layerskip.model.stages import Stages
from tests import tiny
from tests.test_layerskip_batch import WAYS

ENDS = [7, 8, 9]


class Ends(StopRule):
    def __init__(self) -> None:
        super().__init__(StoppingCriteriaList())
        self.eos_token_ids = set(ENDS)


def newcomers(count: int, seed: int, sampler: Sampler) -> list[Newcomer]:
    """Prompts of 1 to 14 tokens, up to 20 new ones."""
    draw = random.Random(seed)
    lengths = [1, *(draw.randint(1, 14) for _ in range(count - 1))]
    prompts = [torch.tensor([draw.randrange(10, 64) for _ in range(length)]) for length in lengths]
    return [Newcomer(prompt, len(prompt) + draw.randint(1, 20), sampler, Ends()) for prompt in prompts]


def continuously(model, way: dict, waiting: list[Newcomer], seed: int, most: int = 4) -> list[list[int]]:
    """New tokens of every row, in the order of coming: at random moments some of those that wait join."""
    setting = resolve_setting(model, **{"exit_layer": 2, "num_draft_tokens": 3, **way})
    stages, draw = Stages(model, setting.exit_layer), random.Random(seed)
    waiting, outputs = list(waiting), {}
    sizes = []
    while waiting:
        first, waiting[:] = waiting[:2], waiting[2:]

        def admit(going: int) -> list[Newcomer]:
            sizes.append(going)
            count = min(draw.randint(0, 2), most - going) if draw.random() < 0.5 else 0
            taken, waiting[:] = waiting[:count], waiting[count:]
            return taken

        offset, length = len(outputs), len(outputs) + len(first)
        weighing = adaptive_for(stages, setting, sampled=False) if setting.weighs else nullcontext()
        with weighing as adaptive:
            drafter = drafter_for(setting, adaptive=adaptive)
            steps = decode(
                stages,
                [row.prompt for row in first],
                [row.sampler for row in first],
                [row.stop for row in first],
                drafter=drafter,
                max_length=[row.max_length for row in first],
                cache=stages.new_cache(4),
                admit=admit,
            )
            outputs |= {number: [] for number in range(offset, length)}
            for step in steps:
                outputs.setdefault(offset + step.row, []).extend(step.tokens[0].tolist())
    assert max(sizes) > 1, "rows were decoded together"
    return [outputs[number] for number in range(len(outputs))]


def alone(model, row: Newcomer, **kwargs) -> list[int]:
    config = GenerationConfig(do_sample=False, max_length=row.max_length, eos_token_id=ENDS, pad_token_id=0, **kwargs)
    prompt = row.prompt[None]
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[
        0, prompt.shape[1] :
    ].tolist()


CASES = [("llama", way) for way in WAYS] + [("gemma3", "dynamic tree"), ("gemma3", "hybrid"), ("gpt2", "chain")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_row_is_continued_as_it_is_alone(name, way):
    model, rows = tiny.architecture(name, seed=1), newcomers(9, 1, Sampler())
    assert continuously(model, WAYS[way], rows, 1) == [alone(model, row) for row in rows]


@pytest.mark.parametrize("way", ["chain", "tree", "branch"])
def test_rows_that_join_pass_through_an_exits_blocks(way, tiny_llama):
    """They are what they are alone, and the cache holds as many positions of the blocks as of the layers (or it could
    not be rolled back to all that was committed)."""
    attach_adapters(tiny_llama, [2], blocks=2)
    rows = newcomers(9, 1, Sampler())
    assert continuously(tiny_llama, WAYS[way], rows, 1) == [alone(tiny_llama, row) for row in rows]


@pytest.mark.parametrize("way", ["dynamic tree", "hybrid"])
def test_processors_see_the_newcomers_own_prefix(way, tiny_llama):
    sampler = Sampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)]))
    rows = newcomers(5, 3, sampler)
    expected = [alone(tiny_llama, row, repetition_penalty=1.7) for row in rows]
    assert expected != [alone(tiny_llama, row) for row in rows]
    assert continuously(tiny_llama, WAYS[way], rows, 3) == expected


def test_noise_by_row_number_is_refused(tiny_llama):
    rows = newcomers(5, 0, Sampler(do_sample=True, acceptance="coupled", seeds=(0, 1)))
    with pytest.raises(ValueError, match="no row can join"):
        continuously(tiny_llama, {}, rows, 0)


def test_a_prompt_that_leaves_no_room_is_refused(tiny_llama):
    stages = Stages(tiny_llama, 2)
    going, *_ = newcomers(2, 0, Sampler())
    full = [replace(going, max_length=len(going.prompt))]
    rows = Rows([going.prompt], [going.prompt], [going.max_length])
    with pytest.raises(ValueError, match="max_length=1 leaves no room behind a prompt of 1 tokens"):
        join(full, stages, stages.new_cache(), rows, None)
