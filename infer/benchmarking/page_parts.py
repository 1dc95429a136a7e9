"""HTML for a page that is one file: everything in it, nothing fetched, light and dark as the reader's system is."""

from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root { color-scheme: light dark; --back: #f8fafc; --box: #fff; --edge: #e5e7eb; --row: #f1f5f9; --rule: #d1d5db;
  --ink: #1f2937; --soft: #4b5563; --mark: #1d4ed8; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --back: #0b1120; --box: #131c2e; --edge: #26324a; --row: #1c273b;
  --rule: #3b4a66; --ink: #e5e7eb; --soft: #a3b0c2; --mark: #7db0ff; --bad: #fca5a5; } }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .6rem; } h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .4rem 0 .8rem; max-width: 50rem; } p.headline { font-size: 1.15rem; } p.lead { color: var(--soft); }
p.caption { color: var(--soft); font-size: .85rem; margin: .5rem .1rem 1.2rem; max-width: none; }
p.warning { border-left: 3px solid var(--bad); padding-left: .8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: .9rem; margin: 1.4rem 0; }
.card { background: var(--box); border: 1px solid var(--edge); border-radius: 10px; padding: .9rem 1rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; } .card span { color: var(--soft); font-size: .87rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr)); gap: 1rem;
  align-items: start; margin-top: 1rem; }
figure { margin: 0; background: var(--box); border: 1px solid var(--edge); border-radius: 10px; padding: .9rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .87rem; margin: .6rem .1rem 0; }
.scroll { overflow-x: auto; background: var(--box); border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .45rem .6rem; text-align: right; vertical-align: bottom; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--rule); }
td { border-top: 1px solid var(--row); vertical-align: top; }
th:first-child, td:first-child { text-align: left; } table.text td, table.text th { text-align: left; }
table.text td { white-space: normal; overflow-wrap: anywhere; } table.text td:first-child { white-space: nowrap; }
tr.strong td { font-weight: 600; } tr.bad td { color: var(--bad); }
details { background: var(--box); border: 1px solid var(--edge); border-radius: 10px; padding: .7rem 1.1rem;
  margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
details pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32rem; overflow: auto; margin: .7rem 0 0;
  font: .8rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .35rem 1.2rem; max-width: 62rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
@media (max-width: 520px) { main { padding: 1.5rem .8rem 3rem; } h1 { font-size: 1.5rem; }
  dl { grid-template-columns: 1fr; gap: .1rem; } dd { margin-bottom: .6rem; } }
@media print { body { background: #fff; } details { display: none; } figure, .scroll { break-inside: avoid; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole HTML document."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def heading(title: str, level: int = 2) -> str:
    """A heading of level 1 to 6."""
    return f"<h{level}>{escape(title)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Text; of a kind, "headline", "lead", "caption" or "warning", if given. Empty without text."""
    mark = f' class="{kind}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>" if text else ""


def section(title: str, *parts: str, lead: str = "") -> str:
    """A heading, a sentence on how to read what follows, and what follows; empty if that is empty."""
    content = "\n".join(filter(None, parts))
    return f"<section>\n{heading(title)}\n{paragraph(lead, 'lead')}\n{content}\n</section>" if content else ""


def cards(numbers: Iterable[tuple[str, str]]) -> str:
    """Large numbers, each with a line below that says what it is."""
    inner = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(what)}</span></div>' for big, what in numbers)
    return f'<div class="cards">{inner}</div>'


def figures(images: Iterable[tuple[tuple[str, str] | None, str, str]]) -> str:
    """((light, dark) data URIs, what it shows, how to read it) side by side; those without an image are left out."""
    shown = [
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{uris[1]}">'
        f'<img src="{uris[0]}" alt="{escape(alt)}"></picture><figcaption>{escape(caption)}</figcaption></figure>'
        for uris, alt, caption in images
        if uris is not None
    ]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    marks: Sequence[str] = (),
    text: bool = False,
) -> str:
    """Numbers to the right, or all `text` to the left, in a box that scrolls where the screen is narrow.

    Args:
        caption: below it.
        marks: of each row "strong", "bad" or "".

    Returns:
        Empty without rows.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for row, mark in zip(rows, [*marks, *[""] * (len(rows) - len(marks))], strict=True):
        kind = f' class="{mark}"' if mark else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    kind = ' class="text"' if text else ""
    header = f"<thead><tr>{head}</tr></thead>" if columns else ""
    box = f'<div class="scroll"><table{kind}>{header}<tbody>{"".join(lines)}</tbody></table></div>'
    return box + paragraph(caption, "caption")


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Terms and what they mean."""
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(what)}</dd>" for term, what in pairs) + "</dl>"


def details(summary: str, content: str, name: str) -> str:
    """Preformatted text under the id `name`, behind a heading that opens it."""
    return f'<details><summary>{escape(summary)}</summary><pre id="{name}">{escape(content)}</pre></details>'
