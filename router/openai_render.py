"""What all answers share in OpenAI's JSON: errors, usage, models, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.errors import NotFound, PdserveError
from pdserve.rpc.events import Usage
from pdserve.rpc.status import http_status

Json = dict[str, Any]

BODY_TOO_LARGE = "BODY_TOO_LARGE"


def usage(counts: Usage) -> Json:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.output_tokens,
        "total_tokens": counts.prompt_tokens + counts.output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_prompt_tokens},
    }


def logprob_value(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999.0 for a token that cannot come."""
    return max(value, -9999.0)


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


def models(served: Mapping[str, tuple[str, int]]) -> Json:
    return {"object": "list", "data": [model(name, *told) for name, told in served.items()]}


def model(name: str, base: str, created: int) -> Json:
    """`base`: the model that an adapter is for; empty: it is none. In the way that vLLM tells it."""
    told: Json = {"id": name, "object": "model", "created": created, "owned_by": "pdserve"}
    return told | {"parent": base} if base else told


def sse(data: Json | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else dumps(data)
    return f"data: {text}\n\n".encode()


def dumps(data: Json | Iterable[Json]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
