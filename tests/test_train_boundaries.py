"""Documents that share a block: each is computed as if it were alone, or the model is known not to manage it."""

import json
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.runs import TINY
from tests.test_train_chat import CHATML
from train.blocks import Blocks, Mixture, position_ids
from train.boundaries import why_not_apart
from train.command import load_config
from train.data import prepare_data
from train.errors import ConfigError, TrainingError
from train.loop import train
from train.packing import START, TARGET

# Families that build their masks without looking at positions, or take no positions at all.
CANNOT = {"opt", "opt-projected", "bloom", "gpt_oss"}
LENGTHS = (11, 1, 13, 7)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_packed_row_equals_its_documents_alone_or_the_model_is_refused(name, attention):
    model = tiny.architecture(name)
    try:
        model.set_attn_implementation(attention)
    except ValueError:
        pytest.skip(f"{name} has no {attention} attention")
    reason = why_not_apart(model, 2, torch.device("cpu"))
    assert bool(reason) == (name in CANNOT), reason
    documents = [torch.randint(3, 64, (3, length)) for length in LENGTHS]
    row = torch.cat(documents, dim=1)  # (3, 32)
    starts = torch.zeros(row.shape, dtype=torch.bool)
    starts[:, [0, 11, 12, 25]] = True
    if name in CANNOT:
        return
    with torch.no_grad():
        packed = model(input_ids=row, position_ids=position_ids(starts), use_cache=False).logits
        alone = torch.cat([model(input_ids=d, use_cache=False).logits for d in documents], dim=1)
        together = model(input_ids=row, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert (together - alone).abs().max() > 0.1  # and not because documents do not matter to each other


def test_the_trial_leaves_the_model_as_it_was():
    model = tiny.llama().train()
    assert why_not_apart(model, 1, torch.device("cpu")) == ""
    assert model.training
    assert why_not_apart(tiny.architecture("bloom"), 2, torch.device("cpu")) == "BloomForCausalLM takes no positions"
    reason = why_not_apart(tiny.architecture("opt"), 2, torch.device("cpu"))
    assert reason.startswith("OPTForCausalLM with ")
    assert reason.endswith(" attention lets them see each other in batches of 2")


def test_labels_and_positions_follow_the_marks(tmp_path):
    ids = torch.arange(64, dtype=torch.int16).numpy()
    marks = [0] * 64
    for start in (0, 5, 40):
        marks[start] |= START
    for target in (*range(3, 5), *range(5, 38), 45, 63):
        marks[target] |= TARGET
    (tmp_path / "train.bin").write_bytes(ids.tobytes())
    (tmp_path / "train.marks").write_bytes(bytes(marks))
    joined, apart = (Blocks(tmp_path / "train.bin", ids.dtype, 32, has) for has in (False, True))
    batch = joined.rows([0, 1])
    assert batch.position_ids is None
    assert batch.labels.flatten().tolist() == [i if marks[i] & TARGET else -100 for i in range(64)]
    batch = apart.rows([0, 1])
    # The first token of a document that sees nothing before it is predicted by nothing.
    assert batch.labels[0, 5] == -100
    assert (batch.labels != joined.rows([0, 1]).labels).sum() == 1
    assert batch.position_ids.tolist() == [[*range(5), *range(27)], [*range(8), *range(24)]]
    assert Mixture([apart], [1.0]).read(0, [0, 1, 2]).inputs().keys() == {"input_ids", "labels", "position_ids"}
    # What is continued to choose a setting: the prompt of the first answer, without the document before it.
    assert joined.prompt(0).tolist() == [0, 1, 2]
    assert joined.prompt(1).tolist() == [40, 41, 42, 43, 44]


# A run on conversations


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> list[str]:
    """Overrides that make tiny.yaml learn the answers of sixty short conversations and of a few lines of text."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "template.jinja").write_text(CHATML.replace("<|im_start|>", "# ").replace("<|im_end|>", "<|endoftext|>"))
    words = ["def", "return", "class", "value", "index", "self", "import", "raise", "yield", "lambda"]
    rows = [
        [{"role": "user", "content": f"{w} {i}?"}, {"role": "assistant", "content": f"{v} {i} {w} {v}"}]
        for i, (w, v) in enumerate(zip(words * 6, words[3:] * 9, strict=False))
    ]
    lines = [json.dumps({"messages": row}) for row in rows]
    (folder / "chat.jsonl").write_text("\n".join([*lines, '{"messages": []}']))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{i} {' '.join(words * 5)}"}) for i in range(40)))
    chat = f"{{path: {folder / 'chat.jsonl'}, messages_column: messages, weight: 3}}"
    return [
        "data.standard_library=false",
        "data.max_documents=null",
        f"data.sources=[{chat}, {{path: {folder / 'text.jsonl'}}}]",
        f"tokenizer.chat_template={folder / 'template.jinja'}",
        "tokenizer.train_vocab_size=300",
        "data.evaluation_blocks=4",
        "every.log=1",
        "recipe.max_dropout=0.3",
        "optim.micro_batch_size=4",
    ]


def records(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == "train"]


def test_answers_that_lie_beyond_the_block_are_named_where_no_text_is_left(tmp_path):
    row = {"prompt": "a question of many words " * 50, "completion": "an answer"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    source = ["data.standard_library=false", "data.max_documents=null", f"data.path={tmp_path}/rows.jsonl"]
    source += ["data.prompt_column=prompt", "data.completion_column=completion", "data.as_chat=false"]
    options = [*source, "tokenizer.train_vocab_size=300", f"run.output_dir={tmp_path}/run", "data.sequence_length=32"]
    told = (
        r"no text for train and validation and test: 9 rows were left out, longer than data\.sequence_length=32 tokens "
    )
    with pytest.raises(TrainingError, match=told + "with the answer beyond them; raise it, or give shorter ones"):
        prepare_data(load_config(TINY, options))


@pytest.mark.slow
def test_a_mixture_with_conversations_trains_and_resumes_exactly(conversations, tmp_path, capsys):
    options = [*conversations, "optim.schedule=constant", "every.save=3"]
    for name, steps in (("whole", 6), ("halves", 3), ("halves", 6)):
        config = load_config(TINY, [*options, f"run.output_dir={tmp_path / name}", f"optim.max_steps={steps}"])
        assert train(config) == 0
    assert "1 unusable row skipped: " in capsys.readouterr().out
    whole, halves = records(tmp_path / "whole"), records(tmp_path / "halves")
    assert [record["loss"] for record in whole] == [record["loss"] for record in halves]
    manifest = json.loads((tmp_path / "whole" / "data" / "manifest.json").read_text())
    assert [record["bad_rows"] for record in manifest["sources"]] == [1, 0]
    prompts = (tmp_path / "whole" / "prompts" / "test.jsonl").read_text().splitlines()
    assert all(json.loads(line)["prompt"].startswith(("# user\n", *"0123456789")) for line in prompts)
    assert any(json.loads(line)["prompt"].endswith("# assistant\n") for line in prompts)


@pytest.mark.slow
def test_boundaries_that_the_model_cannot_keep(conversations, tmp_path, capsys):
    bloom = "model.architecture={model_type: bloom, n_layer: 4, hidden_size: 32, n_head: 4}"
    options = [*conversations, bloom, "optim.max_steps=1", "optim.warmup_steps=0", f"run.output_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"data\.respect_boundaries is true, but BloomForCausalLM takes no positions"):
        train(load_config(TINY, [*options, "data.respect_boundaries=true"]))
    assert train(load_config(TINY, options)) == 0  # nobody asked: it is said, and done without
    assert "conversations in one block see each other: BloomForCausalLM takes no positions" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_without_a_token_to_learn_is_a_step_with_loss_zero(conversations, tmp_path):
    folder = tmp_path / "run"
    options = [*conversations, "optim.schedule=constant", f"run.output_dir={folder}"]
    assert train(load_config(TINY, [*options, "optim.max_steps=2"])) == 0
    for path in folder.glob("data/*/train.marks"):  # from now on nothing is learnt
        path.write_bytes(bytes(path.stat().st_size))
    assert train(load_config(TINY, [*options, "optim.max_steps=4"])) == 0
    losses = [record["loss"] for record in records(folder)]
    assert losses[2:] == [0, 0]
    assert all(0 < loss < 10 for loss in losses[:2])
