"""Batches and trees through generate(): every row says what it says alone, whatever stands beside it."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import layerskip
from layerskip.decode.door import padded_left
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.model.block import Sight, place
from layerskip.model.cache import RollbackCache
from layerskip.model.stages import Stages
from layerskip.model.tree import parse_shape
from tests import tiny

WAYS = {
    "chain": {"num_draft_tokens": 3},
    "tree": {"tree": (2, 2, 1)},
    "dynamic tree": {"tree": "s3_k2_d5"},
    "lookup": {"lookup": "only", "exit_layer": None},
    "hybrid": {"lookup": "hybrid", "num_draft_tokens": 2},
    "branch": {"lookup": "branch", "tree": (2, 1)},
    "stop": {"num_draft_tokens": 4, "draft_stop": 0.3},
    "heuristic stop": {"num_draft_tokens": 6, "draft_stop": "heuristic"},
    "cost stop": {"num_draft_tokens": 6, "draft_stop": "cost"},
    "plain": {"exit_layer": None},
}
GREEDY = {"do_sample": False, "max_new_tokens": 20}


def batch(side: str = "left", lengths=(14, 9, 3)):
    """Prompts of unequal length, padded on one side, and their mask."""
    ids = torch.randint(3, 64, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))
    places = torch.arange(max(lengths))
    real = torch.stack([places >= max(lengths) - n if side == "left" else places < n for n in lengths])
    return ids * real, real.long()


def decoded(model, ids, mask, **kwargs):
    return layerskip.generate(model, ids, attention_mask=mask, **{"exit_layer": 2, **GREEDY, **kwargs})


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize("way", ["chain", "dynamic tree", "hybrid"])
def test_a_padded_batch_is_generates(name, way):
    """Windows of 8 are crossed; rows end at different lengths."""
    if name == "bloom" and way == "dynamic tree":
        pytest.skip("refused, see below")
    model, (ids, mask) = tiny.architecture(name), batch()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(decoded(model, ids, mask, **WAYS[way]), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_are_what_they_are_alone(name, way, side):
    model, (ids, mask) = tiny.architecture(name, seed=1), batch(side)
    together = decoded(model, ids, mask, eos_token_id=[7, 8, 9], **WAYS[way])
    for row, real in zip(range(3), mask.bool(), strict=True):
        prompt = ids[row, real][None]
        alone = model.generate(prompt, eos_token_id=[7, 8, 9], **GREEDY)[0, prompt.shape[1] :]
        assert torch.equal(together[row, 14 : 14 + len(alone)], alone)
        assert not together[row, 14 + len(alone) :].any()  # padding


@pytest.mark.parametrize("way", WAYS)
def test_coupled_rows_are_plain_samplings(tiny_llama, way):
    ids, mask = batch()
    kwargs = {"do_sample": True, "temperature": 1.3, "top_k": 20, "acceptance": "coupled"}
    together = decoded(tiny_llama, ids, mask, seed=3, **kwargs, **WAYS[way])
    plain = decoded(tiny_llama, ids, mask, seed=3, **kwargs, exit_layer=None)
    assert torch.equal(together, plain)
    for row, real in zip(range(3), mask.bool(), strict=True):
        alone = decoded(tiny_llama, ids[row, real][None], None, seed=3 + row, **kwargs, exit_layer=1)
        new = alone[0, int(real.sum()) :]
        assert torch.equal(together[row, 14 : 14 + len(new)], new)
    assert not torch.equal(together, decoded(tiny_llama, ids, mask, seed=4, **kwargs, **WAYS[way]))


def test_every_row_has_settings_of_its_own(tiny_llama):
    """Greedy beside sampled, other penalties, other lengths, other ends."""
    ids, mask = batch()
    configs = [
        GenerationConfig(max_new_tokens=5, do_sample=False, repetition_penalty=1.5),
        GenerationConfig(max_new_tokens=20, do_sample=True, temperature=0.7, top_p=0.9),
        GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=[5, 6, 7, 8, 9, 10, 11, 12]),
    ]
    kwargs = {"attention_mask": mask, "exit_layer": 2, "acceptance": "coupled", "seed": 8}
    together = layerskip.generate(tiny_llama, ids, generation_config=configs, **kwargs)
    for row, config in enumerate(configs):
        own = {**kwargs, "attention_mask": mask[row : row + 1], "seed": 8 + row, "exit_layer": None}
        alone = layerskip.generate(tiny_llama, ids[row : row + 1], generation_config=config, **own)
        assert torch.equal(together[row, : alone.shape[1]], alone[0])
    with pytest.raises(ValueError, match="2 generation configs for 3 prompts"):
        layerskip.generate(tiny_llama, ids, generation_config=configs[:2], exit_layer=2)


def test_every_row_has_a_generator_of_its_own(tiny_llama):
    ids, mask = batch(lengths=(6, 6))

    def sample(seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return decoded(tiny_llama, ids, mask, do_sample=True, generator=generators, num_draft_tokens=3)

    first = sample((1, 2))
    assert torch.equal(first, sample((1, 2)))
    assert not torch.equal(first[1], sample((1, 3))[1])
    with pytest.raises(ValueError, match="got 1 generators for 2 rows"):
        sample((1,))


@pytest.mark.parametrize("asked", ["call", "config", "checkpoint"])
def test_several_sequences_of_a_row_with_a_config_of_its_own_are_refused(asked):
    model, (ids, mask) = tiny.llama(), batch()
    several = {"num_return_sequences": 2}
    model.generation_config.num_return_sequences = 2 if asked == "checkpoint" else None
    config = GenerationConfig(do_sample=True, max_new_tokens=4, **several if asked == "config" else {})
    with pytest.raises(ValueError, match="num_return_sequences=2 does not go with a generation config for each row"):
        layerskip.generate(
            model, ids, attention_mask=mask, generation_config=[config] * 3, exit_layer=2,
            **several if asked == "call" else {},
        )  # fmt: skip


def test_num_return_sequences(tiny_llama):
    ids, _ = batch(lengths=(6, 6))
    kwargs = {"do_sample": True, "num_return_sequences": 3, "acceptance": "coupled", "seed": 1}
    output = decoded(tiny_llama, ids, None, **kwargs)
    assert output.shape == (6, 26)
    assert torch.equal(output[:, :6], ids.repeat_interleave(3, 0))
    assert len({tuple(row.tolist()) for row in output[:3]}) == 3
    assert torch.equal(
        output, decoded(tiny_llama, ids.repeat_interleave(3, 0), None, do_sample=True, seed=1, acceptance="coupled")
    )


def test_scores_and_statistics_of_every_row(tiny_llama):
    ids, mask = batch()
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": [7, 8, 9]}
    kwargs |= {"repetition_penalty": 1.3}
    expected = tiny_llama.generate(ids, attention_mask=mask, **GREEDY, **kwargs)
    for way in ("chain", "dynamic tree"):
        actual = decoded(tiny_llama, ids, mask, **kwargs, **WAYS[way])
        assert torch.equal(actual.sequences, expected.sequences)
        new = [int((row != 0).sum()) for row in actual.sequences[:, 14:]]
        for name in ("scores", "logits"):
            ours, theirs = torch.stack(getattr(actual, name), 1), torch.stack(getattr(expected, name), 1)
            assert ours.shape == theirs.shape
            for row, n in enumerate(new):
                torch.testing.assert_close(ours[row, :n], theirs[row, :n], atol=2e-3, rtol=1e-3)
        assert [own.num_tokens for own in actual.row_statistics] == new
        assert actual.statistics.num_tokens == sum(new)
        assert actual.statistics.num_accepted <= actual.statistics.num_drafted


def test_a_finished_row_costs_nothing(tiny_llama, monkeypatch):
    """The batch shrinks to the rows still going, and their caches with it."""
    ids, mask = batch()
    sizes = []
    verify = Stages.verify
    monkeypatch.setattr(Stages, "verify", lambda self, ids, *rest: sizes.append(len(ids)) or verify(self, ids, *rest))
    configs = [GenerationConfig(max_new_tokens=n, do_sample=False) for n in (2, 6, 20)]
    layerskip.generate(tiny_llama, ids, attention_mask=mask, generation_config=configs, exit_layer=2)
    sizes = sizes[sizes.index(3) :]  # before, the stages check themselves
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 3
    assert sizes[-1] == 1


def test_processors_of_a_row_know_which_row_it_is(tiny_llama):
    def allowed(row, ids):
        return [3 + row, 10 + row + int(ids[-1]) % 5]

    ids, mask = batch()
    kwargs = {"prefix_allowed_tokens_fn": allowed, "encoder_repetition_penalty": 1.4}
    expected = tiny_llama.generate(ids, attention_mask=mask, **GREEDY, **kwargs)
    for way in ("chain", "tree"):
        assert torch.equal(decoded(tiny_llama, ids, mask, **kwargs, **WAYS[way]), expected)


def test_what_spans_prompt_and_output_is_seen_wherever_padding_stands(tiny_llama):
    """Bans, n-grams and biases that begin in the prompt hold in a batch padded on the right, too."""
    ids, mask = batch("right")
    left, left_mask = padded_left(ids, mask)
    last = [int(ids[row, n - 1]) for row, n in enumerate((14, 9, 3))]
    kwargs = {"bad_words_ids": [[token, t] for token in last for t in range(3, 50)], "no_repeat_ngram_size": 2}
    kwargs["sequence_bias"] = {(token, 55): 9.0 for token in last}
    for way in ("chain", "tree", "hybrid"):
        right = decoded(tiny_llama, ids, mask, **kwargs, **WAYS[way])
        assert torch.equal(right[:, 14:], decoded(tiny_llama, left, left_mask, **kwargs, **WAYS[way])[:, 14:])
        assert torch.equal(right[:, :14], ids)
    expected = tiny_llama.generate(left, attention_mask=left_mask, **GREEDY, **kwargs)
    assert torch.equal(right[:, 14:], expected[:, 14:])


class Kept(BaseStreamer):
    """What a streamer is put."""

    def __init__(self) -> None:
        self.put_there: list[list] = []

    def put(self, value) -> None:
        self.put_there.append(value.tolist())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("prompt", [[9, 8, 7, 0, 0], [9, 0, 0, 8, 7], [0, 0, 9, 8, 7]])
def test_a_streamer_is_put_the_prompt_once_where_padding_is_found_out(tiny_llama, prompt):
    streamer = Kept()
    layerskip.generate(
        tiny_llama, torch.tensor([prompt]), exit_layer=2, max_new_tokens=5, do_sample=False, streamer=streamer
    )
    assert streamer.put_there[0] == [prompt]
    assert all(isinstance(token, int) for tokens in streamer.put_there[1:] for token in tokens)


def test_padding_that_transformers_finds_out_by_itself(tiny_llama):
    """Without a mask: the same as with one, wherever it stands, also where a processor leaves out padding."""
    ids, mask = batch("right")
    for rows in (slice(0, 3), slice(1, 2)):
        for way in ("chain", "tree"):
            kwargs = {"repetition_penalty": 0.6, "pad_token_id": 0, **WAYS[way]}
            told = decoded(tiny_llama, ids[rows], mask[rows], **kwargs)
            assert torch.equal(decoded(tiny_llama, ids[rows], None, **kwargs), told)
            assert torch.equal(told[:, :14], ids[rows])


def test_a_tree_wider_than_the_vocabulary(tiny_llama):
    ids, mask = batch()
    expected = tiny_llama.generate(ids, attention_mask=mask, **GREEDY)
    for tree in ((65,), "s2_k65_d70"):
        assert torch.equal(decoded(tiny_llama, ids, mask, tree=tree), expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seed": [1, 2, 3, 4]}, "got 4 seeds for 3 rows"),
        ({"seed": "abc"}, "a whole number from 0"),
        ({"seed": True}, "a whole number from 0"),
        ({"seed": -1}, "a whole number from 0"),
        ({"seed": 2**64}, "a whole number from 0"),
        ({"generator": 3}, r"no torch\.Generator"),
        ({"grammar": "abc"}, r"no layerskip\.Grammar"),
        ({"generation_config": {}}, "no GenerationConfig"),
        ({"generation_config": [None] * 3}, "for each row"),
        ({"draft_stop": True}, "no probability"),
        ({"tree": 5}, "no list of widths"),
        ({"draft_vocabulary": "yes"}, "neither True nor False"),
        ({"num_draft_tokens": 10**14}, "more than 256"),
        ({"attention_mask": torch.ones(1, 14)}, r"shape \(1, 14\)"),
    ],
)
def test_values_that_are_none_are_told(tiny_llama, kwargs, message):
    ids, mask = batch()
    with pytest.raises(ValueError, match=message):
        layerskip.generate(tiny_llama, ids, **{"attention_mask": mask, "exit_layer": 2, "do_sample": True, **kwargs})


@pytest.mark.parametrize("way", WAYS)
def test_guidance_is_generates(tiny_llama, way):
    """Classifier-free guidance, with and without a negative prompt, each row its own."""
    ids, mask = batch(lengths=(9, 9))
    negative = torch.randint(3, 64, (2, 4), generator=torch.Generator().manual_seed(1))
    for kwargs in ({"guidance_scale": 1.7}, {"guidance_scale": 1.7, "negative_prompt_ids": negative}):
        first = kwargs | ({"negative_prompt_ids": negative[:1]} if "negative_prompt_ids" in kwargs else {})
        alone = tiny_llama.generate(ids[:1], **GREEDY, **first)
        assert torch.equal(decoded(tiny_llama, ids[:1], mask[:1], **first, **WAYS[way]), alone)
        together = decoded(tiny_llama, ids, mask, **kwargs, **WAYS[way])
        assert torch.equal(together, tiny_llama.generate(ids, attention_mask=mask, **GREEDY, **kwargs))


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


class Favour(LogitsProcessor):
    """Looks at the prefix; for rows of any number."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -1] + 1) % 64] += 5
        return scores


