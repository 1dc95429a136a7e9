"""`tune`: what it forecasts is what decoding does, what it chooses pays, and nothing is written unless asked."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import layerskip
from infer.command import main
from infer.options import ModelOptions
from infer.tune import MOST_DRAFT_TOKENS, TuneOptions
from infer.tuning import run as tuning
from infer.tuning.choice import OFF, decide, how_to_use
from infer.tuning.evidence import candidates
from infer.tuning.report import ideal_line, rows
from infer.tuning.run import rivals, setting_of
from layerskip.checkpoint.settings import Setting, carry, tuned_setting
from layerskip.checkpoint.vocabulary import store_draft_vocabulary
from layerskip.forecast import Forecast
from layerskip.model.tree import MAX_TREE_TOKENS
from layerskip.share.card import write_model_card
from tests import tiny

SHORT = ("--num-prompts", "2", "--max-new-tokens", "12", "--max-draft-tokens", "3")


def tune(folder, capsys, *flags: str) -> tuple[str, dict, str]:
    """What is printed before the last line, the last line, and what is said on standard error. Chains only, unless a
    tree is asked for."""
    trees = () if "--tree" in flags else ("--tree", "none")
    assert main(["tune", str(folder), *SHORT, *trees, *flags]) == 0
    out, err = capsys.readouterr()
    shown, _, last = out.rstrip("\n").rpartition("\n")
    return shown, json.loads(last), err


@pytest.fixture(autouse=True)
def timed_once(monkeypatch):
    """What is timed here is only shown and added up."""
    monkeypatch.setattr("infer.tuning.evidence._REPEATS", 1)
    monkeypatch.setattr("infer.tuning.evidence._SECONDS", 0.0)


@pytest.fixture
def agreeing(tiny_checkpoint):
    """A checkpoint whose layers from the second on do nothing: exits 1 to 3 say what the model says."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tiny_checkpoint)
    return tiny_checkpoint


def confirmed(speedup: float, loop: float = 0.9):
    """In place of the measurement: plain decoding, the loop, and the best setting at this speed."""

    def confirm(loaded, options, evidence, prompts, terminal):
        best = evidence.forecasts[0]
        setting = {"exit_layer": best.exit_layer, "num_draft_tokens": best.num_draft_tokens, "drafts": "3"}
        own = {"arm": "self-speculative", **setting, "draft_vocabulary": best.draft_vocabulary}
        names = {"arm": "plain", "exit_layer": None, "num_draft_tokens": None, "drafts": None}
        speeds = {"error": None, "tokens": 5, "tokens_per_second": 1.0}
        return [
            {**names, **speeds, "speedup": 1.0},
            {**names, **speeds, "speedup": loop},
            {**own, **speeds, "speedup": speedup, "forecast_speedup": best.speedup},
        ]

    return confirm


def check_speedups(result: dict) -> None:
    """The forecasts are what follows from the times and the acceptance in the record."""
    times = result["milliseconds"]
    loop = times["bookkeeping"]
    for forecast in (forecast for forecast in result["forecasts"] if forecast["tree"] is None):
        exit_layer, n = str(forecast["exit_layer"]), forecast["num_draft_tokens"]
        draft = times["cut_draft" if forecast["head"] == "cut" else "draft"][exit_layer] + loop["draft"]
        verify = times["verify"][exit_layer][str(n + 1)]  # 2, 3 and 4 positions are all timed
        spent = n * draft + times["extend"][exit_layer] + verify + loop["round"]
        expected = forecast["mean_acceptance_length"] * (times["plain"] + loop["plain"]) / spent
        assert forecast["speedup"] == pytest.approx(expected, rel=2e-3)


def test_an_exit_that_always_agrees_is_forecast_to_be_accepted_whole(agreeing, capsys):
    shown, result, err = tune(agreeing, capsys, "--exit-layers", "1,3")
    assert {(f["exit_layer"], f["num_draft_tokens"]) for f in result["forecasts"]} == {
        (e, n) for e in (1, 3) for n in (1, 2, 3)
    }
    for forecast in result["forecasts"]:
        assert forecast["mean_acceptance_length"] == forecast["num_draft_tokens"] + 1
        assert forecast["head"] == "whole"
    speeds = [forecast["speedup"] for forecast in result["forecasts"]]
    assert speeds == sorted(speeds, reverse=True)
    for exit_layer in result["exits"]:
        assert exit_layer["agreement"] == 1
        assert exit_layer["overlap"] == pytest.approx(1, abs=1e-3)
        assert exit_layer["mean_acceptance_length"] == [2, 3, 4]
        assert exit_layer["num_tokens"] == 24
    check_speedups(result)
    assert "choice: " in shown
    assert "nothing is written: --write" in err
    assert "python -m infer generate" in err
    assert "layerskip" not in json.loads((agreeing / "generation_config.json").read_text())


