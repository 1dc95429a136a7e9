"""What a load test is asked for. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.benchmark import BenchmarkOptions
from infer.errors import InputError
from infer.files import check_file, check_picture
from infer.options import ModelOptions
from infer.prompts import Prompts
from infer.serving.arrivals import ClosedLoop, Level, OpenLoop
from infer.serving.metrics import Objective

ARMS = ("plain", "loop", "chain", "tree", "hybrid", "lookup", "branch")
BATCHINGS = ("continuous", "static")
CLOCKS = ("wall", "processor")
DEFAULT_ARMS = ("plain", "loop", "chain", "hybrid")
DEFAULT_CONCURRENCY = (1, 2, 4, 8)


@dataclass(frozen=True)
class LoadOptions:
    """What load, on what."""

    concurrency: tuple[int, ...] = ()  # closed loops: requests in flight
    rate: tuple[float, ...] = ()  # open loops: requests a second
    arms: tuple[str, ...] = DEFAULT_ARMS  # of ARMS
    batch_size: int = 16  # most rows decoded together
    batching: str = "continuous"  # of this kit's loop, one of BATCHINGS; transformers' is static
    num_requests: int = 32  # of each arm under each level, and repeat
    clock: str = "wall"  # one of CLOCKS
    timeout: float = 120.0  # seconds from arrival after which a request counts as timed out
    slo_ttft: float | None = None  # milliseconds; of the goodput
    slo_tpot: float | None = None  # milliseconds; likewise
    exit_layer: int | None = None  # None: the checkpoint's
    num_draft_tokens: int | None = None  # None: the checkpoint's, else 4
    num_prompts: int = 8  # different ones; requests go round them
    prompt_tokens: int = 64  # longer prompts are cut
    max_new_tokens: int = 64  # tokens; an output ends earlier at the end-of-sequence token
    repeats: int = 1  # times that everything is run
    seed: int = 0  # of the arrivals
    json: Path | None = None  # where to write the record as well
    png: Path | None = None  # where to draw latency against throughput

    @property
    def levels(self) -> tuple[Level, ...]:
        """Closed loops, then open ones."""
        return (*map(ClosedLoop, self.concurrency), *map(OpenLoop, self.rate))

    @property
    def widest(self) -> int:
        """Most requests that are decoded together: an open loop may fill the batch."""
        most = self.num_requests if self.rate else max(self.concurrency)
        return min(self.batch_size, most)

    @property
    def objective(self) -> Objective:
        """What goodput asks for."""
        return Objective(self.slo_ttft, self.slo_tpot)

    def batching_of(self, arm: str) -> str:
        """How the arm of this name makes batches."""
        return "static" if arm == "plain" else self.batching

    def as_benchmark(self) -> BenchmarkOptions:
        """The same arms, settings and prompts, for what `benchmark` shares with this command."""
        return BenchmarkOptions(
            exit_layers=None if self.exit_layer is None else (self.exit_layer,),
            num_draft_tokens=None if self.num_draft_tokens is None else (self.num_draft_tokens,),
            arms=self.arms,
            num_prompts=self.num_prompts,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=self.max_new_tokens,
        )

    def scope(self, prompts: Prompts, num_prompts: int) -> dict[str, Any]:
        """What was run, for the record."""
        names = ["batch_size", "clock", "timeout", "slo_ttft", "slo_tpot", "prompt_tokens", "max_new_tokens"]
        names += ["repeats", "seed"]
        own = {name: getattr(self, name) for name in names}
        own["max_batch_size"] = own.pop("batch_size")
        return {"prompts": prompts.source, "num_prompts": num_prompts, "num_requests": self.num_requests, **own}

    def check(self, model: ModelOptions) -> None:
        """Raise `InputError` if what is found out could not be written in the end, or the clock would not tell."""
        check_file("--json", self.json)
        check_picture("--png", self.png)
        if self.clock == "processor":
            self._check_processor_clock(model)

    def _check_processor_clock(self, model: ModelOptions) -> None:
        if model.threads != 1:
            raise InputError("--clock processor would count every thread's time: add --threads 1")
        if model.device not in (None, "cpu"):
            raise InputError(f"--clock processor does not see the time of --device {model.device}: leave one out")
