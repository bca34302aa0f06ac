from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from pdserve.errors import CheckpointError
from pdserve.tokenizer import IncrementalDetokenizer, Tokenizer

from .conftest import TEXTS, byte_level, gemma_like, llama2_like, tokenizer_of, unigram_like

FAMILIES: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "llama2": llama2_like,
    "unigram": unigram_like,
    "gemma": gemma_like,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Backend]:
    backend = FAMILIES[request.param]()
    return tokenizer_of(tmp_path_factory.mktemp(request.param), backend), backend


@functools.cache
def every_byte() -> Tokenizer:
    """A byte-level tokenizer in which any text can be written (SmolLM2's lacks some rare bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizer_of(Path(folder), byte_level(vocab_size=400))


def stream(tokenizer: Tokenizer | None, ids: Iterable[int], *, continuation: bool = False) -> list[bytes]:
    """Every push, then the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, continuation=continuation)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_equals_the_library_on_texts(family: tuple[Tokenizer, Backend]) -> None:
    tokenizer, backend = family
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == tuple(backend.encode(text).ids)
        pieces = stream(tokenizer, ids)
        for piece in pieces:
            piece.decode()  # whole characters only
        assert b"".join(pieces).decode() == backend.decode(list(ids)) == tokenizer.decode(ids), text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_loses_no_byte_of_any_ids(family: tuple[Tokenizer, Backend], data: st.DataObject) -> None:
    tokenizer, backend = family
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    pieces = stream(tokenizer, ids, continuation=True)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    assert b"".join(pieces) == b"".join(tokenizer.token_bytes(i) for i in ids if i not in special)
    # The library replaces a run of byte tokens as a whole when it is broken; only byte-level text is replaced alike.
    if tokenizer.pieces.plan.byte_level or is_utf8(b"".join(pieces)):
        assert b"".join(stream(tokenizer, ids)).decode("utf-8", "replace") == backend.decode(ids)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(text=st.text(max_size=30))
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = every_byte()
    pieces = stream(tokenizer, tokenizer.encode(text))
    for piece in pieces:
        piece.decode()
    if "<|end|>" not in text:
        assert b"".join(pieces) == text.encode()


def test_characters_over_tokens_appear_when_complete(smollm: Tokenizer) -> None:
    text = "a👩‍👩‍👧 𠜎\u200d"
    ids = smollm.encode(text)
    assert len(ids) > len(text)  # some character takes several tokens, so the stream has to wait
    pieces = stream(smollm, ids)
    assert pieces[-1] == b"" and any(piece == b"" for piece in pieces[:-1])
    assert "".join(piece.decode() for piece in pieces) == text


def test_generation_cut_inside_a_character_keeps_its_bytes(smollm: Tokenizer) -> None:
    ids = smollm.encode("𠜎")
    *pieces, rest = stream(smollm, ids[:-1])
    assert b"".join(pieces) == b""
    assert 0 < len(rest) < 4 and "𠜎".encode().startswith(rest)
    assert "\ufffd" in smollm.decode(ids[:-1])


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "pushes"),
    [
        (b"\xe2\x82\xac", [b"", b"", b"\xe2\x82\xac"]),
        (b"\xe2\x82A", [b"", b"", b"\xe2\x82A"]),  # cannot be completed any more
        (b"\xffA", [b"\xff", b"A"]),  # never begins a character
        (b"\xe0\x80\x80", [b"", b"\xe0\x80", b"\x80"]),  # overlong: impossible from its second byte
        (b"\xed\xa0", [b"", b"\xed\xa0"]),  # a surrogate
        (b"\xf0\x9f\xf0\x9f\x98\x80", [b"", b"", b"\xf0\x9f", b"", b"", b"\xf0\x9f\x98\x80"]),
    ],
)
def test_impossible_bytes_are_not_held(data: bytes, pushes: list[bytes]) -> None:
    tokenizer = every_byte()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(token) for token in bytes_as_ids(tokenizer, data)] == pushes
    assert b"".join(pushes) + detokenizer.flush() == data


def test_special_end_and_unknown_ids_add_nothing(smollm: Tokenizer) -> None:
    (hi,) = smollm.encode("hi")
    ids = [0, hi, 2, smollm.vocab_size, smollm.vocab_size + 100_000, 2**40, -1, hi]
    assert b"".join(stream(smollm, ids)) == b"hihi"
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert smollm.token_bytes(smollm.vocab_size) == b""


def test_without_tokenizer_nothing_is_text() -> None:
    assert stream(None, [1, 2, 3]) == [b"", b"", b"", b""]


def test_added_text_is_not_read_as_byte_letters(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("é", normalized=False), AddedToken("<tool>", normalized=False)])
    tokenizer = tokenizer_of(tmp_path, backend)
    ids = tokenizer.encode("xé<tool>é")
    assert backend.token_to_id("é") in ids
    assert tokenizer.decode(ids) == "xé<tool>é"


@pytest.mark.parametrize("make", [llama2_like, unigram_like, gemma_like])
def test_continuation_joins_the_prompt(tmp_path: Path, make: Callable[[], Backend]) -> None:
    tokenizer = tokenizer_of(tmp_path, make())
    ids = tokenizer.encode("the cat sat in the ☃ 日", add_special=False)
    for cut in range(1, len(ids)):
        joined = b"".join([*stream(tokenizer, ids[:cut]), *stream(tokenizer, ids[cut:], continuation=True)])
        assert joined == b"".join(stream(tokenizer, ids))


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
    ],
)
def test_unsupported_decoders_are_refused_when_loaded(tmp_path: Path, decoder: Any) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="decoder") as caught:
        tokenizer_of(tmp_path, backend)
    assert caught.value.reason == "UNSUPPORTED_TOKENIZER"
