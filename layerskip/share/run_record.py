"""What a run folder says of itself, for the model card. Imports neither torch nor transformers.

A run folder holds an ordinary Hugging Face checkpoint and, where they are known, the numbers of the run:

    config.json              "layerskip": {"recipe": {...}, "exits": {"2": {"loss", "agreement", "overlap"}},
                             "draft_vocabulary": {"size": n}}
    generation_config.json   "layerskip": {"exit_layer", "num_draft_tokens"}
    config.yaml              every setting of the run
    provenance.json          how, when and on what it was started
    evaluation.json          losses before and after training, every exit, the forecast
    benchmark.json           what `python -m infer benchmark RUN --json RUN/benchmark.json` measured
    *.png, *.svg             pictures, in the folder itself or in plots/
    custom_generate/         code that transformers' `generate` loads by itself
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import RepoCard

SETTINGS, PROVENANCE = "config.yaml", "provenance.json"
EVALUATION, BENCHMARK = "evaluation.json", "benchmark.json"
RECORDS = (SETTINGS, PROVENANCE, EVALUATION, BENCHMARK)
# Pages to look at, curves, prompts: what people read, or the programs read again.
TEXTS = ("report.html", "benchmark.html", "metrics.jsonl", "prompts/*.jsonl")
PICTURES = ("*.png", "*.svg", "plots/*.png", "plots/*.svg")


class HubError(RuntimeError):
    """The run cannot be described or uploaded; the message says why and what to do."""


@dataclass(frozen=True)
class RunRecord:
    """The records of one run folder; what is not there is empty."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    setting: dict[str, Any] = field(default_factory=dict)  # the tuned one, of generation_config.json
    settings: dict[str, Any] = field(default_factory=dict)  # config.yaml
    evaluation: dict[str, Any] = field(default_factory=dict)
    benchmark: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()  # names relative to the folder
    custom_generate: bool = False  # whether transformers can decode it by itself

    @property
    def layerskip(self) -> dict[str, Any]:
        """What the checkpoint carries under our key."""
        return self.config.get("layerskip") or {}

    @property
    def num_layers(self) -> int | None:
        """Layers of the model, None if its config does not say."""
        config = self.config.get("text_config") or self.config
        return config.get("num_hidden_layers") or config.get("n_layer")

    @property
    def split(self) -> str:
        """The held-out text the reported numbers are from: test, or what an unfinished run has."""
        after = self.evaluation.get("after") or {}
        return "test" if "test" in after or not after else next(iter(after))

    def measured(self, when: str) -> dict[str, Any]:
        """The evaluation `when`, "before" or "after", on `split`: {"last": {...}, "exits": {...}}."""
        return (self.evaluation.get(when) or {}).get(self.split) or {}

    def last_loss(self, when: str) -> float | None:
        """Loss of the last layer (nats a token), None where it was not measured."""
        loss: float | None = (self.measured(when).get("last") or {}).get("loss")
        return loss


def read_run(folder: Path) -> RunRecord:
    """The records of a folder.

    Raises:
        HubError: if one of them is damaged.
    """
    return RunRecord(
        folder=folder,
        config=read_json(folder / "config.json"),
        setting=read_json(folder / "generation_config.json").get("layerskip") or {},
        settings=read_settings(folder / SETTINGS),
        evaluation=read_json(folder / EVALUATION),
        benchmark=read_json(folder / BENCHMARK),
        pictures=tuple(sorted(p.relative_to(folder).as_posix() for name in PICTURES for p in folder.glob(name))),
        custom_generate=(folder / "custom_generate" / "generate.py").is_file(),
    )


def setting_in_words(setting: dict[str, Any], num_layers: int) -> str:
    """A setting, as `settings.Setting` is stored: who drafts, and what."""
    exit_layer, lookup = setting.get("exit_layer"), setting.get("lookup", "off")
    if lookup == "only":
        return "drafts come from a prompt lookup alone"
    if exit_layer is None:
        return "plain decoding, without drafts"
    number = setting.get("num_draft_tokens")
    drafts = "as many tokens a step as pay" if number == "auto" else f"up to {number} tokens a step"
    if setting.get("tree") is not None:
        drafts = f"candidate trees ({_tree_name(setting['tree'])})"
    who = f"{exit_layer} of {num_layers} layers draft"
    if exit_layer == "auto":
        who = "in each step the exit that pays best, or none, drafts"
    also = {"hybrid": ", where a prompt lookup finds nothing", "branch": ", beside what a prompt lookup finds"}
    return f"{who} {drafts}{also.get(lookup, '')}"


def drafts_in_words(setting: dict[str, Any]) -> str:
    """What the setting's exit drafts a step: "4 drafted tokens", "trees 2,1,1"."""
    tree = setting.get("tree")
    return f"{setting.get('num_draft_tokens')} drafted tokens" if tree is None else f"trees {_tree_name(tree)}"


def _tree_name(tree: str | Sequence[int]) -> str:
    return tree if isinstance(tree, str) else ",".join(map(str, tree))


def local_folder(name: Any, run_dir: Path) -> Path | None:
    """The local folder that a setting of the run means, or None: it is none, or it is not on this machine.

    A relative one is looked for where the programs are usually started: here, in the checkout, above the run.
    """
    if not isinstance(name, str) or not name:
        return None
    path = Path(name).expanduser()
    places = (Path.cwd(), Path(__file__).resolve().parents[1], *run_dir.resolve().parents)
    return next((place / path for place in places if (place / path).is_dir()), None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file is not there.

    Raises:
        HubError: if it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HubError(f"{path} is not a JSON object: mend or remove it")
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by huggingface_hub's own reader of card metadata, which are YAML too.

    Raises:
        HubError: if they cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        return RepoCard(f"---\n{path.read_text(encoding='utf-8')}\n---\n").data.to_dict()
    except Exception as error:  # of a YAML library that is not ours to import
        reason = str(error).partition("\n")[0]
        raise HubError(f"{path} cannot be read ({reason}): mend or remove it") from error
