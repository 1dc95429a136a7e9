"""The exits' objective: the same whatever the chunks, unbiased at a share of the positions, right for every head."""

import copy

import pytest
import torch
import torch.nn.functional as F

from layerskip.model.views import Head, layers_return_tuples
from layerskip.training.objective import (
    IGNORE_INDEX,
    Positions,
    choose_positions,
    exit_loss,
    num_chunks,
    reference_loss,
)
from layerskip.training.recipe import Recipe, prepare
from tests import tiny

HIDDEN, VOCAB = 6, 11


def everything(targets: torch.Tensor, items: int | None = None) -> Positions:
    return choose_positions(targets, 1.0, items, 0, "test")


def some_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, requires_grad=True)
    last = torch.randn(3, 5, VOCAB, generator=generator)
    targets = torch.randint(0, VOCAB, (3, 5), generator=generator)
    targets[0, 3:] = targets[2, 0] = IGNORE_INDEX
    return hidden, weight, last, targets


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("chunks", "recompute"), [(1, True), (2, True), (5, True), (5, False), (40, True)])
def test_chunks_change_neither_loss_nor_gradients(share, chunks, recompute):
    hidden, weight, last, targets = some_batch()
    positions = everything(targets)
    head = lambda h: h @ weight.T  # noqa: E731
    actual = exit_loss(hidden, head, last, positions, chunks, distillation=share, recompute=recompute)
    gradients = torch.autograd.grad(actual, [hidden, weight])
    logits, counted = hidden @ weight.T, targets != IGNORE_INDEX
    hard = F.cross_entropy(logits[counted], targets[counted])
    soft = -(last[counted].softmax(-1) * logits[counted].log_softmax(-1)).sum(-1).mean()
    expected = (1 - share) * hard + share * soft
    torch.testing.assert_close(actual, expected)
    for one, other in zip(gradients, torch.autograd.grad(expected, [hidden, weight]), strict=True):
        torch.testing.assert_close(one, other)


def test_no_more_than_a_chunk_of_logits_exists():
    """Nor is any kept for backward: it computes them again."""
    hidden, weight, last, targets = some_batch()
    widths: list[int] = []

    def head(states):
        widths.append(len(states))
        return states @ weight.T

    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        loss = exit_loss(hidden, head, last, everything(targets), 4, distillation=0.5)
    assert max(widths) == 3  # of 12 counted positions
    assert max(saved) < 3 * VOCAB + HIDDEN * VOCAB  # inputs of the chunks, but no logits
    loss.backward()
    assert len(widths) == 8  # each chunk twice


def test_distillation_has_no_gradient_where_exit_and_model_agree():
    """At q = p the cross-entropy to the model's own distribution is its entropy, and its gradient vanishes."""
    _, _, last, targets = some_batch()
    states = last.clone().requires_grad_()
    loss = exit_loss(states, lambda h: h, last, everything(targets), 1, distillation=1.0)
    entropy = torch.distributions.Categorical(logits=last[targets != IGNORE_INDEX]).entropy().mean()
    torch.testing.assert_close(loss, entropy)
    assert torch.autograd.grad(loss, states)[0].abs().max() < 1e-6


def test_temperature_softens_both_sides_and_keeps_the_gradients_size():
    hidden, weight, last, targets = some_batch()
    loss = exit_loss(hidden, lambda h: h @ weight.T, last, everything(targets), 1, distillation=1.0, temperature=2.0)
    counted = targets != IGNORE_INDEX
    logits = (hidden @ weight.T)[counted]
    expected = -4 * ((last[counted] / 2).softmax(-1) * (logits / 2).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, expected)


def test_a_share_of_the_positions_is_unbiased():
    """Exactly: over all ways to choose, each counted position of a row weighs on average 1, and the ignored 0."""
    targets = torch.tensor([[4, 1, 9, IGNORE_INDEX, 2], [IGNORE_INDEX, 3, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]])
    mean, draws = torch.zeros(10), 4000
    for step in range(draws):
        chosen = choose_positions(targets, 0.4, None, 0, step)
        assert len(chosen.places) == 2 + 1  # ceil(0.4 x 4) of the first row, one of the second
        mean += torch.zeros(10).index_add(0, chosen.places, chosen.weight) / draws
        assert torch.equal(chosen.targets, targets.flatten()[chosen.places])
    torch.testing.assert_close(mean, (targets != IGNORE_INDEX).flatten().float(), atol=0.06, rtol=0)


