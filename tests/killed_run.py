"""The program `train`, killed at a given moment: `python -m tests.killed_run step:7 CONFIG [section.key=value ...]`.

`step:7` is before the eighth step's first forward; `write:10` is while the checkpoint of step 10 is written, all its
files there and nothing of it flushed; `answer:3` is after the third answer of `regenerate`. The signal is SIGKILL:
nothing is tidied up. Only process 1 dies, if there are several.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

from train import answers, checkpoint, step
from train.command import main


def kill() -> None:
    """Die as in a power cut."""
    if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(place: str, number: int) -> None:
    """Have the run die at step `number`, while that step's checkpoint is written, or after so many answers."""
    if place == "step":
        seed_step = step.seed_step

        def dying(seed: int, at: int, rank: int) -> None:
            if at == number:
                kill()
            seed_step(seed, at, rank)

        step.seed_step = dying
    elif place == "answer":
        add, numbers = answers.Answers.add, itertools.count(1)

        def dying_add(*arguments: object) -> None:
            add(*arguments)
            if next(numbers) == number:
                kill()

        answers.Answers.add = dying_add
    else:
        flush = checkpoint.flush

        def dying_flush(folder: Path) -> None:
            if folder.name == f"step-{number:06d}.partial":
                kill()
            flush(folder)

        checkpoint.flush = dying_flush


if __name__ == "__main__":
    moment, *arguments = sys.argv[1:]
    kill_at(moment.split(":")[0], int(moment.split(":")[1]))
    sys.exit(main(arguments))
