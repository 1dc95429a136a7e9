"""How long a sequence may become: positions that a model has, and those that change as it grows."""

from __future__ import annotations

from transformers import PreTrainedModel

from layerskip.model.anatomy import anatomy


def check_rope(model: PreTrainedModel, prompt_length: int, max_length: int) -> None:
    """Refuse lengths at which rotary positions change with the length of the sequence itself.

    "longrope" and "dynamic" rescale all positions once a sequence passes their original length: a block that
    reaches over it would be computed with other positions than token by token.

    Raises:
        ValueError: if decoding up to `max_length` tokens may cross that length.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind not in ("longrope", "dynamic"):
            continue
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        original = original or config.max_position_embeddings
        if max_length > original and not (kind == "longrope" and prompt_length > original):
            raise ValueError(
                f"decoding to {max_length} tokens crosses {original}, where this model's {kind} positions change: "
                f"keep prompt and output within {original}, or use model.generate()"
            )


def check_positions(model: PreTrainedModel, prompt_length: int, num_new: int) -> None:
    """Refuse lengths past a table of positions: there, it is an index error (on a GPU, one that ends the process).

    Where positions are computed there is no such end, only a length the model was made for: see `Session.steps`.

    Args:
        prompt_length: of the longest prompt, padding not counted.
        num_new: most tokens decoded. The last one is never read, and needs no position.

    Raises:
        ValueError: if `prompt_length + num_new` tokens need more positions than the model has.
    """
    limit = anatomy(model).num_positions
    if limit is None or prompt_length + num_new - 1 <= limit:
        return
    room = limit + 1 - prompt_length
    way_out = f"set max_new_tokens to at most {room}, or shorten the prompt" if room > 0 else "shorten the prompt"
    raise ValueError(
        f"{type(model).__name__} has a table of {limit} positions, and a prompt of {prompt_length} tokens with "
        f"{num_new} new ones goes past it: {way_out}"
    )
