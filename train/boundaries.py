"""Whether a model keeps the documents of a block apart, by trying it.

Given positions that begin again with each document, transformers gives most models a mask in which a document sees
itself alone. Whether one does depends on its family (OPT and GPT-OSS build their masks without looking at positions,
Bloom takes none) and on its attention (flash attention looks at them only in batches of one). Nothing says so when
it does not, hence the trial.
"""

import inspect

import torch

from layerskip.model.anatomy import unwrap
from train.blocks import position_ids
from train.model import evaluating

_LENGTHS = 7, 9  # tokens of the two documents of the trial
_LEAK = 0.01  # of what leaks without boundaries: room for rounding alone


@torch.no_grad()
def why_not_apart(model: torch.nn.Module, rows: int, device: torch.device) -> str:
    """Why documents of one block would see each other, in a batch of `rows` blocks; empty if they do not.

    The tokens of a row's first document are changed, and the second one's logits must not. Every process calls
    this: a sharded model needs all of them in each forward.
    """
    inner = unwrap(model)
    name = type(inner).__name__
    if "position_ids" not in inspect.signature(type(inner).forward).parameters:
        return f"{name} takes no positions"
    first, second = _LENGTHS
    length, vocab_size = first + second, inner.config.get_text_config().vocab_size
    ids = torch.arange(length, device=device).repeat(rows, 1) * 7 % vocab_size
    changed = ids.clone()
    changed[:, :first] = (changed[:, :first] + 1) % vocab_size
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, [0, first]] = True
    positions = position_ids(starts).to(device)
    with evaluating(model):
        apart, together = (
            (_logits(model, ids, places) - _logits(model, changed, places))[:, first:].abs().max()
            for places in ({"position_ids": positions}, {})
        )
    if apart <= _LEAK * together:
        return ""
    attention = inner.config.get_text_config()._attn_implementation
    return f"{name} with {attention} attention lets them see each other in batches of {rows}"


def _logits(model: torch.nn.Module, ids: torch.Tensor, places: dict[str, torch.Tensor]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **places).logits  # (rows, length, vocab)
    return logits.float()
