"""Which files of a run are shared, and as what: weights as they are, records without local paths.

All else stays where it is: checkpoints/ and optimizer states, packed data, logs, samples, and whatever is not known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from safetensors import SafetensorError, safe_open

from layerskip.share.run_record import (
    PICTURES,
    RECORDS,
    SETTINGS,
    TEXTS,
    HubError,
    local_folder,
    read_json,
    read_settings,
)
from layerskip.share.scrub import find_secret, local_paths, scrub

# Named in config.json by these keys. model/adapters.py and checkpoint/vocabulary.py have the names too, and torch.
_COMPANIONS = {"adapters": "exit_adapters.safetensors", "draft_vocabulary": "draft_vocabulary.safetensors"}
# Too large to be read, or nobody's text: they go as they are.
_AS_THEY_ARE = (
    *("model*.safetensors", *_COMPANIONS.values(), "*.model", "vocab*", "merges.txt", "tokenizer.json"),
    *("LICENSE*", "NOTICE*", *(name for name in PICTURES if name.endswith(".png"))),
)
# Written by programs, who may have noted where: any absolute path in them is cut to its last part.
_RECORDS = (
    *("config.json", "generation_config.json", "*.index.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", *RECORDS),
)
# In these, text that has paths of its own: only this machine's are replaced.
_TEXTS = (
    *("README.md", "chat_template*", "custom_generate/*", *TEXTS),
    *(name for name in PICTURES if name.endswith(".svg")),
)


@dataclass(frozen=True)
class SharedFile:
    """One file of the repository."""

    name: str  # its path in the repository
    source: Path  # where it is here
    text: str | None = None  # what goes instead of it, None if it goes as it is

    @property
    def size(self) -> int:
        """Bytes that go."""
        return self.source.stat().st_size if self.text is None else len(self.text.encode())


def shared_files(run_dir: Path, exclude: Sequence[str] = (), card: str | None = None) -> list[SharedFile]:
    """The files of a run that are uploaded, by name.

    Args:
        exclude: patterns of names that stay, such as `prompts/*`.
        card: the model card, where the folder has none yet.

    Raises:
        HubError: if the folder holds no whole checkpoint, or a file holds a secret.
    """
    check_checkpoint(run_dir)
    paths, token = local_paths(run_dir), get_token()
    found = {} if card is None else {"README.md": SharedFile("README.md", run_dir / "README.md", scrub(card, paths))}
    for pattern in (*_AS_THEY_ARE, *_RECORDS, *_TEXTS):
        for path in run_dir.glob(pattern):
            name = path.relative_to(run_dir).as_posix()
            if name in found or not path.is_file() or any(fnmatch(name, skipped) for skipped in exclude):
                continue
            text = None
            if pattern not in _AS_THEY_ARE:
                text = scrub(_read(path), paths, everywhere=pattern in _RECORDS)
                _refuse_secrets(path, text, token)
            found[name] = SharedFile(name, path, text)
    for name, path in _base_licence(run_dir).items():
        if not any(fnmatch(name, skipped) for skipped in exclude):
            found.setdefault(name, SharedFile(name, path))
    return [file for _, file in sorted(found.items())]


def _base_licence(run_dir: Path) -> dict[str, Path]:
    """The licence files of the local folder that the run began from, by name; most licences ask that they travel."""
    name = (read_settings(run_dir / SETTINGS).get("model") or {}).get("name_or_path")
    base = local_folder(name, run_dir)
    there = [*base.glob("LICENSE*"), *base.glob("NOTICE*")] if base else []
    return {path.name: path for path in there if path.is_file()}


def stage(files: Sequence[SharedFile], folder: Path) -> None:
    """Lay the files out in an empty folder as they go: what goes as it is, is linked and not copied.

    A hard link stays whole when its source is deleted or replaced; across file systems it is a symbolic one.
    """
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.text is not None:
            path.write_text(file.text, encoding="utf-8", newline="")
            continue
        source = file.source.resolve()
        try:
            os.link(source, path)
        except OSError:
            path.symlink_to(source)


def check_checkpoint(run_dir: Path) -> None:
    """Raise HubError unless the folder holds a whole checkpoint, with what its config names."""
    if not run_dir.is_dir():
        raise HubError(f"{run_dir} is no folder: give the folder of a finished run")
    if not (run_dir / "config.json").is_file():
        raise HubError(f"{run_dir} holds no config.json: give the folder of a finished run")
    index = read_json(run_dir / "model.safetensors.index.json")
    shards = set(index.get("weight_map", {}).values()) or {"model.safetensors"}
    carried = read_json(run_dir / "config.json").get("layerskip") or {}
    shards.update(file for key, file in _COMPANIONS.items() if carried.get(key))
    missing = sorted(shard for shard in shards if not (run_dir / shard).is_file())
    if missing:
        raise HubError(f"{run_dir} holds no {missing[0]}: only a whole checkpoint in safetensors is uploaded")
    if carried.get("adapters"):
        _check_adapters(run_dir / _COMPANIONS["adapters"], carried["adapters"])


def _check_adapters(path: Path, described: dict[str, Any]) -> None:
    """Raise HubError unless the file has weights for just the exits that the config names."""
    try:
        with safe_open(path, framework="np") as file:
            found = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except SafetensorError as error:
        raise HubError(f"{path} cannot be read ({error}): save the adapters again") from None
    named = {str(exit_layer) for exit_layer in described.get("exits") or ()}
    if found != named:
        raise HubError(
            f"{path} has adapters for exit {', '.join(sorted(found)) or 'none'}, and config.json names "
            f"{', '.join(sorted(named))}: copy the file that was saved with these weights"
        )


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise HubError(f"{path} is not UTF-8 text: mend it, or leave it out with --exclude") from None


def _refuse_secrets(path: Path, text: str, token: str | None) -> None:
    kind = find_secret(text, token)
    if kind is not None:
        raise HubError(f"{path} holds what looks like {kind}: take it out, or leave the file out with --exclude")
