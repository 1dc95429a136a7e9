"""Which exits are trained at a step: C(t, l) of the paper (4.1.2), a pure function of the step.

Nothing is kept between steps, so a resumed run needs no state. Exits are counted in layers run, 1 .. L.
"""

from __future__ import annotations

from layerskip.recipe import Recipe


def active_exits(recipe: Recipe, num_layers: int, step: int) -> tuple[int, ...]:
    """The exits in the loss at optimizer step `step` (from 0), ascending; `num_layers` is the last layer itself."""
    candidates = recipe.exits or tuple(range(1, num_layers + 1))
    if recipe.curriculum == "rotational":
        active = rotational(candidates, recipe.curriculum_stride, step)
    elif recipe.curriculum == "gradual":
        assert recipe.total_steps is not None
        active = gradual(candidates, step, recipe.total_steps)
    else:
        active = candidates
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
