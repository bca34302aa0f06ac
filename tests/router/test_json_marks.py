"""Bodies whose punctuation alone says that they have too many entries are refused before they are parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import from_json

from pdserve.errors import InvalidRequest
from router import openai_json
from router.openai_schema import MAX_ENTRIES, parse_body

BASE = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
SIZE = 1 << 20
Parse = Callable[[bytes], Any]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was given to the parser."""
    sizes: list[int] = []
    parse: Parse = from_json

    def watched(data: bytes) -> Any:
        sizes.append(len(data))
        return parse(data)

    monkeypatch.setattr(openai_json, "from_json", watched)
    return sizes


@pytest.mark.parametrize("piece", ["[],", "[[],[]],", "{},", "1,", '"",', '"a":1,', "[", "{", '"', '[{"a":'])
def test_marks_alone_are_never_parsed(parsed: list[int], piece: str) -> None:
    body = json.dumps(BASE)[:-1] + ', "user": [' + piece * (SIZE // len(piece)) + "0]}"
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body.encode())
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_ENTRIES", "body")
    assert not parsed


@pytest.mark.parametrize("piece", ["[],{", '"', "\\", '\\"[', 'a\\\\",[', "\u00e9[", "\n,"])
def test_marks_inside_of_a_text_do_not_count(parsed: list[int], piece: str) -> None:
    text = piece * (SIZE // len(piece))
    for escaped in (True, False):
        body = json.dumps({**BASE, "messages": [{"role": "user", "content": text}]}, ensure_ascii=escaped)
        assert parse_body(body.encode()).messages[0].content == text
    assert len(parsed) == 2


def test_the_greatest_number_of_entries_is_still_read() -> None:
    """Each an opening bracket and a comma: what is counted is what the limit says."""
    left = MAX_ENTRIES - len(BASE) - 1 - 1 - 2  # the body's keys, the list of messages, the keys of one
    body = {**BASE, "user": [[]] * left}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps(body).encode())
    assert caught.value.field == "user"  # it was looked at: a list is no name
    body["user"] = [[]] * (left + 1)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps(body).encode())
    assert caught.value.reason == "TOO_MANY_ENTRIES"
