"""The report of a run: one page with everything in it, true to what was logged, also after a resumption."""

import base64
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.runs import TINY, documents
from train import before_after, report_sections
from train import report_figures as figures
from train.command import load_config, main
from train.loop import train
from train.report_page import page, sample, table
from train.tracking import read_lines

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Six steps of configs/tiny.yaml in two launches, evaluated every second step."""
    folder = tmp_path_factory.mktemp("report")
    source = [*documents(folder / "text.jsonl"), "every.log=1", "every.evaluate=2"]
    source += [f"run.output_dir={folder / 'run'}", "optim.schedule=constant", "every.save=2", "tracking.report=true"]
    for steps in (3, 6):
        config = load_config(TINY, [*source, f"optim.max_steps={steps}"])
        assert train(config, ["tiny.yaml", f"optim.max_steps={steps}"]) == 0
    return folder / "run"


def curves(image: str) -> dict[str, list[tuple[float, float]]]:
    """The vertices of every named line of a figure, in the units of the picture: y grows downwards."""
    tree = ElementTree.fromstring(base64.b64decode(image.removeprefix("data:image/svg+xml;base64,")))
    lines = {}
    for group in tree.iter(f"{SVG}g"):
        if re.match(r"exit-\d+$|last$", group.get("id", "")):
            path = next(group.iter(f"{SVG}path")).get("d", "")
            lines[group.get("id")] = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]
    return lines


def test_what_tune_chose_is_said_as_it_is():
    forecast = {"speedup": 1.5, "mean_acceptance_length": 2.5}
    setting = {"exit_layer": 2, "num_draft_tokens": 3, "tree": [2, 1, 1], "chosen_on": "tune", "forecast": forecast}
    metrics = [{"kind": "validation", "step": 1}]
    assert "at exit 2, trees 2,1,1" in report_sections.summary("a run", metrics, {"setting": setting}, {})
    exits = {"2": {"forecast": {"greedy": {"num_draft_tokens": 4, **forecast}}}}
    text = report_sections.forecasts({"after": {"test": {"exits": exits}}, "setting": setting})
    assert "tuned to exit 2 and trees 2,1,1:" in text
    assert "test prompts" not in text
    arm = {"arm": "tree", "exit_layer": 2, "num_draft_tokens": 3, "drafts": "2,1,1"}
    assert "<td>2 / 2,1,1</td>" in report_sections.measured({"greedy": [arm]})


def test_the_page_needs_nothing_from_outside(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'src="(?!data:image/svg\+xml;base64,)', text) == []
    assert re.findall(r"<(script|link|iframe|object)|@import|url\(", text) == []
    images = re.findall(r'src="(data:[^"]+)"', text)
    assert len(images) == 6
    for image in images:
        content = base64.b64decode(image.partition(",")[2]).decode()
        assert ElementTree.fromstring(content).tag == f"{SVG}svg"
        assert re.findall(r'(?:href|src)="(?!#)', content) == []


def test_it_says_what_the_run_measured_did_and_wrote(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    record = json.loads((run / "evaluation.json").read_text())
    losses = [record[when]["test"]["last"]["loss"] for when in ("before", "after")]
    assert f"{losses[0]:.3f} → {losses[1]:.3f}" in text
    assert f"({losses[1] / losses[0] - 1:+.1%})" in text
    for exit_layer, numbers in record["after"]["test"]["exits"].items():
        assert f"→ {numbers['agreement']:.3f}</td>" in text
        assert f"<td>exit {exit_layer}, sampled</td>" in text
        assert f"<td>{numbers['forecast']['sampled']['mean_acceptance_length']:.2f}</td>" in text
    assert f"{record['setting']['forecast']['speedup']:.2f}\N{MULTIPLICATION SIGN}" in text
    assert "tiny.yaml optim.max_steps=3" in text  # the first launch
    assert "tiny.yaml optim.max_steps=6" in text
    assert "train_vocab_size: 300" in text
    samples = read_lines(run / "samples.jsonl")
    assert {line["step"] for line in samples} == {0, 2, 3, 4, 6}
    assert len({line["prompt"] for line in samples}) == 2  # the same ones each time
    assert "after 0 steps" in text
    assert "after 6 steps" in text


def test_curves_show_every_evaluation_of_both_launches(run):
    validation = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "validation"]
    steps = [line["step"] for line in validation]
    assert steps == [0, 2, 3, 4, 6]
    for exit_layer in ("1", "2"):
        values = [line["exits"][exit_layer]["agreement"] for line in validation]
        line = curves(figures.shares(validation, "agreement", "t", "y"))[f"exit-{exit_layer}"]
        x, y = zip(*line, strict=True)
        # Picture units are linear in steps and values: y falls by (y(0) - y(1)) a unit.
        assert np.allclose(np.interp(x, (x[0], x[-1]), (0, 6)), steps, atol=1e-3)
        assert np.corrcoef(y, values)[0, 1] == pytest.approx(-1, abs=1e-4)
    lines = curves(figures.losses([], validation))
    losses = [line["last"]["loss"] for line in validation]
    assert np.corrcoef([y for _, y in lines["last"]], losses)[0, 1] == pytest.approx(-1, abs=1e-4)


def test_it_can_be_made_again_and_of_a_run_that_goes_on(run, tmp_path, capsys):
    going = tmp_path / "going <on>"
    going.mkdir()
    first = [line for line in read_lines(run / "metrics.jsonl") if line["step"] <= 2]
    (going / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first))
    assert main(["report", str(going)]) == 0
    assert capsys.readouterr().out.strip() == str(going / "report.html")
    text = (going / "report.html").read_text(encoding="utf-8")
    assert "going &lt;on&gt;" in text
    assert "still going on or stopped" in text
    assert "Before and after" not in text
    before = (run / "report.html").read_bytes()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_bytes() == before  # nothing of the clock in it


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no metrics.jsonl of a run" in capsys.readouterr().err


def test_a_benchmark_beside_the_run_is_in_the_report():
    from train.report_sections import measured

    arm = {"arm": "self-speculative", "exit_layer": 2, "num_draft_tokens": 3, "tokens_per_second": 128.4}
    arm |= {"speedup": 1.96, "mean_acceptance_length": 2.64}
    text = measured({"greedy": [arm], "conditions": {"threads": 1, "dtype": "bfloat16"}})
    assert "<td>greedy: self-speculative</td><td>2 / 3</td><td>128.40</td><td>1.96</td><td>2.64</td>" in text
    assert "threads 1, dtype bfloat16" in text
    assert measured({}) == ""


def test_what_a_model_writes_cannot_break_the_page():
    wild = "</pre><script>alert(1)</script>"
    for text in (sample(wild, [(1, wild)]), table(["a", "b"], [[wild, "1"]]), page(wild, [])):
        assert "<script>" not in text
        assert "&lt;script&gt;" in text


def test_many_exits_are_all_drawn_and_some_named():
    exits = {str(e): {"loss": 1.0 + e, "agreement": 0.5, "overlap": 0.5} for e in range(1, 32)}
    validation = [{"step": step, "last": {"loss": 1.0}, "exits": exits} for step in (0, 5)]
    assert len(curves(figures.losses([], validation))) == 32
    assert figures.speedups(validation) == ""  # nothing was forecast


def test_before_and_after_need_both():
    numbers = {"loss": 2.0, "agreement": 0.5, "overlap": 0.6}
    forecast = {"greedy": {"num_draft_tokens": 3, "mean_acceptance_length": 2.0, "speedup": 1.25}}
    before = {"test": {"last": {"loss": 4.0}, "exits": {"10": numbers, "2": numbers}}}
    after = {"test": {"last": {"loss": 3.0}, "exits": {"10": {**numbers, "forecast": forecast}, "2": numbers}}}
    assert before_after.rows({"before": before}) == before_after.rows({"before": {}, "after": after}) == []
    assert before_after.last_layer({"before": before}) == {}
    rows = before_after.rows({"before": before, "after": after})
    assert [row[0] for row in rows] == ["2", "10", "all"]
    assert rows[1][1:5] == ["2.000 → 2.000", "0.500 → 0.500", "0.600 → 0.600", "- → 1.25x"]
    assert rows[2][1] == "4.000 → 3.000"
    assert before_after.last_layer({"before": before, "after": after})["change"] == -0.25
