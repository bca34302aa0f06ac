"""GGUF files: parity with the model they were written from, and with the peer reading the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from pdserve.engine.load import load_model
from pdserve.errors import CheckpointError
from tests.engine.loading import peers
from tests.engine.loading.gguf_writing import llama3_divisors, pair_neighbours, write_gguf

LENGTH = 23
CUTS = {"prefill": (), "chunked": (3, 4, 11, 20), "decode": tuple(range(9, LENGTH))}
# As the loader reads it: every published llama3-scaled model has these parameters.
STANDARD_LLAMA3 = {**peers.LLAMA3, "original_max_position_embeddings": 8192}
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


def test_gguf_and_directory_give_one_spec(tmp_path: Path) -> None:
    model = peers.make_peer("llama")
    directory = peers.save_peer(model, tmp_path / "hf")
    assert load_model(directory, "fp32").spec == load_model(write_gguf(model, tmp_path / "m.gguf"), "fp32").spec


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
        ("llama.rope.scaling.type", "yarn", "UNSUPPORTED_KEY"),
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


def test_unknown_gguf_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(peers.make_peer("llama"), tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(CheckpointError, match="mamba") as caught:
        load_model(path, "fp32")
    assert caught.value.reason == "UNKNOWN_ARCHITECTURE"


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
