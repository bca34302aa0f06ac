from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from pdserve.errors import CheckpointError, InvalidRequest
from pdserve.tokenizer import Bundle, Tokenizer, load_bundle

from .conftest import TEXTS, byte_level, llama2_like, write_directory


def test_bytes_give_back_an_equal_bundle(smollm_bundle: Bundle, smollm: Tokenizer) -> None:
    data = smollm_bundle.to_bytes()
    copy = Bundle.from_bytes(data)
    assert copy == smollm_bundle and copy.to_bytes() == data and copy.digest() == smollm_bundle.digest()
    assert len(copy.digest()) == 32
    again = Tokenizer(copy)
    assert [again.encode(text) for text in TEXTS] == [smollm.encode(text) for text in TEXTS]


def test_digest_is_over_every_field() -> None:
    base = Bundle("{}", "t", 1, (2,), False, {"bos_token": "<s>"}, 10)
    others = {
        "tokenizer_json": "{ }",
        "chat_template": "u",
        "bos_id": None,
        "eos_ids": (2, 3),
        "add_bos": True,
        "special_tokens": {"bos_token": "<S>"},
        "vocab_size": 11,
        "sampling": {"top_p": 0.5},
    }
    assert set(others) == {field.name for field in dataclasses.fields(Bundle)}
    digests = {dataclasses.replace(base, **{name: value}).digest() for name, value in others.items()}  # type: ignore[arg-type]
    assert len(digests | {base.digest()}) == len(others) + 1


def test_digest_is_over_content_not_layout(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "a", llama2_like(), {"bos_token": "<s>", "eos_token": "</s>"})
    first = load_bundle(folder)
    other = write_directory(tmp_path / "b", llama2_like(), {"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    (other / "tokenizer.json").write_text(llama2_like().to_str(pretty=True), encoding="utf-8")
    second = load_bundle(other)
    assert first is not None and second is not None and first.digest() == second.digest()


GOOD: dict[str, Any] = msgpack.unpackb(Bundle("{}", "", 1, (2,), True, {"bos_token": "<s>"}, 10).to_bytes())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 1}, "version"),
        ({"sampling": [["temperature", 1]]}, "sampling"),
        ({"sampling": [["seed", 1.0]]}, "sampling"),
        ({"sampling": [["top_p", float("nan")]]}, "sampling"),
        ({"extra": 1}, "extra"),
        ({"tokenizer_json": b"{}"}, "tokenizer_json"),
        ({"chat_template": "x" * (1024 * 1024 + 1)}, "chat_template"),
        ({"bos_id": -1}, "bos_id"),
        ({"bos_id": True}, "bos_id"),
        ({"bos_id": 10}, "bos_id"),
        ({"eos_ids": [1.5]}, "eos_ids"),
        ({"eos_ids": list(range(257))}, "eos_ids"),
        ({"add_bos": 1}, "add_bos"),
        ({"special_tokens": [["a"]]}, "special_tokens"),
        ({"special_tokens": {"a": "b"}}, "special_tokens"),
        ({"vocab_size": 2**40}, "vocab_size"),
    ],
)
def test_refuses_a_bad_bundle_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Bundle.from_bytes(msgpack.packb({**GOOD, **change}))
    assert caught.value.field == f"bundle.{field}"


@pytest.mark.parametrize("name", [name for name in GOOD if name != "version"])
def test_refuses_a_missing_part(name: str) -> None:
    with pytest.raises(InvalidRequest, match="missing") as caught:
        Bundle.from_bytes(msgpack.packb({key: value for key, value in GOOD.items() if key != name}))
    assert caught.value.field == f"bundle.{name}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01",
        msgpack.packb(GOOD)[:-1],
        msgpack.packb(GOOD) + b"\x00",
        msgpack.packb(dict(reversed(GOOD.items()))),  # the same content in another order
        b"\x81\xa1\xff\x01",
        b"\x91" * 5000,
    ],
)
def test_refuses_bytes_that_are_no_canonical_bundle(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Bundle.from_bytes(data)
    assert caught.value.field.startswith("bundle")


def test_a_bundle_that_is_no_tokenizer() -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Tokenizer(Bundle("{}"))


def test_paths_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_bundle(tmp_path) is None
    plain = tmp_path / "tiny.pdmodel"
    plain.write_bytes(b"\x00" * 64)
    assert load_bundle(plain) is None
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_bundle(tmp_path / "missing")


def test_encodes_alike_from_many_threads(smollm: Tokenizer) -> None:
    expected = [smollm.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for ids in pool.map(lambda _: [smollm.encode(text) for text in TEXTS], range(32)):
            assert ids == expected


def test_long_text(smollm: Tokenizer) -> None:
    text = "The cat sat on the mat, 42 times; naïve 日本語 👩‍👩‍👧.\n" * 2500
    assert len(text) > 100_000
    assert smollm.decode(smollm.encode(text)) == text


def test_invalid_unicode_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        smollm.encode("a\ud800b")
    assert caught.value.field == "prompt"


def test_import_needs_no_heavy_library() -> None:
    code = (
        "import sys, pdserve.tokenizer; print(*sorted({'torch', 'numpy', 'gguf', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_byte_level_keeps_every_byte(tmp_path: Path) -> None:
    bundle = load_bundle(write_directory(tmp_path, byte_level()))
    assert bundle is not None
    tokenizer = Tokenizer(bundle)
    known = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= known
