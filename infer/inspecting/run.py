"""`inspect` itself: decode, read all layers, show."""

from dataclasses import replace

from infer.benchmarking.output import name_of
from infer.errors import InputError
from infer.inspecting import page as inspection_page
from infer.inspecting import table as inspection_table
from infer.inspecting.picture import Picture, decode_watched, read_layers
from infer.inspecting.words import Words
from infer.inspection import MAX_TOKENS, InspectOptions
from infer.loading import Loaded
from infer.options import ModelOptions
from infer.setting import load_to_decode
from infer.streaming import check_room
from infer.terminal import Terminal
from layerskip.checkpoint.settings import Setting
from layerskip.model.adapters import adapter_at


def inspect_text(model: ModelOptions, options: InspectOptions, prompt: str, terminal: Terminal) -> int:
    """Continue the prompt, read all layers, print the table, and write the page if asked for; returns 0.

    Raises:
        InputError: if the model or the prompt cannot be used.
    """
    loaded, setting = load_to_decode(model, options.decoding(), terminal)
    picture = look(loaded, setting, options, prompt)
    words = Words(loaded.tokenizer)
    exit_layer = setting.exit_layer if isinstance(setting.exit_layer, int) else None
    inspection_table.show(picture, words, exit_layer, terminal)
    if options.html is not None:
        adapters = [e for e in range(1, picture.num_layers) if adapter_at(loaded.model, e) is not None]
        page = inspection_page.page(name_of(loaded), picture, words, exit_layer, adapters)
        options.html.write_text(page, encoding="utf-8")
        terminal.note(f"wrote {options.html}")
    else:
        terminal.note("--html FILE writes every layer, to look at in a browser")
    return 0


def look(loaded: Loaded, setting: Setting, options: InspectOptions, prompt: str) -> Picture:
    """The picture of the prompt and its continuation."""
    ids = list(loaded.tokenizer(prompt)["input_ids"])
    check_room(loaded, len(ids), options.max_new_tokens)
    if len(ids) + options.max_new_tokens > MAX_TOKENS:
        raise InputError(
            f"the prompt has {len(ids)} tokens and --max-new-tokens is {options.max_new_tokens}, but a picture has at "
            f"most {MAX_TOKENS} columns: shorten the prompt, or lower --max-new-tokens"
        )
    rounds = decode_watched(loaded, ids, setting, options.decoding()) if options.max_new_tokens else []
    written = [token for each in rounds for token in each.tokens]
    picture = read_layers(loaded, ids + written)
    return replace(picture, num_prompt=len(ids), rounds=tuple(rounds))
