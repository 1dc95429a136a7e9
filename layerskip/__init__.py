"""LayerSkip: one model that drafts for itself.

    layerskip.generate(model, **inputs, exit_layer=4, num_draft_tokens=5)     exact self-speculative decoding
    layerskip.prepare(model, layerskip.Recipe(...))                           training that makes it fast

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerskip.lazy import lazily

__version__ = "0.1.0"

_HOMES = {
    "generate": "decode.generation",
    "steps": "decode.generation",
    "SelfSpeculativeOutput": "decode.generation",
    "stream": "decode.streaming",
    "Piece": "decode.streaming",
    "Step": "decode.step",
    "Statistics": "decode.stats",
    "Stages": "model.stages",
    "UnsupportedModelError": "model.anatomy",
    "RollbackCache": "model.cache",
    "Setting": "checkpoint.settings",
    "Grammar": "grammar.processor",
    "Recipe": "training.recipe",
    "prepare": "training.recipe",
    "RecipeCallback": "training.callback",
}
__all__ = [
    "Grammar",
    "Piece",
    "Recipe",
    "RecipeCallback",
    "RollbackCache",
    "SelfSpeculativeOutput",
    "Setting",
    "Stages",
    "Statistics",
    "Step",
    "UnsupportedModelError",
    "generate",
    "prepare",
    "steps",
    "stream",
]

if TYPE_CHECKING:
    from layerskip.checkpoint.settings import Setting
    from layerskip.decode.generation import SelfSpeculativeOutput, generate, steps
    from layerskip.decode.stats import Statistics
    from layerskip.decode.step import Step
    from layerskip.decode.streaming import Piece, stream
    from layerskip.grammar.processor import Grammar
    from layerskip.model.anatomy import UnsupportedModelError
    from layerskip.model.cache import RollbackCache
    from layerskip.model.stages import Stages
    from layerskip.training.callback import RecipeCallback
    from layerskip.training.recipe import Recipe, prepare


__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
