"""What adapting a model to one domain did elsewhere: loss, agreement, acceptance on code and English, before and after.

    python scripts/outside_domain.py models/SmolLM2-135M-Instruct runs/smollm2-domain --exit-layer 3

The texts need no download: the standard library of this Python (code) and its language reference (English).
Losses are of the last layer, nats a token, over the same tokens for every model; acceptance is of free greedy
decoding with `layerskip.generate`, accepted over drafted tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="+", help="checkpoint folders or Hub ids with one tokenizer, the original first"
    )
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=24, help="blocks of text to take the loss over (default: 24)")
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8, help="prompts to continue (default: 8)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for name in options.models:
        for domain, texts in (("code", code()), ("english", english())):
            record = measure(name, shuffled(texts), options)
            print(json.dumps({"model": name, "domain": domain, **record}), flush=True)


def code() -> Iterator[str]:
    """The modules of the standard library, without packages."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def english() -> Iterator[str]:
    """The language reference, a topic a text."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def shuffled(texts: Iterator[str]) -> list[str]:
    """The same order every time, not that of the names."""
    ordered = list(texts)
    random.Random(0).shuffle(ordered)
    return ordered


def measure(name: str, texts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Loss, agreement and acceptance of the model `name` on one domain."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import layerskip
    from layerskip.forecast import measure_exits

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    blocks = list(islice(blocks_of(texts, tokenizer, options.block_tokens), options.blocks))
    with torch.inference_mode():
        measured = measure_exits(model, (block[None] for block in blocks), [options.exit_layer])
    last, early = measured[model.config.get_text_config().num_hidden_layers], measured[options.exit_layer]
    total = layerskip.Statistics()
    for block in blocks[: options.prompts]:
        prompt = block[None, : options.block_tokens // 4]
        output = layerskip.generate(
            model,
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            exit_layer=options.exit_layer,
            num_draft_tokens=options.num_draft_tokens,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        total.merge(output.statistics)
    return {
        "loss": round(last.loss, 4),
        "agreement": round(early.agreement, 3),
        "accepted": round(total.draft_acceptance_rate, 3),
        "tokens_a_verify_step": round(total.mean_acceptance_length, 2),
    }


def blocks_of(texts: list[str], tokenizer: object, length: int) -> Iterator[torch.Tensor]:
    """The first (length,) tokens of each text that has so many."""
    import torch

    for text in texts:
        ids = tokenizer(text[: 16 * length], add_special_tokens=False)["input_ids"]  # type: ignore[operator]
        if len(ids) >= length:
            yield torch.tensor(ids[:length])


if __name__ == "__main__":
    main()
