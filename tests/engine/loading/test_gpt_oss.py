"""gpt-oss as it is published: experts in MXFP4 in directories and GGUF files, and its configuration's own spelling."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.engine.load import load_model
from pdserve.engine.mxfp4 import unpacked
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.safetensors_file import open_safetensors
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.directories import ABSENT, directory, edit_json, edit_tensors
from tests.engine.loading.gguf_writing import write_gguf
from tests.engine.loading.test_gguf_loading import PUBLISHED_GPT_OSS, peer_reading

IDS = peers.prompt(23)
EVEN = {"hidden_size": 64, "intermediate_size": 32}  # blocks have 32 inputs
EXPERTS = "model.layers.1.mlp.experts"
# As in the published files.
MXFP4 = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
}


def random_pack(*shape: int, scales: tuple[int, int], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Blocks [*shape, 16] of every byte, and scales [*shape] within bounds."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(*scales, shape, generator=generator, dtype=torch.uint8)


def packed_directory(path: Path) -> tuple[Any, Path]:
    """A peer whose experts are what the peer library makes of random blocks, and a directory that holds the blocks."""
    model = peers.make_peer("gpt-oss", **EVEN)
    changes: dict[str, Tensor | None] = {}
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            blocks, scales = random_pack(experts, outputs, inputs // 32, scales=(122, 126), seed=number)
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            full = f"model.layers.{number}.mlp.experts.{name}"
            changes |= {full: None, f"{full}_blocks": blocks, f"{full}_scales": scales}
    peers.save_peer(model, path)
    edit_tensors(path, changes)
    edit_json(path, MXFP4)
    return model, path


def refused(path: Path) -> tuple[str | None, str]:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    return caught.value.field, caught.value.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_and_scales_are_the_numbers_that_the_peer_makes_of_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """Every byte, and every scale whose numbers are finite."""
    blocks, scales = random_pack(3, 40, 16, scales=(0, 253))
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "m.safetensors")
    tensor = unpacked(open_safetensors(tmp_path / "m.safetensors").tensors)["x"]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert bool(expected.isfinite().all()) and len(set(blocks.flatten().tolist())) == 256
    assert tensor.shape == expected.shape and torch.equal(tensor.read(dtype), expected)


def test_a_directory_of_packed_experts_gives_the_logits_of_the_peer_reading_it(tmp_path: Path) -> None:
    model, path = packed_directory(tmp_path / "model")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    expected = peers.peer_logits(transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval(), IDS)
    torch.testing.assert_close(peers.peer_logits(model, IDS), expected, rtol=0, atol=peers.TOLERANCE)
    got = peers.load_logits(path, IDS, (3, 4, 11, 20))
    torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)
    plain = load_model(peers.save_peer(model, tmp_path / "plain"), "fp32")
    packed = load_model(path, "fp32")
    assert packed.spec == plain.spec and packed.digest != plain.digest  # a digest is of what is stored
    assert all(torch.equal(packed.tensors[name], tensor) for name, tensor in plain.tensors.items())


@pytest.mark.parametrize(
    ("ending", "change", "field", "reason"),
    [
        ("gate_up_proj_scales", lambda t: None, "gate_up_proj_scales", "MISSING_TENSOR"),
        ("gate_up_proj_scales", lambda t: t[:, :-1], "gate_up_proj_blocks", "TENSOR_SHAPE"),
        ("down_proj_blocks", lambda t: None, "down_proj", "MISSING_TENSOR"),
        ("down_proj_blocks", lambda t: t[..., :8], "down_proj_blocks", "TENSOR_SHAPE"),
        ("down_proj_scales", lambda t: t.float(), "down_proj_scales", "UNSUPPORTED_DTYPE"),
        ("down_proj", lambda t: torch.zeros(4, 32, 64), "down_proj", "UNKNOWN_TENSOR"),  # both forms at once
        ("gate_up_proj_bias", lambda t: None, "gate_up_proj_bias", "MISSING_TENSOR"),
        ("gate_up_proj_bias", lambda t: t[:, :-2], "gate_up_proj_bias", "TENSOR_SHAPE"),
    ],
)
def test_packed_experts_are_refused_by_name(ending: str, change: Any, field: str, reason: str, tmp_path: Path) -> None:
    _, path = packed_directory(tmp_path / "model")
    name = f"{EXPERTS}.{ending}"
    stored = load_file(path / "model.safetensors")
    changed = change(stored.get(name))
    edit_tensors(path, {name: None if changed is None else changed.contiguous()})
    assert refused(path) == (f"{EXPERTS}.{field}", reason)


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.down_proj"])
def test_a_tensor_that_is_not_there_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt-oss")
    edit_tensors(path, {f"model.layers.2.{name}": None})
    assert refused(path) == (f"model.layers.2.{name}", "MISSING_TENSOR")


PUBLISHED = {
    "rope_parameters": ABSENT,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 0.2, "factor": 4.0, "original_max_position_embeddings": 16,
        "rope_type": "yarn", "truncate": False,
    },
    "experts_per_token": 2,
    "initial_context_length": 16,
    **MXFP4,
}  # fmt: skip


def test_the_published_spelling_means_the_same(tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt-oss")
    before = load_model(path, "fp32").spec
    edit_json(path, PUBLISHED)
    assert load_model(path, "fp32").spec == before


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "UNSUPPORTED_KEY"),
        ({"quantization_config": {}}, "quantization_config", "UNSUPPORTED_KEY"),
        ({"quantization_config": {"quant_method": "mxfp4", "bits": 3}}, "bits", "UNKNOWN_KEY"),
        ({"rope_parameters": ABSENT}, "rope_type", "UNKNOWN_ROPE_TYPE"),  # the peer would take yarn's of the 20B model
        ({"head_dim": ABSENT}, "head_dim", "MISSING_KEY"),  # the peer would take 64
        ({"sliding_window": None}, "layer_types", "UNSUPPORTED_KEY"),
        ({"experts_per_token": 3}, "experts_per_token", "UNSUPPORTED_KEY"),
        ({"swiglu_limit": 0}, "swiglu_limit", "BAD_VALUE"),
        ({"hidden_act": "gelu"}, "hidden_act", "UNSUPPORTED_KEY"),
    ],
)
def test_a_configuration_is_refused_by_name(changes: Any, field: str, reason: str, tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt-oss")
    edit_json(path, changes)
    assert refused(path) == (field, reason)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-long-window"])
def test_prompts_of_unequal_lengths_in_one_step_then_decoded_together(
    name: str, deterministic: bool, tmp_path: Path
) -> None:
    model = peers.make_peer(name)
    loaded = load_model(peers.save_peer(model, tmp_path), "fp32")
    engine = peers.new_engine(loaded, deterministic=deterministic)
    prompts = {f"s{n}": peers.prompt(n, seed=n) for n in (2, 9, 17)}
    pages = {key: tuple(range(31 - 6 * i, 25 - 6 * i, -1)) for i, key in enumerate(prompts)}
    chunks = [Chunk(key, ids, 0, pages[key]) for key, ids in prompts.items()]
    for _ in range(4):
        logits = engine.step(StepPlan(tuple(chunks))).logits
        for key, ids in prompts.items():
            torch.testing.assert_close(logits[key][-1], peers.peer_logits(model, ids)[-1], rtol=0, atol=peers.TOLERANCE)
            prompts[key] = (*ids, int(logits[key][-1].argmax()))
        chunks = [Chunk(key, ids[-1:], len(ids) - 1, pages[key]) for key, ids in prompts.items()]


@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
def test_gguf_logits_are_those_of_the_model_that_was_written(kind: str, tmp_path: Path) -> None:
    """Its experts as the format's library reads them; the peer does not read such files, see below."""
    model = peers.make_peer("gpt-oss", **EVEN, **PUBLISHED_GPT_OSS)
    source, own = copy.deepcopy(model), gguf.GGMLQuantizationType[kind]
    tensors: dict[str, Any] = {}
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        parts = {"gate": experts.gate_up_proj[..., ::2], "up": experts.gate_up_proj[..., 1::2]}
        for name, part in {**parts, "down": experts.down_proj}.items():
            data = gguf.quants.quantize(part.detach().transpose(1, 2).contiguous().numpy(), own)
            read = torch.from_numpy(np.array(gguf.quants.dequantize(data, own))).transpose(1, 2)
            part.data.copy_(read)  # a view of the model's own
            tensors[f"blk.{number}.ffn_{name}_exps.weight"] = (data, own)
    path = write_gguf(source, tmp_path / "tiny.gguf", packed=tensors)
    expected = peers.peer_logits(model, IDS)
    loaded = load_model(path, "fp32")
    for cuts in ((), (3, 4, 11, 20), tuple(range(9, 23))):
        got = peers.engine_logits(peers.new_engine(loaded), IDS, cuts)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)
    difference = peers.largest_difference(expected, peers.peer_logits(source, IDS))
    assert (difference > 100 * peers.TOLERANCE) == (kind == "MXFP4")


