"""Every setting of a training run: frozen dataclasses, one per section of the YAML file.

A field's comment is its documentation, with the unit; `python -m train --help` prints it.
The section `recipe` is the library's own `layerskip.training.recipe.Recipe`. Nothing here imports torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerskip.training.recipe import Recipe
from train.errors import ConfigError, check, check_above_zero, check_at_least, check_at_most
from train.model_config import ModelConfig, TokenizerConfig
from train.text_config import DataConfig


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: its name, its folder, its seed."""

    name: str = ""  # name of the run; left out, the name of the config file
    output_dir: str = ""  # folder of the run; left out, runs/<name>
    seed: int = 0  # seeds the weights, the data order and layer dropout
    cpu_threads: int | None = None  # torch threads of a process; left out, without a GPU all cores, shared evenly
    resume: Literal["auto", "never"] = "auto"  # auto: go on from the folder's last whole checkpoint
    overwrite: bool = False  # delete another run's files in output_dir first

    def __post_init__(self) -> None:
        check_at_least("run", self, {"seed": 0, "cpu_threads": 1})
        check_at_most("run", self, {"seed": 2**64 - 1, "cpu_threads": 4096})  # torch's own; no machine has more

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output_dir).expanduser()


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer: AdamW with warm-up and a learning-rate schedule."""

    max_steps: int = 1000  # optimizer steps of the whole run
    global_batch_size: int = 8  # sequences per optimizer step, over all processes
    micro_batch_size: int = 8  # sequences per process and forward pass
    learning_rate: float = 1e-4  # peak, reached at the end of the warm-up
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # course of the rate after the warm-up
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    min_learning_rate: float = 0.1  # rate at the last step, as a share of the peak (not for constant)
    weight_decay: float = 0.1  # per unit of learning rate; never on norms and biases
    betas: tuple[float, float] = (0.9, 0.95)  # decay of AdamW's two running means
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; .inf: they are left as they are

    def __post_init__(self) -> None:
        check_at_least("optim", self, {"max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1})
        check_at_least("optim", self, {"warmup_steps": 0, "min_learning_rate": 0, "weight_decay": 0})
        check_at_most("optim", self, {"max_steps": 10**9, "global_batch_size": 10**6})  # far beyond any run
        check_above_zero("optim", self, "learning_rate")
        check(self.weight_decay < float("inf"), f"optim.weight_decay is {self.weight_decay}; it must be finite")
        check(self.max_grad_norm > 0, f"optim.max_grad_norm is {self.max_grad_norm}; it must be above 0")
        check(
            self.min_learning_rate <= 1,
            f"optim.min_learning_rate is {self.min_learning_rate}; it is a share of the peak rate, at most 1",
        )
        check(
            self.warmup_steps < self.max_steps,
            f"optim.warmup_steps is {self.warmup_steps}; it must be below optim.max_steps ({self.max_steps})",
        )
        check(all(0 <= beta < 1 for beta in self.betas), f"optim.betas are {self.betas}; each must be in [0, 1)")
        check(
            self.global_batch_size % self.micro_batch_size == 0,
            f"optim.global_batch_size ({self.global_batch_size}) must be a multiple of "
            f"optim.micro_batch_size ({self.micro_batch_size}) times the number of processes",
        )


@dataclass(frozen=True)
class EveryConfig:
    """How often things happen, in optimizer steps. The first and the last step are always evaluated."""

    log: int = 10  # steps between two lines of metrics
    evaluate: int = 500  # steps between two evaluations on held-out text
    save: int = 500  # steps between two checkpoints
    keep: int = 2  # checkpoints kept; older ones are deleted, but for the best one

    def __post_init__(self) -> None:
        check_at_least("every", self, {"log": 1, "evaluate": 1, "save": 1, "keep": 1})


@dataclass(frozen=True)
class BestConfig:
    """The best checkpoint: the fastest forecast of those whose last layer is good enough. Sharded engines, whose
    stages are not timed, have none."""

    keep: bool = True  # save the best one at its evaluation, and never prune it
    margin: float = 0.01  # share by which its last layer's loss may exceed the start's (from scratch: the lowest seen)
    export: bool = False  # finish with the best one; otherwise with the last one, which no timing has a say in

    def __post_init__(self) -> None:
        check_at_least("best", self, {"margin": 0})
        check(self.keep or not self.export, "best.export is true and best.keep false: set best.keep=true")


TRACKERS = ("wandb", "tensorboard", "trackio")


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go beside metrics.jsonl, which is always written, and the samples of what the model writes."""

    trackers: tuple[str, ...] = ()  # any of wandb, tensorboard, trackio; the others are not imported
    project: str = "layerskip"  # project in wandb and trackio
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"  # auto: online if an API key is there
    samples: int = 3  # held-out prompts that the model continues at every evaluation
    sample_tokens: int = 48  # tokens of each continuation, as far as the model's positions reach
    report: bool = True  # write report.html when the run is finished; `python -m train report RUN` does it any time

    def __post_init__(self) -> None:
        for name in self.trackers:
            check(name in TRACKERS, f"tracking.trackers has {name!r}; choose from {', '.join(TRACKERS)}")
        check_at_least("tracking", self, {"samples": 0, "sample_tokens": 1})
        check_at_most("tracking", self, {"sample_tokens": 65536})


@dataclass(frozen=True)
class HubConfig:
    """Upload to the Hugging Face Hub, beside the run: what fails is told, and stops nothing."""

    repo: str | None = None  # repository to upload to, owner/name; left out, no upload
    private: bool = True  # make the repository private; one that is public already is refused
    when: Literal["end", "best"] = "end"  # end: the finished run; best: before it each best checkpoint, too
    revision: str | None = None  # branch to upload to; left out, main
    license: str | None = None  # for the model card, such as apache-2.0; left out, the base model's if its card is here
    timeout: int = 3600  # seconds to wait for the upload when the run is finished

    def __post_init__(self) -> None:
        check_at_least("hub", self, {"timeout": 1})
        if self.repo is None:
            return
        from layerskip.share.hub import HubError, check_repo_id, check_revision  # half a second, for those who upload

        try:
            check_repo_id(self.repo)
        except HubError as error:
            raise ConfigError(f"hub.repo: {error}") from None
        try:
            check_revision(self.revision or "main")
        except HubError as error:
            raise ConfigError(f"hub.revision: {error}") from None


@dataclass(frozen=True)
class TrainConfig:
    """A whole run, as merged from defaults, YAML file and command line."""

    run: RunConfig
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    recipe: Recipe
    optim: OptimConfig
    every: EveryConfig
    best: BestConfig
    tracking: TrackingConfig
    hub: HubConfig

    def __post_init__(self) -> None:
        check(
            self.model.name_or_path is not None
            or self.tokenizer.name_or_path is not None
            or self.tokenizer.train_vocab_size is not None,
            "a model from scratch has no tokenizer of its own: give tokenizer.name_or_path or "
            "tokenizer.train_vocab_size",
        )
        check(
            self.hub.repo is None or self.hub.when != "best" or self.best.keep,
            "hub.when is best and best.keep is false: set best.keep=true, or hub.when=end",
        )
        check(
            self.model.lora_rank is None or not self.recipe.has_adapters,
            "model.lora_rank and recipe.adapter_rank or adapter_blocks do not go together yet: give one of them",
        )
