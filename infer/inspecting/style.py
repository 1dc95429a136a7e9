"""Style and script of the page."""

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --back: #f8fafc; --ink: #1f2937; --soft: #5b6472; --line: #e2e6ec;
  --heat: #4f86e8; --rank: #2aa775; --settle: #d97706; --yes: #d3f2e1; --own: #f3d9f5; --no: #b42318; --exit: #eef2f8; }
@media (prefers-color-scheme: dark) { :root { --paper: #171b22; --back: #0f1217; --ink: #e5e9f0; --soft: #9aa4b2;
  --line: #2b323d; --heat: #3b6fd0; --rank: #1e8a60; --settle: #f0a53a; --yes: #1d4a36; --own: #512b57; --no: #ff8a7a;
  --exit: #222935; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
p { margin: .3rem 0 .7rem; max-width: 52rem; } .lead, .legend { color: var(--soft); } .legend { font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 1rem; margin: 1.3rem 0 0; }
.card, .text, .scroll { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: .9rem 1.1rem; } .card b { display: block; font-size: 1.5rem; line-height: 1.25; }
.card span { color: var(--soft); font-size: .9rem; }
.text { padding: .9rem 1.1rem; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 2.1; }
.text, td, thead th, #tip, .legend span { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .82rem; }
.prompt { color: var(--soft); }
.round { border: 1px solid var(--line); border-radius: 6px; padding: .12rem .2rem; margin: 0 .12rem;
  display: inline-block; line-height: 1.35; }
.yes { background: var(--yes); border-radius: 3px; padding: 0 .1rem; }
.own { background: var(--own); border-radius: 3px; padding: 0 .1rem; }
.no { color: var(--no); text-decoration: line-through; padding: 0 .1rem; }
.choice { font-size: .9rem; color: var(--soft); margin: 0 0 .6rem; } label { margin-left: .6rem; cursor: pointer; }
.scroll { overflow: auto; max-height: 85vh; }
table { border-collapse: separate; border-spacing: 0; }
th, td { padding: .18rem .4rem; text-align: center; white-space: pre; border-bottom: 1px solid var(--line);
  border-right: 1px solid var(--line); max-width: 7.5rem; min-width: 3.2rem; overflow: hidden;
  text-overflow: ellipsis; }
thead th { position: sticky; top: 0; background: var(--paper); z-index: 2; font-weight: 600;
  border-bottom: 2px solid var(--soft); }
thead th.yes { background: var(--yes); } thead th.own { background: var(--own); } thead th { border-radius: 0; }
th.name { position: sticky; left: 0; background: var(--paper); z-index: 1; text-align: right; font-size: .82rem;
  font-weight: 500; color: var(--soft); min-width: 3.6rem; max-width: 9rem; } thead th.name { z-index: 3; }
td { color: var(--soft); } td.same { color: var(--ink); font-weight: 600; }
#grid[data-colour="p"] td { background: color-mix(in srgb, var(--heat) calc(var(--p) * 75%), var(--paper)); }
#grid[data-colour="r"] td { background: color-mix(in srgb, var(--rank) calc(var(--r) * 70%), var(--paper)); }
td.settles { border-bottom: 3px solid var(--settle); }
tr.exit th.name { background: var(--exit); color: var(--ink); font-weight: 700; }
tr.exit td { border-top: 2px solid var(--soft); }
tr.exit th.name { border-top: 2px solid var(--soft); }
td:hover { outline: 2px solid var(--ink); outline-offset: -2px; }
#tip { position: fixed; z-index: 9; background: var(--paper); color: var(--ink); border: 1px solid var(--soft);
  border-radius: 8px; padding: .6rem .8rem; box-shadow: 0 6px 24px #0004; pointer-events: none; max-width: 22rem; }
#tip b { display: block; margin-bottom: .3rem; } #tip div { display: flex; gap: .6rem; align-items: center; }
#tip div span { flex: 1; white-space: pre; overflow: hidden; text-overflow: ellipsis; }
#tip i { height: .5rem; background: var(--heat); border-radius: 3px; display: block; }
#tip p { margin: .4rem 0 0; color: var(--soft); }
@media print { .scroll { max-height: none; } .choice { display: none; } }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const grid = document.getElementById("grid"), tip = document.getElementById("tip");
const percent = thousandths => (thousandths / 10).toFixed(1) + " %";
function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}
function show(cell, x, y) {
  const layer = data.layers.length - cell.parentElement.sectionRowIndex, t = cell.cellIndex - 1;
  const values = data.layers[layer - 1][t];
  tip.replaceChildren(element("b", "layer " + layer + " after " + data.words[data.columns[t]]));
  for (let i = 2; i < values.length; i += 2) {
    const line = element("div"), bar = element("i");
    bar.style.width = Math.max(2, values[i + 1] * 0.08) + "px";
    line.append(element("span", data.words[values[i]]), bar, element("em", percent(values[i + 1])));
    tip.append(line);
  }
  const last = data.words[data.layers.at(-1)[t][2]];
  tip.append(element("p", "the last layer's " + last + ": rank " + values[0] + ", " + percent(values[1])
    + "; settled from layer " + data.settled[t]));
  tip.hidden = false;
  tip.style.left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = (y + 14 + tip.offsetHeight > innerHeight ? Math.max(8, y - tip.offsetHeight - 10) : y + 14) + "px";
}
grid.addEventListener("mousemove", event => {
  const cell = event.target.closest("td");
  if (cell) show(cell, event.clientX, event.clientY); else tip.hidden = true;
});
grid.addEventListener("mouseleave", () => { tip.hidden = true; });
for (const input of document.querySelectorAll("input[name=colour]"))
  input.addEventListener("change", () => { grid.dataset.colour = input.value; });
"""
