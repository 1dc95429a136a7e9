"""`evaluate`: how good the model and each of its exits are, on held-out text and on tasks of lm-evaluation-harness."""

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import InputError
from infer.files import check_file
from infer.options import ModelOptions, add_model_flags, add_prompt_flags, positive, positives
from infer.prompt_file import read_texts
from infer.prompts import find_prompts
from infer.source import local_folder
from infer.terminal import Terminal

MODEL_WINDOW = 1024  # tokens of a window, where the model has as many positions


@dataclass(frozen=True)
class EvaluateOptions:
    """What is measured, and on what."""

    exit_layers: tuple[int, ...] | None = None  # None: those that were trained or tuned, else the first third
    all_exits: bool = False
    own_text: bool = False  # measure on what the model writes after the prompts
    window: int | None = None  # tokens read at once; None: MODEL_WINDOW, or the model's positions
    stride: int | None = None  # tokens by which windows advance; None: half a window
    max_tokens: int | None = None  # tokens of text at most; None: all
    num_prompts: int = 24  # prompts that are measured or continued
    prompt_tokens: int = 64  # with own_text: longer prompts are cut
    max_new_tokens: int = 64  # with own_text: tokens that each prompt is continued with
    tasks: tuple[str, ...] = ()  # of lm-evaluation-harness
    include_path: Path | None = None  # folder with further task files
    limit: int | None = None  # documents a task; None: all
    num_fewshot: int | None = None  # examples before each question; None: the task's own number
    batch_size: int = 1  # questions answered together
    chat_template: bool = False  # ask the tasks' questions as a user of a conversation
    json: Path | None = None  # where to write the record as well

    def __post_init__(self) -> None:
        """Raise `InputError` where flags contradict each other."""
        if self.window is not None and self.window < 2:
            raise InputError(f"--window {self.window} predicts nothing: give 2 or more")
        if self.stride is not None and self.window is not None and self.stride >= self.window:
            raise InputError(
                f"--stride {self.stride} leaves tokens of a --window {self.window} without any context: "
                f"give {self.window - 1} or less"
            )
        if self.own_text and (self.window or self.stride or self.max_tokens):
            raise InputError("--window, --stride and --max-tokens are of text: leave them out with --own-text")
        given = {"--include-path": self.include_path, "--limit": self.limit, "--num-fewshot": self.num_fewshot}
        idle = next((flag for flag, value in given.items() if value is not None), None)
        if not self.tasks and (idle or self.chat_template):
            raise InputError(f"{idle or '--chat-template'} goes with --tasks: give them as well")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    defaults = EvaluateOptions
    add_model_flags(parser)
    add = parser.add_argument_group("exits").add_argument
    add(
        *("--exit-layers", "--exit-layer", "--exits"),
        dest="exit_layers",
        type=exits_or_all,
        metavar="E,...|all",
        help="exits to measure (default: those that were trained or tuned, else the first third of the layers)",
    )
    counts = {
        "--num-prompts": (defaults.num_prompts, "prompts that are measured, or continued"),
        "--prompt-tokens": (defaults.prompt_tokens, "with --own-text: longer prompts are cut"),
        "--max-new-tokens": (defaults.max_new_tokens, "with --own-text: tokens that each prompt is continued with"),
    }
    add = add_prompt_flags(parser, counts)
    add(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help='measure on this text: plain, or .jsonl with {"text": ...} lines (default: the prompts)',
    )
    add("--own-text", action="store_true", help="measure on what the model itself writes after the prompts")
    add("--window", type=positive, metavar="N", help="tokens read at once (default: 1024, or all the model takes)")
    add("--stride", type=positive, metavar="N", help="tokens by which windows advance (default: half a window)")
    add("--max-tokens", type=positive, metavar="N", help="read at most so many tokens of the text (default: all)")
    _add_task_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write the record to FILE as well")


def _add_task_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tasks of lm-evaluation-harness").add_argument
    add("--tasks", type=names, default=(), metavar="NAME,...", help="tasks, groups or patterns, such as arc_easy")
    add("--include-path", type=Path, metavar="FOLDER", help="find tasks in the YAML files of FOLDER too")
    add("--limit", type=positive, metavar="N", help="first documents of each task alone, for a quick look")
    add("--num-fewshot", type=positive, metavar="N", help="examples before each question (default: the task's own)")
    add("--batch-size", type=positive, default=1, metavar="N", help="questions answered together (default: 1)")
    add("--chat-template", action="store_true", help="put questions as the model's chat template does")


def names(text: str) -> tuple[str, ...]:
    """Names between commas, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no task")
    return found


def exits_or_all(text: str) -> list[int] | str:
    """Numbers of layers, or "all"."""
    return text if text == "all" else positives(text)


def read_options(arguments: argparse.Namespace) -> EvaluateOptions:
    """The options from the flags of `add_arguments`.

    Raises:
        InputError: if flags contradict each other, or what is needed is not there.
    """
    given: dict[str, Any] = {
        name: getattr(arguments, name) for name in EvaluateOptions.__dataclass_fields__ if hasattr(arguments, name)
    }
    exits = arguments.exit_layers
    given["all_exits"] = exits == "all"
    given["exit_layers"] = tuple(exits) if isinstance(exits, list) else None
    options = EvaluateOptions(**given)
    if arguments.text and (arguments.prompts or options.own_text):
        other = "--prompts" if arguments.prompts else "--own-text"
        raise InputError(f"--text is read as it is, and {other} is about prompts: leave one of the two out")
    check_file("--json", options.json)
    if options.include_path is not None and not options.include_path.is_dir():
        raise InputError(f"--include-path {options.include_path} is no folder: give one with the tasks' YAML files")
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise InputError("--tasks needs lm-evaluation-harness, which is not installed: pip install lm-eval")
    return options


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, measure; returns the exit code."""
    options = read_options(arguments)
    model = ModelOptions.read(arguments)
    folder = local_folder(model.model, options.exit_layers)
    texts: tuple[str, ...] = ()
    source = ""
    if arguments.text:
        texts = tuple(text for path in arguments.text for text in read_texts(path, "give text it was not trained on"))
        source = ", ".join(path.name for path in arguments.text)
    elif not options.tasks or arguments.prompts or options.own_text:  # tasks alone, where nothing else is asked for
        prompts = find_prompts(arguments.prompts, folder, need_validation=False)
        texts = tuple(prompt.as_text for prompt in prompts.test[: options.num_prompts])
        source = prompts.source

    from infer.evaluating.run import evaluate  # here, so that wrong flags are told before seconds of imports

    return evaluate(model, options, texts, source, Terminal())
