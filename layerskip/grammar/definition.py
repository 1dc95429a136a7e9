"""JSON schema, regular expression or Lark text to a grammar definition, checked before any model is there.

The parsing is llguidance's (the optional extra `grammar`); what it finds wrong is told with the place of the fault.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# JSON on one line, a blank after commas and colons or none, as the model likes: where any whitespace is allowed, small
# models write blanks until their tokens end. A schema's own "x-guidance" settings go before these.
_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_REGEX_FAULT = re.compile(r"regex parse error:\n {4}[^\n]*\n {4}( *)\^+ *\nerror: ([^\n]*)")
_PLACED_FAULT = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_EXCERPT = re.compile(r"\n +\d+ \|.*", re.DOTALL)  # the faulty line and an arrow below it
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else")


def load_llguidance(submodule: str = "") -> Any:
    """llguidance, or one of its submodules.

    Raises:
        ImportError: with the way to install it.
    """
    try:  # by name: it is an extra, and the library runs without it
        return importlib.import_module(f"llguidance{submodule}")
    except ImportError as error:
        raise ImportError(
            f"structured output needs llguidance ({error}): pip install 'layerskip-kit[grammar]'"
        ) from error


def define_json_schema(schema: Mapping[str, Any] | str) -> str:
    """The definition of all one-line JSON texts that `schema` admits, objects' keys in the schema's order.

    Args:
        schema: JSON schema, or its JSON text. "x-guidance": {"whitespace_flexible": true} in it allows any layout.

    Raises:
        ValueError: if it is no JSON, or a part of it is wrong or unknown: says which part.
        ImportError: without llguidance.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"the JSON schema is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            ) from None
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, got {schema!r}: {{}} admits any JSON")
    matcher = load_llguidance().LLMatcher

    def define(part: Any) -> str:
        try:
            return str(matcher.grammar_from_json_schema(json.dumps(part), defaults=_JSON_LAYOUT))
        except TypeError as error:
            raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None

    definition = define(schema)
    if fault := _fault_of(definition):
        place, fault = _locate(schema, fault, lambda part: _fault_of(define(part)))
        raise ValueError(f"the JSON schema cannot be used: {_say(fault)} (at {place})")
    return definition


def define_regex(pattern: str) -> str:
    """The definition of all texts that the whole of `pattern` matches (Rust's syntax; no look-around, no \\b).

    Raises:
        ValueError: if it is no such pattern: says where.
        ImportError: without llguidance.
    """
    definition: str = load_llguidance().LLMatcher.grammar_from_regex(pattern)
    if fault := _fault_of(definition):
        fault = fault.partition("(in regex): ")[2] or fault
        raise ValueError(f"the regex {pattern!r} cannot be used: {_say(fault)}")
    return definition


def define_lark(text: str) -> str:
    """The definition of all texts that the `start` rule of a Lark grammar derives.

    Raises:
        ValueError: if it is no grammar: says in which line and column.
        ImportError: without llguidance.
    """
    definition: str = load_llguidance().LLMatcher.grammar_from_lark(text)
    if fault := _fault_of(definition):
        raise ValueError(f"the Lark grammar cannot be used: {_say(fault)}")
    return definition


def _fault_of(definition: str) -> str:
    """What llguidance finds wrong with a definition, "" if nothing."""
    is_error, messages = load_llguidance().LLMatcher.validate_grammar_with_warnings(definition)
    return messages[0] if is_error else ""


def _say(fault: str) -> str:
    """llguidance's message in one line, with the place it draws an arrow to."""
    fault = _EXCERPT.sub("", fault)
    if placed := _PLACED_FAULT.match(fault):
        line, column, rest = placed.groups()
        return f"{_say(rest)} (line {line}, column {column})"
    if regex := _REGEX_FAULT.search(fault):
        return f"{regex[2]} at character {len(regex[1]) + 1}"
    return " ".join(fault.split())


def _locate(root: Mapping[str, Any], fault: str, fault_of: Callable[[Any], str]) -> tuple[str, str]:
    """The deepest part of a schema that, alone, has the fault: its JSON pointer, and the fault in its words."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}

    def same(fault: str, other: str) -> bool:  # a schema is unsatisfiable because a part of it is
        return fault == other or (fault.startswith("Unsatisfiable") and other.startswith("Unsatisfiable"))

    def search(part: Mapping[str, Any], place: str, fault: str) -> tuple[str, str]:
        for step, child in _children(part):
            if same(fault, inner := fault_of({**shared, **child})):
                return search(child, f"{place}/{step}", inner)
        return place, fault

    return search(root, "#", fault)


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, with their steps of a JSON pointer."""
    for key, value in schema.items():
        parts: Iterable[tuple[str, Any]] = ()
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            parts = ((f"{key}/{name}", part) for name, part in value.items())
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            parts = ((f"{key}/{index}", part) for index, part in enumerate(value))
        elif key in _ONE_SCHEMA:
            parts = ((key, value),)
        yield from ((step, part) for step, part in parts if isinstance(part, Mapping))
