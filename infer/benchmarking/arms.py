"""The ways to decode that a benchmark compares: the same prompts and arguments in, new tokens out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

import layerskip
from infer.benchmarking.latency import Timing
from layerskip.checkpoint.settings import Setting
from layerskip.decode.stats import Statistics

# (model, prompts (B, length), arguments of generate) -> sequences (B, length + n), what was counted if it was.
# Without an attention mask among the arguments nothing is padding.
Decode = Callable[[PreTrainedModel, Tensor, dict[str, Any]], tuple[Tensor, Statistics | None]]


@dataclass(frozen=True)
class Output:
    """What one call of an arm brought.

    Attributes:
        tokens: new token ids.
        seconds: wall time of the call, prefill included.
        statistics: of its steps, if the arm counts them.
        peak_bytes: most GPU memory in use during the call; None on a CPU.
        timing: when its tokens came, where a `TimingStreamer` was its streamer.
    """

    tokens: list[int]
    seconds: float
    statistics: Statistics | None
    peak_bytes: int | None
    timing: Timing | None = None


@dataclass(frozen=True)
class Arm:
    """A way to decode; `setting` is None where there is nothing to set.

    Attributes:
        second_cache: whether drafts have keys and values of their own, beside the model's.
        other_cache_bytes: what a position takes in the cache of a second model.
        compiles: whether its first call compiles, for the longest prompt and all its new tokens if it is given these.
    """

    name: str
    decode: Decode
    setting: Setting | None = None
    second_cache: bool = False
    other_cache_bytes: int = 0
    compiles: bool = False

    @property
    def drafts(self) -> str:
        """What is drafted in a step, for people."""
        setting = self.setting
        if setting is None:
            return "-"
        tree = (
            setting.tree if setting.tree is None or isinstance(setting.tree, str) else ",".join(map(str, setting.tree))
        )
        own = str(setting.num_draft_tokens) if tree is None else tree
        found = f"lookup {setting.num_lookup_tokens}"
        return {"off": own, "only": found}.get(setting.lookup, f"{own}, {found}")

    @property
    def label(self) -> str:
        """The name with the setting, for people."""
        return self.name if self.setting is None else f"{self.name} {self.setting.exit_layer or '-'}/{self.drafts}"

    def run(self, model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any]) -> Output:
        """Decode from a (1, length) prompt, timed; the device has finished before the clock is read."""
        return self.run_batch(model, prompt, arguments)[0]

    def run_batch(self, model: PreTrainedModel, prompts: Tensor, arguments: dict[str, Any]) -> list[Output]:
        """Decode from (B, length) prompts, timed: an output for each row, whose seconds, statistics and bytes are the
        whole batch's. What fills a row up behind its end is cut off."""
        on_gpu = prompts.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(prompts.device)
        _synchronize(prompts.device)
        start = perf_counter()
        sequences, statistics = self.decode(model, prompts, arguments)
        _synchronize(prompts.device)
        seconds = perf_counter() - start
        peak = torch.cuda.max_memory_allocated(prompts.device) if on_gpu else None
        rows = sequences[:, prompts.shape[1] :].tolist()
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return [Output(_until_end(row, ends), seconds, statistics, peak) for row in rows]


def plain() -> Arm:
    """transformers' own decoding: the baseline."""
    return Arm("plain", _plain)


def plain_loop() -> Arm:
    """This kit's loop without drafts: what the loop itself costs or saves, apart from speculation."""
    return Arm("plain loop", partial(_layerskip, setting=Setting(None, 0)))


def self_speculative(setting: Setting, name: str = "self-speculative", **arguments: Any) -> Arm:
    """This kit's decoding; `arguments` are further ones of `layerskip.generate`."""
    return Arm(name, partial(_layerskip, setting=setting, **arguments), setting)


def coupled(setting: Setting) -> Arm:
    """The same with noise that plain decoding shares, from the seed that torch was given for the call."""

    def decode(model: PreTrainedModel, prompts: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Statistics | None]:
        return _layerskip(model, prompts, arguments, setting, acceptance="coupled", seed=torch.initial_seed())

    return Arm("coupled", decode, setting)


def _plain(model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, None]:
    return cast(Tensor, generate(model, prompt, **arguments)), None


def _layerskip(
    model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any], setting: Setting, **others: Any
) -> tuple[Tensor, Statistics | None]:
    arguments = {"attention_mask": torch.ones_like(prompt), **arguments, **others, **vars(setting)}
    output = layerskip.generate(model, prompt, return_dict_in_generate=True, **arguments)
    assert isinstance(output, layerskip.SelfSpeculativeOutput)
    return cast(Tensor, output.sequences), output.statistics


def generate(model: PreTrainedModel, prompt: Tensor, **arguments: Any) -> Any:
    """`model.generate`; without an attention mask among the arguments nothing is padding."""
    return model.generate(prompt, **{"attention_mask": torch.ones_like(prompt), **arguments})  # type: ignore[operator]


def _until_end(tokens: list[int], ends: Sequence[int | None]) -> list[int]:
    """The tokens up to the first that ends a text, which is among them."""
    first = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return tokens[:first]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
