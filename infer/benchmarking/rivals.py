"""The ways to decode that transformers brings itself: compiled, and its three kinds of assisted generation."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from infer.benchmarking.arms import Arm, generate
from layerskip.checkpoint.settings import Setting
from layerskip.decode.stats import Statistics
from layerskip.model.anatomy import decoder_layers

# What transformers drafts with an assistant that says nothing else: its tokens, and the confidence to go on.
DEFAULT_ASSISTANT_TOKENS, DEFAULT_CONFIDENCE = 20, 0.4


def compiled(backend: str | Callable[..., Any] = "inductor") -> Arm:
    """Plain decoding with a static cache and a compiled decoding step (the prompt's pass is not compiled)."""
    return Arm("compiled", partial(_compiled, backend=backend), compiles=True)


def assistant_early_exit(setting: Setting) -> Arm:
    """transformers' own early-exit drafts, with the same number of drafted tokens every round."""
    return Arm("assistant_early_exit", partial(_assistant_early_exit, setting=setting), setting, second_cache=True)


def prompt_lookup(num_tokens: int) -> Arm:
    """transformers' own prompt lookup, of at most so many tokens; otherwise at its defaults."""
    setting = Setting(None, 0, lookup="only", num_lookup_tokens=num_tokens)
    return Arm("prompt_lookup_num_tokens", partial(_assisted, prompt_lookup_num_tokens=num_tokens), setting)


def assistant_model(
    assistant: PreTrainedModel,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None,
    num_draft_tokens: int | None,
    cache_bytes: int = 0,
) -> Arm:
    """transformers' own drafts by a second, smaller model.

    Args:
        tokenizers: the model's and the assistant's, where they are different.
        num_draft_tokens: in every round; None: as many as the assistant's generation config says, else
            transformers' default of at most 20, ended where the assistant is unsure.
        cache_bytes: what a position takes in the assistant's cache.
    """
    config = assistant.generation_config
    if num_draft_tokens is None:
        length = getattr(config, "num_assistant_tokens", None) or DEFAULT_ASSISTANT_TOKENS
        confidence = getattr(config, "assistant_confidence_threshold", None)
        confidence = DEFAULT_CONFIDENCE if confidence is None else confidence
    else:
        length, confidence = num_draft_tokens, 0.0
    others: dict[str, Any] = {"assistant_model": assistant}
    if tokenizers is not None:
        others |= {"tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}

    def decode(model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Statistics]:
        with _knobs(config, length, confidence):
            return _assisted(model, prompt, arguments, **others)

    setting = Setting(None, length, draft_stop=confidence or None)
    return Arm("assistant_model", decode, setting, other_cache_bytes=cache_bytes)


@torch.inference_mode()
def cache_bytes(model: PreTrainedModel) -> int:
    """What one position takes in a model's own cache, of any causal LM that has one."""
    output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
    cache = output.get("cache") or output.get("past_key_values")
    layers = [(layer.keys, layer.values) for layer in getattr(cache, "layers", []) if hasattr(layer, "keys")]
    return sum(part.numel() * part.element_size() for pair in layers for part in pair if part is not None)


def _compiled(
    model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any], backend: str | Callable[..., Any]
) -> tuple[Tensor, Statistics | None]:
    config = CompileConfig(backend=backend)
    config._compile_all_devices = True  # type: ignore[assignment]  # or a CPU would run the static cache uncompiled
    others = {"cache_implementation": "static", "compile_config": config}
    try:
        return cast(Tensor, generate(model, prompt, **others, **arguments)), None
    except Exception as error:
        inner = getattr(error, "inner_exception", None)  # of a compiler that fails, whose first line does not say why
        if inner is None:
            raise
        raise inner from None


def _assisted(
    model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any], **assistance: Any
) -> tuple[Tensor, Statistics]:
    """Assisted generation whose drafts do not run layers of `model`."""
    with _quiet(), _count_passes(model) as passes:
        sequences = cast(Tensor, generate(model, prompt, **assistance, **arguments))
    num_tokens, num_steps = sequences.shape[1] - prompt.shape[1], passes.runs[-1]
    # The first step's pass has the prompt, every later one the last token, and all of them what was drafted.
    num_drafted = passes.positions[-1] - prompt.shape[1] - (num_steps - 1)
    return sequences, Statistics(num_steps, num_tokens, num_drafted, max(0, num_tokens - num_steps))


def _assistant_early_exit(
    model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any], setting: Setting
) -> tuple[Tensor, Statistics]:
    exit_layer, layers = setting.exit_layer, model.config.get_text_config(decoder=True)
    assert isinstance(setting.num_draft_tokens, int)  # the benchmark names numbers
    num_layers = layers.num_hidden_layers
    try:
        with _quiet(), _knobs(model.generation_config, setting.num_draft_tokens, 0.0), _count_passes(model) as passes:
            sequences = cast(Tensor, generate(model, prompt, assistant_early_exit=exit_layer, **arguments))
    finally:
        layers.num_hidden_layers = num_layers  # which it leaves changed when it fails
    num_tokens, num_steps = sequences.shape[1] - prompt.shape[1], passes.runs[-1]
    # Drafts run the first layers only, one token a pass. A last round that was cut counts as not accepted.
    num_accepted = max(0, num_tokens - num_steps)
    return sequences, Statistics(num_steps, num_tokens, passes.runs[0] - num_steps, num_accepted)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that transformers gives about how it calls itself."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _knobs(config: GenerationConfig, num_draft_tokens: int, confidence: float) -> Iterator[None]:
    """Set what transformers reads from the drafting model's config alone, and put it back."""
    wanted = {
        "num_assistant_tokens": num_draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": confidence,
    }
    before = {name: getattr(config, name, None) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@dataclass
class Passes:
    """How often the first layer (key 0) and the last one (key -1) ran, and over how many positions."""

    runs: dict[int, int] = field(default_factory=lambda: {0: 0, -1: 0})
    positions: dict[int, int] = field(default_factory=lambda: {0: 0, -1: 0})

    def count(self, key: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook; a layer's input (B, length, hidden) is its first argument or named hidden_states."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self.runs[key] += 1
        self.positions[key] += hidden.shape[1]


@contextmanager
def _count_passes(model: PreTrainedModel) -> Iterator[Passes]:
    passes, layers = Passes(), decoder_layers(model)
    with ExitStack() as stack:
        for key in passes.runs:
            hook = partial(passes.count, key)
            stack.callback(layers[key].register_forward_hook(hook, with_kwargs=True).remove)
        yield passes
