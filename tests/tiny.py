"""Tiny real models: random weights, every architecture the kit promises, small enough for milliseconds."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NUM_LAYERS = 4
_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
_FULL_SLIDING = ["full_attention", "sliding_attention"] * (NUM_LAYERS // 2)

# name -> (model_type, config). Windows of 8 are crossed by every test prompt plus its continuation.
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _GATED),
    "mistral": ("mistral", {**_GATED, "sliding_window": None}),
    "mistral-window": ("mistral", {**_GATED, "sliding_window": 8}),
    "qwen2": ("qwen2", _GATED),
    "qwen3": ("qwen3", {**_GATED, "head_dim": 8}),
    "gemma2": ("gemma2", {**_GATED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3_text",
        {
            **_GATED,
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": _FULL_SLIDING,
        },
    ),
    "phi3": ("phi3", {**_GATED, "sliding_window": None}),
    "smollm3": ("smollm3", _GATED),
    "gpt2": ("gpt2", {**_COMMON, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", {**_COMMON, "intermediate_size": 48}),
    "opt": ("opt", {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-projected": (
        "opt",
        {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "falcon": ("falcon", {**_COMMON, "alibi": False, "new_decoder_architecture": False}),
    "bloom": ("bloom", {**_COMMON, "n_layer": NUM_LAYERS, "n_head": 4}),
    "granite": (
        "granite",
        {**_GATED, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    ),
    "olmo2": ("olmo2", _GATED),
    "starcoder2": ("starcoder2", {**_GATED, "sliding_window": 8}),
    "cohere2": ("cohere2", {**_GATED, "sliding_window": 8, "layer_types": _FULL_SLIDING, "logit_scale": 0.3}),
    "mixtral": ("mixtral", {**_GATED, **_MOE}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **_GATED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 1, 0],  # three layers see chunks, the last one everything
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**_GATED, **_MOE, "head_dim": 8, "sliding_window": 8, "layer_types": _FULL_SLIDING},
    ),
}


def architecture(name: str, seed: int = 0) -> AutoModelForCausalLM:
    """A random model of one of `ARCHITECTURES`, float32, eval mode."""
    model_type, arguments = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **arguments)
    return liven(AutoModelForCausalLM.from_config(config)).eval()


def llama(num_layers: int = NUM_LAYERS, vocab_size: int = 64, seed: int = 0, **overrides) -> LlamaForCausalLM:
    """A random Llama, float32, eval mode."""
    torch.manual_seed(seed)
    arguments = {**_GATED, "num_hidden_layers": num_layers, "vocab_size": vocab_size, **overrides}
    return liven(LlamaForCausalLM(LlamaConfig(**arguments))).eval()


def liven(model):
    """Scale random weights up until layers disagree and distributions have peaks, as trained ones do: at
    transformers' initialisation every exit says nearly the same, and a broken cut would go unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model


def tokenizer(vocab_size: int = 300, text: str = "def add(a, b):\n    return a + b\n") -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 tokens; 0 is padding, 1 begins, 2 ends."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [text, "the quick brown fox jumps over the lazy dog"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, which no token ends: outputs are as long as asked for."""
    model.generation_config.eos_token_id = None
    return model
