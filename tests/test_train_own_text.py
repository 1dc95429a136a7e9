"""The model's own text: what it begins from, and by which model it is written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import TINY
from train.command import load_config
from train.draft_vocabulary import choose_draft_vocabulary
from train.loop import train

LENGTH, ROWS = 64, 8


@pytest.fixture
def options(tmp_path) -> list[str]:
    """A run on a file that begins with one kind of text and ends with another; its last half reads its own."""
    path = tmp_path / "text.jsonl"
    kinds = ["alpha beta"] * 60 + ["omega psi"] * 60
    path.write_text("\n".join(json.dumps({"text": f"{kind} {i} " * 20}) for i, kind in enumerate(kinds)))
    source = ["data.standard_library=false", "data.max_documents=null", f"data.path={path}", "data.evaluation_blocks=2"]
    own = ["data.own_text=0.5", f"data.own_text_rows={ROWS}", f"data.sequence_length={LENGTH}"]
    steps = ["optim.schedule=constant", "optim.warmup_steps=0", "every.save=2", "every.keep=9"]
    return [f"run.output_dir={tmp_path}/run", *source, *own, *steps, "tokenizer.train_vocab_size=300"]


def own_texts(run: Path) -> dict[str, torch.Tensor]:
    """The files of own text that a run has, (rows, length) ids each."""
    files = sorted((run / "data").glob("own*"))
    return {path.name: torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64)) for path in files}


def test_own_text_begins_from_all_of_the_training_text_and_is_the_models_of_that_step(tmp_path, options):
    run = tmp_path / "run"
    assert train(load_config(TINY, [*options, "optim.max_steps=4"])) == 0
    [(name, first)] = own_texts(run).items()
    assert name == "own-000002.bin"
    first = first.view(ROWS, LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(run)
    prompts = [tokenizer.decode(row) for row in first[:, : LENGTH // 4]]
    for half in (prompts[: ROWS // 2], prompts[ROWS // 2 :]):  # the greedy ones, and the sampled
        assert {"omega" in prompt for prompt in half} == {True, False}
    vocabulary = load_config(TINY, [*options, "optim.max_steps=4", "data.draft_vocabulary=9"])
    model = AutoModelForCausalLM.from_pretrained(run)
    with_own = choose_draft_vocabulary(vocabulary, tokenizer, model).token_ids.tolist()
    (run / "data" / name).rename(run / "kept")
    assert choose_draft_vocabulary(vocabulary, tokenizer, model).token_ids.tolist() != with_own
    (run / "kept").rename(run / "data" / name)

    assert train(load_config(TINY, [*options, "optim.max_steps=8"])) == 0
    [(name, second)] = own_texts(run).items()  # that of the younger model is gone
    assert name == "own-000004.bin"
    second = second.view(ROWS, LENGTH)
    assert (second[:, : LENGTH // 4] == first[:, : LENGTH // 4]).all()
    assert (second != first).any()
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000004")
    prompt = second[:1, : LENGTH // 4]
    said = model.generate(prompt, do_sample=False, max_new_tokens=LENGTH - LENGTH // 4, eos_token_id=None)
    assert said.tolist() == second[:1].tolist()


def test_a_run_that_goes_on_reads_what_it_wrote_before(tmp_path, options, capsys):
    """And not what a later model wrote, where it goes back behind that."""
    run, options = tmp_path / "run", [*options, "optim.max_steps=8"]
    assert train(load_config(TINY, options)) == 0
    path = run / "data" / "own-000004.bin"
    marked = np.fromfile(path, dtype=np.uint16)
    marked[-1] = 7
    marked.tofile(path)
    shutil.rmtree(run / "checkpoints" / "step-000008")
    assert "the model continues 8 texts for exits to follow" in capsys.readouterr().out
    assert train(load_config(TINY, options)) == 0
    assert np.fromfile(path, dtype=np.uint16).tolist() == marked.tolist()
    assert f"exits follow the 8 texts in {path}" in "".join(capsys.readouterr().out.splitlines())
    for gone in ("step-000008", "step-000006", "step-000004"):
        shutil.rmtree(run / "checkpoints" / gone)
    path.rename(path.with_name("own-000006.bin"))
    assert train(load_config(TINY, options)) == 0
    assert list(own_texts(run)) == ["own-000004.bin"]
