"""Flags for structured output, checked before the model is loaded. Nothing here imports torch before it is."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from infer.errors import InputError
from infer.files import read_text

if TYPE_CHECKING:
    from infer.loading import Loaded
    from layerskip.grammar.processor import Grammar


def unfinished(num_tokens: int, max_new_tokens: int) -> str:
    """What to do about an output of so many tokens that is not whole: one that is shorter than it might have been was
    ended by --stop, since the grammar lets no end-of-sequence token come before."""
    cut = num_tokens >= max_new_tokens
    advice = "raise --max-new-tokens" if cut else "--stop ended it, leave that out"
    return f"note: the output ended before it was complete: {advice}"


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """--json-schema, --regex, --lark: at most one of them."""
    group = parser.add_argument_group(
        "structured output", "of every answer; one cut short by --max-new-tokens is not whole"
    )
    add = group.add_mutually_exclusive_group().add_argument
    add("--json-schema", metavar="FILE_OR_JSON", help="write one line of JSON that the schema admits")
    add("--regex", metavar="PATTERN", help="write a text that all of PATTERN matches (Rust's syntax)")
    add("--lark", metavar="FILE", help="write a text that the start rule of a Lark grammar derives")


def read_definition(arguments: argparse.Namespace) -> str | None:
    """The definition that the flags of `add_grammar_flags` ask for, None if they ask for none.

    Raises:
        InputError: with the fault and its place.
    """
    if arguments.json_schema is None and arguments.regex is None and arguments.lark is None:
        return None
    from layerskip.grammar.definition import define_json_schema, define_lark, define_regex

    try:
        if arguments.json_schema is not None:
            given, flag = arguments.json_schema, "--json-schema"
            inline = given.lstrip().startswith("{")
            return define_json_schema(given if inline else read_text(Path(given), f"{flag} {given}"))
        if arguments.regex is not None:
            return define_regex(arguments.regex)
        return define_lark(read_text(Path(arguments.lark), f"--lark {arguments.lark}"))
    except InputError:
        raise
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from None


def compile_grammar(definition: str, loaded: "Loaded") -> "Grammar":
    """The grammar in the tokens of a model; what ends the model's outputs may end this one.

    Raises:
        InputError: if it cannot be written with this tokenizer.
    """
    from layerskip.grammar.processor import Grammar

    ends = loaded.model.generation_config.eos_token_id
    known = [end for end in (ends if isinstance(ends, list) else [ends]) if end in range(len(loaded.tokenizer))]
    try:
        return Grammar(definition, loaded.tokenizer, known or None)
    except ValueError as error:
        raise InputError(str(error)) from None
