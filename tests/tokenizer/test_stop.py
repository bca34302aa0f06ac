from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.tokenizer import StopMatcher


def by_find(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is complete first; the longest of those complete at once."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown, matched = b"", None
    for piece in pieces:
        result = matcher.push(piece.encode())
        result.release.decode()  # never half a character
        shown += result.release
        matched = matched or result.matched
    return (shown + matcher.flush()).decode(), matched


letters = st.text(alphabet="abé日\n", max_size=6)


@given(st.lists(letters, max_size=12), st.lists(letters.filter(bool), max_size=4))
@example(["x", "\n", "\n"], ["\n\n", "\n"])
@example(["aa", "ab"], ["aab", "ab", "b"])
def test_stops_as_a_search_of_the_whole_text_does(pieces: list[str], stops: list[str]) -> None:
    assert feed(StopMatcher(stops), pieces) == by_find("".join(pieces), stops)


@given(st.text(alphabet="ab", max_size=40), st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1))
def test_holds_back_only_a_possible_stop_beginning(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for i, letter in enumerate(text, start=1):
        result = matcher.push(letter.encode())
        shown += result.release.decode()
        if result.matched:
            return
        held = text[len(shown) : i]
        ends = [text[:i][-n:] for n in range(1, i + 1)]
        longest = max((end for end in ends if any(stop.startswith(end) for stop in stops)), key=len, default="")
        assert held == longest


def test_stop_over_tokens_is_not_shown() -> None:
    matcher = StopMatcher(["</answer>"])
    assert [matcher.push(piece).release for piece in (b"42 <", b"/ans", b"was")] == [b"42 ", b"", b"</answas"]
    assert matcher.push(b"</answ").release == b""
    last = matcher.push(b"er> more")
    assert (last.release, last.matched) == (b"", "</answer>")
    assert matcher.push(b"later").release == b"" and matcher.flush() == b""


def test_unfinished_stop_is_text_at_the_end() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push(b"don't sto").release == b"don't "
    assert matcher.flush() == b"sto"


def test_bytes_that_are_no_text_pass() -> None:
    matcher = StopMatcher(["é"])
    assert matcher.push(b"\xff\xc3").release == b"\xff"
    assert matcher.push(b"\x28").release == b"\xc3\x28"


def test_long_periodic_stops_take_linear_time() -> None:
    matcher = StopMatcher([f"{'a' * 1000}{i:02}" for i in range(16)])
    shown = b"".join(matcher.push(b"a" * 4).release for _ in range(2000))
    assert len(shown) == 8000 - 1000


@pytest.mark.parametrize("stop", ["", "\ud800"])
def test_refuses_a_stop_that_cannot_match(stop: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(["ok", stop])
    assert caught.value.field == "stop"
