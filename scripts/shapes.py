"""Shapes of real models for scripts that measure: with random weights they cost what the real ones do."""

from __future__ import annotations

from transformers import LlamaConfig


def smollm2_135m() -> LlamaConfig:
    """SmolLM2-135M: 30 layers, 576 wide, vocabulary 49,152, the head tied to the embedding."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
