"""The HTML of a run's report: one page, everything in it, nothing fetched."""

from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f8fafc; color: #1f2937;
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
p { margin: .4rem 0 .8rem; max-width: 48rem; } p.lead { color: #4b5563; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(225px, 1fr)); gap: 1rem; margin: 1.6rem 0 0; }
.card { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: 1rem 1.1rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; } .card span { color: #4b5563; font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 1rem; }
.figures img { width: 100%; background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; box-sizing: border-box;
  padding: .8rem; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .5rem .8rem; text-align: right; vertical-align: bottom; }
th { color: #4b5563; font-weight: 600; border-bottom: 1px solid #d1d5db; } td { border-top: 1px solid #f1f5f9; }
th:first-child, td:first-child { text-align: left; } table.text td, table.text th { text-align: left; }
table.text td { vertical-align: top; overflow-wrap: anywhere; } table.text td:first-child { white-space: nowrap; }
tr.strong td { font-weight: 600; border-top: 1px solid #d1d5db; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  font: .85rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
.sample { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: .9rem 1.1rem; margin: 0 0 1rem; }
.sample pre.prompt { color: #6b7280; } .sample .step { color: #4b5563; font-size: .85rem; margin: .8rem 0 .1rem; }
.sample pre.new { border-left: 3px solid #2563eb; padding-left: .7rem; }
details { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: .7rem 1.1rem; margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; } details pre { margin-top: .7rem; }
@media (max-width: 520px) { .figures { grid-template-columns: 1fr; } }
@media print { body { background: #fff; } details { display: none; }
  .figures img, .scroll, .sample { break-inside: avoid; } }
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


def section(title: str, *parts: str, lead: str = "") -> str:
    """A heading, a sentence on how to read what follows, and what follows; empty if that is empty."""
    content = "\n".join(filter(None, parts))
    explained = f'<p class="lead">{escape(lead)}</p>\n' if lead else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{explained}{content}\n</section>" if content else ""


def cards(numbers: Iterable[tuple[str, str]]) -> str:
    """Large numbers, each with a line below that says what it is."""
    inner = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(what)}</span></div>' for big, what in numbers)
    return f'<div class="cards">{inner}</div>'


def figures(images: Iterable[tuple[str, str]]) -> str:
    """(data URI, what it shows) side by side; those without an image are left out."""
    shown = [f'<img src="{uri}" alt="{escape(alt)}">' for uri, alt in images if uri]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], strong: int | None = None, text: bool = False) -> str:
    """Numbers to the right, or all `text` to the left; row `strong` is emphasised. Empty without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for index, row in enumerate(rows):
        mark = ' class="strong"' if strong is not None and index == strong % len(rows) else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    kind = ' class="text"' if text else ""
    header = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f'<div class="scroll"><table{kind}>{header}<tbody>{"".join(lines)}</tbody></table></div>'


def sample(prompt: str, continuations: Sequence[tuple[int, str]]) -> str:
    """A prompt and what the model wrote after it, by step."""
    texts = "".join(
        f'<div class="step">after {step} steps{"" if text.strip() else ": blanks alone"}</div>'
        f'<pre class="new">{escape(text)}</pre>'
        for step, text in continuations
    )
    return f'<div class="sample"><pre class="prompt">{escape(prompt)}</pre>{texts}</div>'


def details(summary: str, content: str) -> str:
    """Preformatted text behind a heading that opens it."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(content)}</pre></details>"
