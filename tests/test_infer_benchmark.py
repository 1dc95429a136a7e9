"""`benchmark`: every arm is measured on the same prompts, and what differs from plain decoding does not stay hidden."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerskip
from infer.benchmarking.arms import Arm, coupled, plain, plain_loop, self_speculative
from infer.benchmarking.batches import make_batches, pays_until
from infer.benchmarking.differences import first_difference
from infer.benchmarking.measured import Measured
from infer.benchmarking.measurement import Protocol, best, measure
from infer.benchmarking.memory import bytes_by_layer, key_value_bytes, slots
from infer.benchmarking.record import record
from infer.benchmarking.report import COLUMNS, row
from infer.benchmarking.rivals import assistant_early_exit
from infer.command import main
from infer.options import DecodingOptions
from layerskip.checkpoint.settings import Setting
from layerskip.exact import rules
from layerskip.exact.acceptance import chain_walk
from layerskip.model.stages import Stages
from tests import tiny
from tests.programs import prompts, quiet, run

ARMS = ["plain", "plain loop", "self-speculative", "assistant_early_exit"]
GREEDY = DecodingOptions(max_new_tokens=16).generate_arguments()


def benchmark(folder, capsys, *flags: str, code: int = 0) -> tuple[str, dict]:
    """What is printed before the last line, and the last line."""
    assert main(["benchmark", str(folder), "--max-new-tokens", "10", "--num-prompts", "2", *flags]) == code
    shown, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return shown, json.loads(last)


@pytest.fixture
def model():
    return tiny.endless(tiny.llama())


def test_the_table_and_its_record_hold_every_arm(tiny_checkpoint, capsys):
    file = tiny_checkpoint / "benchmark.json"
    flags = ("--exit-layers", "2", "--num-draft-tokens", "3", "--repeats", "2", "--sampled", "--json", str(file))
    shown, result = benchmark(tiny_checkpoint, capsys, *flags)
    assert json.loads(file.read_text()) == result
    assert [arm["arm"] for arm in result["greedy"]] == [arm["arm"] for arm in result["sampled"]] == ARMS
    for arm in result["greedy"]:
        assert arm["error"] is None
        assert arm["equal_outputs"] == arm["num_outputs"] == 2
        assert arm["tokens"] == result["greedy"][0]["tokens"]
        assert len(arm["speedup_by_repeat"]) == 2
    assert result["greedy"][0]["speedup"] == result["greedy"][0]["median_speedup"] == 1
    assert all("equal_outputs" not in arm for arm in result["sampled"])
    for said in (*ARMS, "greedy: 2 prompts (built in)", "sampled: ", "float32", "torch ", "transformers ", "commit "):
        assert said in shown
    for name in ("cpu", "threads", "dtype", "torch", "transformers", "commit", "prompts", "seed"):
        assert name in result["conditions"]
    assert str(tiny_checkpoint.parent) not in json.dumps(result)  # a published record names no paths


def test_settings_are_chosen_on_prompts_that_are_not_reported(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    seen: list[tuple[str, str]] = []
    run = Arm.run

    def watched(self, model, prompt, arguments):
        seen.append((self.label, str(prompt.tolist())))
        return run(self, model, prompt, arguments)

    monkeypatch.setattr(Arm, "run", watched)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} lazy dogs"}) + "\n" for i in range(4)))
    flags = ("--exit-layers", "1,2", "--num-draft-tokens", "2,4", "--prompts", str(file), "--repeats", "1")
    _, result = benchmark(tiny_checkpoint, capsys, *flags)
    tried = [(arm["arm"], arm["exit_layer"], arm["num_draft_tokens"]) for arm in result["validation"]]
    grid = [(e, k) for e in (1, 2) for k in (2, 4)]
    assert tried == [("plain", None, None)] + [(arm, *pair) for arm in ARMS[2:] for pair in grid]
    for arm in result["greedy"][2:]:
        rivals = [other for other in result["validation"] if other["arm"] == arm["arm"]]
        fastest = max(rivals, key=lambda other: other["tokens_per_second"])
        assert (arm["exit_layer"], arm["num_draft_tokens"]) == (
            fastest["exit_layer"],
            fastest["num_draft_tokens"],
        )
    loop = seen.index(next(entry for entry in seen if entry[0] == "plain loop"))
    choosing = {prompt for _, prompt in seen[: loop - 1]}  # the plain arm warms up just before
    reporting = {prompt for _, prompt in seen[loop:]}
    assert len(choosing) == len(reporting) == 2
    assert not choosing & reporting


def test_a_tuned_checkpoint_needs_no_flags(tiny_checkpoint, capsys):
    path = tiny_checkpoint / "generation_config.json"
    tuned = {"layerskip": {"exit_layer": 2, "num_draft_tokens": 3}, "_from_model_config": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | tuned))
    _, result = benchmark(tiny_checkpoint, capsys, "--repeats", "1")
    assert [(arm["exit_layer"], arm["num_draft_tokens"]) for arm in result["greedy"][2:]] == [(2, 3)] * 2
    assert result["validation"] == []


def test_check_passes_an_exact_engine(tiny_checkpoint, capsys):
    shown, result = benchmark(tiny_checkpoint, capsys, "--check", "--exit-layers", "1,3")
    assert result["exact"] is True
    assert shown.count("2 of 2 greedy float32 outputs equal") == 2


def test_check_catches_a_rule_that_accepts_too_much(tiny_checkpoint, capsys, monkeypatch):
    def accept_all(draft, chosen):
        batch, n = draft.tokens.shape
        return chain_walk(torch.full((batch,), n), n), chosen[:, -1]

    monkeypatch.setattr(rules, "follow", accept_all)
    shown, result = benchmark(tiny_checkpoint, capsys, "--check", "--exit-layers", "1", code=1)
    assert result["exact"] is False
    assert result["check"][0]["equal_outputs"] == 0
    assert "A FAULT, rounding does not explain it" in shown


@pytest.mark.parametrize("position", [0, 5, 15])
def test_a_planted_fault_is_counted_and_placed(model, position):
    def faulty(model, prompt, arguments):
        sequences, statistics = plain().decode(model, prompt, arguments)
        worst = model(sequences[:, : prompt.shape[1] + position]).logits[0, -1].argmin()
        sequences[0, prompt.shape[1] + position] = worst
        return sequences, statistics

    baseline, entry = measure(model, [plain(), Arm("faulty", faulty)], Protocol(prompts(), GREEDY, 1), quiet)
    outputs = enumerate(zip(prompts(), baseline.outputs[0], entry.outputs[0], strict=True))
    differences = {
        index: first_difference(model, prompt, expected.tokens, actual.tokens)
        for index, (prompt, expected, actual) in outputs
    }
    result = record(entry, baseline, differences)
    assert (result["equal_outputs"], result["num_outputs"], result["near_ties"], result["faults"]) == (0, 2, 0, 2)
    assert [difference["position"] for difference in result["differences"]] == [position] * 2
    json.dumps(result, allow_nan=False)


def test_a_tie_is_no_fault(model):
    """Two tokens with the same row in the head have the same logit: either is right."""
    prompt = prompts()[0]
    expected = plain().run(model, prompt, GREEDY).tokens
    twin = next(token for token in range(3, 64) if token not in expected)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[expected[4]]
    actual = [*expected[:4], twin, *expected[5:]]
    difference = first_difference(model, prompt, expected, actual)
    assert difference.position == 4
    assert difference.near_tie
    assert difference.margin == difference.gap == 0


def test_an_output_that_ends_early_is_a_fault(model):
    expected = plain().run(model, prompts()[0], GREEDY).tokens
    difference = first_difference(model, prompts()[0], expected, expected[:-1])
    assert (difference.position, difference.actual, difference.near_tie) == (15, None, False)
    assert first_difference(model, prompts()[0], expected, expected) is None


def test_every_arm_stops_at_the_end_token(model):
    whole = plain().run(model, prompts()[0], GREEDY).tokens
    model.generation_config.eos_token_id = whole[6]
    setting = Setting(2, 4)
    for arm in (plain(), plain_loop(), self_speculative(setting), assistant_early_exit(setting)):
        assert arm.run(model, prompts()[0], GREEDY).tokens == whole[: whole.index(whole[6]) + 1]


def test_transformers_early_exit_drafts_as_long_as_asked_and_leaves_the_model_as_it_was(model):
    """Its knobs are read from the model's own config, where a call's arguments are ignored."""
    before = model.generation_config.to_dict()
    for num_draft_tokens in (1, 3):
        output = assistant_early_exit(Setting(2, num_draft_tokens)).run(model, prompts()[0], GREEDY)
        counts = output.statistics
        assert counts.num_tokens == 16
        assert counts.num_drafted / counts.num_steps == pytest.approx(num_draft_tokens, rel=0.4)
        # The same drafts and the same rule as ours.
        ours = self_speculative(Setting(2, num_draft_tokens)).run(model, prompts()[0], GREEDY).statistics
        assert (counts.num_steps, counts.num_drafted) == (ours.num_steps, ours.num_drafted)
    assert model.generation_config.to_dict() == before
    assert not model.model.layers[0]._forward_hooks


def test_an_architecture_on_which_transformers_early_exit_fails_is_a_row_that_says_so():
    model = tiny.endless(tiny.architecture("gpt2"))
    arms = [plain(), self_speculative(Setting(2, 3)), assistant_early_exit(Setting(2, 3))]
    measured = measure(model, arms, Protocol(prompts(), GREEDY, 1), quiet)
    assert [entry.error is None for entry in measured] == [True, True, False]
    assert model.config.num_hidden_layers == 4
    cells = row(record(measured[2], measured[0], {}))
    assert len(cells) == len(COLUMNS)
    assert "failed, " in cells[0]
    assert best(measured[2:]) is None
    assert plain().run(model, prompts()[0], GREEDY).tokens == measured[0].outputs[0][0].tokens


def test_speedups_are_ratios_of_sums_and_medians_of_prompts():
    from infer.benchmarking.arms import Output

    def measured(*rows):
        return Measured(plain(), [[Output([0] * n, s, None, None) for n, s in outputs] for outputs in rows])

    baseline = measured([(10, 1.0), (10, 1.0), (10, 4.0)], [(10, 1.0), (10, 1.0), (10, 4.0)])
    entry = measured([(10, 1.0), (10, 0.5), (10, 1.0)], [(10, 1.0), (10, 0.5), (10, 1.0)])
    assert entry.speedup(baseline) == pytest.approx(6 / 2.5)
    assert entry.median_speedup(baseline) == pytest.approx(2.0)
    assert entry.speedup_by_repeat(baseline) == pytest.approx([2.4, 2.4])
    assert entry.statistics is None


def test_arms_are_interleaved_and_take_turns_at_going_first(model):
    order: list[str] = []
    arms = [Arm(name, lambda m, p, a, n=name: (order.append(n), (p, None))[1]) for name in "abc"]
    measure(model, arms, Protocol(prompts(3), GREEDY, 1), quiet)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_rates_that_are_not_numbers_are_null(model):
    measured = measure(model, [plain(), plain_loop()], Protocol(prompts(1), GREEDY, 1), quiet)
    result = record(measured[1], measured[0], None)
    assert math.isnan(measured[1].statistics.draft_acceptance_rate)
    assert result["draft_acceptance_rate"] is None
    assert result["mean_acceptance_length"] == 1


def test_any_arms_in_one_run_and_all_greedy_ones_are_exact(tiny_checkpoint, capsys):
    flags = ("--exit-layers", "2", "--num-draft-tokens", "3", "--repeats", "1", "--sampled", "--tree", "3,2")
    names = "tree,hybrid,lookup,branch,block,coupled,chain"
    shown, result = benchmark(tiny_checkpoint, capsys, *flags, "--arms", names)
    greedy = ["plain", "tree", "lookup hybrid", "lookup only", "lookup branch", "self-speculative"]
    assert [arm["arm"] for arm in result["greedy"]] == greedy
    assert [arm["arm"] for arm in result["sampled"]] == [*greedy[:5], "block", "coupled", greedy[5]]
    assert [arm["error"] for arm in [*result["greedy"], *result["sampled"]]] == [None] * 14
    assert all(arm["equal_outputs"] == 2 for arm in result["greedy"])
    drafts = {arm["arm"]: arm["drafts"] for arm in result["greedy"]}
    assert drafts["tree"] == "3,2"
    assert drafts["lookup branch"] == "3, lookup 8"
    assert drafts["lookup only"] == "lookup 8"
    assert "lookup branch" in shown


def test_flags_of_one_draft_add_its_arm_to_the_usual_ones(tiny_checkpoint, capsys):
    flags = ("--exit-layers", "2", "--repeats", "1", "--tree", "s2_k2_d3", "--lookup", "only", "--draft-stop", "0.2")
    _, result = benchmark(tiny_checkpoint, capsys, *flags)
    assert [arm["arm"] for arm in result["greedy"]] == [*ARMS, "tree", "lookup only"]
    assert [arm["error"] for arm in result["greedy"]] == [None] * 6


def test_coupled_outputs_are_those_of_plain_decoding_with_the_noise(tiny_checkpoint):
    model = tiny.endless(tiny.llama())
    arguments = DecodingOptions(max_new_tokens=12, temperature=1.3).generate_arguments()
    outputs = []
    for setting in (Setting(2, 4), Setting(None, 0), Setting(3, 2)):
        torch.manual_seed(11)
        outputs.append(coupled(setting).run(model, prompts()[0], arguments).tokens)
    assert outputs[0] == outputs[1] == outputs[2]


def test_trees_are_chosen_on_validation_prompts_too(tiny_checkpoint, capsys):
    flags = ("--exit-layers", "2", "--repeats", "1", "--arms", "tree", "--tree", "2", "--tree", "s2_k2_d3")
    _, result = benchmark(tiny_checkpoint, capsys, *flags)
    assert [arm["drafts"] for arm in result["validation"]] == [None, "2", "s2_k2_d3"]
    fastest = max(result["validation"][1:], key=lambda arm: arm["tokens_per_second"])
    assert result["greedy"][1]["drafts"] == fastest["drafts"]


def test_check_covers_trees_and_lookups(tiny_checkpoint, capsys):
    flags = ("--check", "--exit-layers", "1", "--arms", "chain,tree,hybrid,lookup,branch", "--tree", "3,2,1")
    shown, result = benchmark(tiny_checkpoint, capsys, *flags)
    assert result["exact"] is True
    assert len(result["check"]) == 5
    assert shown.count("2 of 2 greedy float32 outputs equal") == 5


def test_equal_budgets_verify_as_many_tokens(tiny_checkpoint, capsys):
    flags = ("--equal-budget", "--exit-layers", "2", "--num-draft-tokens", "3,4", "--repeats", "1")
    shown, result = benchmark(tiny_checkpoint, capsys, *flags)
    assert [(arm["arm"], arm["drafts"]) for arm in result["greedy"]] == [
        ("plain", None),
        *(("chain, 3 verified", "3"), ("tree, 3 verified", "s1_k3_d3"), ("tree, 3 verified", "s2_k2_d3")),
        ("tree, 3 verified", "s3_k2_d3"),
        *(("chain, 4 verified", "4"), ("tree, 4 verified", "s2_k3_d4"), ("tree, 4 verified", "s2_k2_d4")),
        *(("tree, 4 verified", "s3_k2_d4"), ("tree, 4 verified", "s4_k2_d4")),
    ]
    assert all(arm["equal_outputs"] == 2 for arm in result["greedy"])
    for number in (3, 4):
        assert f"{number} tokens verified a round: the fastest tree, s" in shown


def test_a_budget_of_ones_own_trees(tiny_checkpoint, capsys):
    flags = ("--equal-budget", "--exit-layers", "2", "--num-draft-tokens", "3", "--repeats", "1", "--tree", "2,0")
    assert main(["benchmark", str(tiny_checkpoint), *flags[:-1], "s2_k2_d4"]) == 2
    assert (
        "--tree s2_k2_d4 verifies 4 tokens a round, and --num-draft-tokens gives chains of 3" in capsys.readouterr().err
    )
    _, result = benchmark(tiny_checkpoint, capsys, *flags[:-1], "1,2")
    assert [arm["drafts"] for arm in result["greedy"]] == [None, "3", "1,2"]


def test_the_cache_of_an_arm_is_counted_in_the_bytes_of_its_layers(model):
    sizes = bytes_by_layer(model)
    assert sizes == [2 * 2 * 8 * 4] * 4  # keys and values of two heads of 8 float32
    per_position = sum(sizes)
    assert key_value_bytes(plain(), 10, sizes).total == 10 * per_position
    chain = key_value_bytes(self_speculative(Setting(1, 3)), 10, sizes)
    assert (chain.total, chain.speculation) == (13 * per_position, 3 * per_position)
    second = key_value_bytes(assistant_early_exit(Setting(1, 3)), 10, sizes)
    assert second.total - chain.total == 10 * sizes[0]
    wanted = {
        Setting(2, 3, tree=(3, 2)): 9,
        Setting(2, 3, tree="s2_k2_d3"): 4,  # all that was grown has a slot
        Setting(None, 0, lookup="only"): 8,
        Setting(2, 3, lookup="hybrid"): 8,
        Setting(2, 3, lookup="branch"): 11,
        Setting(None, 0): 0,
    }
    assert {setting: slots(setting) for setting in wanted} == wanted


@pytest.mark.parametrize("setting", [Setting(2, 3), Setting(2, 0, tree=(3, 2)), Setting(2, 0, tree="s3_k2_d4")])
def test_the_cache_really_holds_so_many_slots(setting, model, monkeypatch):
    """The most that any layer holds beyond what is committed."""
    held = []
    verify = Stages.verify

    def watched(self, token_ids, hidden, cache, block=None):
        before = cache.layers[-1].length
        logits = verify(self, token_ids, hidden, cache, block)
        held.append(cache.layers[-1].length - before)
        return logits

    monkeypatch.setattr(Stages, "verify", watched)
    self_speculative(setting).run(model, prompts()[0], GREEDY)
    assert max(held) == slots(setting) + 1  # and the root


def batch_flags(*flags: str) -> tuple[str, ...]:
    return ("--exit-layers", "2", "--num-draft-tokens", "3", "--repeats", "1", "--batch-sizes", "1,2,3", *flags)


def test_batches_of_every_size_against_plain_decoding_of_the_padded_batch(tiny_checkpoint, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "lazy dog " * (i + 1)}) + "\n" for i in range(4)))
    flags = batch_flags(
        "--prompts", str(file), "--arms", "chain,tree,early-exit", "--tree", "2,1", "--num-prompts", "4"
    )
    shown, result = benchmark(tiny_checkpoint, capsys, *flags)
    records = result["batches"]["greedy"]
    arms = ["self-speculative", "tree"]  # transformers' early exit decodes one prompt at a time
    assert [(r["batch_size"], r["arm"]) for r in records] == [(size, arm) for size in (1, 2, 3) for arm in arms]
    assert [record["num_outputs"] for record in records] == [4, 4, 4, 4, 6, 6]
    assert all(record["equal_outputs"] == record["num_outputs"] for record in records)
    for each in records:
        assert each["ratio"] == pytest.approx(each["tokens_per_second"] / each["plain_tokens_per_second"], abs=1e-3)
    for arm in arms:
        assert re.search(rf"^{arm} (pays|stops paying) ", shown, re.MULTILINE)


def test_batches_are_equal_where_rows_end_at_different_places(tiny_checkpoint, tmp_path, capsys):
    """An end-of-sequence token that the model says soon in some rows and not in others."""
    path = tiny_checkpoint / "generation_config.json"
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    inputs = tokenizer("lazy dog", return_tensors="pt", return_token_type_ids=False)
    said = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, said[3]]}))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("lazy dog", "def add(a, b", "the")))
    _, result = benchmark(tiny_checkpoint, capsys, *batch_flags("--prompts", str(file), "--num-prompts", "3"))
    for each in result["batches"]["greedy"]:
        assert each["equal_outputs"] == each["num_outputs"]


def test_from_which_batch_size_on_it_does_not_pay():
    def records(*ratios):
        sizes = (1, 2, 4, 8)
        return [{"arm": "x", "batch_size": b, "ratio": r, "error": None} for b, r in zip(sizes, ratios, strict=True)]

    assert pays_until(records(1.5, 1.2, 0.9, 0.8), "x").startswith("x stops paying at batch size 4: ")
    assert pays_until(records(1.5, 0.9, 1.1, 0.8), "x").startswith("x stops paying at batch size 8: ")
    assert pays_until(records(1.5, 1.2, 1.1, 1.05), "x") == "x pays up to the largest measured batch size, 8"
    assert pays_until(records(1.0, 0.9, 0.8, 0.7), "x") == "x pays at no measured batch size, from 1 on"
    failed = [{"arm": "x", "batch_size": 1, "error": "no"}]
    assert pays_until(failed, "x") == "x: failed at every batch size"


def test_every_prompt_is_in_a_batch():
    rows = [[1], [2], [3], [4], [5]]
    assert make_batches(rows, 2) == [[[1], [2]], [[3], [4]], [[5], [1]]]
    assert make_batches(rows, 8) == [[[1], [2], [3], [4], [5], [1], [2], [3]]]


def test_an_architecture_that_decodes_no_batches_is_a_row_that_says_so(tiny_checkpoint, capsys, monkeypatch):
    generate = layerskip.generate

    def refuse(model, prompts, **arguments):
        if len(prompts) > 1:
            raise ValueError("no batches here")
        return generate(model, prompts, **arguments)

    monkeypatch.setattr(layerskip, "generate", refuse)
    shown, result = benchmark(tiny_checkpoint, capsys, *batch_flags())
    errors = {(each["batch_size"], each["arm"]): each["error"] for each in result["batches"]["greedy"]}
    assert errors == {
        (size, arm): None if size == 1 else "ValueError: no batches here" for size in (1, 2, 3) for arm in ARMS[1:3]
    }
    assert "plain loop pays" not in shown  # there is nothing drafted that could pay
    assert "failed, ValueError: no batches here" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--arms", "chain,fast"), "'fast' is no arm: choose of plain, "),
        (("--arms", "block"), "arm block is a way to sample: add --sampled"),
        (("--acceptance", "coupled"), "arm coupled is a way to sample: add --sampled"),
        (("--equal-budget", "--batch-sizes", "2"), "are two comparisons: give one"),
        (("--equal-budget", "--exit-layers", "1,2"), "at one exit layer: give one in --exit-layers"),
        (("--exit-layers", "2", "--tree", "s3_k1_d9"), "--tree s3_k1_d9: d is the number"),
        (("--arms", "lookup,tree"), "carries no tuned exit layer to measure: give --exit-layers"),
        (("--exit-layers", "2", "--num-draft-tokens", "300"), "--num-draft-tokens 300 is more than 256: draft fewer"),
        (("--arms", "early-exit", "--exit-layers", "1", "--batch-sizes", "2"), "--batch-sizes compares arms that"),
    ],
)
def test_comparisons_that_will_not_do(flags, said, tiny_checkpoint, capsys):
    code, _, err = run(["benchmark", str(tiny_checkpoint), *flags], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_a_lookup_alone_needs_no_exit_layer(tiny_checkpoint, capsys):
    _, result = benchmark(tiny_checkpoint, capsys, "--arms", "lookup", "--repeats", "1")
    assert [(arm["arm"], arm["exit_layer"], arm["error"]) for arm in result["greedy"]] == [
        ("plain", None, None),
        ("lookup only", None, None),
    ]
