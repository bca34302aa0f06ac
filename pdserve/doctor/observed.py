"""What the doctor sees, as plain values. Everything is judged from these, in checks.py and canaries.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.client.status import Status, Worker
from pdserve.errors import PdserveError
from pdserve.rpc.events import AttemptRecord
from pdserve.rpc.self_report import Certificate


@dataclass(frozen=True)
class Part:
    """What any part says of itself."""

    version: str
    clock_ms: int  # Unix milliseconds by its own clock
    certificates: tuple[Certificate, ...]


@dataclass(frozen=True)
class Way:
    """From a prefill worker to a Transfer listener, as that worker found it."""

    decode_worker: str
    address: str
    ms: float
    error: PdserveError | None


@dataclass(frozen=True)
class Probe:
    """What a worker that answers says of itself and of what it reaches; fields as in the wire schema."""

    part: Part
    lease_s: float
    registry_ms: float
    registry_error: PdserveError | None
    ways: tuple[Way, ...]
    ways_left_out: int
    kernels: str
    kernels_why: str
    cache_folder: str
    cache_free_bytes: int


@dataclass(frozen=True)
class Books:
    """A worker's accounts of its pages."""

    fault: str  # empty: they are intact
    orphans: tuple[str, ...]
    pages_total: int
    pages_held: int


@dataclass(frozen=True)
class Examined:
    """One worker, as the router reached it."""

    worker_id: str
    suspect: bool = False
    clock_ms: int = 0  # the router's, when the worker had answered
    probe: Probe | None = None
    books: Books | None = None
    error: PdserveError | None = None


@dataclass(frozen=True)
class RouterSeen:
    part: Part
    registry_ms: float
    registry_error: PdserveError | None


@dataclass(frozen=True)
class Observed:
    """A deployment at one moment."""

    gateway: str
    status: Status
    router: RouterSeen
    examined: Mapping[str, Examined]  # by worker id
    asked_ms: int  # Unix milliseconds by this machine's clock: before the router was asked
    answered_ms: int  # and when it had answered
    own: tuple[Certificate, ...] = ()  # of this command; none: it uses no TLS

    def answers(self, worker: Worker) -> bool:
        seen = self.examined.get(worker.worker_id)
        return seen is not None and seen.probe is not None and seen.error is None

    def probes(self) -> Mapping[str, Probe]:
        """Of the workers that answer, by worker id, ordered."""
        return {name: seen.probe for name, seen in sorted(self.examined.items()) if seen.probe is not None}


@dataclass(frozen=True)
class Song:
    """One canary. `prefill_worker` empty: the decode worker computed the prompt."""

    prefill_worker: str
    decode_worker: str
    ids: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()  # per token: log probability of the best id less that of the second
    attempt: AttemptRecord = field(default_factory=AttemptRecord)
    error: PdserveError | None = None

    @property
    def pair(self) -> str:
        return f"{self.prefill_worker or self.decode_worker} -> {self.decode_worker}"
