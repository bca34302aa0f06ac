"""Events and errors in OpenAI's JSON: whole completions, stream chunks, error bodies, models."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.errors import NotFound, PdserveError
from pdserve.rpc.events import Finish, HandoffRecord, PositionLogprobs, TokenBatch, TokenLogprob, Usage
from pdserve.rpc.status import http_status
from pdserve.tokenizer import Tokenizer
from router.backlog import Moved
from router.request import Request

Json = dict[str, Any]

BODY_TOO_LARGE = "BODY_TOO_LARGE"


@dataclass
class Completion:
    """One answer, as a whole or in chunks. Mutable: it decodes the byte stream as it comes."""

    request: Request
    wants_usage: bool = False
    record: HandoffRecord | None = None  # when asked for, from shortly before the end
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._contract_digest = self.request.contract_digest
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text: list[str] = []
        self._tokens = 0
        self._logprobs: list[Json] = []

    def moved(self, to: Moved) -> None:
        """Another version of the model answers."""
        self._contract_digest = to.contract_digest

    def take(self, batch: TokenBatch) -> Json:
        """The chunk for a batch; also kept for `whole`."""
        text = self._decoder.decode(batch.text)
        entries = [logprob_entry(position, self.request.tokenizer) for position in batch.logprobs]
        self._text.append(text)
        self._tokens += len(batch.ids)
        self._logprobs += entries
        return self._chunk({"content": text}, entries)

    def first(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def last(self, finish: Finish) -> Json:
        # Bytes of a character that never ended become a replacement sign here, and only here.
        rest = self._decoder.decode(b"", final=True)
        return {**self._chunk({"content": rest} if rest else {}, None, finish.reason), **self.extension()}

    def failed(self, error: PdserveError) -> Json:
        """The last event of a stream that breaks off, with what had been delivered."""
        counts = Usage(len(self.request.prompt_ids), self._tokens)
        return {**error_body(error), "usage": usage(counts), **self.extension()}

    def extension(self) -> Json:
        """What OpenAI's clients do not know, and only comes when asked for: `pdserve_record`."""
        return {} if self.record is None else {"pdserve_record": asdict(self.record)}

    def usage(self, finish: Finish) -> Json:
        """The chunk that `stream_options.include_usage` asks for."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(finish.usage)}

    def whole(self, finish: Finish) -> Json:
        text = "".join(self._text) + self._decoder.decode(b"", final=True)
        wanted = self.request.sampling.logprobs is not None
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": self._logprobs, "refusal": None} if wanted else None,
            "finish_reason": finish.reason,
        }
        head = self._head("chat.completion")
        return {**head, "choices": [choice], "usage": usage(finish.usage), **self.extension()}

    def _chunk(self, delta: Json, logprobs: list[Json] | None, finish_reason: str | None = None) -> Json:
        wanted = self.request.sampling.logprobs is not None and logprobs is not None
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if wanted else None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.wants_usage else chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{self.request.id.removeprefix('req-')}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": f"fp_{self._contract_digest.hex()[:12]}",
        }


def usage(counts: Usage) -> Json:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.output_tokens,
        "total_tokens": counts.prompt_tokens + counts.output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_prompt_tokens},
    }


def logprob_entry(position: PositionLogprobs, tokenizer: Tokenizer | None) -> Json:
    top = [_logprob(entry, tokenizer) for entry in position.top]
    return {**_logprob(position.chosen, tokenizer), "top_logprobs": top}


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer | None) -> Json:
    data = tokenizer.token_bytes(entry.id) if tokenizer is not None else b""
    # JSON has no infinity; OpenAI writes -9999.0 for a token that cannot come.
    return {"token": data.decode("utf-8", "replace"), "logprob": max(entry.logprob, -9999.0), "bytes": list(data)}


def error_status(error: PdserveError) -> int:
    return 413 if error.reason == BODY_TOO_LARGE else http_status(error)


def error_body(error: PdserveError) -> Json:
    """OpenAI's error object, with our differences beside it when contracts disagree."""
    status = error_status(error)
    body: Json = {
        "message": str(error),
        "type": _error_type(status),
        "param": error.field or None,
        "code": "model_not_found" if isinstance(error, NotFound) and error.field == "model" else error.reason.lower(),
    }
    if error.differences:
        body["differences"] = [
            {"code": d.code, "prefill": d.left, "decode": d.right, "class": d.kind} for d in error.differences
        ]
    return {"error": body}


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def models(served: Mapping[str, int]) -> Json:
    return {"object": "list", "data": [model(name, created) for name, created in served.items()]}


def model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "pdserve"}


def sse(data: Json | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else dumps(data)
    return f"data: {text}\n\n".encode()


def dumps(data: Json | Iterable[Json]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
