"""Prompts as token ids: cut to length, through the chat template, turn by turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from infer.benchmark import BenchmarkOptions
from infer.benchmarking.arms import generate
from infer.errors import InputError, first_line
from infer.loading import Loaded
from infer.prompt_file import Prompt
from infer.terminal import Advance, Terminal


@dataclass(frozen=True)
class Question:
    """A turn of a prompt, as a model is given it.

    Attributes:
        prompt: the conversation up to this turn is in its `messages`.
        input_ids: (1, length).
        turn: which of the prompt's it is, from 0.
    """

    prompt: Prompt
    input_ids: Tensor
    turn: int = 0


class Lengths(Protocol):
    """How many prompts, and how long they and their outputs may be: of any command's options."""

    @property
    def num_prompts(self) -> int:
        """Prompts at most."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to which texts are cut."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens of an output at most."""


def encode(loaded: Loaded, prompts: Sequence[Prompt | str], lengths: Lengths) -> list[Tensor]:
    """The first turns of `first_questions`, as (1, length) ids; texts are prompts to be continued."""
    whole = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return [question.input_ids for question in first_questions(loaded, whole, lengths)]


def first_questions(loaded: Loaded, prompts: Sequence[Prompt], lengths: Lengths) -> list[Question]:
    """The first turns of the first `num_prompts` prompts that fit. Texts are cut to `prompt_tokens` tokens,
    conversations stay whole; those that do not fit are told on standard error.

    Raises:
        InputError: if texts and outputs do not fit the model together, or no prompt does.
    """
    limit, longest = loaded.max_positions, lengths.prompt_tokens + lengths.max_new_tokens
    if limit is not None and longest > limit and any(prompt.text for prompt in prompts):
        raise InputError(
            f"--prompt-tokens {lengths.prompt_tokens} and --max-new-tokens {lengths.max_new_tokens} make "
            f"{longest}, but the model has {limit} positions: lower one"
        )
    found: list[Question] = []
    for prompt in prompts:
        ids = prompt_ids(loaded, prompt, lengths.prompt_tokens)
        if len(found) < lengths.num_prompts and _fits(loaded, prompt, ids, lengths.max_new_tokens):
            found.append(Question(prompt, _row(loaded, ids)))
    if prompts and not found:
        raise InputError("no prompt fits the model together with --max-new-tokens: give shorter ones, or lower it")
    return found


def all_questions(
    loaded: Loaded, prompts: Sequence[Prompt], options: BenchmarkOptions, terminal: Terminal
) -> list[Question]:
    """The same with all their turns. Between them stand plain decoding's greedy answers, so that every arm is asked
    the same; a conversation that grows too long ends before.

    Raises:
        InputError: as in `first_questions`.
    """
    first = first_questions(loaded, prompts, options)
    later = sum(len(question.prompt.turns) for question in first)
    if not later:
        return first
    with terminal.progress(later) as advance:
        return [turn for question in first for turn in _turns(loaded, question, options, advance)]


def extent(questions: Sequence[Question]) -> dict[str, int]:
    """How many conversations the turns are of, for JSON."""
    return {"num_questions": sum(question.turn == 0 for question in questions)}


def prompt_ids(loaded: Loaded, prompt: Prompt, most: int) -> list[int]:
    """The token ids up to where the model's answer begins; without a chat template a conversation is continued as
    text, a line for each message.

    Raises:
        InputError: if the chat template refuses the conversation.
    """
    tokenizer = loaded.tokenizer
    if prompt.text:
        return list(tokenizer(prompt.text)["input_ids"])[:most]
    if not tokenizer.chat_template:
        return list(tokenizer(prompt.as_text)["input_ids"])
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs of their own, and refuse what they like
        raise InputError(f"the chat template refuses {prompt.where}: {first_line(error)}") from None
    return list(tokenizer(str(rendered), add_special_tokens=False)["input_ids"])


def _turns(loaded: Loaded, question: Question, options: BenchmarkOptions, advance: Advance) -> Iterator[Question]:
    yield question
    said = question.prompt.turns
    for number, text in enumerate(said, start=1):
        messages = (*question.prompt.messages, ("assistant", _answer(loaded, question, options)), ("user", text))
        prompt = replace(question.prompt, messages=messages, turns=said[number:])
        advance(f"answering turn {number} of {prompt.where}")
        ids = prompt_ids(loaded, prompt, options.prompt_tokens)
        if not _fits(loaded, prompt, ids, options.max_new_tokens):
            return
        question = Question(prompt, _row(loaded, ids), number)
        yield question


def _answer(loaded: Loaded, question: Question, options: BenchmarkOptions) -> str:
    arguments: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    with torch.inference_mode():
        sequences = cast(Tensor, generate(loaded.model, question.input_ids, **arguments))
    return answer_text(loaded, sequences[0, question.input_ids.shape[1] :].tolist())


def answer_text(loaded: Loaded, tokens: list[int]) -> str:
    """What new tokens say, without special tokens."""
    return str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))


def _fits(loaded: Loaded, prompt: Prompt, ids: list[int], max_new_tokens: int) -> bool:
    if not ids:
        Terminal().note(f"note: {prompt.where} has no tokens and is left out")
        return False
    total, limit = len(ids) + max_new_tokens, loaded.max_positions
    if limit is not None and total > limit:
        Terminal().note(
            f"note: {prompt.where} has {len(ids)} tokens, with --max-new-tokens {total}, but the model has {limit} "
            "positions: left out"
        )
        return False
    return True


def _row(loaded: Loaded, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=loaded.model.device)
