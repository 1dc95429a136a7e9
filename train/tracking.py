"""Metrics of a run: one JSON object a line in metrics.jsonl, and the same to wandb if a project is set."""

import json
import netrc
import os
from pathlib import Path
from typing import Any, TextIO

from train.config import TrainConfig, WandbConfig
from train.errors import ConfigError


class Tracker:
    """Writes metrics on the first process, nothing on the others. Leaving it finishes the wandb run."""

    def __init__(self, config: TrainConfig, resumed_step: int, enabled: bool = True) -> None:
        """Open metrics.jsonl after step `resumed_step`; lines of later steps, since lost, are dropped."""
        self._file: TextIO | None = None
        self._wandb: Any = None
        if not enabled:
            return
        folder = config.run.folder
        path = folder / "metrics.jsonl"
        truncate_after(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")
        if config.wandb.project:
            self._wandb = _start_wandb(config, folder)

    def log(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Record `values` (numbers, or dictionaries of them) measured after optimizer step `step`."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
        if self._wandb is not None:
            self._wandb.log(flatten(values, kind), step=step)

    def close(self) -> None:
        """Close the file and finish the wandb run."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def truncate_after(path: Path, step: int) -> None:
    """Drop the records of steps beyond `step`, and a half-written last line; nothing if there is no file."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def flatten(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """{"loss": 1, "exits": {"2": 3}} under prefix "train" as {"train/loss": 1, "train/exits/2": 3}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        flat.update(flatten(value, name) if isinstance(value, dict) else {name: value})
    return flat


def wandb_mode(wandb: WandbConfig) -> str:
    """online, offline or disabled. auto: WANDB_MODE if set, else online if an API key is there, else offline.

    Raises `ConfigError` for online without a key: wandb would ask for one and wait.
    """
    mode = os.environ.get("WANDB_MODE", "auto") if wandb.mode == "auto" else wandb.mode
    has_key = _has_api_key()
    if mode == "auto":
        return "online" if has_key else "offline"
    if mode == "online" and not has_key:
        raise ConfigError("wandb.mode is online, but there is no API key: run `wandb login` or set wandb.mode=offline")
    return mode


def _has_api_key() -> bool:
    """Whether wandb would find a key without asking: in the environment, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start_wandb(config: TrainConfig, folder: Path) -> Any:
    """The wandb run of this training run; a resumed run goes on with the same one."""
    import dataclasses

    import wandb

    run_id = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["run_id"]
    return wandb.init(
        project=config.wandb.project,
        name=config.run.name,
        id=run_id,
        resume="allow",
        dir=str(folder),
        mode=wandb_mode(config.wandb),  # type: ignore[arg-type]
        config=dataclasses.asdict(config),
        settings=wandb.Settings(console="off"),
    )