@pytest.mark.parametrize("way", WAYS)
def test_a_processor_of_the_users(tiny_llama, way):
    ids, mask = batch()
    kwargs = {"logits_processor": LogitsProcessorList([Favour()])}
    expected = tiny_llama.generate(ids, attention_mask=mask, **GREEDY, **kwargs)
    assert torch.equal(decoded(tiny_llama, ids, mask, **kwargs, **WAYS[way]), expected)


def test_what_batches_and_trees_refuse(tiny_llama):
    ids, mask = batch()
    with pytest.raises(ValueError, match="single sequence, not with 3"):
        decoded(tiny_llama, ids, mask, cache=RollbackCache(4))
    with pytest.raises(ValueError, match=r"use layerskip\.stream"):
        decoded(tiny_llama, ids, mask, streamer=Silent())
    with pytest.raises(ValueError, match="2 seeds for 3 rows"):
        decoded(tiny_llama, ids, mask, do_sample=True, acceptance="coupled", seed=[1, 2])
    with pytest.raises(ValueError, match="needs a seed"):
        decoded(tiny_llama, ids, mask, do_sample=True, acceptance="coupled")
    with pytest.raises(ValueError, match="choose one of rejection, block, coupled"):
        decoded(tiny_llama, ids, mask, do_sample=True, acceptance="lossy")
    with pytest.raises(UnsupportedModelError, match="draft a chain"):
        decoded(tiny.architecture("bloom"), ids, mask, tree=(2, 1))