def test_the_best_forecasts_are_measured_beside_plain_decoding(agreeing, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "HOPELESS", 0.0)
    monkeypatch.setattr(tuning, "_NEAR", 0.0)  # the best of the other exit as well
    shown, result, _ = tune(agreeing, capsys, "--num-prompts", "5", "--exit-layers", "1,2")
    arms = [record["arm"] for record in result["confirmation"]]
    assert arms == ["plain", "plain loop", "self-speculative", "self-speculative"]
    bests = [next(f for f in result["forecasts"] if f["exit_layer"] == e) for e in (1, 2)]
    bests.sort(key=lambda forecast: -forecast["speedup"])
    for record, forecast in zip(result["confirmation"][2:], bests, strict=True):
        ideal = record["ideal"]
        assert ideal["share"] == pytest.approx(ideal["measured"] / ideal["ideal"], rel=1e-2)
        assert ideal["share"] + ideal["rollback"] + ideal["between"] + ideal["passes"] == pytest.approx(1, abs=1e-3)
        for name in ("exit_layer", "num_draft_tokens"):
            assert record[name] == forecast[name]
        assert record["forecast_speedup"] == forecast["speedup"]
        assert record["equal_outputs"] == record["num_outputs"] == result["conditions"]["num_confirmed"] == 2
        # The last round of twelve tokens may be cut.
        assert record["mean_acceptance_length"] == pytest.approx(forecast["mean_acceptance_length"], rel=0.15)
    assert "measured on 2 other prompts" in shown


def test_a_hopeless_forecast_is_not_measured_and_speculation_is_off(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "HOPELESS", 1e9)
    before = sorted((path, path.stat().st_mtime_ns) for path in tiny_checkpoint.rglob("*"))
    shown, result, err = tune(tiny_checkpoint, capsys)
    assert result["off"]
    assert result["confirmation"] == []
    assert result["setting"]["exit_layer"] is None
    assert "choice: off (plain decoding): the best forecast is" in shown
    assert "--exit-layer none" in err
    assert sorted((path, path.stat().st_mtime_ns) for path in tiny_checkpoint.rglob("*")) == before


