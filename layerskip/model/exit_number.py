"""Which numbers an exit layer may have. Imports nothing, so that programs can ask before they import torch."""

from __future__ import annotations


def check_exit_layer(exit_layer: int, num_layers: int) -> int:
    """Return `exit_layer` if it is one of 1 .. L-1, else raise ValueError."""
    if isinstance(exit_layer, bool) or not isinstance(exit_layer, int):
        raise ValueError(f"exit_layer must be a whole number of layers, got {exit_layer!r}")
    if not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer={exit_layer} is out of range: this model has {num_layers} layers, so choose "
            f"1 to {num_layers - 1} (the number of layers that draft)"
        )
    return exit_layer
