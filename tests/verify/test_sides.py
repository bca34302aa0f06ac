"""The words that describe a side."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError
from pdserve.verify.sides import Side, parse_side

BASE = Side("base")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", Side("bf16", engine=EngineConfig(dtype="bf16"))),
        ("kv:bf16,page:8,nhd", Side("", engine=EngineConfig(kv_dtype="bf16", page_size=8, axis_order="nhd"))),
        ("deterministic", Side("", engine=EngineConfig(deterministic=True))),
        ("native,int8", Side("", engine=EngineConfig(kernels="native", weights="int8"))),
        ("plain", Side("", engine=EngineConfig(kernels="plain"))),
        ("chunked", Side("", chunk_tokens=16)),
        ("chunked:64,reused:32", Side("", chunk_tokens=64, way="reused", count=32)),
        ("batched:3", Side("", way="batched", count=3)),
        ("handoff", Side("", way="handoff")),
        ("transformers", Side("", kind="transformers")),
        ("worker:127.0.0.1:70", Side("", kind="worker", address="127.0.0.1:70")),
        ("worker:[::1]:70", Side("", kind="worker", address="[::1]:70")),
    ],
)
def test_words(text: str, expected: Side) -> None:
    got = parse_side(text, BASE)
    assert got.text == text
    assert (got.kind, got.address, got.engine, got.chunk_tokens, got.way, got.count) == (
        (expected.kind, expected.address, expected.engine, expected.chunk_tokens, expected.way, expected.count)
    )


def test_a_side_takes_over_what_it_does_not_say() -> None:
    first = parse_side("smollm2,bf16,page:8,chunked:4,reused", BASE)
    second = parse_side("fp32,whole", first)
    assert second.model == "smollm2" and second.engine == EngineConfig(dtype="fp32", page_size=8)
    assert (second.chunk_tokens, second.way) == (0, "reused")
    peer = parse_side("transformers", first)
    assert peer.way == "alone" and peer.engine.dtype == "bf16"
    assert parse_side("fp16", peer).kind == "transformers"
    assert parse_side("page:4", peer).kind == "engine"


def test_a_path_is_a_model_even_with_a_comma(tmp_path: Path) -> None:
    odd = tmp_path / "a,b.pdmodel"
    odd.touch()
    assert parse_side(str(odd), BASE).model == str(odd)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("transfomers", "did you mean transformers?"),
        ("bf61", "did you mean bf16?"),
        ("chunked:0", "chunked:64"),
        ("batched:1", "batched:2"),
        ("handoff,chunked:1", "chunked:2"),
        ("kv:bf61", "kv:bf16"),
        ("worker:nowhere", "host:port"),
        ("./nothing.gguf", "check the path"),
        ("", "words are"),
    ],
)
def test_another_word_is_refused_with_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_side(text, BASE)
    assert remedy in error.value.remedy
