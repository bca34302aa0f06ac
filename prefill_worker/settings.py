"""What an operator may set on a prefill worker. What both have is in CommonSettings."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.plan import EngineConfig
from pdserve.errors import not_allowed
from pdserve.worker.settings import CommonSettings


@dataclass(frozen=True)
class PrefillSettings(CommonSettings):
    """Settings of one prefill worker; each has a default that works on a laptop."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Precision, page pool and threads."""

    context_limit: int = 0
    """Tokens of the longest prompt served; 0: the model's own limit."""

    allow_lossy: bool = False
    """Consents to decode workers whose KV, weight and activation precision is another,
    with loss. Counts only if the other worker and the router consent too; each response then says so."""

    max_queue: int = 64
    """Prompts that may wait for pages; one more is refused with RESOURCE_EXHAUSTED."""

    max_running: int = 16
    """Prompts that may hold pages at a time, those waiting for decode's acknowledgement included."""

    chunk_tokens: int = 256
    """Tokens of one engine step, over all prompts in it. Smaller: other prompts and cancellation come sooner. Larger:
    prompts that a decode worker helps with (router.disaggregate) are done sooner."""

    batch_tokens: int = 64
    """Tokens up to which a step of short prompts is filled with parts of others. Larger: each step's fixed cost is
    shared by more tokens; smaller: short prompts wait for less that is not theirs."""

    step_ms: float = 500.0
    """Milliseconds that one engine step should take at most. Far into a long prompt, or on a slow machine, steps get
    fewer tokens, by halves, but not fewer than batch_tokens."""

    shared_memory: str = "auto"
    """Offers payloads in shared memory to decode workers on this machine, if both agree; off: they
    always travel over gRPC. Both run as the same user and see each other's processes, or gRPC it is."""

    lease_s: float = 60.0
    """Seconds a prompt may hold pages, from leaving the queue to decode's acknowledgement."""

    allow_trace: bool = False
    """Lets `pdserve verify worker:HOST:PORT` see what this model computes for its own test prompts, layer by layer.
    No request's data is shown, but whoever reaches the port can use the engine and learn about the weights."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        self.check_common("prefill")
        if self.shared_memory not in ("auto", "off"):
            raise not_allowed("prefill", "shared_memory", self.shared_memory, "auto or off")
        for name in ("max_queue", "max_running"):
            if getattr(self, name) < 1:
                raise not_allowed("prefill", name, getattr(self, name), "at least 1")
        for name in ("chunk_tokens", "batch_tokens"):
            if getattr(self, name) < 4:
                raise not_allowed("prefill", name, getattr(self, name), "at least 4")
        if self.context_limit < 0:
            raise not_allowed("prefill", "context_limit", self.context_limit, "0 or a number of tokens")
        if not self.lease_s > 0:
            raise not_allowed("prefill", "lease_s", self.lease_s, "more than 0 seconds")
        if not self.step_ms > 0:
            raise not_allowed("prefill", "step_ms", self.step_ms, "more than 0 milliseconds")
