"""Defaults <- YAML file <- dotted overrides: text becomes frozen dataclasses, or an error with a way out.

Knows nothing of training: it turns a mapping into any dataclass by its annotations. Supported are nested
dataclasses, str, bool, int, float, Literal, `X | None`, tuples and plain dictionaries.
"""

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from train.errors import ConfigError, first_line

T = TypeVar("T")

_WORDS = {
    str: "text (str)",
    bool: "true or false (bool)",
    int: "a whole number (int)",
    float: "a number (float)",
    dict: "a mapping (dict)",
}


class _Loader(yaml.SafeLoader):
    """YAML in which `5e-4` is a number (YAML 1.1 reads it as text) and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"line {key.start_mark.line + 1}: a key must be a word, not a list or a mapping")
            if key.value in seen:
                raise ConfigError(f"line {key.start_mark.line + 1}: {key.value} is given twice; keep one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; `where` (a file, an override) names it in a `ConfigError`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{where} is not YAML: {line}{error.problem}") from None
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ConfigError(f"{where} is not YAML: {first_line(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. `ConfigError` if there is no such file or it holds something else."""
    if not path.is_file():
        raise ConfigError(f"no config file {path}; configs/ holds those that come with the kit")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}; it must be text in UTF-8") from None
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; it must be sections of key: value")
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `values` with each `section.key=value` written into it; unknown sections are caught later."""
    merged: dict[str, Any] = {key: dict(v) if isinstance(v, dict) else v for key, v in values.items()}
    for override in overrides:
        name, equals, text = override.partition("=")
        *sections, key = name.split(".")
        if not equals or not sections or not all([*sections, key]):
            raise ConfigError(f"cannot read the override {override!r}; write section.key=value")
        place = merged
        for section in sections:
            # Copied on the way down, so that the caller's mapping stays as it was.
            inner = place.get(section)
            place[section] = dict(inner) if isinstance(inner, dict) else {}
            place = place[section]
        place[key] = parse_yaml(text, f"the override {override!r}")
    return merged


def build(cls: type[T], values: Any, name: str = "") -> T:
    """`cls` (a dataclass) from a mapping. `name` is the dotted place of `values`, for messages.

    Raises `ConfigError` for a key that `cls` does not have (naming the nearest), a missing one without
    default, a value of the wrong type, and whatever `cls` itself refuses with a ValueError.
    """
    if values is None:  # a section that is written but left empty
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is {values!r}; it must be a section of key: value")
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(_unknown(str(key), name, known))
    kwargs = {key: coerce(value, hints[key], f"{name}.{key}".lstrip(".")) for key, value in values.items()}
    try:
        return cls(**kwargs)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}: {error}" if name else str(error)) from None


def _unknown(key: str, name: str, known: list[str]) -> str:
    """The message for a key that does not exist."""
    prefix = f"{name}." if name else ""
    hint = nearest(key, known, prefix) or f"; known here: {', '.join(known)}"
    return f"unknown key {prefix}{key}{hint}"


def nearest(key: str, known: Sequence[str], prefix: str = "") -> str:
    """`; did you mean <prefix><the known key nearest to key>?`, or nothing if none is near."""
    found = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def coerce(value: Any, kind: Any, name: str) -> Any:
    """`value` as the annotation `kind` wants it, or a `ConfigError` naming key, value and expected type."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, name)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        (inner,) = [option for option in get_args(kind) if option is not type(None)]
        return None if value is None else coerce(value, inner, name)
    if origin is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(str, get_args(kind)))}")
        return value
    if origin is tuple:
        return _coerce_tuple(value, get_args(kind), name)
    return _coerce_plain(value, origin or kind, name)


def _coerce_tuple(value: Any, kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """A list as a tuple; one lone value stands for a list of one."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(items)
    if len(items) != len(kinds):
        raise ConfigError(f"{name} has {len(items)} values; it must have {len(kinds)}")
    return tuple(coerce(item, kind, name) for item, kind in zip(items, kinds, strict=True))


def _coerce_plain(value: Any, kind: type, name: str) -> Any:
    """Text, truth values, mappings, and numbers, which may come as text (quoted) or as `1e3` for 1000."""
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if kind is float and number == number:
            return number
        if kind is int and number.is_integer():
            return int(value) if isinstance(value, int) else int(number)
    elif type(value) is kind:
        return value
    if kind is dict and value is None:  # written but left empty, or taken out by `key=null`
        return {}
    raise ConfigError(f"{name} is {value!r}; it must be {_WORDS.get(kind, kind.__name__)}")
