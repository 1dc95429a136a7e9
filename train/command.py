"""The command line: read it, check every setting, and only then load torch and train."""

import argparse
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from layerskip.training.presets import PRESETS, preset_values
from train.config import TrainConfig
from train.errors import ConfigError, LocalError, TrainingError
from train.parsing import apply_overrides, build, nearest, read_yaml

_USAGE = """accelerate launch [--config_file configs/accelerate/ddp.yaml] train CONFIG [section.key=value ...]
       python -m train report RUN
       python -m train regenerate CONFIG --output FILE [section.key=value ...]"""


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The checked settings of a run: defaults <- the YAML file `path` <- `overrides` (`section.key=value`).

    A preset among the overrides takes the place of the file's whole recipe: mixed with it, it would be neither. What
    depends on another section is filled in here: the run's name and folder, and the recipe's seed and total_steps.
    Raises `ConfigError`, one line, without having loaded torch.
    """
    values, given = read_yaml(path), apply_overrides({}, overrides)
    if isinstance(given.get("recipe"), dict) and given["recipe"].get("preset") is not None:
        values.pop("recipe", None)
    values = apply_overrides(values, overrides)
    for section in [f.name for f in dataclasses.fields(TrainConfig)]:
        values.setdefault(section, {})
    values["recipe"] = _with_preset(values["recipe"])
    config = build(TrainConfig, values)
    name = config.run.name or path.stem
    run = dataclasses.replace(config.run, name=name, output_dir=config.run.output_dir or f"runs/{name}")
    recipe = config.recipe
    if "seed" not in (values["recipe"] or {}):
        recipe = dataclasses.replace(recipe, seed=run.seed)
    if recipe.total_steps is None:
        recipe = dataclasses.replace(recipe, total_steps=config.optim.max_steps)
    return dataclasses.replace(config, run=run, recipe=recipe)


def _with_preset(recipe: Any) -> Any:
    """The section `recipe` with the values of its `preset`, if it names one, below its own."""
    if not isinstance(recipe, dict) or recipe.get("preset") is None:
        return {k: v for k, v in recipe.items() if k != "preset"} if isinstance(recipe, dict) else recipe
    own = dict(recipe)
    name = own.pop("preset")
    if name not in PRESETS:
        hint = nearest(str(name), list(PRESETS)) or f"; known are {', '.join(PRESETS)}"
        raise ConfigError(f"recipe.preset is {name!r}, which is no preset{hint}")
    return preset_values(name, own)


def to_yaml(config: TrainConfig) -> str:
    """The merged settings as YAML that `load_config` reads back to an equal config."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False)


def describe_settings() -> str:
    """Every setting with its default and its comment in the source, for `--help`."""
    lines = ["settings (in CONFIG as YAML, or on the command line as section.key=value):"]
    for section in dataclasses.fields(TrainConfig):
        kind: Any = section.type
        source = "".join(inspect.getsource(base) for base in kind.__mro__[:-1])
        comments = dict(re.findall(r"^    (\w+): .*?#\s*(.+)$", source, flags=re.MULTILINE))
        lines.append(f"\n{section.name}:")
        if section.name == "recipe":
            lines.append(f"  {'preset=':<34} start from one of {', '.join(PRESETS)}; what is set beside it goes on top")
        for f in dataclasses.fields(kind):
            lines.append(f"  {f.name + '=' + _as_yaml(f.default):<34} {comments[f.name]}")
    return "\n".join(lines)


def _as_yaml(default: Any) -> str:
    """A default as one would write it in a config or an override; empty if there is none."""
    if default is None or default is dataclasses.MISSING:
        return ""
    values = list(default) if isinstance(default, tuple) else default
    return yaml.safe_dump(values, default_flow_style=True).partition("\n")[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train",
        usage=_USAGE,
        description="Train a causal LM so that its early layers can draft for the rest (LayerSkip).",
        epilog=describe_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of settings, see configs/README.md")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace the file's")
    parser.add_argument("--print-config", action="store_true", help="print the merged settings and stop")
    return parser


def _report(argv: Sequence[str]) -> int:
    """`python -m train report RUN`: make the report of a run again."""
    parser = argparse.ArgumentParser(prog="train report", description="Write RUN/report.html from what the run logged.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run; it may be going on")
    folder = parser.parse_args(argv).run
    from train.report import write_report

    try:
        print(write_report(folder))
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _regenerate(argv: Sequence[str]) -> int:
    """`python -m train regenerate CONFIG --output FILE`: have the model answer the prompts of `data`."""
    from train.regenerate import run
    from train.regenerate_options import parser

    arguments = parser().parse_intermixed_args(argv)
    try:
        return run(arguments, load_config(arguments.config, arguments.overrides))
    except (ConfigError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns 0, 1 (training failed), 2 (wrong settings) or 128 + signal (stopped)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["report"]:
        return _report(argv[1:])
    if argv[:1] == ["regenerate"]:
        return _regenerate(argv[1:])
    arguments = _parser().parse_intermixed_args(argv)
    first_process = os.environ.get("RANK", "0") == "0"
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(to_yaml(config), end="")
            return 0
        from train.loop import train  # here, so that wrong settings are told before seconds of imports

        return train(config, argv)
    except (ConfigError, TrainingError) as error:
        if first_process or isinstance(error, LocalError):  # else the others fail for the same reason
            print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("stopped; what was trained since the last checkpoint is lost", file=sys.stderr)
        return 130