def test_attention_without_masks_is_refused_by_name(tiny_llama):
    tiny_llama.config._attn_implementation = "flash_attention_2"
    stages = Stages(tiny_llama, None)
    with pytest.raises(UnsupportedModelError, match="flash_attention_2 takes no mask of its own for branches"):
        stages.check_blocks(branching=True)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("s3_k2", "write s4_k2_d6"),
        ("s4_k2_d3", r"from s \(4\) to s x k \(8\)"),
        ("s4_k2_d9", r"from s \(4\) to s x k \(8\)"),
        ((), "no list of widths"),
        ((2, 0), "no list of widths"),
        ((9, 9, 9), "more than 256"),
    ],
)
def test_shapes_that_are_none(tree, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(tree)


def test_shapes():
    assert parse_shape((3, 2, 1)).num_nodes == 3 + 6 + 6
    assert parse_shape("s3_k2_d4").widths == (2, 2, 2)
    assert parse_shape((1, 1)).is_chain
    assert parse_shape((3, 2, 1)).cut(2).widths == (3, 2)


# --- where tokens stand ---


def test_siblings_never_see_each_other():
    """Root, two children, and one child below the second; of a row of 3 and one of 5 positions."""
    depths = torch.tensor([[0, 1, 1, 2]] * 2)
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool().expand(2, 4, 4)
    block = place(torch.tensor([3, 5]), depths, ancestors, slice(1, None))
    assert block.slots.tolist() == [[4, 5, 6], [6, 7, 8]]
    assert block.positions.tolist() == [[4, 4, 5], [6, 6, 7]]
    assert block.end == 9
    seen = [[row.nonzero()[:, 0].tolist() for row in rows] for rows in block.visible]
    assert seen == [
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6]],
        [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 7], [0, 1, 2, 3, 4, 5, 7, 8]],
    ]


def test_windows_and_chunks_count_positions_not_slots():
    depths = torch.tensor([[0, 1, 1, 2]])
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]).bool()
    block = place(torch.tensor([6]), depths, ancestors)

    def seen(sight):
        return [(row == 0).nonzero()[:, 0].tolist() for row in block.mask(sight, torch.float32)[0, 0]]

    assert seen(Sight(window=3)) == [[4, 5, 6], [5, 6, 7], [5, 6, 8], [6, 8, 9]]
    assert seen(Sight(chunk=4)) == [[4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 8], [9]]
