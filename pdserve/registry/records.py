"""Worker records, and the one interface that both registries implement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cache_transfer.contract import Endpoint, WorkerContract

PREFILL = "prefill"
DECODE = "decode"

STARTING = "starting"
READY = "ready"
DRAINING = "draining"
STALLED = "stalled"  # an engine step takes too long; READY again when it ends

# Options of a request that workers of the first version ignore without a word, so that those that follow them say so.
GRAMMAR = "grammar"
CHOICES = "choices"
SPECIAL_TOKENS = "skip_special_tokens"
SPLIT = "split_prompts"


@dataclass(frozen=True)
class Load:
    """What a worker reports about itself with every heartbeat."""

    running: int = 0
    waiting: int = 0
    waiting_limit: int = 0
    queued_tokens: int = 0
    pages_total: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    tokens_per_s: float = 0.0
    steps: int = 0
    prefill_tokens_per_s: float = 0.0  # of a prompt alone there; this and what follows: 0 is "not measured yet"
    shared_prefill_tokens_per_s: float = 0.0  # of one beside the streams that run now, or one; decode only
    queued_prefill_tokens: int = 0  # that this worker itself has still to compute
    predicted_wait_s: float = 0.0  # before a prompt as long as the longest step would begin
    transfer_bytes_per_s: float = 0.0  # prefill only
    decode_step_ms: float = 0.0  # decode only
    fixed_step_ms: float = 0.0  # of a step, whatever is in it
    prefill_token_us: float = 0.0  # of a prompt's token in full steps, its part of their fixed cost included
    prefill_pair_ns: float = 0.0  # and for each token that it reads, itself and all before it
    step_ms: float = 0.0  # the step that ran when this was told, as expected; 0: idle
    batch_limit: int = 0  # streams of one step at most; decode only, 0: not told
    chunk_tokens: int = 0  # of a prompt in one step at most; 0: not told


@dataclass(frozen=True)
class NamedAdapter:
    """A version of an adapter that a worker takes requests for."""

    name: str  # empty: a replaced one, for requests that began on it
    digest: bytes  # 32 bytes over its content


@dataclass(frozen=True)
class WorkerRecord:
    worker_id: str
    role: str  # PREFILL | DECODE
    incarnation: bytes  # boot id, 16 random bytes
    state: str
    model: str  # served model name
    endpoints: tuple[Endpoint, ...]  # Prefill or Decode, and Worker, services
    transfer: tuple[Endpoint, ...]  # Transfer listeners; decode only
    contract: WorkerContract
    load: Load = Load()
    lease_s: float = 5.0  # seconds the record lives after each renewal
    takes_prompts: bool = False  # a decode worker that computes prompts itself when asked to
    capabilities: frozenset[str] = frozenset()  # options that it follows and an older version would ignore
    adapters: tuple[NamedAdapter, ...] = ()
    metrics: str = ""  # host:port of its metrics page; empty: it has none


@dataclass(frozen=True)
class LiveRecord:
    """A record and the seconds its lease still had when the snapshot was taken."""

    record: WorkerRecord
    lease_left_s: float


class Registry(Protocol):
    """All methods raise Unavailable when the registry cannot be reached, within `timeout_s`."""

    async def register(self, record: WorkerRecord, again: bool = False) -> None:
        """Adds the record or replaces an earlier incarnation of the same worker id.

        Args:
            again: it was registered before, and forgotten. Raises Refused (WORKER_ID_TAKEN) when another
                incarnation's lease lives: of two workers with one id the later one stays.
        """
        ...

    async def heartbeat(self, worker_id: str, incarnation: bytes, state: str, load: Load) -> None:
        """Renews the lease. Raises NotFound when the record is gone or another incarnation's."""
        ...

    async def deregister(self, worker_id: str, incarnation: bytes) -> None:
        """Removes the record if this incarnation owns it; otherwise does nothing."""
        ...

    async def snapshot(self) -> tuple[LiveRecord, ...]:
        """All records whose lease has not ended, ordered by worker id."""
        ...

    async def close(self) -> None: ...
