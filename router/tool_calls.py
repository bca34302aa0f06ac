"""The calls in one output as they come, for both doors: numbered, each with an id, and no more than were asked for."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field, replace

from pdserve.rpc.events import ToolCallPart
from pdserve.tokenizer import Tokenizer
from router.openai_tools import ToolUse
from router.tool_readers import Part

TOOL_CALLS = "tool_calls"  # the reason of an end
_ID_LETTERS = string.ascii_letters + string.digits
_LONG_ID = 24


@dataclass
class _New:
    """A part that is not taken yet, and what its arguments have grown by."""

    head: ToolCallPart
    arguments: list[str] = field(default_factory=list)


class OutputCalls:
    """Reads one output. Mutable."""

    def __init__(self, tools: ToolUse, tokenizer: Tokenizer | None) -> None:
        """Raises InvalidRequest for a model whose way to call functions is not known."""
        form = tools.format(tokenizer)
        self._reader = form.reader(tools.names)
        self._id_length = form.id_length
        self._several = tools.several
        self._begun = 0  # those that were not asked for included
        self._new: list[_New] = []

    def push(self, text: str, *, last: bool = False) -> str:
        """What of this piece of output is text to show. Calls wait for `take`."""
        shown, parts = self._reader.push(text)
        if last:
            rest, more = self._reader.close()
            shown, parts = shown + rest, [*parts, *more]
        for part in parts:
            self._add(part)
        return shown

    @property
    def waiting(self) -> bool:
        """There is something to take."""
        return bool(self._new)

    def take(self) -> tuple[ToolCallPart, ...]:
        """What has come since the last time; of each call one part. Taken only at the end, each is whole."""
        new, self._new = self._new, []
        return tuple(replace(entry.head, arguments="".join(entry.arguments)) for entry in new)

    def reason(self, finish_reason: str) -> str:
        """Of the output's end: `tool_calls`, unless it ended within a call."""
        return TOOL_CALLS if self._begun and not self._reader.cut else finish_reason

    def _add(self, part: Part) -> None:
        self._begun += part.name is not None
        if self._begun > 1 and not self._several:
            return  # it was not asked for
        index = self._begun - 1
        if part.name is not None:
            self._new.append(_New(ToolCallPart(index, id=self._new_id(), name=part.name)))
        elif not self._new or self._new[-1].head.index != index:
            self._new.append(_New(ToolCallPart(index)))
        self._new[-1].arguments.append(part.arguments)

    def _new_id(self) -> str:
        """Templates of some models want just nine letters."""
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(self._id_length))
        return letters if self._id_length < _LONG_ID else f"call_{letters}"
