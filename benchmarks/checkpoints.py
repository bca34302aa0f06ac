"""A small random checkpoint, its tokenizer, and random LoRA adapters: for --quick, and for what needs many requests."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pdserve.engine.spec import ModelSpec

_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SPREAD = 0.1  # of an adapter's factors: enough to change what is said


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


def add_tokenizer(folder: Path) -> None:
    """A token for every byte, and a chat template, for a checkpoint of at least 256 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))


def random_adapter(folder: Path, spec: ModelSpec, seed: int, rank: int = 4) -> Path:
    """A LoRA checkpoint, as PEFT writes it, for the queries and values of a model of Llama's family."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in range(spec.layers):
        for module, heads in (("q_proj", spec.heads), ("v_proj", spec.kv_heads)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {"A": (rank, spec.width), "B": (heads * spec.head_dim, rank)}
            for factor, shape in shapes.items():
                factors[f"{name}.lora_{factor}.weight"] = torch.randn(shape, generator=generator) * _SPREAD
    save_file(factors, folder / "adapter_model.safetensors")
    return folder
