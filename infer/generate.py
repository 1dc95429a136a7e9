"""`generate`: continue one prompt, streamed to standard output as it is committed, or those of a file in batches."""

import argparse
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from infer.errors import InputError
from infer.files import read_text
from infer.grammar import add_grammar_flags, compile_grammar, read_definition, unfinished
from infer.options import DecodingOptions, ModelOptions, add_decoding_flags, add_model_flags, positive
from infer.prompt_file import read_every_prompt
from infer.source import local_folder
from infer.terminal import Terminal

DEFAULT_BATCH_SIZE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from FILE; its last newline is dropped")
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help='continue each line of FILE, or of a .jsonl file each {"prompt": ...}; prints a line of JSON for each',
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help=f"prompts decoded together (default: {DEFAULT_BATCH_SIZE})",
    )
    add_decoding_flags(parser)
    add_grammar_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--color", action="store_true", help="show which text was drafted and which is the model's own")
    group.add_argument("--verbose", action="store_true", help="also say where the time went and acceptance by position")


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, decode; returns the exit code."""
    options = DecodingOptions.read(arguments)
    local_folder(arguments.model, [options.speculation.exit_layer])
    definition = read_definition(arguments)
    prompts = read_many(arguments)
    terminal = Terminal(arguments.color)
    if prompts is not None:
        from infer.batches import generate_batches  # here, so that wrong flags are told before seconds of imports

        size = arguments.batch_size or DEFAULT_BATCH_SIZE
        model = ModelOptions.read(arguments)
        return generate_batches(model, options, prompts, size, terminal, arguments.verbose, definition)
    prompt = read_prompt(arguments.prompt, arguments.prompt_file)
    return generate(ModelOptions.read(arguments), options, prompt, terminal, arguments.verbose, definition)


def read_many(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """The prompts of --prompts; None without it.

    Raises:
        InputError: if it is given with what goes with a single prompt, or without it what goes with many.
    """
    if arguments.prompts is None:
        if arguments.batch_size is not None:
            raise InputError(f"--batch-size {arguments.batch_size} goes with --prompts FILE: give it as well")
        return None
    for flag, value in (("PROMPT", arguments.prompt), ("--prompt-file", arguments.prompt_file)):
        if value is not None:
            raise InputError(f"both {flag} and --prompts are given: give one")
    if arguments.color:
        raise InputError("--color shows how one text comes about: leave it out with --prompts")
    return read_every_prompt(Path(arguments.prompts))


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from where it is: the command line, a file, or standard input.

    Raises:
        InputError: if there is none, or two, or it is empty or no text.
    """
    if prompt is not None and file is not None:
        raise InputError("both PROMPT and --prompt-file are given: give one")
    where = "PROMPT"
    if prompt is None:
        where = file or "standard input"
        text = _read_input() if file is None else read_text(Path(file), f"--prompt-file {file}")
        prompt = text.removesuffix("\n")  # which editors and `echo` add
    if not prompt:
        raise InputError(f"{where} is empty: give at least one character to continue")
    return prompt


def _read_input() -> str:
    if sys.stdin.isatty():
        raise InputError("no prompt: give PROMPT, --prompt-file FILE, or text on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text (byte {error.start}): convert it") from None


def generate(
    model: ModelOptions,
    options: DecodingOptions,
    prompt: str,
    terminal: Terminal,
    verbose: bool,
    definition: str | None = None,
) -> int:
    """Load the model, stream the continuation of `prompt`, and say how it went; returns the exit code.

    Args:
        definition: of the grammar whose texts alone may be written; None is free text.

    Raises:
        InputError: if the model or the prompt cannot be used.
    """
    import torch  # here, so that wrong flags are told before seconds of imports

    from infer.setting import load_to_decode
    from infer.streaming import Splitter, stream
    from infer.tally import Tally

    loaded, setting = load_to_decode(model, options, terminal)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    if terminal.color:
        terminal.legend()
    if definition is not None:
        options = replace(options, grammar=compile_grammar(definition, loaded))
    splitter, tally, output = Splitter(loaded), Tally(), []
    with closing(stream(loaded, loaded.tokenizer(prompt)["input_ids"], setting, options)) as pieces:
        for piece in pieces:
            tally.add(piece)
            output += piece.step.tokens[0].tolist() if piece.step else []
            for span in splitter.split(piece):
                terminal.write(span.text, span.drafted)
    terminal.end_line()
    terminal.note(tally.line())
    if verbose:
        terminal.note(tally.details())
    if options.grammar is not None and not options.grammar.accepts(output):
        terminal.note(unfinished(len(output), options.max_new_tokens))
        return 1
    return 0
