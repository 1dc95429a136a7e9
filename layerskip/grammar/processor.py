"""Structured output: a grammar as a logits processor that speculation can roll back, and the tokens it forces.

The processor is a pure function of the prefix: it may be asked about draft positions, then about earlier ones
after a rejection, about siblings in a tree and about the rows of a batch, in any order. Draft and target pass
through it position by position, so the accept rules see masked p and masked q and stay exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from layerskip.grammar.definition import (
    define_json_schema,
    define_lark,
    define_regex,
    load_llguidance,
)
from layerskip.grammar.states import ParserStates

_MAX_MASKS = 128  # masks kept a processor: verification asks for those of the draft again

_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class Grammar:
    """A set of texts, and how a tokenizer writes them.

    Args:
        definition: from `layerskip.grammar.definition`; or use one of the `from_` methods.
        tokenizer: a fast tokenizer, the model's own.
        eos_token_id: what may end the output, as in `generate`; None is the tokenizer's own.

    Attributes:
        eos_token_ids: what may end the output.

    Raises:
        ValueError: if the tokenizer is slow or of an unknown kind, or has no such token to end the output with.
        ImportError: without llguidance.
    """

    def __init__(
        self,
        definition: str,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        ends = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        if ends is None:
            raise ValueError("the tokenizer has no eos_token to end the output with: give eos_token_id=...")
        self.eos_token_ids: tuple[int, ...] = (ends,) if isinstance(ends, int) else tuple(ends)
        if unknown := [token for token in self.eos_token_ids if not 0 <= token < len(tokenizer)]:
            raise ValueError(f"eos_token_id {unknown[0]} is not one of the tokenizer's {len(tokenizer)} tokens")
        self._tokenizer = _wrap(tokenizer, self.eos_token_ids)
        self._start = load_llguidance().LLMatcher(self._tokenizer, definition, log_level=0)
        if self._start.is_error():
            raise ValueError(f"the grammar cannot be used with this tokenizer: {self._start.get_error()}")

    @classmethod
    def from_json_schema(
        cls,
        schema: Mapping[str, Any] | str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Grammar:
        """All one-line JSON texts a schema admits; arguments and errors as in `define_json_schema` and `Grammar`."""
        return cls(define_json_schema(schema), tokenizer, eos_token_id)

    @classmethod
    def from_regex(
        cls, pattern: str, tokenizer: PreTrainedTokenizerBase, *, eos_token_id: int | Sequence[int] | None = None
    ) -> Grammar:
        """All texts a pattern matches whole; arguments and errors as in `define_regex` and `Grammar`."""
        return cls(define_regex(pattern), tokenizer, eos_token_id)

    @classmethod
    def from_lark(
        cls, text: str, tokenizer: PreTrainedTokenizerBase, *, eos_token_id: int | Sequence[int] | None = None
    ) -> Grammar:
        """All texts a Lark grammar derives; arguments and errors as in `define_lark` and `Grammar`."""
        return cls(define_lark(text), tokenizer, eos_token_id)

    def processor(self, prompt_length: int) -> GrammarProcessor:
        """A logits processor for one call of `generate`: constrains what follows `prompt_length` tokens (padded)."""
        return GrammarProcessor(self, prompt_length)

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Whether the output may end after these tokens; what follows an end of sequence does not count."""
        ends = [i for i, token in enumerate(token_ids) if token in self.eos_token_ids]
        output = list(token_ids[: ends[0]] if ends else token_ids)
        matcher = self._start.deep_copy()
        return matcher.try_consume_tokens(output) == len(output) and bool(matcher.is_accepting())


