"""wandb, TensorBoard and trackio behind one small interface; each is imported only if it is asked for."""

import dataclasses
import importlib.util
import json
import netrc
import os
from pathlib import Path
from typing import Any, Protocol

from layerskip.checkpoint.whole_files import read_json
from train.config import TRACKERS, TrackingConfig, TrainConfig
from train.errors import ConfigError


class Sink(Protocol):
    """A run in one tracker.

    Attributes:
        note: what a person should be told about it; may be empty.
    """

    note: str

    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        """Begin, or go on with, the run of `config` after step `resumed_step`."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record numbers, by flat names, as they are after optimizer step `step`."""

    def show(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record texts: all of the run so far, {"step", "prompt", "continuation"} each."""

    def close(self) -> None:
        """Finish the run."""


def check_trackers(tracking: TrackingConfig) -> None:
    """Raise `ConfigError` for a tracker that is not installed, or that would ask for a key."""
    for name in tracking.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"tracking.trackers has {name}, which is not installed: run `pip install {name}`")
    if "wandb" in tracking.trackers:
        wandb_mode(tracking)


def start_trackers(config: TrainConfig, resumed_step: int) -> list[Sink]:
    """The runs of `tracking.trackers`; of a training run that is resumed after `resumed_step`, the ones it had."""
    kinds: tuple[type[Sink], ...] = (_Wandb, _TensorBoard, _Trackio)
    start = dict(zip(TRACKERS, kinds, strict=True))
    return [start[name](config, resumed_step) for name in config.tracking.trackers]


class _Wandb:
    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        import wandb

        folder = config.run.folder
        mode = wandb_mode(config.tracking)
        self._wandb = wandb
        self._run = wandb.init(
            project=config.tracking.project,
            name=config.run.name,
            id=_run_id(folder),
            resume="allow",
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            config=dataclasses.asdict(config),
            settings=wandb.Settings(console="off", quiet=True),
        )
        # A resumed run repeats the steps it lost. wandb's own step only counts up and would drop them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.note = f"wandb is offline; to send it later: wandb sync {folder}/wandb/offline-run-*"
        if mode != "offline":
            self.note = f"wandb: {self._run.url}" if mode == "online" else ""

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def show(self, step: int, samples: list[dict[str, Any]]) -> None:
        columns: list[str | int] = ["step", "prompt", "continuation"]
        table = self._wandb.Table(columns=columns, data=[[sample[str(name)] for name in columns] for sample in samples])
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        from train.command import to_yaml

        folder = config.run.folder / "tensorboard"
        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)  # type: ignore[no-untyped-call]
        if not resumed_step:
            self._writer.add_text("config", f"```\n{to_yaml(config)}```", 0)
        self.note = f"TensorBoard: tensorboard --logdir {folder}"

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, step: int, samples: list[dict[str, Any]]) -> None:
        newest = [sample for sample in samples if sample["step"] == step]
        texts = (f"```\n{sample['prompt']}\n```\n\n```\n{sample['continuation']}\n```" for sample in newest)
        self._writer.add_text("samples", "\n\n---\n\n".join(texts), step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=config.tracking.project,
            name=f"{config.run.name}-{_run_id(config.run.folder)}",
            resume="allow",
            config=json.loads(json.dumps(dataclasses.asdict(config))),
            embed=False,
        )
        self.note = f"trackio: trackio show --project {config.tracking.project}"

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def show(self, step: int, samples: list[dict[str, Any]]) -> None:
        columns = ["step", "prompt", "continuation"]
        rows = [[sample[str(name)] for name in columns] for sample in samples]
        self._run.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_mode(tracking: TrackingConfig) -> str:
    """online, offline or disabled. auto: WANDB_MODE if set, else online if an API key is there, else offline.

    Raises `ConfigError` for online without a key: wandb would ask for one and wait.
    """
    mode = os.environ.get("WANDB_MODE", "auto") if tracking.wandb_mode == "auto" else tracking.wandb_mode
    has_key = _has_api_key()
    if mode == "auto":
        return "online" if has_key else "offline"
    if mode == "online" and not has_key:
        raise ConfigError(
            "tracking.wandb_mode is online, but there is no API key: run `wandb login` or set "
            "tracking.wandb_mode=offline"
        )
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


def _run_id(folder: Path) -> str:
    """The id of the training run in this folder, the same for every launch of it."""
    run_id: str = read_json(folder / "provenance.json")["run_id"]
    return run_id
