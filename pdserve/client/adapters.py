"""Adapters of a deployment as plain values, and the requests that change them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.rpc.status import from_detail
from pdserve.v1 import adapters_pb2

LOAD_TIMEOUT_S = 330.0  # for every worker to read an adapter
UNLOAD_WAIT_S = 30.0
_ANSWER_S = 20.0  # beyond the time that requests get


@dataclass(frozen=True)
class Adapter:
    name: str  # empty: a replaced version that may still be used
    digest: bytes
    users: int  # requests that compute with it now
    rank: int
    size_bytes: int


@dataclass(frozen=True)
class WorkerAdapters:
    """What one worker serves after the call, or why it did not do what was asked."""

    worker_id: str
    role: str  # prefill | decode
    model: str
    adapters: tuple[Adapter, ...]
    error: PdserveError | None = None


def load_request(name: str, path: str, model: str) -> adapters_pb2.LoadAdapterRequest:
    return adapters_pb2.LoadAdapterRequest(model=model, name=name, path=path)


def unload_request(name: str, model: str, wait_s: float) -> adapters_pb2.UnloadAdapterRequest:
    return adapters_pb2.UnloadAdapterRequest(model=model, name=name, wait_ms=round(1000 * wait_s))


def unload_timeout_s(wait_s: float) -> float:
    """Decode workers first, then prefill workers."""
    return 2 * wait_s + _ANSWER_S


def adapters_from_proto(message: adapters_pb2.AdaptersResponse) -> tuple[WorkerAdapters, ...]:
    return tuple(
        WorkerAdapters(
            worker_id=worker.worker_id,
            role=worker.role,
            model=worker.model,
            adapters=tuple(Adapter(a.name, a.digest, a.users, a.rank, a.size_bytes) for a in worker.adapters),
            error=from_detail(worker.error) if worker.HasField("error") else None,
        )
        for worker in message.workers
    )
