"""Values of a message that is not trusted, each checked as it is read."""

from __future__ import annotations

import math
from typing import NoReturn

from pdserve.errors import InvalidRequest

DIGEST_BYTES = 32
MAX_TEXT = 256  # characters of a name


class FieldReader:
    """Checks single values of one message and raises InvalidRequest with the field's path."""

    def __init__(self, message: str, reason: str) -> None:
        self._message = message
        self._reason = reason

    def fail(self, name: str, problem: str) -> NoReturn:
        raise InvalidRequest(
            f"the {self._message}'s {name} {problem}",
            reason=self._reason,
            field=f"{self._message}.{name}",
            remedy="send what docs/protocol.md describes",
        )

    def digest(self, name: str, value: bytes, size: int = DIGEST_BYTES) -> bytes:
        if len(value) != size:
            self.fail(name, f"has {len(value)} bytes, not {size}")
        return value

    def number(self, name: str, value: int, low: int, high: int = 2**32 - 1) -> int:
        if not low <= value <= high:
            self.fail(name, f"is {value}, outside [{low}, {high}]")
        return value

    def count(self, name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            self.fail(name, f"has {value} entries, outside [{low}, {high}]")

    def finite(self, name: str, value: float) -> float:
        if not math.isfinite(value):
            self.fail(name, f"is {value}, not a finite number")
        return value

    def text(self, name: str, value: str, low: int = 1, high: int = MAX_TEXT) -> str:
        if not low <= len(value) <= high:
            self.fail(name, f"has {len(value)} characters, outside [{low}, {high}]")
        return value

    def one_of(self, name: str, value: str, known: tuple[str, ...]) -> str:
        if value not in known:
            self.fail(name, f"is {value[:MAX_TEXT]!r}, not one of {', '.join(known)}")
        return value
