"""The draft's own head: rows of the model's output embeddings for a reduced draft vocabulary (see `vocabulary.py`).

The head alone is replaced, in a view of the model, so that scales and soft-caps stay the model's own forward's doing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.checkpoint.vocabulary import check_token_ids
from layerskip.model.anatomy import UnsupportedModelError, anatomy, decoder_layers, device_of
from layerskip.model.views import _shallow_copy, silent, with_layers

# Relative error allowed between the reduced logits and the model's own: another shape of matrix may be another kernel.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALF_TOLERANCE = 2e-2


class DraftHead(nn.Module):
    """The rows of a model's output embeddings for some tokens: hidden (..., hidden_size) -> logits (..., n) over them.

    A copy of n x (hidden_size + 1 if there is a bias) weights in the model's dtype (8,192 tokens of 2,048 in bfloat16:
    32 MiB), made when built: weights that change later, in training, are not seen, and gradients do not flow back.
    What the model does to logits after its head (scales, soft-cap) is not done here: see `with_draft_head`.

    Args:
        model: one whose output embeddings are a plain nn.Linear.
        token_ids: (n,) int64, ascending, each once.

    Raises:
        UnsupportedModelError: if they are something else, or their weights quantised, offloaded or shared out.
        ValueError: if ids are out of range.
    """

    weight: Tensor  # (n, hidden_size)
    bias: Tensor | None  # (n,)

    def __init__(self, model: PreTrainedModel, token_ids: Tensor) -> None:
        super().__init__()
        head = _plain_head(model)
        check_token_ids(token_ids, head.weight.shape[0], "token_ids")
        rows = token_ids.to(head.weight.device)
        self.register_buffer("weight", head.weight.detach()[rows], persistent=False)
        self.register_buffer("bias", None if head.bias is None else head.bias.detach()[rows], persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        # A model spread over devices moves hidden states to its head by a hook on the head, which is not called here.
        return F.linear(hidden.to(self.weight.device), self.weight, self.bias)


def _plain_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    name = type(model).__name__
    if type(head) is not nn.Linear:
        what = "no output embeddings" if head is None else f"output embeddings of type {type(head).__name__}"
        raise UnsupportedModelError(f"{name} has {what}, not a plain Linear: draft with the whole head")
    weight = head.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.is_meta:
        raise UnsupportedModelError(
            f"{name}'s output embeddings are a {type(weight).__name__} of {weight.dtype} on {weight.device}, whose "
            "rows cannot be copied: draft with the whole head"
        )
    return head


def with_draft_head(view: nn.Module, model: PreTrainedModel, token_ids: Tensor) -> nn.Module:
    """A copy of `view` whose logits are over `token_ids` alone: the model's own forward does the rest.

    Its parameters are shared, but for the `DraftHead`, which is made once a model and made anew when the weights
    have changed since (an optimizer's step is noticed, a change through `.data` is not).

    Args:
        view: of `model`, by `views.with_layers`, or `model` itself; it is not touched.
        token_ids: (n,) int64, ascending, each once.

    Raises:
        UnsupportedModelError: if the model's head is not a plain Linear, or its forward does more to logits than
            what is done to each token's alone.
        ValueError: if ids are out of range.
    """
    head = _plain_head(model)
    path = next(name.split(".") for name, module in model.named_modules() if module is head)
    state = [None if w is None else (w.data_ptr(), w.is_inference() or w._version) for w in (head.weight, head.bias)]
    built = _heads.get(model)
    if built is None or built[0] != state or not torch.equal(built[1], token_ids.cpu()):
        draft_head = DraftHead(model, token_ids)
        _self_check(model, path, draft_head, token_ids)
        built = _heads[model] = state, token_ids.cpu(), draft_head
    return _with_module(view, path, built[2])


_heads: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], Tensor, DraftHead]] = weakref.WeakKeyDictionary()


def _with_module(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """A copy along `path` only; everything else is shared."""
    copy = _shallow_copy(module)
    child = module._modules[path[0]]
    assert child is not None
    copy._modules[path[0]] = _with_module(child, path[1:], replacement) if path[1:] else replacement
    return copy


@torch.no_grad()
def _self_check(model: PreTrainedModel, path: list[str], draft_head: DraftHead, token_ids: Tensor) -> None:
    """A few tokens through one layer: the reduced logits must be the whole head's at these ids."""
    view = with_layers(model, anatomy(model).layers_path, decoder_layers(model)[:1])
    tokens = torch.arange(3, 7, device=device_of(model)).remainder(model.get_input_embeddings().num_embeddings)[None]
    asked = {"use_cache": False, **silent(view)}
    expected = view(input_ids=tokens, **asked).logits
    expected = expected[..., token_ids.to(expected.device)].float()
    actual = _with_module(view, path, draft_head)(input_ids=tokens, **asked).logits.float()
    error = float((actual - expected).norm() / expected.norm()) if actual.shape == expected.shape else float("inf")
    if not error <= _TOLERANCE.get(draft_head.weight.dtype, _HALF_TOLERANCE):
        raise UnsupportedModelError(
            f"{type(model).__name__}: logits over {len(token_ids)} tokens differ from the whole head's (relative error "
            f"{error:.1e}), so its forward does more than scale them: draft with the whole head"
        )


def scatter(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits (..., n) over `token_ids` (n,) -> (..., vocab_size), -inf outside: what logits processors expect."""
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    return full.index_copy_(-1, token_ids, logits)
