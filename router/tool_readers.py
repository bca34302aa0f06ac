"""Reads tool calls off an output as it comes: text to show, and calls piece by piece.

A call begins once its name is known, is one that was offered, and an object of arguments follows it. From there on its
arguments are given out as the model writes them, up to the bracket that closes them. What does not begin so is held
until its end and read as a whole, or stays text: nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.tool_arguments import Arguments

SPACE = " \t\r\n"
DECODER = json.JSONDecoder()
_OBJECT = r"(?=\{\s*[\"}])"  # of arguments, not yet taken
_NAME = r'"(?P<name>(?:[^"\\]|\\.)*)"'


def head(key: str) -> str:
    """The beginning of a call that is an object of a name and `key`, up to the arguments."""
    return rf'\{{\s*"name"\s*:\s*{_NAME}\s*,\s*"{key}"\s*:\s*{_OBJECT}'


MORE_KEYS = r'(?:\s*,\s*"\w+"\s*:\s*"[^"\\]*")*'
"""What a model may add to a call after its arguments, such as an id of its own."""

_CLOSING = re.compile(MORE_KEYS + r"\s*\}?\s*")

PLAIN_HEAD = rf"(?P<plain>[a-zA-Z0-9_.-]+)\s*(?:\[CALL_ID\]\s*[a-zA-Z0-9_-]+\s*)?\[ARGS\]\s*{_OBJECT}"
"""The same for a name that is written as it is."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Part:
    """Of the call that was begun last, or (with a name) of a new one."""

    arguments: str
    name: str | None = None


Read = tuple[str, list[Part]]
Whole = Callable[[str], Sequence[Call | None]]


