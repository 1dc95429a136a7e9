"""What a decoding keeps of the tokens: bytes of keys and values, and which of them are there for speculation alone."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from infer.benchmarking.arms import Arm
from layerskip.checkpoint.settings import Setting
from layerskip.model.cache import RollbackCache
from layerskip.model.stages import Stages


@dataclass(frozen=True)
class KeyValueBytes:
    """Bytes of one sequence's cache where it is longest.

    Attributes:
        total: of all layers.
        speculation: of these, what plain decoding does not keep: the slots of the tokens of one draft, and of arms
            that have one a second cache, of the layers that draft or of another model. Ours have none: the early
            layers' keys and values exist once, and serve the next draft and the verification alike.
    """

    total: int
    speculation: int


def bytes_by_layer(model: PreTrainedModel) -> list[int]:
    """What one position takes in the cache of each layer."""
    stages = Stages(model, None)
    cache: RollbackCache = stages.new_cache()
    with torch.inference_mode():
        stages.prefill(torch.zeros(1, 1, dtype=torch.long, device=model.device), cache)
    sizes = []
    for layer in cache.layers:
        states = [layer.keys, layer.values] if layer.is_initialized else []
        sizes.append(sum(part.numel() * part.element_size() for part in states))
    return sizes


def key_value_bytes(arm: Arm, num_positions: int, sizes: list[int]) -> KeyValueBytes:
    """Of an arm's sequence of `num_positions` tokens in the cache.

    Args:
        sizes: of `bytes_by_layer`. Layers with a sliding window are counted whole, as our cache holds them;
            transformers' own forgets what is behind the window.
    """
    base, extra = num_positions * sum(sizes), 0
    if arm.setting is not None and arm.other_cache_bytes:  # of another model, which drafts
        n = Setting(1, arm.setting.num_draft_tokens).shape.num_nodes
        extra = n * sum(sizes) + (num_positions + n) * arm.other_cache_bytes
    elif arm.setting is not None:
        extra = slots(arm.setting) * sum(sizes)
        if arm.second_cache and isinstance(setting_exit := arm.setting.exit_layer, int):
            extra += num_positions * sum(sizes[:setting_exit])
    return KeyValueBytes(base + extra, extra)


def slots(setting: Setting) -> int:
    """Most drafted tokens that stand in the cache before a verification."""
    own = 0 if setting.exit_layer is None or setting.lookup == "only" else setting.shape.num_nodes
    if setting.lookup == "off":
        return own
    return own + setting.num_lookup_tokens if setting.lookup == "branch" else max(own, setting.num_lookup_tokens)
