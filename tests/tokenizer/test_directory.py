"""Model directories, against `transformers`' AutoTokenizer on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import CheckpointError
from pdserve.tokenizer import bundle_from_directory

from .conftest import TEXTS, byte_level, gemma_like, llama2_like, tokenizer_of, unigram_like, write_directory

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def peer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("make", [byte_level, llama2_like, unigram_like, gemma_like])
def test_ids_and_text_equal_autotokenizer(tmp_path: Path, make: Any) -> None:
    names = NAMES if make is not byte_level else {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    ours = tokenizer_of(tmp_path, make(), names)
    peer = peer_of(tmp_path)
    assert ours.vocab_size == len(peer)
    assert ours.bundle.bos_id == peer.bos_token_id and ours.bundle.eos_ids == (peer.eos_token_id,)
    assert ours.bundle.special_tokens == peer.special_tokens_map
    for text in TEXTS:
        ids = peer(text)["input_ids"]
        begun = ours.bundle.add_bos and ids[:2] == [peer.bos_token_id] * 2  # the peer begins such a text twice
        assert list(ours.encode(text)) == ids[1 if begun else 0 :]
        assert list(ours.encode(text, add_special=False)) == peer(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True)


def test_tokens_that_only_the_configuration_has(tmp_path: Path) -> None:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    size = byte_level().get_vocab_size()
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<b>", **plain},
        "eos_token": "<|end|>",
        "added_tokens_decoder": {
            "0": {"content": "<|end|>", "special": True, **plain},
            str(size): {"content": "<b>", "special": True, **plain},
            str(size + 1): {"content": "<tool>", "special": False, **plain},
        },
        "extra_special_tokens": ["<extra>"],
    }
    ours = tokenizer_of(tmp_path, byte_level(), config)
    peer = peer_of(tmp_path)
    text = "<b>x <tool>y<extra> <|end|>"
    ids = peer(text)["input_ids"]
    assert list(ours.encode(text)) == ids and max(ids) == size + 2
    assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True) == "x <tool>y "


def test_named_tokens_of_an_older_checkpoint(tmp_path: Path) -> None:
    older = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "additional_special_tokens": ["x"]}
    ours = tokenizer_of(tmp_path, llama2_like(), {}, special_tokens_map=older)
    assert ours.bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_named_token_in_the_vocabulary_becomes_special(tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path, llama2_like(), {"eos_token": "the"})
    peer = peer_of(tmp_path)
    assert list(ours.encode("in the in")) == peer("in the in")["input_ids"]
    assert ours.decode(ours.encode("in the in")) == peer.decode(
        peer("in the in")["input_ids"], skip_special_tokens=True
    )


@pytest.mark.parametrize("processor", [None, "ByteLevel"])
def test_add_bos_token_of_the_configuration(tmp_path: Path, processor: str | None) -> None:
    backend = byte_level()
    folder = write_directory(tmp_path, backend, {"bos_token": "<|end|>", "add_bos_token": True})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = processor and {
        "type": processor, "add_prefix_space": False, "trim_offsets": False, "use_regex": True
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    from pdserve.tokenizer import Tokenizer

    bundle = bundle_from_directory(folder)
    assert bundle is not None and bundle.add_bos
    assert Tokenizer(bundle).encode("hi") == (0, *backend.encode("hi").ids)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 9}, {2, 5, 7}),
        ({"eos_token_id": 5}, {}, {2, 5}),
        ({}, {"eos_token_id": 9}, {2, 9}),
        ({}, {"eos_token_id": [900_000]}, {2, 900_000}),  # beyond the tokenizer, still an end
        ({}, {}, {2}),
    ],
)
def test_ids_that_end_an_answer(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    ours = tokenizer_of(tmp_path, llama2_like(), NAMES, generation_config=generation, config=config)
    assert set(ours.bundle.eos_ids) == expected


@pytest.mark.parametrize(
    "form",
    [
        "T",
        {"default": "T", "tool_use": "U"},
        [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}],
    ],
)
def test_forms_of_a_chat_template(tmp_path: Path, form: Any) -> None:
    assert tokenizer_of(tmp_path, byte_level(), {"chat_template": form}).bundle.chat_template == "T"


def test_prompts_are_never_cut_filled_or_varied(tmp_path: Path) -> None:
    backend = llama2_like()
    expected = backend.encode("the cat sat in the hat").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.model.dropout = 0.9
    assert list(tokenizer_of(tmp_path, backend).encode("the cat sat in the hat")) == expected


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", b"{", "not JSON"),
        ("tokenizer.json", b"[]", "instead of an object"),
        ("tokenizer.json", b"{}", "cannot be loaded"),
        ("tokenizer.json", b"\xff", "cannot be read"),
        ("tokenizer_config.json", b"nope", "not JSON"),
        ("tokenizer_config.json", b'{"chat_template": {"a": "b"}}', "no default"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "added_tokens_decoder"),
        ("generation_config.json", b'{"eos_token_id": ["a"]}', "eos_token_id"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    write_directory(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        bundle_from_directory(tmp_path)
    assert caught.value.field == name


def test_other_formats_are_refused_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match="fast form") as caught:
        bundle_from_directory(tmp_path)
    assert caught.value.field == "tokenizer.model"