def test_positions_do_not_depend_on_how_the_batch_is_shared():
    targets = torch.randint(0, 9, (6, 7), generator=torch.Generator().manual_seed(0))
    whole = choose_positions(targets, 0.3, 42, 0, "k", 5)
    parts = [choose_positions(targets[first : first + 2], 0.3, 42, first, "k", 5) for first in (0, 2, 4)]
    index = torch.cat([part.places + 14 * i for i, part in enumerate(parts)])
    assert torch.equal(index, whole.places)
    assert not torch.equal(choose_positions(targets, 0.3, 42, 0, "k", 6).places, whole.places)


def test_a_batch_without_labels_is_zero_and_reaches_every_parameter():
    hidden, weight, last, targets = some_batch()
    none = choose_positions(torch.full_like(targets, IGNORE_INDEX), 0.5, 0, 0, "k")
    loss = exit_loss(hidden, lambda h: h @ weight.T, last, none, 3, distillation=0.5)
    assert loss.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, [hidden, weight]))


def test_the_number_of_chunks_follows_from_shapes_alone():
    assert num_chunks(4, 512, 1.0, 2048) == 1  # small vocabularies need none
    assert num_chunks(4, 512, 1.0, 49152) == 8
    assert num_chunks(4, 512, 0.25, 49152) == 3
    pieces = everything(torch.tensor([[1, 2, IGNORE_INDEX]])).chunks(5)
    assert [piece.weight.sum().item() for piece in pieces] == [1, 1, 0, 0, 0]


def test_autocast_does_not_round_the_distillation():
    _, _, last, targets = some_batch()
    states = torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(3)) * 20
    arguments = (states, lambda z: z, last * 20, everything(targets), 1)
    exact = exit_loss(*arguments, distillation=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exit_loss(*arguments, distillation=1.0), exact)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere2", "gpt2", "opt-projected", "falcon"])
def test_the_head_reads_positions_one_by_one_as_in_a_row(name):
    """Soft-caps, scales and projections right: norm and head see no neighbours."""
    model = tiny.architecture(name)
    head = Head(model)
    head.returns_tuple = layers_return_tuples(model)
    hidden = torch.randn(2, 3, 32)
    with torch.no_grad():
        together, alone = head(hidden), head(hidden.flatten(0, 1)[:, None])
    torch.testing.assert_close(alone[:, 0], together.flatten(0, 1))


def test_reference_loss_is_the_divergence():
    _, _, last, targets = some_batch()
    positions = everything(targets)
    reference = torch.randn(len(positions.places), VOCAB)
    counted = last[targets != IGNORE_INDEX]
    p, q = torch.distributions.Categorical(logits=reference), torch.distributions.Categorical(logits=counted)
    expected = torch.distributions.kl_divergence(p, q).mean()
    torch.testing.assert_close(reference_loss(last, reference, positions), expected)
    torch.testing.assert_close(reference_loss(last, counted, positions), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_a_guarded_model_is_held_to_what_it_was(tiny_llama):
    """The guard is zero at the start, and under it the last layer strays less from the original."""
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    original = copy.deepcopy(tiny_llama)
    strays = []
    for weight in (0.0, 20.0):
        model = copy.deepcopy(original)
        handle = prepare(model, Recipe(max_dropout=0, exits=(2,), reference_weight=weight))
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
        for step in range(5):
            handle.set_step(step)
            model(input_ids=ids, labels=ids).loss.backward()
            if step == 0 and weight:
                assert handle.reference_loss.item() == pytest.approx(0, abs=1e-6)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            p, q = original(input_ids=ids).logits.log_softmax(-1), model.eval()(input_ids=ids).logits.log_softmax(-1)
        strays.append((p.exp() * (p - q)).sum(-1).mean().item())
    assert strays[1] < 0.5 * strays[0]
