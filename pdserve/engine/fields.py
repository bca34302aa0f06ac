"""Reading a configuration so that no key is overlooked.

Both loaders (Hugging Face config.json, GGUF metadata) take what they understand from a
`Fields` and then call `finish`, which refuses by name whatever nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pdserve.errors import CheckpointError

T = TypeVar("T")
_MISSING: Any = object()


class Fields:
    """A mapping that remembers which keys were taken. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._named = frozenset(values)
        self._values = {key: value for key, value in values.items() if value is not None}
        self._where = where
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self, key: str) -> bool:
        """Whether the key is there at all, even as null."""
        return key in self._named

    def taken(self, key: str) -> bool:
        return key in self._taken

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a key; raises CheckpointError if it is absent and has no default."""
        self._taken.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise self.missing(key)
        return value

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1, maximum: int = 2**62) -> int:
        what = f"an integer from {minimum}" + (f" to {maximum}" if maximum < 2**62 else "")
        value: int = self._typed(key, default, lambda v: _is_integer(v) and minimum <= v <= maximum, what)
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite positive number."""
        return float(self._typed(key, default, _is_positive, "a positive number"))

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` finite positive numbers."""

        def good(value: Any) -> bool:
            return isinstance(value, list) and len(value) == count and all(_is_positive(item) for item in value)

        return [float(item) for item in self._typed(key, _MISSING, good, f"{count} positive numbers")]

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value: bool = self._typed(key, default, lambda v: isinstance(v, bool), "true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value: str = self._typed(key, default, lambda v: isinstance(v, str), "a string")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: Any = _MISSING) -> T:
        """The meaning of a named option; raises CheckpointError with the known names."""
        name = self.text(key, default)
        if name not in choices:
            raise self.unsupported(key, name, f"known are {', '.join(sorted(choices))}")
        return choices[name]

    def expect(self, key: str, allowed: Sequence[Any]) -> None:
        """Takes a key that changes the computation and is supported only at these values."""
        if key in self._values and self._values[key] not in allowed:
            raise self.unsupported(key, self._values[key], f"only {', '.join(map(str, allowed))} is supported")
        self._taken.add(key)

    def missing(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where} has no {key}",
            field=key,
            reason="MISSING_KEY",
            remedy="use a complete checkpoint; this key has no safe default",
        )

    def unsupported(self, key: str, value: object, remedy: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where} asks for {key} = {_short(value)}, which is not supported",
            field=key,
            reason="UNSUPPORTED_KEY",
            remedy=remedy,
        )

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Raises CheckpointError for the first key that was neither taken nor known to be harmless."""
        for key in sorted(self._values):
            if key not in self._taken and not ignorable(key):
                raise CheckpointError(
                    f"{self._where} has {key} = {_short(self._values[key])}, which this loader does not know",
                    field=key,
                    reason="UNKNOWN_KEY",
                    remedy="remove the key if it does not change the computation; otherwise the model is not supported",
                )

    def _typed(self, key: str, default: Any, good: Callable[[Any], bool], what: str) -> Any:
        value = self.take(key, default)
        if value is not default and not good(value):
            raise CheckpointError(
                f"{self._where} has {key} = {_short(value)}, expected {what}",
                field=key,
                reason="BAD_VALUE",
                remedy="correct it, or get the model's files again",
            )
        return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value > 0


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
