"""`inspect`: what each layer would say after each token of one text, and how its continuation was drafted."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from infer.files import check_file
from infer.generate import read_prompt
from infer.options import DecodingOptions, ModelOptions, add_model_flags, number
from infer.source import local_folder
from infer.speculation import SpeculationOptions, add_speculation_flags
from infer.terminal import Terminal

MAX_TOKENS = 512  # columns of a picture that can still be looked at


@dataclass(frozen=True)
class InspectOptions:
    """How the text is continued, and where the picture goes."""

    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    max_new_tokens: int = 24  # tokens that the text is continued with, greedily; 0: none
    html: Path | None = None  # page to write

    def decoding(self) -> DecodingOptions:
        """How the text is continued."""
        return DecodingOptions(self.speculation, self.max_new_tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to look at (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the text from FILE; its last newline is dropped")
    parser.add_argument(
        "--max-new-tokens",
        type=whole,
        default=InspectOptions.max_new_tokens,
        metavar="N",
        help="continue it greedily with N tokens, and look at them too; 0: the text alone (default: %(default)s)",
    )
    add_speculation_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--html", type=Path, metavar="FILE", help="write the whole picture as one page to look at")


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    return int(number(text, int, lambda value: value >= 0, "a whole number, 0 or more"))


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, look; returns the exit code."""
    options = InspectOptions(SpeculationOptions.read(arguments), arguments.max_new_tokens, arguments.html)
    local_folder(arguments.model, [options.speculation.exit_layer])
    check_file("--html", options.html)
    prompt = read_prompt(arguments.prompt, arguments.prompt_file)

    from infer.inspecting.run import inspect_text  # here, so that wrong flags are told before seconds of imports

    return inspect_text(ModelOptions.read(arguments), options, prompt, Terminal())
