"""`load`: whatever comes when, each request is answered with what its prompt alone gives plain decoding."""

import json
from functools import partial

import pytest
import torch

from infer.command import main
from infer.options import DecodingOptions
from infer.serving.arrivals import ClosedLoop, OpenLoop
from infer.serving.engines import LoopEngine, PlainEngine
from infer.serving.level import run_level
from infer.serving.report import draw, pays_line
from infer.serving.request_queue import Request
from infer.serving.worker import Worker
from layerskip.checkpoint.settings import Setting
from tests import tiny
from tests.programs import run

SETTINGS = {
    "loop": Setting(None, 0),
    "chain": Setting(2, 3),
    "tree": Setting(2, 3, tree="s3_k2_d5"),
    "hybrid": Setting(2, 3, lookup="hybrid"),
    "lookup": Setting(None, 0, lookup="only"),
    "cost": Setting(2, 3, draft_stop="cost"),
}
NEW = 14  # most tokens of an answer
PROMPTS = [tuple(range(10 + n, 11 + n + n * 5 % 9)) for n in range(11)]  # 1 to 9 tokens


@pytest.fixture(scope="module")
def model():
    model = tiny.llama()
    model.generation_config.eos_token_id = [7, 35, 61]
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    """What each prompt gives plain decoding; some of it ends early."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        found.append(whole[0, len(prompt) :].tolist())
    assert len({len(tokens) for tokens in found}) > 2
    return found


def engine_of(model, arm: str, continuous: bool = True, new: int = NEW):
    arguments = DecodingOptions(max_new_tokens=new).generate_arguments()
    return PlainEngine(model, arguments) if arm == "plain" else LoopEngine(model, SETTINGS[arm], arguments, continuous)


CASES = [("plain", False), *((arm, True) for arm in SETTINGS), ("chain", False), ("loop", False)]


@pytest.mark.parametrize(("arm", "continuous"), CASES)
@pytest.mark.parametrize("level", [ClosedLoop(4), OpenLoop(200.0)])
def test_answers_are_those_of_each_prompt_alone(arm, continuous, level, model, alone):
    outcome = run_level(engine_of(model, arm, continuous), level, PROMPTS, batch_size=3, timeout=1e6, seed=1)
    assert [request.error for request in outcome.answers] == [None] * len(PROMPTS)
    answers = {request.number: request for request in outcome.answers}
    assert [answers[number].tokens for number in range(len(PROMPTS))] == alone
    for request in outcome.answers:
        assert request.arrived <= request.started <= request.bursts[0][0] <= request.bursts[-1][0] == request.finished
        assert sum(tokens for _, tokens in request.bursts) == len(request.tokens)


@pytest.mark.parametrize("arm", ["plain", "chain"])
@pytest.mark.parametrize("continuous", [True, False])
def test_rows_join_a_running_batch_or_wait_until_it_has_ended(arm, continuous, model):
    """All arrive at once, two are decoded together."""
    outcome = run_level(engine_of(model, arm, continuous), OpenLoop(1e9), PROMPTS, batch_size=2, timeout=1e6)
    answers = sorted(outcome.answers, key=lambda request: request.number)
    joined = [
        request.number
        for request in answers
        if any(other.started < request.started < other.finished for other in answers)
    ]
    assert bool(joined) == (continuous and arm == "chain")


class Deadlines(ClosedLoop):
    """All requests at once, each with a deadline of its own."""

    def __init__(self, deadlines: dict[int, float]) -> None:
        super().__init__(len(PROMPTS))
        object.__setattr__(self, "deadlines", deadlines)

    def feed(self, prompts, queue, clock, timeout, seed):
        for number, prompt in enumerate(prompts):
            queue.submit(Request(number, prompt, 0.0, self.deadlines.get(number, float("inf"))))


@pytest.mark.parametrize("arm", ["plain", "chain", "hybrid"])
def test_a_row_that_nobody_waits_for_leaves_and_the_others_do_not_notice(arm, model, alone, monkeypatch):
    """The clock counts bursts."""
    bursts: list[int] = []
    emit = Worker.emit

    def counted(self, request, *rest):
        bursts.append(request.number)
        emit(self, request, *rest)

    monkeypatch.setattr(Worker, "emit", counted)
    slow = max(range(3), key=lambda number: len(alone[number]))
    level = Deadlines({slow: 3.5, 8: -1.0})
    run = partial(run_level, level=level, prompts=PROMPTS, batch_size=3, timeout=1e6, clock=lambda: float(len(bursts)))
    answers = {request.number: request for request in run(engine_of(model, arm)).answers}
    assert sorted(answers) == list(range(len(PROMPTS)))
    assert {number for number, request in answers.items() if request.timed_out} == {slow, 8}
    assert answers[slow].tokens == alone[slow][: len(answers[slow].tokens)] != alone[slow]
    assert answers[8].started is None
    for number, request in answers.items():
        assert request.timed_out or request.tokens == alone[number]
    assert bursts.count(slow) <= len(answers[slow].bursts) + 2, "one round more tells it"


def test_a_model_that_cannot_be_batched_is_refused_before_the_test(tiny_checkpoint, capsys, monkeypatch):
    from layerskip.model.stages import Stages

    def refuse(self, branching):
        raise ValueError("decode one sequence at a time")

    monkeypatch.setattr(Stages, "check_blocks", refuse)
    assert main(["load", str(tiny_checkpoint), "--arms", "plain,chain", "--exit-layer", "2"]) == 2
    assert "self-speculative 2/4 cannot be served: decode one" in capsys.readouterr().err


def load(folder, capsys, *flags: str, code: int = 0) -> tuple[str, dict]:
    """What is printed before the last line, and the last line."""
    argv = ["load", str(folder), "--exit-layer", "2", "--max-new-tokens", "8", "--num-prompts", "3"]
    assert main([*argv, "--num-requests", "5", *flags]) == code
    shown, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return shown, json.loads(last)


def test_the_table_the_record_and_the_picture_hold_every_arm_and_level(tiny_checkpoint, tmp_path, capsys):
    files = ["--json", str(tmp_path / "load.json"), "--png", str(tmp_path / "load.png")]
    objective = ["--slo-ttft", "1e7", "--slo-tpot", "1e-7", "--arms", "plain,loop,chain"]
    levels = ["--concurrency", "2,1", "--rate", "300", "--repeats", "2", "--num-requests", "3"]
    shown, result = load(tiny_checkpoint, capsys, *levels, *files, *objective)
    assert json.loads((tmp_path / "load.json").read_text()) == result
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    arms = ["plain", "plain loop", "self-speculative"]
    records = result["load"]
    levels_of = [(each["max_concurrency"], each["request_rate"]) for each in records]
    assert levels_of == [(1, None)] * 3 + [(2, None)] * 3 + [(None, 300.0)] * 3
    assert [each["arm"] for each in records] == arms * 3
    assert [each["batching"] for each in records[:3]] == ["static", "continuous", "continuous"]
    for each in records:
        assert each["completed"] == each["equal_outputs"] == each["num_requests"] == 6
        assert each["output_throughput"] == pytest.approx(each["total_output_tokens"] / each["duration"], rel=1e-2)
        assert each["median_ttft_ms"] <= each["p95_ttft_ms"] <= each["p99_ttft_ms"] <= each["p99_e2el_ms"]
        assert each["request_goodput"] == 0  # nobody keeps that time per token
    assert all(records[i]["mean_tokens_per_burst"] == 1 for i in (0, 1, 3, 4))
    assert {each["total_output_tokens"] for each in records} == {records[0]["total_output_tokens"]}
    for said in (*arms[:2], "self-speculative 2/4", "closed loop", "open loop", "TTFT ms", "good/s", "float32"):
        assert said in shown
    assert "self-speculative over plain loop, output tokens/s: " in shown
    assert str(tiny_checkpoint.parent) not in json.dumps(result)


def test_under_the_processors_clock_an_open_loop_waits_for_nothing(tiny_checkpoint, capsys):
    """At this rate the fifth request would come after hours."""
    flags = ("--clock", "processor", "--threads", "1", "--rate", "0.0005", "--arms", "loop")
    shown, result = load(tiny_checkpoint, capsys, *flags)
    assert [(each["completed"], each["equal_outputs"]) for each in result["load"]] == [(5, 5)]
    assert result["load"][0]["duration"] > 600
    assert result["load"][0]["mean_in_flight"] < 0.1
    assert "processor time" in shown


def test_ctrl_c_reports_what_there_is(tiny_checkpoint, capsys, monkeypatch):
    answers, answer = [], Worker._answer

    def interrupted(self, request, *rest):
        answer(self, request, *rest)
        answers.append(request)
        if len(answers) == 2 + 2 + 5 + 3:  # warm-up of both arms, the first arm, three of the second
            raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_answer", interrupted)
    shown, result = load(tiny_checkpoint, capsys, "--arms", "loop,chain", "--concurrency", "2", code=130)
    assert result["interrupted"]
    assert [(each["completed"], each["interrupted"]) for each in result["load"]] == [(5, False), (3, True)]
    assert "3/5" in shown
    assert "interrupted: the last row" in shown


def test_an_arm_that_fails_is_a_row_of_errors(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    def broken(self, batch, worker):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(PlainEngine, "__call__", broken)
    flags = ("--arms", "plain,chain", "--concurrency", "2", "--png", str(tmp_path / "load.png"))
    shown, result = load(tiny_checkpoint, capsys, *flags)
    assert [(each["completed"], each["failed"]) for each in result["load"]] == [(0, 5), (5, 0)]
    assert "plain, 2 in flight: RuntimeError: no such kernel" in shown
    assert "self-speculative over plain: nothing to compare" in shown


def test_nothing_to_draw_is_drawn(tmp_path):
    draw({"model": "m", "load": []}, tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").exists()


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ({1: 2.0, 2: 1.5, 4: 0.5}, "2.00 at 1, 1.50 at 2, 0.50 at 4: more up to 2 in flight, not from 4 on"),
        ({1: 2.0}, "2.00 at 1: more at every level"),
        ({1: 0.9, 8: 1.0}, "0.90 at 1, 1.00 at 8: never more"),
    ],
)
def test_where_drafting_pays_is_said(speeds, said):
    records = [
        {"arm": arm, "max_concurrency": level, "output_throughput": speed * scale}
        for level, speed in speeds.items()
        for arm, speed, scale in (("chain", speed, 10.0), ("plain", 1.0, 10.0))
    ]
    assert pays_line(records, "chain", "plain") == f"chain over plain, output tokens/s: {said}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--rate", "0"), "argument --rate: '0' is not a number above 0"),
        (("--concurrency", "0"), "argument --concurrency: '0' is not a whole number"),
        (("--arms", "plain,block"), "'block' is no arm"),
        (("--png", "/nowhere/x.png"), "--png /nowhere/x.png: there is no folder /nowhere"),
        (("--json", "/nowhere/x.json"), "--json /nowhere/x.json: there is no folder /nowhere"),
        (("--json", "/tmp"), "--json /tmp is a folder: name a file"),
        (("--png", "x.bmp"), "--png x.bmp: name it with one of"),
        (("--clock", "processor"), "--clock processor would count every thread's time: add --threads 1"),
        (("--max-new-tokens", "250"), "--prompt-tokens 64 and --max-new-tokens 250 make 314"),
        ((), "carries no tuned exit layer"),
    ],
)
def test_wrong_flags_are_told(flags, said, tiny_checkpoint, capsys):
    exit_layer = ("--exit-layer", "2") if flags else ()
    code, _, err = run(["load", str(tiny_checkpoint), *exit_layer, *flags], capsys)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
