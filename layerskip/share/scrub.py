"""What must not leave with a run: local paths, which are replaced, and secrets, which are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerskip.share.run_record import PROVENANCE, SETTINGS, read_json, read_settings

# At least two parts, not within a URL or a relative path.
_PATH = re.compile(r"(?<![\w.~:/<+-])/[\w.@+~-]+(?:/[\w.@+~-]+)+")
_WHOLE_PATH = re.compile(r"(?:/|~[\w-]*/|[A-Za-z]:[\\/])\S.*[\w.]")  # a setting that is nothing but a path
_SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50,})"),
    "an AWS key": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "an API key": re.compile(r"\bsk-[A-Za-z0-9_-]{40,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}


def local_paths(run_dir: Path) -> dict[str, str]:
    """The paths of this machine that a run's files may name, each with what is said instead.

    They are the run's folder, the working directory, the user's home, and every absolute path among the settings
    and in the provenance; of each of these `./` and the last part is left, which cannot be taken for a Hub id.
    """
    found: dict[str, str] = {}
    for text in _strings(read_settings(run_dir / SETTINGS)):
        found.update(_paths_in(text))
    for text in _strings(read_json(run_dir / PROVENANCE)):
        found.update(_paths_in(text))
    home = Path.home()
    if len(home.parts) > 2:  # /root says nothing of anybody
        found[str(home)] = "~"
    found[str(Path.cwd())] = "."
    found[str(run_dir.absolute())] = found[str(run_dir.resolve())] = run_dir.resolve().name
    return {path: said for path, said in found.items() if len(Path(path).parts) > 1}


def scrub(text: str, paths: dict[str, str], everywhere: bool = False) -> str:
    """`text` with each of `paths` replaced by what is said instead of it.

    Args:
        everywhere: whether any other absolute path is cut to its last part, too: in records, never in anybody's text.
    """
    if paths:
        longest_first = sorted(paths, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w+]){re.escape(path)}(?![\w-])" for path in longest_first)
        text = re.sub(pattern, lambda match: paths[match[0]], text)
    return _PATH.sub(lambda match: _cut(match[0]), text) if everywhere else text


def find_secret(text: str, token: str | None = None) -> str | None:
    """What kind of secret a text holds, None if it holds none; `token` is one that is known to be one."""
    if token and token in text:
        return "your own token"
    return next((kind for kind, pattern in _SECRETS.items() if pattern.search(text)), None)


def _paths_in(text: str) -> dict[str, str]:
    """The absolute paths in one setting or argument, with what is left of them; spaces are only understood in a path
    that is all of it."""
    value = text.partition("=")[2] or text  # an argument is section.key=value
    whole = [value] if _WHOLE_PATH.fullmatch(value) else []
    return {path: _cut(path) for path in (*whole, *_PATH.findall(text))}


def _cut(path: str) -> str:
    return "./" + re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
