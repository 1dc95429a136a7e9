"""docs/api.md from the library's docstrings.

    python scripts/api_reference.py            # write it
    python scripts/api_reference.py --check    # exit code 1 if it is not what the docstrings say

What `layerskip` exports comes first, then the public functions and classes of every other module.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
sys.path.insert(0, str(ROOT))

import layerskip  # noqa: E402

HEAD = """# API reference

Made from the docstrings by `scripts/api_reference.py`. What stands under `layerskip` is the interface; the modules
below it are what it is made of.
"""


def page() -> str:
    """The whole page."""
    exported = {name: getattr(layerskip, name) for name in layerskip.__all__}
    parts = [HEAD, "## layerskip\n", first_paragraph(layerskip) + "\n"]
    parts += [entry(name, thing) for name, thing in exported.items()]
    for info in sorted(pkgutil.walk_packages(layerskip.__path__, "layerskip."), key=lambda info: info.name):
        module = importlib.import_module(info.name)
        own = [(name, thing) for name, thing in members(module) if thing not in exported.values()]
        if own:
            parts += [f"## {info.name}\n", first_paragraph(module) + "\n"]
            parts += [entry(name, thing) for name, thing in own]
    return "\n".join(parts)


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public functions and classes that the module itself defines, in the order of its text."""
    found = [
        (name, thing)
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__ and inspect.getdoc(thing)
    ]
    yield from (pair for pair in found if inspect.isclass(pair[1]) or inspect.isfunction(pair[1]))


def first_paragraph(thing: Any) -> str:
    """Of its docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def entry(name: str, thing: Any) -> str:
    """Heading, signature, docstring, and a class's methods."""
    parts = [f"### {name}\n", block(signature(name, thing)), block(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                shown = f"{name}.{method}" if isinstance(value, property) else signature(f"{name}.{method}", function)
                parts += [f"`{oneline(shown)}`: {first_paragraph(function)}\n"]
    return "\n".join(parts)


def signature(name: str, thing: Any) -> str:
    """As it would be called; broken up where it is long."""
    try:
        arguments = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    arguments = re.sub(r"(: |-> )'([^']*)'", r"\1\2", arguments)  # annotations are kept as strings
    arguments = arguments.replace("<factory>", "...")
    if inspect.isclass(thing):
        arguments = arguments.removesuffix(" -> None")
    if len(name + arguments) <= 100:
        return name + arguments
    parts = split(arguments)
    body = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{body}){arguments[arguments.rindex(')') + 1 :]}"


def oneline(text: str) -> str:
    """Without the line breaks of `signature`."""
    return " ".join(text.split()).replace("( ", "(").replace(", )", ")")


def split(text: str) -> list[str]:
    """The parameters of "(a: X, b: Y) -> Z", cut at the commas that are in no brackets."""
    parts, depth, start = [], 0, 1
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
        if depth == 0:
            break
    return [part for part in parts if part]


def block(text: str) -> str:
    """Fenced."""
    return f"```text\n{text}\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    check = parser.parse_args().check
    text = page()
    if check:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        if current != text:
            print("docs/api.md is not what the docstrings say: run python scripts/api_reference.py", file=sys.stderr)
        return int(current != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
