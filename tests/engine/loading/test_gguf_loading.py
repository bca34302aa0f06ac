"""GGUF files: parity with the model they were written from, and with the peer reading the same file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from pdserve.engine.load import load_model
from pdserve.errors import CheckpointError
from tests.engine.loading import peer_rows, peers
from tests.engine.loading.gguf_writing import llama3_divisors, pair_neighbours, write_gguf

LENGTH = 23
CUTS = {"prefill": (), "chunked": (3, 4, 11, 20), "decode": tuple(range(9, LENGTH))}
# As the loader reads it: every published llama3-scaled model has these parameters.
STANDARD_LLAMA3 = {**peer_rows.LLAMA3, "original_max_position_embeddings": 8192}
# Rows of a multiple of 32, the block of the quantised types, which also divides width by heads.
EVEN = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-derived-head-dim",
        "llama-biases",
        "llama-tied",
        "llama-one-kv-head",
        "qwen2",
        "qwen3",
        "gpt2",
        "gpt2-untied",
        "mistral",
        "llama-linear",
        "phi3",
        "phi3-long-window",
        "bloom",
        "bloom-six-heads",
        "qwen3-moe",
        "stablelm-parallel",
        "falcon-groups",
    ],
)
def test_gguf_logits_equal_the_source_models(name: str, tmp_path: Path) -> None:
    model = peers.make_peer(name)
    loaded = load_model(write_gguf(model, tmp_path / "tiny.gguf"), "fp32")
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(model, ids)
    for cuts in CUTS.values():
        got = peers.engine_logits(peers.new_engine(loaded), ids, cuts)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)
    assert (loaded.spec.bos_id, loaded.spec.eos_ids) == (1, (2,))


# The peer takes from its own defaults what it does not read from the file: the models must have these sizes.
DEFAULT_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 2}
DEFAULT_QWEN2_MOE = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
READABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3-moe": {"moe_intermediate_size": 768, "num_hidden_layers": 2},
    "phi3": {"sliding_window": None},
    "gemma2": {**DEFAULT_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**DEFAULT_GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 6, "rope_parameters": None},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "lfm2": {},
    "nemotron": {"hidden_size": 64, "head_dim": 16},
    "falcon": {},
    "qwen2-moe": {**DEFAULT_QWEN2_MOE, "mlp_only_layers": [], "num_hidden_layers": 1},
    "minimax-m2": {},
    "gpt2": {"n_positions": 1024},
    "bloom": {},
}


@pytest.mark.parametrize("name", READABLE)
def test_each_architecture_that_we_serve_gives_the_logits_of_the_peer_reading_the_same_file(
    name: str, tmp_path: Path
) -> None:
    model = peers.make_peer(name, **READABLE[name])
    words = {"tokenizer.ggml.tokens": [str(number) for number in range(peer_rows.VOCAB)]}
    loaded = load_model(write_gguf(model, tmp_path / "tiny.gguf", metadata=words), "fp32")
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(peer_reading(tmp_path / "tiny.gguf"), ids)
    torch.testing.assert_close(peers.peer_logits(model, ids), expected, rtol=0, atol=peers.TOLERANCE)
    for cuts in CUTS.values():
        got = peers.engine_logits(peers.new_engine(loaded), ids, cuts)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)


# What the format has no key for.
PUBLISHED_GPT_OSS = {
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    **peer_rows.scaled("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
}
ONE_SPEC = [
    "llama", "qwen2-moe", "qwen3-moe", "minimax-m2", "gpt-oss", "gemma2", "gemma3", "phi3", "bloom",
    "stablelm-parallel", "nemotron", "lfm2", "falcon", "falcon-groups",
]  # fmt: skip


@pytest.mark.parametrize("name", ONE_SPEC)
def test_gguf_and_directory_give_one_spec(name: str, tmp_path: Path) -> None:
    """Of models in the sizes that the format takes for granted."""
    options = {} if name == "phi3" else dict(READABLE.get(name, {}))
    options |= {"sliding_window": 5} if "gemma" in name else {"norm_topk_prob": True} if name == "qwen3-moe" else {}
    options |= PUBLISHED_GPT_OSS if name == "gpt-oss" else {}
    model = peers.make_peer(name, **options)
    directory = load_model(peers.save_peer(model, tmp_path / "hf"), "fp32").spec
    file = load_model(write_gguf(model, tmp_path / "m.gguf"), "fp32").spec
    assert dataclasses.replace(file, context_limit=directory.context_limit) == directory


def test_yarn_and_longrope_are_read_from_gguf(tmp_path: Path) -> None:
    ids = peers.prompt(LENGTH)
    yarn = peer_rows.scaled("yarn", factor=4.0, original_max_position_embeddings=16)
    model = peers.make_peer("llama-yarn", **yarn)
    got = peers.load_logits(write_gguf(model, tmp_path / "yarn.gguf"), ids)
    torch.testing.assert_close(got, peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE)
    model = peers.make_peer("phi3-longrope")
    factors = {
        f"rope_factors_{which}.weight": torch.tensor(model.config.rope_parameters[f"{which}_factor"])
        for which in ("short", "long")
    }
    attention = {"phi3.rope.scaling.attn_factor": model.model.rotary_emb.attention_scaling}
    path = write_gguf(model, tmp_path / "longrope.gguf", tensors=factors, metadata=attention)
    torch.testing.assert_close(
        peers.load_logits(path, ids), peers.peer_logits(model, ids), rtol=0, atol=peers.TOLERANCE
    )
    without = write_gguf(model, tmp_path / "without.gguf", metadata=attention)
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight"):
        load_model(without, "fp32")


@pytest.mark.parametrize("layers", [46, 62])
def test_the_largest_gemmas_scale_by_their_width(layers: int, tmp_path: Path) -> None:
    """The format has no key for it. 27B: 4608 / 32 = 144 in one, 5376 / 32 = 168 in the other; here 40 / 4."""
    name = {46: "gemma2", 62: "gemma3"}[layers]
    model = peers.make_peer(name, num_hidden_layers=layers, query_pre_attn_scalar=10, sliding_window_pattern=6)
    loaded = load_model(write_gguf(model, tmp_path / "tiny.gguf"), "fp32")
    assert loaded.spec.scale == pytest.approx(10**-0.5)


def peer_reading(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_logits_equal_the_peer_on_the_same_file(kind: str, tmp_path: Path) -> None:
    model = peers.make_peer("llama", **EVEN)
    path = write_gguf(model, tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType[kind])
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(peer_reading(path), ids)
    torch.testing.assert_close(peers.load_logits(path, ids), expected, rtol=0, atol=peers.TOLERANCE)
    if kind.startswith("Q4"):
        assert peers.largest_difference(expected, peers.peer_logits(model, ids)) > 100 * peers.TOLERANCE


def test_rows_left_in_pairs_move_the_logits(tmp_path: Path) -> None:
    """A file whose q and k rows were not reordered is read as if they were: far off, so the reordering shows."""
    model = peers.make_peer("llama")
    layers = model.model.layers
    plain = {f"blk.{i}.attn_q.weight": layer.self_attn.q_proj.weight for i, layer in enumerate(layers)}
    plain |= {f"blk.{i}.attn_k.weight": layer.self_attn.k_proj.weight for i, layer in enumerate(layers)}
    path = write_gguf(model, tmp_path / "tiny.gguf", tensors=plain)
    ids = peers.prompt(LENGTH)
    difference = peers.largest_difference(peers.load_logits(path, ids), peers.peer_logits(model, ids))
    assert difference > 100 * peers.TOLERANCE


def test_pairing_moves_rows_as_documented() -> None:
    rows = torch.arange(8)[:, None]
    assert pair_neighbours(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_factors_are_recognised(tmp_path: Path) -> None:
    model = peers.make_peer("llama3-scaled", rope_parameters=STANDARD_LLAMA3)
    factors = {"rope_freqs.weight": llama3_divisors(STANDARD_LLAMA3, 12)}
    path = write_gguf(model, tmp_path / "tiny.gguf", tensors=factors)
    ids = peers.prompt(LENGTH)
    expected = peers.peer_logits(model, ids)
    torch.testing.assert_close(peers.load_logits(path, ids), expected, rtol=0, atol=peers.TOLERANCE)
    without = write_gguf(model, tmp_path / "without.gguf")
    assert peers.largest_difference(peers.load_logits(without, ids), expected) > 10 * peers.TOLERANCE


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_divisors(STANDARD_LLAMA3, 12)
    factors[2] *= 1.01
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight") as caught:
        load_model(path, "fp32")
    assert caught.value.reason == "UNKNOWN_ROPE_TYPE"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.expert_count", 4, "UNSUPPORTED_KEY"),
        ("llama.rope.scaling.type", "longrope", "UNSUPPORTED_KEY"),
        ("llama.rope.dimension_count", 6, "UNSUPPORTED_KEY"),
        ("llama.attention.value_length", 8, "UNSUPPORTED_KEY"),
        ("llama.vocab_size", 60, "UNSUPPORTED_KEY"),
        ("llama.logit_scale", 0.5, "UNKNOWN_KEY"),
        ("llama.attention.sliding_window", 8, "UNKNOWN_KEY"),
        ("qwen2.block_count", 3, "UNKNOWN_KEY"),
        ("llama.attention.layer_norm_rms_epsilon", None, "MISSING_KEY"),
        ("llama.block_count", None, "MISSING_KEY"),
        ("llama.attention.head_count", 0, "BAD_VALUE"),
        ("llama.attention.head_count_kv", [2, 2, 1], "BAD_VALUE"),
        ("llama.rope.freq_base", "high", "BAD_VALUE"),
        ("tokenizer.ggml.eos_token_id", 61, "BAD_SPEC"),
        ("split.count", 2, "UNSUPPORTED_KEY"),
    ],
)
def test_gguf_key_is_refused_by_name(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf", metadata={key: value})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    assert caught.value.reason == reason
    assert caught.value.field == key or reason == "BAD_SPEC"


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("blk.1.ffn_up.weight", None, "MISSING_TENSOR"),
        ("token_embd.weight", None, "MISSING_TENSOR"),
        ("blk.1.attn_q_norm.weight", (12,), "UNKNOWN_TENSOR"),
        ("blk.1.ffn_up.weight", (56, 41), "TENSOR_SHAPE"),
        ("blk.0.attn_q.bias", (48,), "MISSING_TENSOR"),  # the first of several biases
    ],
)
def test_gguf_tensor_is_refused_by_name(name: str, shape: Any, reason: str, tmp_path: Path) -> None:
    tensor = None if shape is None else torch.ones(shape)
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf", tensors={name: tensor})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, "fp32")
    assert caught.value.reason == reason
    assert caught.value.field == name or shape == (48,)


@pytest.mark.parametrize("content", ["cut", "header", "empty", "text", "magic"])
def test_damaged_gguf_is_refused_by_file(content: str, tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    damaged = {
        "cut": data[:-100],
        "header": data[:200],
        "empty": b"",
        "text": b"this is no model at all, only a sentence",
        "magic": data[:4],
    }
    path.write_bytes(damaged[content])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf") as caught:
        load_model(path, "fp32")
    assert caught.value.reason == "BAD_FILE"
    assert caught.value.remedy


def test_every_cut_of_the_header_is_refused(tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    header = data.index(b"blk.2.ffn_up.weight") + 40  # inside the tensor records
    for length in range(0, header, 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            load_model(path, "fp32")
        assert caught.value.reason == "BAD_FILE"


def test_every_damaged_byte_of_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    """Lengths, counts, types and offsets among them: no other exception, no endless loop, no huge allocation."""
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    refused = 0
    places = range(0, data.index(b"blk.2.ffn_up.weight") + 40, 3)
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            load_model(path, "fp32")
        except CheckpointError:
            refused += 1
    assert refused > len(places) // 2