def test_gguf_may_say_where_yarns_ramp_ends(tmp_path: Path) -> None:
    model = peers.make_peer("gpt-oss", swiglu_alpha=1.702, swiglu_limit=7.0)
    ends = {"gpt-oss.rope.scaling.yarn_beta_fast": 1.0, "gpt-oss.rope.scaling.yarn_beta_slow": 0.2}
    path = write_gguf(model, tmp_path / "tiny.gguf", metadata=ends)
    expected = peers.peer_logits(model, IDS)
    torch.testing.assert_close(peers.load_logits(path, IDS), expected, rtol=0, atol=peers.TOLERANCE)
    without = write_gguf(model, tmp_path / "without.gguf")
    assert peers.largest_difference(peers.load_logits(without, IDS), expected) > 10 * peers.TOLERANCE


@pytest.mark.parametrize("name", ["blk.1.attn_sinks.weight", "blk.1.ffn_up_exps.bias", "blk.1.attn_q.bias"])
def test_a_gguf_tensor_that_is_not_there_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("gpt-oss"), tmp_path / "tiny.gguf", tensors={name: None})
    assert refused(path) == (name, "MISSING_TENSOR")


def test_the_peer_does_not_read_such_a_file(tmp_path: Path) -> None:
    """It stumbles over the rotary keys. Should it learn to read them, compare with it on the same file."""
    words = {"tokenizer.ggml.tokens": [str(number) for number in range(61)]}
    path = write_gguf(peers.make_peer("gpt-oss"), tmp_path / "tiny.gguf", metadata=words)
    with pytest.raises(TypeError):
        peer_reading(path)
