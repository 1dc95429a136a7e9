"""Which exits are trained at a step: C(t, l) of the paper (4.1.2), a pure function of the step.

Nothing is kept between steps, so a resumed run needs no state. Exits are counted in layers run, 1 .. L.
"""

from __future__ import annotations

from layerskip.training.recipe import Recipe


def active_exits(recipe: Recipe, num_layers: int, step: int) -> tuple[int, ...]:
    """The exits in the loss at optimizer step `step` (from 0), ascending; `num_layers` is the last layer itself."""
    candidates = recipe.trained_exits(num_layers)
    if recipe.exits is None and recipe.exit_weights != "shallow":  # all, in the paper the last layer among them
        candidates = (*candidates, num_layers)
    if recipe.curriculum == "rotational":
        # Of fewer than R exits one is on at every step, rather than none at most.
        active = rotational(candidates, min(recipe.curriculum_stride or num_layers - 1, len(candidates)), step)
    elif recipe.curriculum == "gradual":
        assert recipe.total_steps is not None
        active = gradual(candidates, step, recipe.total_steps)
    else:
        active = candidates
    if recipe.freeze_model:  # there is nothing to learn at its last layer
        return tuple(sorted({*active} - {num_layers})) or recipe.trained_exits(num_layers)[-1:]
    last = (num_layers,) if recipe.include_last else ()
    return tuple(sorted({*active, *last}))


def rotational(candidates: tuple[int, ...], stride: int, step: int) -> tuple[int, ...]:
    """C_rot,R: every R-th candidate, one further each step; each is on once in R steps."""
    return tuple(exit_layer for i, exit_layer in enumerate(candidates) if (i - step) % stride == 0)


def gradual(candidates: tuple[int, ...], step: int, total_steps: int) -> tuple[int, ...]:
    """C_grad: from the deepest candidate down, one more every T/(2n) steps; all n are on from T/2."""
    n = len(candidates)
    count = min(n, 1 + (2 * n * step) // total_steps)
    return candidates[n - count :]
