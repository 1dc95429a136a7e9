"""What a person sees while a run goes on: a bar with speed and time left on a terminal, lines in a file."""

import itertools
import re

from train.console import Reporter

METRICS = {"loss": 2.5, "last": 2.0, "learning_rate": 1e-3, "tokens_per_second": 12345.6}


def test_a_terminal_shows_steps_loss_speed_and_time_left_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for: this is a terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rich.console.monotonic", itertools.count().__next__)  # a second a look
    with Reporter(True, steps=10, done=2) as reporter:
        for step in (3, 4, 5):
            reporter.advance(step)
        reporter.metrics(5, METRICS)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    last = plain.replace("\r", "\n").strip().splitlines()[-1]
    assert re.search(r"step\s+5/10 .*loss 2\.500 +12,346 tokens/s +\d:\d\d:\d\d left", last)
    assert len(last) <= 80


def test_a_file_gets_a_line_with_the_time_left_counted_from_the_first_step(capsys):
    reporter = Reporter(True, steps=10, done=2)
    with reporter:
        reporter._start -= 3600  # an hour of evaluation before the first step
        reporter.begin()
        reporter._start -= 30  # three steps in 30 s: 50 s for the five that are left
        reporter.metrics(5, METRICS)
    line = capsys.readouterr().out.strip()
    assert line == "step 5/10  loss 2.500  last layer 2.000  lr 1.00e-03  12,346 tokens/s  0:00:50 left"


def test_other_processes_say_nothing(capsys):
    with Reporter(False, steps=2) as reporter:
        reporter.say("a")
        reporter.metrics(1, METRICS)
        reporter.table("t", ["a"], [["1"]])
    assert capsys.readouterr().out == ""
