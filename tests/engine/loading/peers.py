"""Tiny random models made with the peer library, and our engine run over the same checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan

TOLERANCE = 1e-4  # absolute, of fp32 logits
SPREAD = 0.2  # of the initialiser: wide enough for a wrong position or head to show
VOCAB = 61
PAGE = 4
_SMALL = {"vocab_size": VOCAB, "initializer_range": SPREAD, "bos_token_id": 1, "eos_token_id": 2}
# Four query and two KV heads of 12: head_dim * heads is 48, the width 40.
_GROUPED = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    **_SMALL,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}

# Name -> (config class, model class, options).
_PEERS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-derived-head-dim": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": None}),
    "llama-biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama3-scaled": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-one-kv-head": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral-short-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "mistral-long-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 50}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"head_dim": None}),
    "qwen2-windows": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-biases": ("Qwen3Config", "Qwen3ForCausalLM", {"attention_bias": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"activation_function": "gelu_new"}),
    "gpt2-exact-gelu": ("GPT2Config", "GPT2LMHeadModel", {"activation_function": "gelu"}),
    "gpt2-unscaled": ("GPT2Config", "GPT2LMHeadModel", {"scale_attn_weights": False}),
    "gpt2-untied": ("GPT2Config", "GPT2LMHeadModel", {"tie_word_embeddings": False, "n_inner": 72}),
}
NAMES = tuple(_PEERS)
_GPT2_SIZES = {"n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 64, **_SMALL}


def make_peer(name: str, **options: Any) -> Any:
    """A tiny model in evaluation mode, every parameter random: norms and biases too."""
    config_class, model_class, own = _PEERS[name]
    sizes = _GPT2_SIZES if config_class == "GPT2Config" else _GROUPED
    given = {key: value for key, value in {**sizes, **own, **options}.items() if key != "head_dim" or value is not None}
    config = getattr(transformers, config_class)(**given)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "ln_" in key:
                parameter.uniform_(0.5, 1.5)
            if key.endswith("bias"):
                parameter.normal_(0.0, SPREAD)
    return model


def save_peer(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def prompt(length: int, seed: int = 5) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(token) for token in torch.randint(0, VOCAB, (length,), generator=generator))


def peer_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab]: the peer's logits at every position, in one pass."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def new_engine(model: LoadedModel, pages: int = 32, page_size: int = PAGE, kernels: str = "auto") -> Engine:
    """An engine of its own: it may rearrange the tensors, so it gets its own mapping."""
    own = dataclasses.replace(model, tensors=dict(model.tensors))
    return Engine(own, EngineConfig(dtype=model.dtype, pages=pages, page_size=page_size, kernels=kernels))


def engine_logits(
    engine: Engine,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    before_chunk: Callable[[int], None] = lambda start: None,
) -> Tensor:
    """[len(ids), vocab]: our logits at every position, the ids run in chunks that end at `cuts`."""
    pages = tuple(reversed(range(engine.config.pages)))  # not the identity: block tables must be followed
    rows = []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        before_chunk(start)
        used = pages[: -(-end // engine.config.page_size)]
        plan = StepPlan((Chunk("s", tuple(ids[start:end]), start, used, logits="all"),))
        rows.append(engine.step(plan).logits["s"])
    return torch.cat(rows)


def load_logits(path: Path, ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
    return engine_logits(new_engine(load_model(path, "fp32")), ids, cuts)


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
