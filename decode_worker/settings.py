"""What an operator may set on a decode worker. What both have is in CommonSettings."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.plan import EngineConfig
from pdserve.errors import not_allowed
from pdserve.rpc.settings import check_advertised
from pdserve.worker.settings import CommonSettings


@dataclass(frozen=True)
class DecodeSettings(CommonSettings):
    """Settings of one decode worker; each has a default that works on a laptop."""

    transfer_port: int = 0
    """Port of the Transfer service, a listener of its own; 0: any free one."""

    advertise_transfer: str = ""
    """host:port that prefill workers reach the Transfer service by; empty: the address it listens on."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Precision, page pool and threads."""

    context_limit: int = 0
    """Tokens of prompt and output together; 0: the model's own limit."""

    allow_lossy: bool = False
    """Consents to caches whose KV, weight and activation precision is another,
    with loss. Counts only if the other worker and the router consent too; each response then says so."""

    max_queue: int = 64
    """Requests that may wait for their cache; one more is refused with RESOURCE_EXHAUSTED."""

    max_batch: int = 32
    """Sequences of one engine step."""

    growth_watermark: float = 0.05
    """Share of the page pool that must stay available after a new request got its pages, so that those
    that run can grow; a request gets pages for its prompt and one more token. 0 fills the pool; more
    preempts less. It does not apply to a request that would be alone."""

    recompute_tokens: int = 256
    """Tokens of one step that may be spent on sequences that were preempted, to compute again what their
    pages held. More brings them back sooner and makes the others' tokens wait longer."""

    chunk_tokens: int = 256
    """Prompt tokens of one step, over all prompts that this worker computes itself (router.disaggregate)."""

    step_ms: float = 100.0
    """Milliseconds that a step should take at most in which streams wait for their next token: prompts that this
    worker computes itself get as many tokens of it as fit, but at least 8. 0: always chunk_tokens."""

    max_unread_tokens: int = 256
    """Tokens that wait for a slow reader before its sequence pauses."""

    shared_memory: str = "auto"
    """Reads payloads from memory that a prefill worker on this machine offers, if both agree; off: they
    always travel over gRPC. Both run as the same user and see each other's processes, or gRPC it is."""

    ticket_ttl_s: float = 60.0
    """Seconds from a ticket's issue until the push must have opened and got its pages."""

    idle_s: float = 30.0
    """Seconds between two messages of a push; then the attempt has failed, and may be retried."""

    receive_s: float = 120.0
    """Seconds from a grant until the whole cache must have been verified; then the request has expired."""

    handoff_s: float = 180.0
    """Seconds from admission until the whole cache must have been verified, all attempts together."""

    max_attempts: int = 16
    """Tickets that one request may use, the first included."""

    generate_s: float = 600.0
    """Seconds from admission to the last token; an earlier deadline of the call counts instead."""

    reader_s: float = 30.0
    """Seconds a sequence may pause, or a message wait, for its reader before it is ended."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        self.check_common("decode")
        if self.shared_memory not in ("auto", "off"):
            raise not_allowed("decode", "shared_memory", self.shared_memory, "auto or off")
        for name in ("max_queue", "max_batch", "recompute_tokens", "max_unread_tokens", "max_attempts"):
            if getattr(self, name) < 1:
                raise not_allowed("decode", name, getattr(self, name), "at least 1")
        if self.chunk_tokens < 4:
            raise not_allowed("decode", "chunk_tokens", self.chunk_tokens, "at least 4")
        if not 0 <= self.step_ms < float("inf"):
            raise not_allowed("decode", "step_ms", self.step_ms, "0 milliseconds or more")
        if not 0 <= self.growth_watermark < 1:
            raise not_allowed(
                "decode", "growth_watermark", self.growth_watermark, "a share of the pool from 0 to below 1"
            )
        if self.context_limit < 0:
            raise not_allowed("decode", "context_limit", self.context_limit, "0 or a number of tokens")
        for name in ("ticket_ttl_s", "idle_s", "receive_s", "handoff_s", "generate_s", "reader_s"):
            if not getattr(self, name) > 0:
                raise not_allowed("decode", name, getattr(self, name), "more than 0 seconds")
        check_advertised("decode.advertise_transfer", self.advertise_transfer, self.rpc)
