"""Uploads beside a run that goes on: one at a time, each in a process of its own. What fails is told and stops nothing.

A process and not a thread: it can be ended when its time is over, whatever it waits for, its hashing takes no turns of
the training's interpreter, and a Ctrl-C at the training does not reach it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from layerskip.checkpoint.whole_files import read_json, write_json
from train.config import HubConfig, TrainConfig
from train.console import Reporter
from train.upload import Job

_STAGE = "uploads.partial"  # in the run folder, so that files can be linked and need no room of their own
_NOT_SHARED = ("optimizer.pt", "state.json", "README.md")
_ROOT = Path(__file__).resolve().parents[1]
_WAITS = (10.0, 60.0)  # seconds before the second and the third try, where the Hub cannot be reached


class Uploads:
    """The uploads of a run; on the first process, nothing on the others. Use as a context manager around the loop.

    Leaving it before `finished` was called (the run stopped or failed) ends what is under way.
    """

    def __init__(self, config: TrainConfig, reporter: Reporter, main: bool, waits: tuple[float, ...] = _WAITS) -> None:
        """`main`: whether this is the first process; `waits`: see `_WAITS`."""
        self._hub: HubConfig = config.hub
        self._folder, self._reporter, self._waits = config.run.folder, reporter, waits
        self._enabled = main and config.hub.repo is not None
        self._process: subprocess.Popen[str] | None = None
        self._output: IO[str] | None = None  # of that process
        self._current: Path | None = None  # the folder it uploads
        self._next: Path | None = None
        self._finished = False

    def __enter__(self) -> "Uploads":
        if self._enabled:
            shutil.rmtree(self._folder / _STAGE, ignore_errors=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._enabled and not self._finished:
            if self._process is not None:
                self._end("the run stopped before it was done")
            self._clear()

    def best(self, checkpoint: Path, record: dict[str, Any], tokens: int) -> None:
        """Upload a checkpoint if `hub.when` says so; of several that wait, only the newest goes.

        Args:
            record: its validation record: {"step", "last", "exits"}.
            tokens: that it was trained on.
        """
        if not self._enabled or self._hub.when != "best":
            return
        folder = self._folder / _STAGE / checkpoint.name
        try:
            _stage(checkpoint, folder, self._folder, record, tokens)
        except OSError as error:
            self._reporter.say(f"warning: the best checkpoint is not uploaded: {error}")
            return
        if self._next is not None:
            shutil.rmtree(self._next, ignore_errors=True)
        self._next = folder
        self.poll()

    def finished(self) -> None:
        """Upload the finished run, after what is under way and instead of what waits. Returns at once."""
        self._finished = True
        if self._enabled:
            self._next = self._folder
            self.poll()

    def poll(self) -> None:
        """Tell what is done, and begin what waits."""
        if self._process is not None and self._process.poll() is not None:
            self._tell()
        if self._process is None and self._next is not None:
            self._begin()

    def wait(self) -> None:
        """Wait for all that was begun, `hub.timeout` seconds at most; what is not done by then is ended and told."""
        if not self._enabled:
            return
        until = time.monotonic() + self._hub.timeout
        if self._process is not None and self._process.poll() is None:
            self._reporter.say(f"waiting for the upload to {self._hub.repo}, {self._hub.timeout:,} s at most")
        try:
            while self._process is not None:
                self._process.wait(max(0.0, until - time.monotonic()))
                self.poll()
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._next = self._folder
            self._end("interrupted" if interrupted else f"not done after {self._hub.timeout:,} s (hub.timeout)")
        finally:
            self._clear()

    def _begin(self) -> None:
        assert self._next is not None
        self._current, self._next, hub = self._next, None, self._hub
        assert hub.repo is not None
        job = Job(str(self._current), hub.repo, hub.private, hub.revision, hub.license, self._waits)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed when it is read
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "train.upload", json.dumps(asdict(job))],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            start_new_session=True,
        )

    def _tell(self) -> None:
        """What the process that ended says of itself: its last line."""
        assert self._process is not None
        assert self._output is not None
        self._output.seek(0)
        last = (self._output.read().strip().splitlines() or [""])[-1]
        try:
            said = json.loads(last)
        except ValueError:
            said = {}
        code, what = self._process.returncode, self._what()
        self._forget()
        if said.get("address"):
            self._reporter.say(f"uploaded {what} to {said['address']}")
        else:
            self._warn(what, said.get("error") or f"its process ended with code {code}: {last or 'no message'}")

    def _end(self, reason: str) -> None:
        """Kill what is under way, and say why."""
        assert self._process is not None
        what = self._what() if self._next is None else "the finished run"
        self._process.kill()
        self._process.wait()
        self._forget()
        self._warn(what, reason)

    def _warn(self, what: str, reason: str) -> None:
        flags = [f"--repo {self._hub.repo}", "--private" if self._hub.private else ""]
        flags += [f"--revision {self._hub.revision}" if self._hub.revision else ""]
        flags += [f"--license {self._hub.license}" if self._hub.license else ""]
        again = f"; python -m infer push {self._folder} {' '.join(filter(None, flags))}" if self._finished else ""
        self._reporter.say(f"warning: {what} was not uploaded: {reason}{again}")

    def _what(self) -> str:
        assert self._current is not None
        finished = self._current == self._folder
        return "the finished run" if finished else f"the best checkpoint so far ({self._current.name})"

    def _forget(self) -> None:
        if self._current is not None and self._current != self._folder:
            shutil.rmtree(self._current, ignore_errors=True)
        if self._output is not None:
            self._output.close()
        self._process = self._output = self._current = None

    def _clear(self) -> None:
        shutil.rmtree(self._folder / _STAGE, ignore_errors=True)


def _stage(checkpoint: Path, folder: Path, run_folder: Path, record: dict[str, Any], tokens: int) -> None:
    """Lay a checkpoint out as a run folder: linked, so that it outlives its deletion, with its own numbers.

    Where files cannot be linked they are copied: a checkpoint that is pruned during its upload would be half a model.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in _NOT_SHARED:
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copy(path, folder / path.name)
    before = read_json(run_folder / "evaluation.json").get("before")
    after = {"validation": {name: record[name] for name in ("last", "exits")}}
    numbers = {"before": before, "after": after, "steps": record["step"], "tokens": tokens, "unfinished": True}
    write_json(folder / "evaluation.json", numbers)
