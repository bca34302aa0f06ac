"""A small random checkpoint, for --quick."""

from __future__ import annotations

from pathlib import Path


def tiny_checkpoint(folder: Path, layers: int = 4, kv_heads: int = 2, head_dim: int = 16) -> Path:
    """A Llama of `layers` layers with 8 query heads, a vocabulary of 512 and a context of 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