class Reader(ABC):
    """Reads one output; what `push` and `close` return, joined, is the whole of it."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._arguments: Arguments | None = None  # of the call that is being given out
        self._parts: list[Part] = []

    @property
    def cut(self) -> bool:
        """The last call has begun and not ended."""
        return self._arguments is not None

    def push(self, text: str) -> Read:
        """Text to show, and parts of calls."""
        self._held += text
        shown = ""
        while True:
            if self._arguments is not None and not self._take_arguments(self._arguments):
                break
            more = self._advance()
            if more is None:
                break
            shown += more
        return shown, self._given()

    def close(self) -> Read:
        """No more comes."""
        shown = "" if self.cut else self._rest()
        return shown, self._given()

    @abstractmethod
    def _advance(self) -> str | None:
        """Takes what can be told of what is held: text to show, or a call begun. None: nothing more now."""

    @abstractmethod
    def _rest(self) -> str:
        """The end: what of all that is held is text."""

    def _begin(self, match: re.Match[str] | None) -> bool:
        """A call begins here, if it is one that was offered."""
        if match is None:
            return False
        found = match.groupdict()
        name = found.get("plain") or _unquoted(found.get("name") or "")
        if name not in self._names:
            return False
        self._parts.append(Part("", name))
        self._held = self._held[match.end() :]
        self._arguments = Arguments()
        return True

    def _take(self, calls: Sequence[Call]) -> None:
        """Whole calls."""
        self._parts += [Part(call.arguments, call.name) for call in calls]

    def _take_arguments(self, arguments: Arguments) -> bool:
        """True: they are complete."""
        taken = arguments.take(self._held)
        self._parts.append(Part(self._held[:taken]))
        self._held = self._held[taken:]
        if arguments.complete:
            self._arguments = None
        return arguments.complete

    def _given(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [part for part in parts if part.name is not None or part.arguments]

    def _call(self, value: object, key: str) -> Call | None:
        match value:
            case {"name": str(name), **rest} if name in self._names and isinstance(rest.get(key, {}), dict):
                return Call(name, json.dumps(rest.get(key, {}), ensure_ascii=False))
        return None


class TaggedReader(Reader):
    """Any number of calls between two tags, with text around."""

    def __init__(self, names: frozenset[str], begin: str, end: str, key: str) -> None:
        super().__init__(names)
        self._begin_tag, self._end_tag, self._key = begin, end, key
        self._head = re.compile(rf"\s*{re.escape(begin)}\s*{head(key)}")
        self._inside = False  # after the arguments of a call, before its end
        self._called = False  # white space after a call belongs to nothing

    def _advance(self) -> str | None:
        if self._inside:
            end = self._held.find(self._end_tag)
            if end < 0:
                return None
            between = self._held[:end]
            self._held = self._held[end + len(self._end_tag) :]
            self._inside, self._called = False, True
            return "" if _CLOSING.fullmatch(between) else between
        begin = self._held.find(self._begin_tag)
        if begin < 0:
            ends = len(self._held) - _tail(self._held, self._begin_tag)
            shown, self._held = self._held[:ends], self._held[ends:]
            return self._text(shown) if shown else None
        if text := self._held[:begin].rstrip(SPACE):
            self._held = self._held[len(text) :]  # the white space before a call belongs to it, as long as it is one
            return self._text(text)
        if self._begin(self._head.match(self._held)):
            self._inside = True
            return ""
        end = self._held.find(self._end_tag)
        if end < 0:
            return None
        whole = self._held[: end + len(self._end_tag)]
        self._held = self._held[len(whole) :]
        call = self._read(whole[begin + len(self._begin_tag) : -len(self._end_tag)])
        if call is None:
            return self._text(whole)
        self._take([call])
        self._called = True
        return ""

    def _rest(self) -> str:
        held, self._held = self._held, ""
        if self._inside:  # the output ended where the end's tag was due
            return "" if _CLOSING.fullmatch(held) else held
        _, begun, body = held.partition(self._begin_tag)
        if begun and (call := self._read(body)) is not None:
            self._take([call])
            return ""
        return self._text(held)

    def _text(self, text: str) -> str:
        if self._called:
            text = text.lstrip(SPACE)
            self._called = not text
        return text

    def _read(self, body: str) -> Call | None:
        try:
            return self._call(json.loads(body), self._key)
        except (ValueError, RecursionError):
            return None


class SeriesReader(Reader):
    """Calls from some place on to the end of the output.

    Args:
        marker: where they begin; before it there may be text.
        bare: they may begin without it as well, but only where the output does.
        first, following: what stands before the arguments of a call; names as in `head` or PLAIN_HEAD.
        ending: what may follow the last.
        whole: reads the calls of an output that begins in no such way.
    """

    def __init__(
        self,
        names: frozenset[str],
        marker: str,
        first: str,
        following: str,
        ending: str,
        whole: Whole,
        bare: bool = False,
    ) -> None:
        super().__init__(names)
        self._marker, self._bare, self._whole = marker, bare, whole
        self._first, self._following = re.compile(first), re.compile(following)
        self._ending = re.compile(ending)
        self._called = self._is_text = False

    def _advance(self) -> str | None:
        if self._called:
            return "" if self._begin(self._following.match(self._held)) else None
        shown = self._skim()
        if shown:
            self._held = self._held[len(shown) :]
            return shown
        if self._is_text or not self._begin(self._first.match(self._held)):
            return None
        self._called = True
        return ""

    def _skim(self) -> str:
        """What of the beginning can be no call."""
        if self._is_text:
            return self._held
        if self._bare:
            begin = self._held.lstrip(SPACE)
            if not begin or begin.startswith(("{", self._marker)) or self._marker.startswith(begin):
                return ""
            self._is_text = True
            return self._held
        begin_at = self._held.find(self._marker)
        if begin_at >= 0:
            return self._held[:begin_at].rstrip(SPACE) if self._held[:begin_at].strip(SPACE) else ""
        return self._held[: len(self._held) - _tail(self._held, self._marker)]

    def _rest(self) -> str:
        held, self._held = self._held, ""
        if self._called:
            return "" if self._ending.fullmatch(held) else held
        marked, _, body = held.partition(self._marker)
        if self._bare and not body:
            marked, body = "", marked
        try:
            calls = [] if marked.strip(SPACE) else self._whole(body)
        except (ValueError, RecursionError):
            return held
        good = [call for call in calls if call is not None]
        if not good or len(good) < len(calls):
            return held
        self._take(good)
        return ""


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return ""


def _tail(text: str, marker: str) -> int:
    """Characters at the end that may belong to a marker to come: its beginning, and white space before it."""
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip(SPACE))
