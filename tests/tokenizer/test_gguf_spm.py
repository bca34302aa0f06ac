"""SentencePiece's BPE out of GGUF files, against SentencePiece itself: models that it trains here."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import CheckpointError
from pdserve.tokenizer import IncrementalDetokenizer, Tokenizer, bundle_from_gguf, load_bundle

from .conftest import CORPUS, TEXTS

SENTENCES = [line for text in CORPUS for line in text.splitlines() if line.strip()] + [
    "the cat sat on a mat, there"
] * 5


def train(prefix: bool) -> Any:
    """A small model with Llama's settings; the words in its corpus decide its pieces."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=written,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<mark>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def kind_of(model: Any, token: int) -> int:
    for kind, holds in ((2, model.IsUnknown), (3, model.IsControl), (6, model.IsByte), (5, model.IsUnused)):
        if holds(token):
            return kind
    return 4 if model.IdToPiece(token) == "<mark>" else 1


def write(path: Path, model: Any, *, prefix: bool = True, **extra: Any) -> Path:
    count = model.GetPieceSize()
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.IdToPiece(n) for n in range(count)])
    writer.add_token_scores(extra.pop("scores", [model.GetScore(n) for n in range(count)]))
    writer.add_token_types([kind_of(model, n) for n in range(count)])
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    if not prefix:
        writer.add_add_space_prefix(False)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["space before", "no space before"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    model = train(request.param)
    path = write(tmp_path_factory.mktemp("spm") / "m.gguf", model, prefix=request.param)
    bundle = load_bundle(path)
    assert bundle is not None
    return Tokenizer(bundle), model


def test_ids_and_text_equal_sentencepiece(pair: tuple[Tokenizer, Any]) -> None:
    ours, model = pair
    # Names of special tokens in a text become those tokens here, as `transformers` has it, and stay text there.
    texts = [text for text in TEXTS if not any(name in text for name in ("<s>", "</s>", "<unk>"))]
    for text in texts:
        ids = model.EncodeAsIds(text)
        assert list(ours.encode(text, add_special=False)) == ids, text
        assert ours.decode(ids) == model.DecodeIds(ids) == text


@settings(deadline=None, max_examples=150)
@given(
    text=st.text(alphabet=st.one_of(st.sampled_from("  the catsno.12é日👍"), st.characters(codec="utf-8")), max_size=40)
)
def test_any_text_has_the_same_ids_and_comes_back(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, model = pair
    text = text.replace("\x00", "").replace("▁", "")  # the end of a text, and a space, for SentencePiece
    ids = model.EncodeAsIds(text)
    assert list(ours.encode(text, add_special=False)) == ids
    stream = IncrementalDetokenizer(ours)
    assert b"".join([*map(stream.push, ids), stream.flush()]).decode() == text


def test_the_begin_token_comes_once_and_the_end_token_ends(pair: tuple[Tokenizer, Any]) -> None:
    ours, model = pair
    assert ours.bundle.add_bos and ours.bundle.eos_ids == (model.eos_id(),)
    assert ours.encode("the cat") == (model.bos_id(), *model.EncodeAsIds("the cat"))
    assert ours.encode("<s>the cat").count(model.bos_id()) == 1


def test_a_marked_word_is_one_token_and_text(pair: tuple[Tokenizer, Any]) -> None:
    ours, model = pair
    ids = ours.encode("a<mark>b", add_special=False)
    assert model.PieceToId("<mark>") in ids and ours.decode(ids).replace(" ", "") == "a<mark>b"


def test_a_file_that_asks_for_no_begin_token(tmp_path: Path) -> None:
    model = train(True)
    made = bundle_from_gguf(write(tmp_path / "m.gguf", model, add_bos_token=False))
    assert not made.add_bos and Tokenizer(made).encode("the") == tuple(model.EncodeAsIds("the"))


def test_scores_that_are_none_are_named(tmp_path: Path) -> None:
    model = train(True)
    with pytest.raises(CheckpointError) as caught:
        load_bundle(write(tmp_path / "m.gguf", model, scores=[0.0, 1.0]))
    assert caught.value.field == "tokenizer.ggml.scores"
