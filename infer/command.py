"""The table of commands. Only the one asked for is imported."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from infer.errors import InputError

# name -> (module with add_arguments(parser) and run(arguments) -> exit code, one line of help)
COMMANDS = {
    "generate": ("infer.generate", "continue one prompt, streamed as it is committed, or a file of them in batches"),
    "chat": ("infer.chat", "talk to a model; the cache is kept between turns"),
    "benchmark": ("infer.benchmark", "speed and exactness against plain decoding, side by side"),
    "load": ("infer.load", "latency and throughput of serving: so many requests at once, or so many a second"),
    "tune": ("infer.tune", "choose exit layer and draft length, forecast from the model's own text and then measured"),
    "evaluate": ("infer.evaluation", "loss, agreement and task quality of the model and of each of its exits"),
    "inspect": ("infer.inspection", "what each layer would say after each token of a text, and what was drafted"),
    "vocabulary": ("infer.vocabulary", "choose the tokens that the draft's head has rows for"),
    "export": ("infer.export", "make a checkpoint that decodes by itself, or its draft a model of its own"),
    "push": ("infer.push", "upload a run with its model card to the Hugging Face Hub"),
}

_NEEDED = ("huggingface_hub", "rich", "torch", "transformers")  # missing in a Python that is not the environment's


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and leave with exit code 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def build_parser(asked: str | None) -> argparse.ArgumentParser:
    """The parser of the whole program, with the flags of the command `asked` alone."""
    parser = Parser(prog="python -m infer", description="Decode with a model that drafts for itself (LayerSkip).")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, help_line) in COMMANDS.items():
        child = commands.add_parser(name, help=help_line, description=f"{help_line.capitalize()}.")
        if name == asked:
            module = importlib.import_module(module_name)
            module.add_arguments(child)
            child.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: 0, 1 (a check failed), 2 (wrong input), 130 (Ctrl-C)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    asked = next((argument for argument in argv if argument in COMMANDS), None)
    try:
        arguments = build_parser(asked).parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        way_out = "`source .venv/bin/activate`, or `pip install -e '.[infer]'`"
        print(f"error: {sys.executable} has no module {error.name!r}: {way_out}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return 0
    return code