class GrammarProcessor(LogitsProcessor):
    """Masks every token that no text of the grammar continues with; made by `Grammar.processor`.

    End of sequence is allowed exactly where a text may end. It is all that is allowed where nothing matters: after
    an end of sequence, and after a prefix that no text begins with (a draft that verification will reject). Rows
    of logits beyond the tokenizer's vocabulary are masked.

    Args:
        grammar: what to write.
        prompt_length: tokens before the output, padding included.
    """

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.grammar = grammar
        self.prompt_length = prompt_length
        self._states = ParserStates(grammar._start)
        self._masks: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._only_end = torch.zeros(grammar._tokenizer.vocab_size, dtype=torch.bool)
        self._only_end[list(grammar.eos_token_ids)] = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask scores (batch, vocab) of what follows input_ids (batch, length), prompt included.

        Raises:
            ValueError: if the prefix is shorter than the prompt, or the model lacks the tokens needed.
            RuntimeError: if llguidance cannot go on: the grammar is too complex, or the tokenizer cannot write it.
        """
        if input_ids.shape[1] < self.prompt_length:
            raise ValueError(
                f"the prefix has {input_ids.shape[1]} tokens but the grammar begins after {self.prompt_length}: make "
                "the processor with the length of the prompt, grammar.processor(input_ids.shape[1])"
            )
        outputs = input_ids[:, self.prompt_length :].tolist()
        allowed = torch.stack([self._mask(output) for output in outputs])  # (batch, the tokenizer's vocab)
        vocab = scores.shape[-1]
        if vocab < allowed.shape[1] and not allowed[:, :vocab].any(dim=1).all():
            raise ValueError(
                f"the model has {vocab} logits, but the grammar needs a token of the tokenizer beyond them"
            )
        allowed = F.pad(allowed, (0, vocab - allowed.shape[1])).to(scores.device)  # cuts, if that is negative
        return torch.where(allowed, scores, -torch.inf)

    def forced(self, prefix_row: Sequence[int], limit: int) -> list[int]:
        """The tokens that must follow, each the only one the mask allows at its position: free draft tokens.

        Args:
            prefix_row: one row's token ids, prompt included.
            limit: most tokens to return.

        Returns:
            0 .. limit token ids; an end of sequence is the last of them.
        """
        output = list(prefix_row[self.prompt_length :])
        tokens: list[int] = []
        while len(tokens) < limit and not self._has_ended(output):
            mask = self._mask(output)
            if int(mask.count_nonzero()) != 1:
                break
            tokens.append(int(mask.nonzero()))
            output.append(tokens[-1])
        return tokens

    def _has_ended(self, output: Sequence[int]) -> bool:
        return not set(self.grammar.eos_token_ids).isdisjoint(output)

    def _mask(self, output: list[int]) -> Tensor:
        """(the tokenizer's vocab,) bool on the CPU: which tokens can follow `output`."""
        key = tuple(output)
        if key in self._masks:
            self._masks.move_to_end(key)
            return self._masks[key]
        mask = self._only_end if self._has_ended(output) else self._compute(output)
        self._masks[key] = mask
        if len(self._masks) > _MAX_MASKS:
            self._masks.popitem(last=False)
        return mask

    def _compute(self, output: list[int]) -> Tensor:
        matcher = self._states.after(output)
        if matcher is None:
            return self._only_end
        mask = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8).bool()
        if matcher.is_error():
            self._states.forget()  # it stays in error, whatever is rolled back
            so_far = self.grammar._tokenizer.decode_str(output)
            reason = matcher.get_error().partition("\n")[0]
            raise RuntimeError(
                f"the grammar cannot go on after {so_far!r} ({reason}): simplify it, or allow other text"
            )
        return mask


def _wrap(tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer. Takes up to a second, so it is kept as long as the tokenizer lives."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"structured output needs a fast tokenizer, got {type(tokenizer).__name__}: load it with AutoTokenizer"
        )
    known = _tokenizers.setdefault(tokenizer, {})
    key = (len(tokenizer), *eos_token_ids)  # tokens may be added
    if key not in known:
        try:
            known[key] = load_llguidance(".hf").from_tokenizer(tokenizer, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ValueError(
                f"llguidance cannot read this tokenizer ({error}): use one with a byte-level decoder"
            ) from None
    return known[key]
