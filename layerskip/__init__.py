"""LayerSkip: one model that drafts for itself.

    layerskip.generate(model, **inputs, exit_layer=4, num_draft_tokens=5)     exact self-speculative decoding
    layerskip.prepare(model, layerskip.Recipe(...))                           training that makes it fast

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "generate": "generation",
    "steps": "generation",
    "SelfSpeculativeOutput": "generation",
    "stream": "streaming",
    "Piece": "streaming",
    "Step": "decoding",
    "Statistics": "stats",
    "Stages": "stages",
    "UnsupportedModelError": "anatomy",
    "RollbackCache": "cache",
    "Setting": "settings",
    "Grammar": "grammar",
    "Recipe": "recipe",
    "prepare": "recipe",
    "RecipeCallback": "callback",
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
    from layerskip.anatomy import UnsupportedModelError
    from layerskip.cache import RollbackCache
    from layerskip.callback import RecipeCallback
    from layerskip.decoding import Step
    from layerskip.generation import SelfSpeculativeOutput, generate, steps
    from layerskip.grammar import Grammar
    from layerskip.recipe import Recipe, prepare
    from layerskip.settings import Setting
    from layerskip.stages import Stages
    from layerskip.stats import Statistics
    from layerskip.streaming import Piece, stream


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layerskip' has no attribute {name!r}")
    return getattr(importlib.import_module(f"layerskip.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
