"""A conversation with a model: its turns, and a cache that is kept between them."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

import layerskip
from infer.errors import InputError, first_line
from infer.loading import Loaded
from infer.options import DecodingOptions
from infer.streaming import stream
from layerskip.checkpoint.settings import Setting
from layerskip.model.anatomy import num_layers
from layerskip.model.cache import shared_length


class Conversation:
    """Turns between a user and a model.

    With a chat template each turn's prompt is the whole conversation rendered anew; without one the model
    simply continues all text so far. Either way only what the cache does not hold already is computed.

    Attributes:
        has_template: whether the tokenizer knows how to mark turns.
        prefilled: prompt positions computed for the last answer; the others were in the cache.
    """

    def __init__(self, loaded: Loaded, setting: Setting, options: DecodingOptions, system: str | None = None) -> None:
        """`system` is an instruction that stands before all turns.

        Raises:
            InputError: if there is a system text but no template to put it in.
        """
        self.has_template = bool(loaded.tokenizer.chat_template)
        check_system(loaded, system)
        self.loaded, self._setting, self._options = loaded, setting, options
        self._system = system
        self._cache = layerskip.RollbackCache(num_layers(loaded.model))
        self._cached: list[int] = []  # the token ids whose positions the cache holds
        self.prefilled = 0
        self.reset()

    def reset(self) -> None:
        """Forget all turns. The cache stays: what a new conversation shares with it is not computed again."""
        self._messages: list[dict[str, str]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})
        self._transcript: list[int] = []  # without a template: the ids of all text so far

    def answer(self, text: str) -> Generator[layerskip.Piece, None, None]:
        """Stream the answer to `text`.

        The turn is remembered as far as it was streamed, if the generator is closed early or interrupted; if
        nothing was, it is as if it had not been said.

        Raises:
            InputError: if the conversation leaves no room for an answer; it is then as it was.
        """
        prompt = self.prompt_ids(text)
        options = self._fit(len(prompt))
        self._rewind(prompt)
        committed, answer = list(prompt), ""
        try:
            with closing(stream(self.loaded, prompt, self._setting, options, self._cache)) as pieces:
                for piece in pieces:
                    committed += piece.step.tokens[0].tolist() if piece.step else []
                    answer += piece.text
                    yield piece
        finally:
            self._settle(committed)
            if len(committed) > len(prompt):
                self._remember(text, answer, committed)

    def prompt_ids(self, text: str) -> list[int]:
        """The token ids of the conversation with `text` as its next turn, up to where the answer begins."""
        tokenizer = self.loaded.tokenizer
        if not self.has_template:
            if not self._transcript:
                return list(tokenizer(text)["input_ids"])
            return self._transcript + list(tokenizer("\n" + text, add_special_tokens=False)["input_ids"])
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs of their own, and refuse what they like
            raise InputError(f"the chat template refuses this conversation: {first_line(error)}") from None
        return list(tokenizer(str(rendered), add_special_tokens=False)["input_ids"])

    def _fit(self, num_prompt_tokens: int) -> DecodingOptions:
        """The options, with an answer as long as the model has positions left for."""
        limit = self.loaded.max_positions
        if limit is None:
            return self._options
        room = limit - num_prompt_tokens
        if room < 1:
            raise InputError(
                f"the conversation has {num_prompt_tokens} tokens, and the model {limit} positions: "
                "say less, or /reset to start afresh"
            )
        return replace(self._options, max_new_tokens=min(room, self._options.max_new_tokens))

    def _rewind(self, prompt: list[int]) -> None:
        """Keep of the cache what the prompt begins with; its last token is always computed."""
        shared = shared_length(self._cached, prompt[:-1])
        self._cache.rollback(shared)
        self._cached = self._cached[:shared]
        self.prefilled = len(prompt) - shared

    def _settle(self, committed: list[int]) -> None:
        """Make cache and token ids agree wherever decoding ended: an interrupt may come between layers."""
        self._cache.rollback(len(committed))  # or to what the shortest layer holds
        self._cached = committed[: self._cache.length]

    def _remember(self, text: str, answer: str, committed: list[int]) -> None:
        if self.has_template:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        elif committed[-1] in self._end_ids():  # text goes on after an end only if it is taken off
            self._transcript = committed[:-1]
        else:
            self._transcript = committed

    def _end_ids(self) -> list[int]:
        end = self.loaded.model.generation_config.eos_token_id
        return end if isinstance(end, list) else [] if end is None else [end]


def check_system(loaded: Loaded, system: str | None) -> None:
    """Raise `InputError` if there is a system text but no template to put it in."""
    if system is not None and not loaded.tokenizer.chat_template:
        raise InputError(f"--system {system!r} needs a chat template, which this tokenizer has not: leave it out")
