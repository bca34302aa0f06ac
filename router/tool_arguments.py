"""The arguments of a call as a model writes them: one JSON object, in pieces."""

from __future__ import annotations


class Arguments:
    """Where an object ends that comes in pieces."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._quoted = self._escaped = False

    def take(self, text: str) -> int:
        """Characters that belong to it."""
        for at, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return at + 1
        return len(text)
