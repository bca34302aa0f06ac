"""One answer in OpenAI's JSON, whole or in chunks: what chat and text completions have in common.

An answer has `n` choices per prompt, prompt-major. Each decodes its own bytes, so that no character is cut in two. An
event of a stream costs one string: everything but its text is written once per choice.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring
from typing import Any, ClassVar

from pdserve.errors import PdserveError
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, PositionLogprobs, TokenBatch, Usage
from router.backlog import Moved
from router.openai_render import Json, dumps, error_body, sse, usage
from router.request import Request

_MARK = "\x00"  # where the text goes; as JSON it is the only such escape in a chunk


@dataclass
class Choice:
    """One output as far as it has come. Mutable."""

    index: int
    request: Request
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish: Finish | None = None
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    frame: tuple[str, str] | None = None  # an event of a stream before and after its text

    @property
    def wants_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None


class Answer(ABC):
    """See the module's docstring. Events come as (number of the request, event)."""

    prefix: ClassVar[str]  # of its id
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, requests: Sequence[Request], wants_usage: bool = False, wants_ids: bool = False) -> None:
        outputs = [request for request in requests for _ in range(request.n)]
        self.choices = [Choice(index, request) for index, request in enumerate(outputs)]
        self._requests = requests
        self.record: HandoffRecord | None = None  # when asked for, from shortly before the end
        self.wants_usage = wants_usage
        self._wants_ids = wants_ids
        self._contract_digest = requests[0].contract_digest
        self._created = int(time.time())

    def note(self, number: int, event: Accepted | Moved | HandoffRecord) -> None:
        """What comes besides tokens and ends."""
        if isinstance(event, Moved):  # another version of the model answers
            self._contract_digest = event.contract_digest
        elif isinstance(event, HandoffRecord):
            self.record = event

    def keep(self, number: int, event: TokenBatch | Finish) -> None:
        """For `whole`."""
        choice = self._choice(number, event)
        if isinstance(event, TokenBatch):
            self._take(choice, event)
        else:
            self._finish(choice, event)

    def opening(self) -> bytes:
        """Events of a stream before the first token's."""
        return b""

    def event(self, number: int, event: TokenBatch | Finish) -> bytes:
        """The events of a stream for this one; none where there is nothing to show."""
        choice = self._choice(number, event)
        if isinstance(event, Finish):
            return self._ending(choice, event)
        text, logprobs = self._take(choice, event)
        if logprobs is None and not self._wants_ids and not self._has_more(choice):
            return self._quick(choice, text)
        body = self._delta(choice, text, logprobs, None)
        return sse(self._chunk({**body, "token_ids": list(event.ids)} if self._wants_ids else body))

    def closing(self) -> bytes:
        """After the last choice's end."""
        counts = (
            sse({**self._head(self.chunk_kind), "choices": [], "usage": self._usage()}) if self.wants_usage else b""
        )
        return counts + sse("[DONE]")

    def failed(self, error: PdserveError) -> bytes:
        """The last event of a stream that breaks off, with what had been delivered."""
        return sse({**error_body(error), "usage": self._usage(), **self.extension()})

    def whole(self) -> Json:
        choices = [self._whole(choice) for choice in self.choices]
        return {**self._head(self.whole_kind), "choices": choices, "usage": self._usage(), **self.extension()}

    def extension(self) -> Json:
        """What OpenAI's clients do not know, and only comes when asked for: `pdserve_record`."""
        return {} if self.record is None else {"pdserve_record": asdict(self.record)}

    def _choice(self, number: int, event: TokenBatch | Finish) -> Choice:
        return self.choices[number * self._requests[number].n + event.choice]

    def _visible(self, choice: Choice, text: str, last: bool) -> str:
        """What of a piece of output is text to show."""
        return text

    def _has_more(self, choice: Choice) -> bool:
        """There is something besides text to tell now."""
        return False

    def _reason(self, choice: Choice, finish: Finish) -> str:
        return finish.reason

    @abstractmethod
    def _delta(self, choice: Choice, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice of a stream's chunk."""

    @abstractmethod
    def _entire(self, choice: Choice, text: str) -> Json:
        """A choice of a whole answer."""

    @abstractmethod
    def _logprobs(self, choice: Choice, positions: Sequence[PositionLogprobs]) -> list[Json]:
        """What a choice keeps of each position."""

    @abstractmethod
    def _logprobs_of(self, entries: Sequence[Json]) -> Json:
        """Kept positions as they are sent."""

    def _take(self, choice: Choice, batch: TokenBatch) -> tuple[str, Json | None]:
        text = self._visible(choice, choice.decoder.decode(batch.text), last=False)
        choice.text.append(text)
        choice.ids += batch.ids
        if not choice.wants_logprobs:
            return text, None
        entries = self._logprobs(choice, batch.logprobs)
        choice.logprobs += entries
        return text, self._logprobs_of(entries)

    def _finish(self, choice: Choice, finish: Finish) -> str:
        """The rest of its text: bytes of a character that never ended become a replacement sign here, and only here."""
        rest = self._visible(choice, choice.decoder.decode(b"", final=True), last=True)
        choice.text.append(rest)
        choice.finish = finish
        return rest

    def _quick(self, choice: Choice, text: str) -> bytes:
        if not text:
            return b""
        if choice.frame is None:
            chunk = dumps(self._chunk(self._delta(choice, _MARK, None, None)))
            before, _, after = chunk.partition(encode_basestring(_MARK))
            choice.frame = f"data: {before}", f"{after}\n\n"
        before, after = choice.frame
        return (before + encode_basestring(text) + after).encode()

    def _ending(self, choice: Choice, finish: Finish) -> bytes:
        rest = self._finish(choice, finish)
        body = self._delta(choice, rest, None, self._reason(choice, finish))
        return sse({**self._chunk(body), **self.extension()})

    def _whole(self, choice: Choice) -> Json:
        body = self._entire(choice, "".join(choice.text))
        return {**body, "token_ids": choice.ids} if self._wants_ids else body

    def _usage(self) -> Json:
        """Each prompt once, and the output of all choices, also of one without an end."""
        cached = {id(c.request): c.finish.usage.cached_prompt_tokens for c in self.choices if c.finish is not None}
        return usage(
            Usage(
                sum(len(request.prompt_ids) for request in self._requests),
                sum(len(choice.ids) for choice in self.choices),
                sum(cached.values()),
            )
        )

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head(self.chunk_kind), "choices": [choice]}
        return {**chunk, "usage": None} if self.wants_usage else chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self.choices[0].request.id.removeprefix('req-')}",
            "object": kind,
            "created": self._created,
            "model": self.choices[0].request.served,
            "system_fingerprint": f"fp_{self._contract_digest.hex()[:12]}",
        }
