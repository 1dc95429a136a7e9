"""The picture in a terminal: a line for each token, as many layers as fit."""

from collections.abc import Sequence

from infer.inspecting.picture import Picture, Round
from infer.inspecting.words import Words
from infer.terminal import Terminal

_WORD = 9  # most characters of a word
_CELL = _WORD + 5  # with its probability, and the space between columns
_OTHERS = 2 * (_WORD + 3) + 34  # columns that are always there


def show(picture: Picture, words: Words, exit_layer: int | None, terminal: Terminal) -> None:
    """The table, and what the numbers come to."""
    layers = choose_layers(picture.num_layers, exit_layer, terminal.width)
    columns = ["after", *(f"layer {layer}" for layer in layers), "settles", "next", "drafted"]
    title = f"what each layer would say after each token, and its probability ({picture.num_layers} layers)"
    terminal.marked_table(title, columns, rows(picture, words, layers), summary(picture, exit_layer))


def choose_layers(num_layers: int, exit_layer: int | None, width: int) -> list[int]:
    """As many layers as fit into `width` columns, evenly spread: the first, the exit and the last among them."""
    room = min(num_layers, max(2, (width - _OTHERS) // _CELL))
    spread = [1 + round(i * (num_layers - 1) / max(1, room - 1)) for i in range(room)]
    if exit_layer is not None and exit_layer not in spread:
        nearest = min(spread[:-1], key=lambda layer: abs(layer - exit_layer))  # the last one stays
        spread[spread.index(nearest)] = exit_layer
    return sorted(spread)


def rows(picture: Picture, words: Words, layers: Sequence[int]) -> list[list[tuple[str, bool | None]]]:
    """Of each token its cells: (text, whether it is what the last layer says; None: neither)."""
    drafted = verdicts(picture, words)
    lines = []
    for t, token in enumerate(picture.token_ids.tolist()):
        line: list[tuple[str, bool | None]] = [(short(words.of(token)), None)]
        last = int(picture.top_ids[-1, t, 0])
        for layer in layers:
            best = int(picture.top_ids[layer - 1, t, 0])
            share = _percent(float(picture.top_probabilities[layer - 1, t, 0]))
            line.append((f"{short(words.of(best))} {share:>3}", best == last))
        following = t + 1 < len(picture.token_ids)
        next_word = short(words.of(int(picture.token_ids[t + 1]))) if following else ""
        line += [(str(int(picture.settled[t])), None), (next_word, None), drafted[t]]
        lines.append(line)
    return lines


def verdicts(picture: Picture, words: Words) -> list[tuple[str, bool | None]]:
    """Of each token how the one after it came about: accepted, or the model's own instead of what was drafted."""
    found: list[tuple[str, bool | None]] = [("", None)] * len(picture.token_ids)
    t = picture.num_prompt - 1
    for each in picture.rounds:
        for index in range(len(each.tokens)):
            found[t + index] = verdict(each, index, words)
        t += len(each.tokens)
    return found


def verdict(each: Round, index: int, words: Words) -> tuple[str, bool | None]:
    """In words, of the `index`-th token of a round."""
    if index < each.num_accepted:
        return "accepted", True
    if not each.rejected:
        return ("bonus" if each.drafted else "own"), None
    proposed = "|".join(short(words.of(token)) for token in each.rejected[0][:2])
    more = len(each.rejected) - 1
    return f"not {proposed}" + (f" +{more}" if more else ""), False


def summary(picture: Picture, exit_layer: int | None) -> str:
    """Below the table."""
    mean = float(picture.settled.float().mean())
    parts = [
        "per cent beside each word",
        f"settles: the first layer from which on the best token stays the last layer's; on average {mean:.1f}",
    ]
    if exit_layer is not None:
        by_exit = float((picture.settled <= exit_layer).float().mean())
        parts.append(f"{by_exit:.0%} of the tokens settle by the exit (layer {exit_layer})")
    if picture.rounds:
        committed = sum(len(each.tokens) for each in picture.rounds)
        parts.append(
            f"{committed} tokens in {len(picture.rounds)} rounds: {committed / len(picture.rounds):.2f} a verify step"
        )
    return "; ".join(parts)


def short(word: str) -> str:
    """At most `_WORD` characters."""
    return word if len(word) <= _WORD else word[: _WORD - 1] + "…"


def _percent(probability: float) -> str:
    return f"{probability * 100:.0f}"
