"""A narrow, structured corpus anyone can get: Debian's package descriptions, one source package a line of .jsonl.

    python scripts/debian_stanzas.py                      # on Debian and Ubuntu: from `apt-cache dumpavail`
    python scripts/debian_stanzas.py --from URL_OR_FILE   # anywhere: a Packages file (.xz, .gz or plain) of a mirror

A line is {"text": ..., "source": ...}: the stanzas of every binary package (libfoo1, libfoo-dev, foo-doc) that
one source package builds, with a blank line between them. The trainer holds out whole lines, so siblings, which
differ in a word or two, never sit on two sides of the split. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

EXAMPLE = "https://deb.debian.org/debian/dists/bookworm/main/binary-amd64/Packages.xz"
# What no reader could foretell: hashes, sizes, the path (name and version again), what a build happened to find.
DROPPED = {
    *("Filename", "Size", "Installed-Size", "MD5sum", "SHA1", "SHA256", "SHA512", "Description-md5", "Build-Ids"),
    *("Built-Using", "Static-Built-Using", "X-Cargo-Built-Using", "Javascript-Built-Using", "Ghc-Package"),
}


class CorpusError(Exception):
    """What the user can do something about; its text is the whole message."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="origin", metavar="URL_OR_FILE", help=f"a Packages file, e.g. {EXAMPLE}")
    parser.add_argument("--output", type=Path, default=Path("data/debian.jsonl"), help="default: %(default)s")
    parser.add_argument("--most-siblings", type=int, default=6, help="stanzas kept of a source package (default: 6)")
    options = parser.parse_args()
    try:
        if options.most_siblings < 1:
            raise CorpusError(f"--most-siblings is {options.most_siblings}; it must be at least 1")
        sources = by_source(stanzas(read_lines(options.origin)), options.most_siblings)
        if not sources:
            raise CorpusError(f"no package in {options.origin or 'apt-cache dumpavail'}: {way_out(options.origin)}")
        characters = write(sources, options.output)
    except CorpusError as error:
        sys.exit(f"debian_stanzas: {error}")
    packages = sum(len(texts) for texts in sources.values())
    print(f"{options.output}: {packages:,} packages of {len(sources):,} sources, {characters / 1e6:.1f} M characters")


def way_out(origin: str | None) -> str:
    """What to do about an origin without packages."""
    return f"name a Packages file such as {EXAMPLE}" if origin else f"run `apt-get update`, or give --from {EXAMPLE}"


def read_lines(origin: str | None) -> Iterator[str]:
    """The lines of a Packages file, of apt's own lists if `origin` is None. Raises `CorpusError`."""
    if origin is None:
        if shutil.which("apt-cache") is None:
            raise CorpusError(f"there is no apt-cache here; give --from {EXAMPLE}")
        result = subprocess.run(["apt-cache", "dumpavail"], capture_output=True)
        if result.returncode:
            raise CorpusError(f"apt-cache dumpavail failed: {result.stderr.decode(errors='replace').strip()}")
        content = result.stdout
    else:
        content = unpacked(fetched(origin), origin)
    return iter(content.decode("utf-8", errors="replace").splitlines())


def fetched(origin: str) -> bytes:
    """The bytes of a file or URL."""
    try:
        if "://" not in origin:
            return Path(origin).read_bytes()
        print(f"downloading {origin}", file=sys.stderr)
        with urllib.request.urlopen(origin, timeout=60) as response:
            return bytes(response.read())
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise CorpusError(f"cannot read {origin}: {error}; {way_out(origin)}") from None


def unpacked(content: bytes, origin: str) -> bytes:
    """`content` without its compression, told by its first bytes."""
    try:
        if content.startswith(b"\xfd7zXZ"):
            return lzma.decompress(content)
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise CorpusError(f"{origin} is damaged: {error}; download it again") from None


def stanzas(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """One {field: value} a package, in the file's order; a value keeps its continuation lines as they are."""
    fields: dict[str, str] = {}
    name = ""
    for line in lines:
        if not line.strip():
            if fields:
                yield fields
            fields, name = {}, ""
        elif line[0] in " \t" and name:
            fields[name] += "\n" + line
        elif ":" in line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    if fields:
        yield fields


def source_of(fields: dict[str, str]) -> str:
    """The source package: "Source: foo (1.2)" names it where it is not called like the package."""
    return fields.get("Source", fields["Package"]).split()[0]


def by_source(packages: Iterable[dict[str, str]], most_siblings: int) -> dict[str, list[str]]:
    """Texts of each source's packages, sorted by name; of several versions of a package the first one counts.

    The sources come in an order drawn from their names, so that the first few are a fair sample. A few build
    hundreds of packages (a dictionary or a kernel flavour each) and would be most of the text: `most_siblings`
    of each are kept.
    """
    texts: dict[str, dict[str, str]] = {}
    for fields in packages:
        if "Package" in fields:
            texts.setdefault(source_of(fields), {}).setdefault(fields["Package"], render(fields))
    return {
        source: [texts[source][name] for name in sorted(texts[source])[:most_siblings]]
        for source in sorted(texts, key=digest)
    }


def digest(name: str) -> bytes:
    """A fixed order that has nothing to do with the alphabet."""
    return hashlib.sha256(name.encode()).digest()


def render(fields: dict[str, str]) -> str:
    """The stanza as Debian writes it, without the fields nobody could foretell."""
    return "\n".join(f"{name}: {value}" for name, value in fields.items() if name not in DROPPED)


def write(sources: dict[str, list[str]], path: Path) -> int:
    """Write one line a source, whole or not at all; returns the number of characters of text."""
    characters = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for source, texts in sources.items():
            text = "\n\n".join(texts) + "\n"
            characters += len(text)
            file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return characters


if __name__ == "__main__":
    main()
