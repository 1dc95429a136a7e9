"""Reading and running what the README and docs/ show: `console` blocks and `python` snippets, on a tiny run.

A block fenced as `sh` is shown and not run: what needs a GPU, a network or another program.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from infer.command import main

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# A benchmark's flags in a document are for people; a test asks for the least.
CHEAP = {
    "benchmark": "--num-prompts 1 --repeats 1 --max-new-tokens 8",
    "tune": "--num-prompts 2 --max-new-tokens 16",
}
SMALLER = {"--num-draft-tokens 3,4,6": "--num-draft-tokens 2,3", "1,2,4,8,16": "1,2"}


def commands(text: str) -> list[str]:
    """The lines of console blocks that begin with `$ `, comments left out; a line that ends with \\ goes on."""
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line[2:].partition("  #")[0].strip() for line in lines if line.startswith("$ ")]


def snippets(text: str) -> list[str]:
    """The python blocks."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def on(tiny_run: Path, text: str) -> str:
    """`text` with the tiny run and config in the quickstart's place."""
    return text.replace("runs/quickstart", str(tiny_run)).replace("configs/quickstart.yaml", "configs/tiny.yaml")


def cheap(command: str) -> str:
    """The same command asking for less."""
    for flags, less in SMALLER.items():
        command = command.replace(flags, less)
    name = next((name for name in CHEAP if f"python -m infer {name}" in command), None)
    return command if name is None else f"{command} {CHEAP[name]}"


def run(command: str, **environment: str) -> str:
    """What it prints; an AssertionError with the end of its output if it fails."""
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


def follow(command: str, tiny_run: Path, folder: Path) -> None:
    """Run a command of a document. `python -m infer` goes through its door in this process where no shell is needed:
    importing torch takes seconds. What trains does so for two steps, into `folder`."""
    command = cheap(on(tiny_run, command))
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "infer"] and not set(words) & {"|", ">", ">>", "<", "&&", ";"}:
        setting = tiny_run / "generation_config.json"
        before = setting.read_bytes()
        assert main(words[3:]) == 0, command
        if "tune" in words:  # what it chose, perhaps "off", is this moment's; the next command's is not to depend on it
            setting.write_bytes(before)
        return
    if "accelerate launch" in command or "python -m train configs" in command:
        command += f" run.output_dir={folder / 'run'} optim.max_steps=2"
    run(command)


def links(text: str) -> list[str]:
    """Targets of the links that are not on the web, without their anchors."""
    return re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