def test_off_is_stored_and_decoded_plainly(tiny_checkpoint, capsys, monkeypatch, recwarn):
    monkeypatch.setattr(tuning, "confirm", confirmed(1.01))
    path = tiny_checkpoint / "generation_config.json"
    kept = json.loads(path.read_text())
    _, result, err = tune(tiny_checkpoint, capsys, "--write")
    assert result["off"]
    assert str(path) in err
    kept.pop("_from_model_config", None)
    stored = json.loads(path.read_text())
    assert stored["layerskip"].pop("tuned_for")["dtype"] == "float32"
    assert stored == {**kept, "layerskip": {"exit_layer": None, "num_draft_tokens": 0}}
    assert not list(tiny_checkpoint.glob("*.partial"))
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    assert tuned_setting(model) == OFF
    prompt = torch.randint(3, 200, (1, 5))
    output = layerskip.generate(model, prompt, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert output.statistics.num_drafted == 0
    assert not [warning for warning in recwarn if "tuned" in str(warning.message)]
    assert main(["generate", str(tiny_checkpoint), "def", "--max-new-tokens", "4"]) == 0


def test_a_choice_that_pays_is_what_decoding_then_uses(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "confirm", confirmed(1.5))
    _, result, _ = tune(tiny_checkpoint, capsys, "--exit-layers", "3", "--write")
    assert not result["off"]
    best = result["forecasts"][0]
    setting = tuned_setting(AutoModelForCausalLM.from_pretrained(tiny_checkpoint))
    assert setting == Setting(3, best["num_draft_tokens"])
    again = GenerationConfig.from_pretrained(tiny_checkpoint)
    assert again.eos_token_id == 2  # what was there stays


def test_a_checkpoint_without_a_generation_config_gets_a_whole_one(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "confirm", confirmed(1.5))
    (tiny_checkpoint / "generation_config.json").unlink()
    tune(tiny_checkpoint, capsys, "--write")
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    assert tuned_setting(model) is not None
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (2, 1)


def test_the_runs_record_and_card_follow_the_choice(agreeing, capsys, monkeypatch):
    """Those that are there: nothing else in them changes, and a card that somebody has made their own stays."""
    monkeypatch.setattr(tuning, "confirm", confirmed(1.5))
    old = {"exit_layer": 3, "num_draft_tokens": 1, "forecast": {"mean_acceptance_length": 1.25, "speedup": 1.125}}
    path, card = agreeing / "evaluation.json", agreeing / "README.md"
    path.write_text(json.dumps({"steps": 3, "setting": old, "forecast_conditions": {"dtype": "bfloat16"}}))
    write_model_card(agreeing)
    before = card.read_text()
    _, result, err = tune(agreeing, capsys, "--exit-layers", "1", "--write")
    record, best = json.loads(path.read_text()), result["forecasts"][0]
    assert record["steps"] == 3
    assert record["setting"]["exit_layer"] == 1
    assert record["setting"]["num_draft_tokens"] == best["num_draft_tokens"]
    for name in ("speedup", "mean_acceptance_length"):
        assert record["setting"]["forecast"][name] == pytest.approx(best[name], abs=1e-4)
    assert record["setting"]["measured"]["speedup"] == 1.5
    assert record["forecast_conditions"]["dtype"] == "float32"
    assert card.read_text() != before
    assert all(str(each) in err for each in (path, card))
    card.write_text("mine")
    tune(agreeing, capsys, "--exit-layers", "3", "--write")
    assert card.read_text() == "mine"
    assert json.loads(path.read_text())["setting"]["exit_layer"] == 3
    assert list(agreeing.glob("*.partial")) == []


def test_a_choice_in_another_dtype_than_the_checkpoints_is_told(agreeing, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "confirm", confirmed(1.5))
    _, result, err = tune(agreeing, capsys, "--exit-layers", "1", "--write", "--dtype", "bfloat16")
    assert result["conditions"]["dtype"] == "bfloat16"
    assert "the choice holds for bfloat16, but without --dtype the checkpoint is decoded in float32" in err
    _, _, err = tune(agreeing, capsys, "--exit-layers", "1", "--write", "--dtype", "float32")
    assert "the choice holds" not in err


def test_trees_are_forecast_beside_chains(agreeing, capsys, monkeypatch):
    """An exit that says what the model says has no use for them; the one that wins is what is written and decoded."""
    monkeypatch.setattr(tuning, "confirm", confirmed(1.5))
    flags = ("--exit-layers", "1", "--tree", "2,1", "--tree", "s3_k2_d6", "--tree", "2,1,1,1")
    shown, result, _ = tune(agreeing, capsys, *flags)
    found = {str(f["tree"]): f for f in result["forecasts"]}
    assert set(found) == {"None", "[2, 1]", "s3_k2_d6"}  # the third one is deeper than chains may be
    assert found["[2, 1]"]["mean_acceptance_length"] == 3
    assert found["s3_k2_d6"]["mean_acceptance_length"] == 4
    assert all(f["interval"][0] <= f["speedup"] <= f["interval"][1] for f in result["forecasts"])
    check_speedups(result)
    assert "2,1" in shown
    tree = Forecast(1, 2, 3.0, 9.0, tree=(2, 1))
    assert setting_of(tree) == Setting(1, 2, tree=(2, 1))
    chain, other, far = Forecast(1, 2, 3.0, 8.9), Forecast(2, 3, 3.0, 8.6), Forecast(2, 3, 3.0, 1.0)
    assert rivals([tree, Forecast(1, 4, 3.0, 8.95, tree="s4_k2_d6"), chain, other]) == [tree, chain]
    assert rivals([tree, far]) == [tree]
    with_tree = arm(1.3) | {"tree": (2, 1)}
    assert decide([tree], [arm(1.0), arm(0.9), with_tree])[0] == Setting(2, 4, tree=(2, 1), draft_vocabulary=False)


def test_with_a_draft_vocabulary_both_heads_are_forecast(agreeing, tokenizer, capsys):
    store_draft_vocabulary(agreeing, torch.arange(0, len(tokenizer), 100))  # three tokens: hardly ever right
    shown, result, _ = tune(agreeing, capsys, "--exit-layers", "1")
    assert [exit_layer["head"] for exit_layer in result["exits"]] == ["whole", "cut"]
    whole, cut = result["exits"]
    assert (whole["agreement"], whole["mean_acceptance_length"]) == (1, [2, 3, 4])
    assert cut["agreement"] < 0.5
    assert cut["mean_acceptance_length"][2] < 3
    assert len(result["forecasts"]) == 2 * 3
    check_speedups(result)
    assert {forecast["head"] for forecast in result["forecasts"]} == {"whole", "cut"}
    assert "cut" in shown


def test_sampling_is_forecast_at_the_temperature_asked_for(tiny_checkpoint, capsys):
    asked = {
        temperature: tune(tiny_checkpoint, capsys, "--exit-layers", "2", "--temperature", temperature)[1]
        for temperature in ("0.5", "3")
    }
    cold, hot = (asked[each]["exits"][0] for each in ("0.5", "3"))
    assert cold["overlap"] < hot["overlap"]  # hot distributions are all alike
    assert cold["mean_acceptance_length"][0] == pytest.approx(1 + cold["overlap"], abs=0.15)
    assert asked["3"]["conditions"]["temperature"] == 3


def test_the_same_seed_measures_the_same_texts(tiny_checkpoint, capsys):
    flags = ("--exit-layers", "2", "--temperature", "1", "--top-p", "0.9", "--seed")
    first, again, other = (tune(tiny_checkpoint, capsys, *flags, seed)[1]["exits"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_candidates_are_the_trained_exits_or_the_first_third():
    config = tiny.llama(num_layers=4).config
    assert candidates(config, 12) == [1, 2, 3, 4]
    assert candidates(config, 2) == [1]
    carry(config, recipe={"exits": [2, 9]})
    assert candidates(config, 12) == [2, 9]
    carry(config, recipe={"exits": None, "exit_weights": "paper"})  # trains all
    assert candidates(config, 30) == list(range(1, 11))
    carry(config, recipe={"exits": "of a version to come"})
    assert candidates(config, 12) == [1, 2, 3, 4]
    carry(config, recipe={"a_field_to_come": 3, "exits": [2]})
    assert candidates(config, 12) == [2]


def arm(speedup: float, error: str | None = None) -> dict:
    own = {"exit_layer": 2, "num_draft_tokens": 4, "draft_vocabulary": False}
    return {"error": error, **own, **({} if error else {"speedup": speedup, "forecast_speedup": 1.5})}


@pytest.mark.parametrize(
    ("records", "setting", "said"),
    [
        ([], OFF, "the best forecast is 0.70x"),
        ([arm(1.0), arm(0.9), arm(1.3)], Setting(2, 4, draft_vocabulary=False), "1.30x plain decoding measured"),
        ([arm(1.0), arm(0.9), arm(1.01)], OFF, "less than 2% gained"),
        ([arm(1.0), arm(0.9), arm(0.7)], OFF, "0.70x plain decoding measured (1.50x forecast)"),
        ([arm(1.0), arm(1.2), arm(1.21)], OFF, "the loop without drafts 1.20x"),  # off is faster by that already
        ([arm(1.0), arm(1.2), arm(1.3)], Setting(2, 4, draft_vocabulary=False), "1.30x"),
        ([arm(1.0), arm(0.9), arm(0, "RuntimeError: x")], OFF, "decoding failed: RuntimeError: x"),
        ([arm(1.0), arm(0.9), arm(0, "RuntimeError: x"), arm(1.1)], Setting(2, 4, draft_vocabulary=False), "1.10x"),
    ],
)
def test_the_choice_must_beat_plain_decoding_by_two_percent(records, setting, said):
    chosen, reason = decide([Forecast(2, 4, 2.0, 0.7)], records)
    assert chosen == setting
    assert said in reason


def test_the_line_to_run_names_the_choice_and_what_it_was_made_for():
    plain, greedy = ModelOptions("M"), TuneOptions()
    assert how_to_use(plain, greedy, OFF).endswith("generate M --exit-layer none PROMPT")
    assert how_to_use(plain, greedy, Setting(2, 4)).endswith("generate M --exit-layer 2 --num-draft-tokens 4 PROMPT")
    tree = Setting(2, 3, tree=(2, 1, 1))
    assert how_to_use(plain, greedy, tree).endswith("generate M --exit-layer 2 --tree 2,1,1 PROMPT")
    whole = Setting(2, 4, draft_vocabulary=False)
    said = how_to_use(ModelOptions("M", "bfloat16", "cpu", 2), TuneOptions(temperature=0.8, top_p=0.9), whole)
    assert said.endswith(
        "generate M --exit-layer 2 --num-draft-tokens 4 --no-draft-vocabulary --dtype bfloat16 --device cpu "
        "--threads 2 --temperature 0.8 --top-p 0.9 PROMPT"
    )


def test_the_table_shows_the_best_and_every_exits_best():
    forecasts = [
        {"exit_layer": e, "num_draft_tokens": n, "tree": None, "head": "whole", "mean_acceptance_length": 2.0}
        | {"speedup": 9.0 - e, "interval": [8.5 - e, 9.25 - e]}
        for e in (1, 2, 3)
        for n in range(1, 9)
    ]
    exits = [{"exit_layer": e, "head": "whole", "agreement": 0.5, "overlap": 0.25} for e in (1, 2, 3)]
    shown = rows({"forecasts": forecasts, "exits": exits})
    assert [row[:3] for row in shown[7:]] == [["8", "1", "8"], ["9", "2", "1"], ["17", "3", "1"]]
    assert shown[0] == ["1", "1", "1", "whole", "0.50", "0.25", "2.00", "8.00x", "7.50-8.25"]


def test_the_heat_map_is_a_picture(tiny_checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    _, _, err = tune(tiny_checkpoint, capsys, "--exit-layers", "1,2", "--tree", "2,1", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-new-tokens", "8"], "--max-new-tokens 8 holds no whole round of --max-draft-tokens 8: give 9 or more"),
        (["--max-draft-tokens", "257", "--max-new-tokens", "300"], "--max-draft-tokens 257 is more than 256"),
        (["--top-p", "0.9"], "--top-p 0.9 does nothing at temperature 0"),
        (["--png", "{tmp}/nowhere/map.png"], "there is no folder {tmp}/nowhere"),
        (["--prompts", "{tmp}/no.jsonl"], "cannot read prompts from {tmp}/no.jsonl"),
        (["--exit-layers", "2,9"], "exit_layer=9 is out of range"),
        (["--tree", "none", "--tree", "2,1"], "--tree none leaves trees out, and another --tree names one"),
    ],
)
def test_errors_come_before_the_weights_are_read(argv, said, tiny_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    code = main(["tune", str(tiny_checkpoint), *(part.format(tmp=tmp_path) for part in argv)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.format(tmp=tmp_path) in err


def test_a_hub_model_cannot_be_written_to_and_a_missing_extra_is_named(tiny_checkpoint, capsys, monkeypatch):
    assert main(["tune", "nobody/nothing", "--write"]) == 2
    assert "--write needs a folder, and nobody/nothing is on the Hub" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["tune", str(tiny_checkpoint), "--png", "map.png"]) == 2
    assert "--png needs matplotlib, which is not installed: pip install matplotlib" in capsys.readouterr().err


def test_texts_that_end_at_once_are_told(tiny_checkpoint, capsys):
    path = tiny_checkpoint / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": list(range(300))}))
    assert main(["tune", str(tiny_checkpoint), *SHORT]) == 2
    assert "ends its texts at once: give other --prompts" in capsys.readouterr().err


def test_the_defaults_hold_together():
    options = TuneOptions()
    assert options.decoding().generate_arguments() == {"max_new_tokens": 64, "do_sample": False}


def test_what_may_be_drafted_is_what_the_library_drafts():
    assert MOST_DRAFT_TOKENS == MAX_TREE_TOKENS


@pytest.mark.parametrize(
    ("passes", "said"), [(0.125, "slower passes 12.5%"), (-0.25, "its passes were faster than when")]
)
def test_no_share_of_the_time_is_below_nothing(passes, said):
    ideal = {"measured": 2.0, "ideal": 1.6, "share": 1.25, "rollback": 0.0, "between": 0.0, "passes": passes}
    line = ideal_line({"exit_layer": 2, "drafts": "3", "mean_acceptance_length": 2.5, "ideal": ideal})
    assert said in line
    assert "-" not in line
