"""Stages: layers [0:E) and [E:L) of a causal LM, run by the model's own forward.

A model's `forward` knows its embeddings, positions, masks, rotary, soft-caps, scales and head. So a stage is
not a second forward but a view of the model with another layer list:

    draft    embed -> [layers 0 .. E-1, Tap]                      -> norm, head    Tap keeps h_E
    verify   embed -> [Inject h_E, Skip x (E-1), layers E .. L-1] -> norm, head    Inject replaces the embeddings

Where the exit has an adapter the Tap runs it. Blocks (`adapters.ExitBlocks`) are layers of the draft alone, with keys
and values of their own: every token then passes through the draft.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from layerskip.model.adapters import ExitBlocks, adapter_at, num_blocks
from layerskip.model.anatomy import UnsupportedModelError, anatomy, check_exit_layer, decoder_layers, device_of, unwrap
from layerskip.model.block import Block, place
from layerskip.model.cache import RollbackCache
from layerskip.model.draft_head import scatter, with_draft_head
from layerskip.model.views import Here, Inject, Placed, Skip, Tap, layers_return_tuples, with_layers

# Relative error allowed between the stages and the model at construction. Both run the same kernels on the
# same shapes, so the difference is zero on every architecture tried; the slack is for nondeterministic kernels.
SELF_CHECK_TOLERANCE = 1e-3


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
        self._whole = with_layers(self.model, self.anatomy.layers_path, list(self._layers))
        self.draft_vocabulary = None if draft_vocabulary is None else draft_vocabulary.to(device_of(self.model))
        self._cuts: dict[int, tuple[nn.Module, Tap, nn.Module, Inject]] = {}
        self._num_blocks = 0
        if self.exit_layer is not None:
            self.use(self.exit_layer)

    def use(self, exit_layer: int) -> None:
        """Cut at this exit layer from now on; between two rounds it may change, every layer then being as far. (Not
        to or from an exit with blocks, whose keys and values would miss what others drafted.)"""
        if exit_layer not in self._cuts:
            self._cuts[exit_layer] = self._cut(check_exit_layer(exit_layer, self.num_layers))
        self.exit_layer, self._num_blocks = exit_layer, num_blocks(self.model, exit_layer)
        self._early, self._tap, self._late, self._inject = self._cuts[exit_layer]
        if exit_layer not in _checks(self.model):
            self._self_check()
            _checks(self.model).add(exit_layer)

    def _cut(self, exit_layer: int) -> tuple[nn.Module, Tap, nn.Module, Inject]:
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
        return early, tap, with_layers(self.model, path, [inject, *skips, *layers[exit_layer:]]), inject

    def new_cache(self, capacity: int = 256, limit: int | None = None) -> RollbackCache:
        return RollbackCache(self.num_layers, capacity, limit)

    def fit(self, cache: RollbackCache) -> None:
        """Make a cache that was decoded with before, perhaps from another exit, fit for these stages: where the exit
        drafts through blocks, positions that these have not seen are forgotten."""
        cache.fit(self.exit_layer, self._num_blocks)

    def prefill(self, token_ids: Tensor, cache: RollbackCache) -> None:
        """Run the whole model, and the exit's blocks, over (batch, n) tokens for their keys and values alone."""
        if not self._num_blocks:
            self._run(self.model, token_ids, cache, logits_to_keep=0)
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
        logits = self._run(self._early, token_ids, view, logits_to_keep)
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
            return self._run(self._whole, token_ids, cache.stage(0, self.num_layers, block), n)
        return self._verify(token_ids, hidden, cache, block, n)

    def _verify(
        self, token_ids: Tensor, hidden: Tensor, cache: RollbackCache, block: Block | None, logits_to_keep: int
    ) -> Tensor:
        assert self.exit_layer is not None
        self._inject.hidden = hidden
        try:
            view = cache.stage(self.exit_layer, self.num_layers, block)
            return self._run(self._late, token_ids, view, logits_to_keep)
        finally:
            self._inject.hidden = None

    def _run(self, model: nn.Module, token_ids: Tensor, cache: Cache, logits_to_keep: int) -> Tensor:
        arguments: dict[str, Any] = {self.anatomy.cache_argument: cache}
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

    @torch.no_grad()
    def _self_check(self) -> None:
        """[0:E) then [E:L) over two chunks must give the model's own logits."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        token_ids = torch.arange(3, 10, device=device_of(self.model)).remainder(vocab_size)[None]  # (1, 7)
        self._check_positions(token_ids)
        whole, staged = self.new_cache(8), self.new_cache(8)
        for chunk in token_ids.split([4, 3], dim=1):
            expected = self._run(self.model, chunk, whole, logits_to_keep=chunk.shape[1])
            _, hidden = self.draft(chunk, staged)
            actual = self.verify(chunk, hidden, staged)
            error = _relative_error(actual, expected)
            if not error <= SELF_CHECK_TOLERANCE:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: layers [0:{self.exit_layer}) then [{self.exit_layer}:"
                    f"{self.num_layers}) differ from the whole model (relative error {error:.1e}, limit "
                    f"{SELF_CHECK_TOLERANCE:.0e}); decode it with plain model.generate()"
                )

    @torch.no_grad()
    def check_blocks(self, branching: bool) -> None:
        """Refuse a model that cannot take rows of unequal length, or (`branching`) candidate trees. Asked once.

        Raises:
            UnsupportedModelError: with the reason and the way out.
        """
        asked, what = ("trees", "branches") if branching else ("batches", "rows of unequal length")
        state = _checks(self.model)
        if asked in state:
            return
        attention = self.model.config._attn_implementation
        way_out = "draft a chain (leave tree out)" if branching else "decode one sequence at a time"
        if attention not in ("eager", "sdpa"):
            raise UnsupportedModelError(
                f"{attention} takes no mask of its own for {what}: load the model with attn_implementation='sdpa', "
                f"or {way_out}"
            )
        error, rounding = self._block_error(branching)
        limit = max(SELF_CHECK_TOLERANCE, 4 * rounding)
        if not error <= limit:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not reproduce itself for {what} (relative error {error:.1e}, limit "
                f"{limit:.0e}): {way_out}"
            )
        state.add(asked)

    def _block_error(self, branching: bool) -> tuple[float, float]:
        """Two rows of 5 and 3 tokens, then two more tokens for each, in a row or side by side: against one by one.

        Returns the relative error, and that of decoding one row in two passes instead of one, which is rounding.
        """
        device, vocab_size = device_of(self.model), self.model.get_input_embeddings().num_embeddings
        prompts = torch.arange(3, 13, device=device).remainder(vocab_size).view(2, 5)
        nodes = torch.arange(20, 26, device=device).remainder(vocab_size).view(2, 3)  # a root and two tokens
        lengths = torch.tensor([5, 3], device=device)
        depths = torch.tensor([[0, 1, 1 if branching else 2]] * 2, device=device)
        ancestors = torch.ones(2, 3, 3, dtype=torch.bool, device=device).tril()
        ancestors[:, 2, 1] = not branching
        cache = self.new_cache(8)
        self.prefill(prompts, cache)
        actual = self._run(self._whole, nodes, cache.stage(0, self.num_layers, place(lengths, depths, ancestors)), 3)
        errors = []
        for row, length in enumerate((5, 3)):
            for node in (1, 2):
                path = nodes[row, [0, 2] if branching and node == 2 else range(node + 1)]
                sequence = torch.cat([prompts[row, :length], path])[None]
                expected = self.model(input_ids=sequence, use_cache=False).logits[0, -1]
                errors.append(_relative_error(actual[row, node], expected))
        cache = self.new_cache(8)
        self.prefill(sequence[:, :-1], cache)
        stepped = self._run(self.model, sequence[:, -1:], cache, 1)[0, -1]
        return max(errors), _relative_error(stepped, expected)

    def _check_positions(self, token_ids: Tensor) -> None:
        """Positions are left to the model, so it must count them as `generate` does: 0, 1, 2, ..."""
        if "position_ids" not in inspect.signature(type(self.model).forward).parameters:
            return
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        expected = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits
        error = _relative_error(self.model(input_ids=token_ids, use_cache=False).logits, expected)
        if not error <= SELF_CHECK_TOLERANCE:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} counts positions in a way of its own (relative error {error:.1e} against "
                "0, 1, 2, ...), or its output is not finite; decode it with plain model.generate()"
            )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


_checked: weakref.WeakKeyDictionary[nn.Module, dict[Any, set[int | str]]] = weakref.WeakKeyDictionary()


def _checks(model: PreTrainedModel) -> set[int | str]:
    """What was checked for this model as it is now (dtype, device, attention): exit layers, "batches", "trees"."""
    state = (model.dtype, device_of(model), model.config._attn_implementation)
    return _checked.setdefault(model, {}).setdefault(state, set())
