"""Stages: layers [0:E) and [E:L) of a causal LM, run by the model's own forward.

A model's `forward` knows its embeddings, positions, masks, rotary, soft-caps, scales and head. So a stage is
not a second forward but a view of the model with another layer list:

    draft    embed -> [layers 0 .. E-1, Tap]                      -> norm, head    Tap keeps h_E
    verify   embed -> [Inject h_E, Skip x (E-1), layers E .. L-1] -> norm, head    Inject replaces the embeddings

Where the exit has an adapter the Tap runs it. Blocks (`exit_layers.ExitBlocks`) are layers of the draft alone, with
keys and values of their own: every token then passes through the draft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from layerskip.model.adapters import adapter_at
from layerskip.model.anatomy import anatomy, decoder_layers, device_of, unwrap
from layerskip.model.block import Block
from layerskip.model.cache import RollbackCache
from layerskip.model.draft_head import scatter, with_draft_head
from layerskip.model.exit_layers import ExitBlocks
from layerskip.model.exit_number import check_exit_layer
from layerskip.model.self_check import check_blocks, check_cut
from layerskip.model.views import Here, Inject, Placed, Skip, Tap, layers_return_tuples, silent, with_layers


class _Cut(NamedTuple):
    """The model cut at one exit."""

    early: nn.Module
    tap: Tap
    late: nn.Module
    inject: Inject
    num_blocks: int  # layers of the draft's own behind the tap


class Stages:
    """Layers [0:E) and [E:L) of `model`, with the model's own embeddings, norm and head.

    Views are cheap; every `Stages` has its own, so several may decode from one model in several threads.
    The first construction for an exit layer checks the stages against the model; later ones trust it.

    Args:
        model: a decoder-only `transformers` causal LM in eval mode (PEFT- or compile-wrapped is unwrapped).
        exit_layer: E, the number of layers that draft, 1 .. L-1; None leaves the model whole, for plain
            decoding through the same interface.
        draft_vocabulary: (n,) ascending token ids that the exit's head is cut to; its other logits are -inf.

    Raises:
        UnsupportedModelError: if the model cannot be cut (encoder-decoder, recurrent state, shared KV, ...)
            or the stages do not reproduce it.
        ValueError: if `exit_layer` is out of range or the model is in training mode.
    """

    def __init__(self, model: nn.Module, exit_layer: int | None, draft_vocabulary: Tensor | None = None) -> None:
        self.model = unwrap(model)
        if self.model.training:
            raise ValueError("the model is in training mode, where dropout is on: call model.eval() first")
        self.anatomy = anatomy(self.model)
        self.num_layers = self.anatomy.num_layers
        self.exit_layer = None if exit_layer is None else check_exit_layer(exit_layer, self.num_layers)
        self._no_position = torch.empty(0, dtype=torch.long, device=device_of(self.model))
        # Every view has its own stand-ins: two `Stages` of one model never meet.
        self._here = Here()
        sights = zip(decoder_layers(self.model), self.anatomy.sights, strict=True)
        self._layers = [Placed(layer, sight, self._here) for layer, sight in sights]
        self.whole = with_layers(self.model, self.anatomy.layers_path, list(self._layers))
        self.draft_vocabulary = None if draft_vocabulary is None else draft_vocabulary.to(device_of(self.model))
        self._cuts: dict[int, _Cut] = {}
        self._num_blocks = 0
        if self.exit_layer is not None:
            self.use(self.exit_layer)

    def use(self, exit_layer: int) -> None:
        """Cut at this exit layer from now on; between two rounds it may change, every layer then being as far. (Not
        to or from an exit with blocks, whose keys and values would miss what others drafted.)"""
        if exit_layer not in self._cuts:
            self._cuts[exit_layer] = self._cut(check_exit_layer(exit_layer, self.num_layers))
        self.exit_layer = exit_layer
        self._early, self._tap, self._late, self._inject, self._num_blocks = self._cuts[exit_layer]
        check_cut(self, exit_layer)

    def _cut(self, exit_layer: int) -> _Cut:
        layers, path = self._layers, self.anatomy.layers_path
        returns_tuple = layers_return_tuples(self.model)
        tap = Tap(layers[exit_layer], returns_tuple)
        adapter, blocks = adapter_at(self.model, exit_layer), []
        if isinstance(adapter, ExitBlocks):
            sights = self.anatomy.sights[exit_layer:]
            blocks = [Placed(layer, sight, self._here) for layer, sight in zip(adapter.layers, sights, strict=False)]
            tap.__dict__["block"] = blocks[0]  # not a submodule: its parameters belong to the model
        else:
            tap.__dict__["adapter"] = adapter
        inject = Inject(layers[0], returns_tuple)
        skips = [Skip(layer, returns_tuple) for layer in layers[1:exit_layer]]
        early = with_layers(self.model, path, [*layers[:exit_layer], tap, *blocks[1:]])
        if self.draft_vocabulary is not None:
            self._vocab_size = self.model.get_output_embeddings().weight.shape[0]
            early = with_draft_head(early, self.model, self.draft_vocabulary)
        late = with_layers(self.model, path, [inject, *skips, *layers[exit_layer:]])
        return _Cut(early, tap, late, inject, len(blocks))

    def new_cache(self, capacity: int = 256, limit: int | None = None) -> RollbackCache:
        return RollbackCache(self.num_layers, capacity, limit)

    def fit(self, cache: RollbackCache) -> None:
        """Make a cache that was decoded with before, perhaps from another exit, fit for these stages: where the exit
        drafts through blocks, positions that these have not seen are forgotten."""
        cache.fit(self.exit_layer, self._num_blocks)

    def prefill(self, token_ids: Tensor, cache: RollbackCache) -> None:
        """Run the whole model, and the exit's blocks, over (batch, n) tokens for their keys and values alone."""
        if not self._num_blocks:
            self.run(self.model, token_ids, cache, logits_to_keep=0)
            return
        _, hidden = self.draft(token_ids, cache)
        self._verify(token_ids, hidden, cache, None, logits_to_keep=0)

    def draft(
        self, token_ids: Tensor, cache: RollbackCache, logits_to_keep: int = 0, block: Block | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Run layers [0:E) over (batch, n) tokens.

        Args:
            logits_to_keep: of how many of the last positions the exit's logits are wanted.
            block: where the tokens stand; None: after the cache's last position.

        Returns:
            The exit's logits (batch, logits_to_keep, vocab), or None if not asked for, and the hidden states after
            layer E-1 of all n positions (batch, n, hidden_size).
        """
        assert self.exit_layer is not None, "a whole model does not draft"
        view = cache.stage(0, self.exit_layer, block, num_blocks=self._num_blocks)
        logits = self.run(self._early, token_ids, view, logits_to_keep)
        hidden, self._tap.hidden = self._tap.hidden, None
        assert hidden is not None
        if not logits_to_keep:
            return None, hidden
        logits = logits[:, -logits_to_keep:]
        if self.draft_vocabulary is not None:
            logits = scatter(logits, self.draft_vocabulary, self._vocab_size)
        return logits, hidden

    def verify(
        self, token_ids: Tensor, hidden: Tensor | None, cache: RollbackCache, block: Block | None = None
    ) -> Tensor:
        """Run layers [E:L) over the hidden states (batch, n, hidden_size) that `draft` gave for (batch, n)
        tokens, or the whole model where there are none; return the model's logits (batch, n, vocab)."""
        n = token_ids.shape[1]
        if hidden is None and self._num_blocks:
            _, hidden = self.draft(token_ids, cache, block=block)
        if self.exit_layer is None or hidden is None:
            return self.run(self.whole, token_ids, cache.stage(0, self.num_layers, block), n)
        return self._verify(token_ids, hidden, cache, block, n)

    def _verify(
        self, token_ids: Tensor, hidden: Tensor, cache: RollbackCache, block: Block | None, logits_to_keep: int
    ) -> Tensor:
        assert self.exit_layer is not None
        self._inject.hidden = hidden
        try:
            view = cache.stage(self.exit_layer, self.num_layers, block)
            return self.run(self._late, token_ids, view, logits_to_keep)
        finally:
            self._inject.hidden = None

    def run(self, model: nn.Module, token_ids: Tensor, cache: Cache, logits_to_keep: int) -> Tensor:
        """Logits of the last positions of (batch, n) tokens, by the model or a view of it; 0 costs no head."""
        arguments: dict[str, Any] = {self.anatomy.cache_argument: cache, **silent(model)}
        if self.anatomy.keeps_logits:
            # 0 means "all" to transformers; an empty list of positions means none, and costs no head.
            arguments["logits_to_keep"] = logits_to_keep or self._no_position
        block = getattr(cache, "block", None)
        if block is None:
            return model(input_ids=token_ids, use_cache=True, return_dict=True, **arguments).logits
        if self.anatomy.takes_positions:
            arguments["position_ids"] = block.positions
        self._here.block = block
        try:
            return model(input_ids=token_ids, use_cache=True, return_dict=True, **arguments).logits
        finally:
            self._here.block = None

    def check_blocks(self, branching: bool) -> None:
        """Refuse a model that cannot take rows of unequal length, or (`branching`) candidate trees. Asked once.

        Raises:
            UnsupportedModelError: with the reason and the way out.
        """
        check_blocks(self, branching)
