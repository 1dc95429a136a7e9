"""`data.draft_vocabulary`: a run leaves the tokens it learnt to write most, and a checkpoint's own are carried on."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerskip
from layerskip.checkpoint.vocabulary import DRAFT_VOCABULARY_FILE, coverage, draft_vocabulary_of, store_draft_vocabulary
from tests.runs import TINY
from train.command import load_config
from train.draft_vocabulary import choose_draft_vocabulary, count_tokens
from train.errors import ConfigError
from train.packing import START, TARGET


def token_file(folder, ids, learnt=None, split="train"):
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(ids, dtype=np.uint16).tofile(folder / f"{split}.bin")
    if learnt is not None:
        (folder / f"{split}.marks").write_bytes(bytes(TARGET * each | START for each in learnt))
    return folder / f"{split}.bin"


def test_what_is_not_learnt_is_not_counted(tmp_path, monkeypatch):
    path = token_file(tmp_path, [5, 5, 5, 7, 9, 7], [0, 1, 0, 1, 0, 1])
    monkeypatch.setattr("train.draft_vocabulary._TOKENS_AT_ONCE", 4)
    assert count_tokens(path, 12).tolist() == [0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0]
    path.with_suffix(".marks").unlink()
    assert count_tokens(path, 12)[5] == 3


def test_sources_count_by_weight_and_the_models_own_text_as_much_as_all(tmp_path, tiny_llama, tokenizer):
    """One token is frequent in each of three texts of very different lengths."""
    sources = '[{"path": "a.txt", "weight": 3}, {"path": "b.txt", "weight": 1}]'
    data = tmp_path / "data"
    for number, (token, length) in enumerate([(50, 10), (60, 900)]):
        token_file(data / f"source-{number}", [token] * length, [1] * length)
        token_file(data / f"source-{number}", [token] * length, [1] * length, split="test")

    def chosen(size: int):
        settings = [f"data.sources={sources}", f"run.output_dir={tmp_path}", f"data.draft_vocabulary={size}"]
        config = load_config(TINY, ["data.standard_library=false", "data.max_documents=null", *settings])
        return choose_draft_vocabulary(config, tokenizer, tiny_llama)

    assert chosen(4).token_ids.tolist() == [0, 1, 2, 50]  # the special tokens, and that of the heavier source
    assert chosen(4).coverage == pytest.approx(0.75)
    assert chosen(5).token_ids.tolist() == [0, 1, 2, 50, 60]
    token_file(data, [61] * 4)
    (data / "train.bin").rename(data / "own-000004.bin")
    assert chosen(4).token_ids.tolist() == [0, 1, 2, 61]
    assert chosen(5).token_ids.tolist() == [0, 1, 2, 50, 61]


def test_a_run_leaves_a_vocabulary_of_its_text_and_decodes_exactly_with_it(train_tiny, capsys):
    folder = train_tiny("data.draft_vocabulary=40")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = draft_vocabulary_of(model)
    assert len(token_ids) == 40
    assert tokenizer.eos_token_id in token_ids
    counts = count_tokens(folder / "data" / "train.bin", len(tokenizer))
    left_out = torch.ones(len(tokenizer), dtype=torch.bool)
    left_out[token_ids] = False
    assert counts[left_out].max() <= counts[token_ids[token_ids != tokenizer.eos_token_id]].min()
    record = json.loads((folder / "evaluation.json").read_text())["draft_vocabulary"]
    expected = coverage(count_tokens(folder / "data" / "test.bin", len(tokenizer)), token_ids)
    assert record == {"size": 40, "coverage": pytest.approx(expected, abs=1e-5)}
    assert f"draft vocabulary: 40 of {len(tokenizer)} tokens" in capsys.readouterr().out
    assert "knows the 40 most frequent tokens" in (folder / "README.md").read_text()
    inputs = tokenizer("class value", return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(layerskip.generate(model, **inputs, exit_layer=2, max_new_tokens=12, do_sample=False), plain)


def test_without_it_a_run_leaves_none_and_asking_later_adds_it_without_training(train_tiny, tmp_path):
    folder = train_tiny(folder=tmp_path / "run")
    assert not (folder / DRAFT_VOCABULARY_FILE).exists()
    weights = (folder / "model.safetensors").read_bytes()
    lines = (folder / "metrics.jsonl").read_text().count('"train"')
    train_tiny("data.draft_vocabulary=30", folder=folder)
    assert len(draft_vocabulary_of(AutoModelForCausalLM.from_pretrained(folder))) == 30
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "metrics.jsonl").read_text().count('"train"') == lines


def test_a_checkpoints_own_vocabulary_is_carried_on_through_checkpoints_and_resuming(train_tiny, tmp_path):
    base = shutil.copytree(train_tiny(), tmp_path / "base", ignore=shutil.ignore_patterns("checkpoints", "data"))
    token_ids = torch.arange(0, 90, 3)
    store_draft_vocabulary(base, token_ids)
    further = ["model.architecture={}", f"model.name_or_path={base}", "tokenizer.train_vocab_size=null"]
    further += ["optim.schedule=constant", "every.save=1", "every.keep=1"]
    folder = train_tiny(*further, "optim.max_steps=2", folder=tmp_path / "run")
    train_tiny(*further, "optim.max_steps=4", folder=folder)  # the checkpoint it went on from is pruned on the way
    for saved in (folder, folder / "checkpoints" / "step-000004"):
        assert torch.equal(draft_vocabulary_of(AutoModelForCausalLM.from_pretrained(saved)), token_ids)


def test_a_checkpoint_that_lost_its_vocabulary_is_refused_before_training(train_tiny, tmp_path):
    from train.errors import TrainingError

    base = shutil.copytree(train_tiny(), tmp_path / "base", ignore=shutil.ignore_patterns("checkpoints", "data"))
    store_draft_vocabulary(base, torch.arange(20)).unlink()
    further = ["model.architecture={}", f"model.name_or_path={base}", "tokenizer.train_vocab_size=null"]
    with pytest.raises(TrainingError, match=r"there is no draft_vocabulary\.safetensors beside its weights"):
        train_tiny(*further, folder=tmp_path / "run")


@pytest.mark.parametrize("size", [1, 300, 100_000])
def test_a_size_that_is_no_part_of_the_vocabulary_is_refused(size, train_tiny, tmp_path):
    with pytest.raises(ConfigError, match=rf"data\.draft_vocabulary is {size}; "):
        train_tiny(f"data.draft_vocabulary={size}", folder=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
