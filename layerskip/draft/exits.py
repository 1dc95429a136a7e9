"""Which exit layers of a model are worth trying, by what its checkpoint says of them."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.checkpoint.settings import AUTO, Setting, carried, tuned_setting
from layerskip.model.adapters import num_blocks
from layerskip.model.anatomy import num_layers
from layerskip.model.stages import Stages
from layerskip.training.recipe import Recipe

MOST = 3  # exits that a run chooses from: each has to be looked at
_UNKNOWN = 0.5  # acceptance, of an exit that was trained but never measured
_UNTRAINED = 0.1  # of one that nobody taught to draft


@dataclass(frozen=True)
class KnownExit:
    """An exit and what is expected of it.

    Attributes:
        exit_layer: E.
        agreement: chance that a greedily drafted token is accepted.
        overlap: the same of a sampled one.
        trained: whether it was taught to draft, so that its confidence means something.
    """

    exit_layer: int
    agreement: float
    overlap: float
    trained: bool = True


def known_exits(model: PreTrainedModel) -> list[KnownExit]:
    """Exits that the checkpoint was tuned to, measured at or trained for, the most promising, ascending; else a few
    shallow ones of a model that was never taught to draft."""
    layers = num_layers(model)
    found = [known for known in _taught(model) if 1 <= known.exit_layer < layers]
    if not found:
        shallow = {max(1, round(layers * share)) for share in (1 / 10, 1 / 5, 1 / 3)}
        return [_untaught(exit_layer) for exit_layer in sorted(shallow) if exit_layer < layers]
    best_first = sorted(found, key=lambda known: -_promise(known, layers))
    if any(num_blocks(model, known.exit_layer) for known in found):
        return best_first[:1]  # blocks must see every token, also those that another exit would draft
    return sorted(best_first[:MOST], key=lambda known: known.exit_layer)


def known_exit(model: PreTrainedModel, exit_layer: int | str | None) -> KnownExit:
    """What is expected of one exit."""
    assert isinstance(exit_layer, int)
    return next((known for known in _taught(model) if known.exit_layer == exit_layer), _untaught(exit_layer))


def first_exit(model: PreTrainedModel, setting: Setting) -> int | None:
    """The exit that a setting names; of "auto" one of those it chooses from."""
    if setting.exit_layer == AUTO:
        return known_exits(model)[0].exit_layer
    assert not isinstance(setting.exit_layer, str)
    return setting.exit_layer


def prepare_exits(stages: Stages, setting: Setting) -> Stages:
    """Cut and check the model at every exit that the setting may draft from, before anything is decoded."""
    if setting.exit_layer == AUTO and setting.lookup != "only":
        for known in reversed(known_exits(stages.model)):
            stages.use(known.exit_layer)
    return stages


def _taught(model: PreTrainedModel) -> list[KnownExit]:
    """Every exit that was measured, or else trained, and the tuned one."""
    kept = carried(model.config)
    measured = {int(exit_layer): numbers for exit_layer, numbers in (kept.get("exits") or {}).items()}
    exits = set(measured) or set(trained_exits(model.config, num_layers(model)))
    tuned = tuned_setting(model)
    if tuned is not None and isinstance(tuned.exit_layer, int):
        exits.add(tuned.exit_layer)
    found = []
    for exit_layer in sorted(exits):
        numbers = measured.get(exit_layer, {})
        agreement = numbers.get("agreement", _UNKNOWN)
        found.append(KnownExit(exit_layer, agreement, numbers.get("overlap", agreement)))
    return found


def _untaught(exit_layer: int) -> KnownExit:
    return KnownExit(exit_layer, _UNTRAINED, _UNTRAINED, trained=False)


def _promise(known: KnownExit, layers: int) -> float:
    """Tokens of an endless chain over the time of a round of four drafts: in plain steps, layers alone counted."""
    return 1 / (1 - min(known.agreement, 0.99)) / (1 + 4 * known.exit_layer / layers)


def trained_exits(config: PreTrainedConfig, layers: int) -> tuple[int, ...]:
    """Early exits that the recipe in a model's config trains in `layers` layers, ascending; none where there is no
    recipe, or another version wrote it."""
    recipe = carried(config).get("recipe")
    if not recipe:
        return ()
    try:
        return Recipe.from_dict(recipe).trained_exits(layers)
    except (TypeError, ValueError):
        return ()
