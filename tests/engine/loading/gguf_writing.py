"""Tiny GGUF files written from a peer model, laid out as the format's converter does it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "deci": gguf.MODEL_ARCH.DECI,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "minimax-m2": gguf.MODEL_ARCH.MINIMAXM2,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "bloom": gguf.MODEL_ARCH.BLOOM,
}
_RENAMED = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    model: Any,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
    kind: gguf.GGMLQuantizationType = F32,
    architecture: str = "",
    packed: Mapping[str, tuple[Any, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Writes `model`; `metadata` and `tensors` add to what follows from it, None takes away.

    Matrices are stored as `kind`, vectors in fp32, but for those that are `packed` already.
    """
    arch = _RENAMED.get(model.config.model_type, model.config.model_type)
    values = {**_metadata(model.config, arch), **(metadata or {})}
    packed = packed or {}
    stored = {**_tensors(model, arch), **(tensors or {}), **dict.fromkeys(packed)}
    writer = gguf.GGUFWriter(path, architecture or arch)
    for key, value in values.items():
        if value is not None:
            _adder(writer, value)(key, value)
    for name, tensor in stored.items():
        if tensor is not None:
            data = tensor.detach().float().contiguous().numpy()
            own = kind if data.ndim > 1 else F32
            writer.add_tensor(name, gguf.quants.quantize(data, own), raw_dtype=own)
    for name, (data, own) in packed.items():
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pair_neighbours(weight: Tensor, heads: int) -> Tensor:
    """Within each head row i of the first half and row i of the second become rows 2i and 2i + 1."""
    first_and_second = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return first_and_second.swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(parameters: Mapping[str, Any], dims: int) -> Tensor:
    """[dims / 2] in fp32, one frequency at a time."""
    low_wavelength = parameters["original_max_position_embeddings"] / parameters["low_freq_factor"]
    high_wavelength = parameters["original_max_position_embeddings"] / parameters["high_freq_factor"]
    divisors = []
    for i in range(0, dims, 2):
        wavelength = 2 * np.pi * parameters["rope_theta"] ** (i / dims)
        if wavelength < high_wavelength:
            divisors.append(1.0)
        elif wavelength > low_wavelength:
            divisors.append(parameters["factor"])
        else:
            smooth = parameters["original_max_position_embeddings"] / wavelength - parameters["low_freq_factor"]
            smooth /= parameters["high_freq_factor"] - parameters["low_freq_factor"]
            divisors.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    common = {
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        f"{arch}.context_length": getattr(config, "max_position_embeddings", 64),
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
    }
    if arch == "gpt2":
        return common | {
            f"{arch}.feed_forward_length": config.n_inner or 4 * config.n_embd,
            f"{arch}.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    if arch == "bloom":
        return common | {
            f"{arch}.feed_forward_length": 4 * config.hidden_size,
            f"{arch}.attention.head_count_kv": config.n_head,
            f"{arch}.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    if arch == "falcon":
        one_key = config.multi_query and not config.new_decoder_architecture
        return common | {
            f"{arch}.tensor_data_layout": "jploski",
            f"{arch}.feed_forward_length": config.ffn_hidden_size,
            f"{arch}.attention.head_count_kv": 1 if one_key else config.num_kv_heads,
            f"{arch}.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    if arch == "gemma4":
        return common | _gemma4(config)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    norm = "layer_norm" if arch in ("starcoder2", "stablelm", "nemotron") else "layer_norm_rms"
    eps = next(
        e for n in ("norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps") if (e := getattr(config, n, 0))
    )
    return (
        common
        | _own(config, arch, rope)
        | {
            f"{arch}.feed_forward_length": _lfm2_width(config) if arch == "lfm2" else config.intermediate_size,
            f"{arch}.attention.head_count_kv": _lfm2_heads(config) if arch == "lfm2" else config.num_key_value_heads,
            f"{arch}.attention.{norm}_epsilon": eps,
            f"{arch}.attention.key_length": head_dim,
            f"{arch}.attention.value_length": head_dim,
            f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
            f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        }
    )


def _gemma4(config: Any) -> dict[str, Any]:
    """Two sizes of heads, and lists by layer where layers differ."""
    kinds, own = config.layer_types, [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    dims = {kind: layer.head_dim for kind, layer in zip(kinds, own, strict=True)}
    narrow = dims.get("sliding_attention")
    kv_heads = [layer.num_key_value_heads for layer in own]
    first = config.num_hidden_layers - config.num_kv_shared_layers
    widths = [config.intermediate_size * (2 if i >= first else 1) for i in range(config.num_hidden_layers)]
    said = {
        "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else kv_heads[0],
        "feed_forward_length": widths if config.use_double_wide_mlp else config.intermediate_size,
        "attention.key_length": dims["full_attention"],
        "attention.value_length": dims["full_attention"],
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        "rope.dimension_count": dims["full_attention"],
        "rope.dimension_count_swa": narrow,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }
    if config.enable_moe_block:
        said |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return {f"gemma4.{key}": value for key, value in said.items()}


def _own(config: Any, arch: str, rope: dict[str, Any]) -> dict[str, Any]:
    """What only some architectures have."""
    own: dict[str, Any] = {}
    if arch == "lfm2":
        own["lfm2.shortconv.l_cache"] = config.conv_L_cache
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        own[f"{arch}.attention.sliding_window"] = config.sliding_window or 0
    if arch == "gemma2":
        own[f"{arch}.attn_logit_softcapping"] = config.attn_logit_softcapping
        own[f"{arch}.final_logit_softcapping"] = config.final_logit_softcapping
    if arch == "phi3":
        own[f"{arch}.rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if arch == "stablelm":
        own[f"{arch}.use_parallel_residual"] = True  # the converter's default, whatever the model has
    if arch == "qwen2moe":
        own[f"{arch}.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if arch == "minimax-m2":
        own[f"{arch}.expert_gating_func"] = 2
    if arch in ("qwen2moe", "qwen3moe", "minimax-m2", "gpt-oss"):
        own[f"{arch}.expert_count"] = config.num_experts
        own[f"{arch}.expert_used_count"] = config.num_experts_per_tok
        own[f"{arch}.expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if rope["rope_type"] in ("linear", "yarn"):
        own[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        own[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        own[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return own


def _tensors(model: Any, arch: str) -> dict[str, Tensor]:
    """Named by the format's own table of names."""
    config = model.config
    names = gguf.get_tensor_name_map(_ARCHITECTURES[arch], config.num_hidden_layers)
    stored: dict[str, Tensor] = {}
    heads: dict[str, list[Tensor]] = defaultdict(list)
    for key, tensor in model.state_dict().items():
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        if arch == "gpt2" and key.endswith(_CONV1D):
            tensor = tensor.T
        if arch in ("gemma2", "gemma3", "nemotron") and key.endswith("norm.weight"):
            tensor = tensor + 1
        if arch == "bloom" and ".query_key_value." in key:  # heads of (q, k, v) become all q, all k, all v
            tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        if arch == "falcon" and ".query_key_value." in key:  # groups of (queries, k, v) become all q, all k, all v
            head_dim = config.hidden_size // config.num_attention_heads
            groups = (tensor.shape[0] // head_dim - config.num_attention_heads) // 2
            grouped = tensor.unflatten(0, (groups, -1, head_dim))
            parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
            tensor = torch.cat([part.flatten(0, 2) for part in parts])
        if key.endswith(".conv.conv.weight"):
            tensor = tensor[:, 0]
        if ".norms." in key:  # of one head each; stacked below
            heads[key.split(".norms.")[0] + ".weight"].append(tensor)
            continue
        if key.endswith(".shared_expert_gate.weight"):
            tensor = tensor[0]
        if arch == "gpt-oss" and (".sinks" in key or ".experts." in key):
            stored |= _gpt_oss(key, tensor)
            continue
        if arch != "gemma4" and key.endswith(".experts.gate_up_proj"):
            block = key.split(".")[2]
            stored |= {
                f"blk.{block}.ffn_{n}_exps.weight": half
                for n, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
            }
            continue
        if arch == "llama" and ".q_proj." in key:
            tensor = pair_neighbours(tensor, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in key:
            tensor = pair_neighbours(tensor, config.num_key_value_heads)
        if arch == "gemma4" and key.endswith(("layer_scalar", ".scale", "_scale", "gate_up_proj", "down_proj")):
            stored |= _gemma4_tensor(key, tensor)
            continue
        key = key.replace("_correction_bias", "_correction.bias")
        key = key.removeprefix("transformer.") if arch == "bloom" else key
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        if key.endswith(".experts.down_proj"):
            name += ".weight"
        stored[name] = tensor
    if arch == "gemma4":
        stored["rope_freqs.weight"] = _gemma4_divisors(config)
    for key, scales in heads.items():
        stored[names.get_name(key, try_suffixes=(".weight",)) or key] = torch.stack(scales)
    return stored


def _gpt_oss(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Sinks, and experts with gate and up taken apart and outputs first."""
    block, ending = key.split(".")[2], ".bias" if key.endswith("_bias") else ".weight"
    if "sinks" in key:
        return {f"blk.{block}.attn_sinks.weight": tensor}
    tensor = tensor if ending == ".bias" else tensor.transpose(1, 2)
    if "down_proj" in key:
        return {f"blk.{block}.ffn_down_exps{ending}": tensor}
    return {f"blk.{block}.ffn_{name}_exps{ending}": tensor[:, at::2] for at, name in enumerate(("gate", "up"))}


def _lfm2_heads(config: Any) -> list[int]:
    """Of each layer; a convolution has none."""
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _lfm2_width(config: Any) -> int:
    """What the configuration's width becomes."""
    if not config.block_auto_adjust_ff_dim:
        return int(config.intermediate_size)
    width, multiple = (
        int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3)),
        config.block_multiple_of,
    )
    return int((width + multiple - 1) // multiple * multiple)


def _gemma4_tensor(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """What its checkpoints name without a suffix."""
    block, name = key.split(".", 3)[2:]
    names = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    return {f"blk.{block}.{names[name]}": tensor}


def _gemma4_divisors(config: Any) -> Tensor:
    """Of the frequencies in layers without a window: pairs that do not turn have a huge one."""
    head_dim = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
    rotated = int(head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return torch.tensor([1.0] * rotated + [1e30] * (head_dim // 2 - rotated))


def _adder(writer: Any, value: Any) -> Callable[[str, Any], None]:
    kinds = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    adder: Callable[[str, Any], None] = getattr(writer, kinds[type(value)])
    return adder
