"""`chat`: a conversation in the terminal, or piped through it."""

import argparse
import sys
from dataclasses import replace

from infer.grammar import add_grammar_flags, compile_grammar, read_definition
from infer.options import DecodingOptions, ModelOptions, add_decoding_flags, add_model_flags
from infer.source import local_folder
from infer.terminal import Terminal

BASE_MODEL = "note: this tokenizer has no chat template: the model continues the text (base model)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_flags(parser)
    add_decoding_flags(parser)
    add_grammar_flags(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="an instruction before all turns, if the template has a place")
    group.add_argument("--color", action="store_true", help="show which text was drafted and which is the model's own")


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, talk; returns the exit code."""
    options = DecodingOptions.read(arguments)
    local_folder(arguments.model, [options.speculation.exit_layer])
    definition = read_definition(arguments)
    terminal = Terminal(arguments.color)

    import torch  # here, so that wrong flags are told before seconds of imports

    from infer.conversation import Conversation, check_system
    from infer.dialogue import Dialogue
    from infer.setting import load_to_decode

    loaded, setting = load_to_decode(
        ModelOptions.read(arguments),
        options,
        terminal,
        lambda loaded: check_system(loaded, arguments.system),
    )
    if definition is not None:
        options = replace(options, grammar=compile_grammar(definition, loaded))
    conversation = Conversation(loaded, setting, options, arguments.system)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    if not conversation.has_template:
        terminal.note(BASE_MODEL)
    if sys.stdin.isatty():
        terminal.note("/help lists the commands")
    return Dialogue(conversation, terminal).talk()
