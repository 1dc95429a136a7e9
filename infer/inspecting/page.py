"""The picture as one HTML page: everything in it, nothing fetched, light and dark."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from infer.inspecting.picture import Picture, Round
from infer.inspecting.style import CSS, SCRIPT
from infer.inspecting.words import Words


def page(name: str, picture: Picture, words: Words, exit_layer: int | None, adapters: Sequence[int]) -> str:
    """A whole document.

    Args:
        name: of the model.
        exit_layer: the one that drafts, None without.
        adapters: exits that have one.
    """
    parts = [
        f"<h1>{escape(name)}: what each layer would say</h1>",
        f'<p class="lead">{escape(_lead(picture, exit_layer))}</p>',
        cards(picture, exit_layer),
        decoded(picture, words),
        grid(picture, words, exit_layer, adapters),
    ]
    data = json.dumps(cells(picture, words), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(name)}: layers</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + f'\n</main>\n<div id="tip" hidden></div>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _lead(picture: Picture, exit_layer: int | None) -> str:
    drafts = "" if exit_layer is None else f" Layers 1 to {exit_layer} draft, the others verify."
    return (
        f"After each token, the hidden states of every one of the {picture.num_layers} layers went through the model's "
        f"final norm and head.{drafts}"
    )


def cards(picture: Picture, exit_layer: int | None) -> str:
    """Large numbers, each with a line below that says what it is."""
    numbers = [(f"{float(picture.settled.float().mean()):.1f}", "layer where a token settles, on average")]
    if exit_layer is not None:
        share = float((picture.settled <= exit_layer).float().mean())
        numbers.append((f"{share:.0%}", f"of the tokens settle by the exit, layer {exit_layer}"))
    if picture.rounds:
        committed = sum(len(each.tokens) for each in picture.rounds)
        drafted = sum(each.num_drafted for each in picture.rounds)
        numbers.append((f"{committed / len(picture.rounds):.2f}", "tokens committed a verify step"))
        if drafted:
            accepted = sum(each.num_accepted for each in picture.rounds)
            numbers.append((f"{accepted / drafted:.0%}", f"of {drafted} drafted tokens accepted"))
    inner = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(what)}</span></div>' for big, what in numbers)
    return f'<div class="cards">{inner}</div>'


def decoded(picture: Picture, words: Words) -> str:
    """The text, and the continuation token by token as it was drafted and verified; empty without one."""
    if not picture.rounds:
        return ""
    prompt = "".join(words.text(token) for token in picture.token_ids[: picture.num_prompt].tolist())
    rounds = "".join(_round(each, number, words) for number, each in enumerate(picture.rounds, start=1))
    legend = (
        '<p class="legend"><span class="yes">accepted</span> drafted, and what the model says '
        '<span class="own">own</span> the model\'s own word <span class="no">rejected</span> drafted, and not what the '
        "model says: it and all after it are dropped. A frame is a round: what was drafted, and how it ended.</p>"
    )
    return (
        f'<h2>The continuation</h2>{legend}<div class="text"><span class="prompt">{escape(prompt)}</span>{rounds}</div>'
    )


def _round(each: Round, number: int, words: Words) -> str:
    said = [_word(words, token) for token in each.tokens]
    accepted = "".join(f'<span class="yes">{word}</span>' for word in said[: each.num_accepted])
    dropped = "".join(
        f'<span class="no">{"|".join(_word(words, token) for token in level)}</span>' for level in each.rejected
    )
    own = "".join(f'<span class="own">{word}</span>' for word in said[each.num_accepted :])
    title = f"round {number}: {each.num_drafted} drafted, {each.num_accepted} accepted"
    return f'<span class="round" title="{title}">{accepted}{dropped}{own}</span>'


def _word(words: Words, token: int) -> str:
    return escape(words.of(token))


def grid(picture: Picture, words: Words, exit_layer: int | None, adapters: Sequence[int]) -> str:
    """Layers x tokens, the last layer on top; each cell has the layer's best next token."""
    chosen = (
        '<div class="choice">colour: <label><input type="radio" name="colour" value="p" checked> probability of the '
        'layer\'s word</label> <label><input type="radio" name="colour" value="r"> rank of the last layer\'s word'
        "</label></div>"
    )
    lead = (
        "A cell is what that layer would say next. The line under a column's cells marks where its word settles: from "
        "there up, all layers say the same. Point at a cell for its five best words."
    )
    ids = picture.token_ids.tolist()
    heads = "".join(f"<th{_kind(picture, t)}>{_word(words, token)}</th>" for t, token in enumerate(ids))
    lines = [f'<tr><th class="name">after</th>{heads}</tr>']
    for layer in range(picture.num_layers, 0, -1):
        notes = ["exit"] * (layer == exit_layer) + ["adapter"] * (layer in adapters)
        label = f"{layer}{' ' + ', '.join(notes) if notes else ''}"
        mark = ' class="exit"' if layer == exit_layer else ""
        lines.append(f'<tr{mark}><th class="name">{label}</th>{"".join(_cells(picture, words, layer))}</tr>')
    head, *body = lines
    table = f'<table id="grid" data-colour="p"><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'
    return f'<h2>Layers and tokens</h2><p class="lead">{lead}</p>{chosen}<div class="scroll">{table}</div>'


def _kind(picture: Picture, t: int) -> str:
    """The class of a column's token: of the text, accepted, or the model's own."""
    if t < picture.num_prompt:
        return ""
    position = t - picture.num_prompt
    for each in picture.rounds:
        if position < len(each.tokens):
            return ' class="yes"' if position < each.num_accepted else ' class="own"'
        position -= len(each.tokens)
    return ""


def _cells(picture: Picture, words: Words, layer: int) -> Iterator[str]:
    for t in range(len(picture.token_ids)):
        best = int(picture.top_ids[layer - 1, t, 0])
        share = float(picture.top_probabilities[layer - 1, t, 0])
        classes = [
            *(["same"] if best == int(picture.top_ids[-1, t, 0]) else []),
            *(["settles"] if layer == int(picture.settled[t]) else []),
        ]
        mark = f' class="{" ".join(classes)}"' if classes else ""
        weight = closeness(int(picture.ranks[layer - 1, t]))
        yield f'<td{mark} style="--p:{share:.2f};--r:{weight:g}">{_word(words, best)}</td>'


def closeness(rank: int) -> float:
    """How strongly a rank is coloured: 1 for the best, 0 beyond the hundredth."""
    return next((weight for limit, weight in ((1, 1.0), (2, 0.6), (5, 0.4), (20, 0.2), (100, 0.1)) if rank <= limit), 0)


def cells(picture: Picture, words: Words) -> dict[str, Any]:
    """What pointing at a cell shows, for the script: words by number, and of each layer and token the rank and
    probability (in 1/1000) of the last layer's word, then word and probability of the best five."""
    known: dict[str, int] = {}

    def number(token: int) -> int:
        return known.setdefault(words.of(token), len(known))

    layers = []
    for layer in range(picture.num_layers):
        line = []
        for t in range(len(picture.token_ids)):
            best = zip(picture.top_ids[layer, t].tolist(), picture.top_probabilities[layer, t].tolist(), strict=True)
            own = [int(picture.ranks[layer, t]), round(float(picture.probabilities[layer, t]) * 1000)]
            line.append(own + [value for token, share in best for value in (number(token), round(share * 1000))])
        layers.append(line)
    columns = [number(token) for token in picture.token_ids.tolist()]
    return {"layers": layers, "columns": columns, "settled": picture.settled.tolist(), "words": list(known)}
