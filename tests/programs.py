"""What tests of `infer` share: calling its door, and prompts to measure on."""

import pytest
import torch

from infer.command import main


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(argv)
    except SystemExit as leave:  # argparse's own
        code = leave.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def prompts(n: int = 2) -> list[torch.Tensor]:
    """(1, 5) token ids each, all different."""
    return [torch.tensor([[5, 9, 17 + i, 30, 8]]) for i in range(n)]


def quiet(label: str) -> None:
    """Is told how a measurement advances."""
