"""What an operator may set on a decode worker. Standard library only besides the owners' settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.engine.plan import EngineConfig
from pdserve.errors import not_allowed
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, check_advertised
from pdserve.telemetry.settings import TelemetrySettings


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of one decode worker; each has a default that works on a laptop."""

    model: str = ""
    """Path of the checkpoint: a Hugging Face directory, a .gguf file or a ModelSpec checkpoint."""

    name: str = ""
    """Served model name; empty: the checkpoint's own."""

    worker_id: str = ""
    """Name in the registry, unique in the pool; empty: made at start."""

    host: str = "127.0.0.1"
    """Interface to listen on. Anything but loopback needs rpc.allow_plaintext."""

    port: int = 0
    """Port of the Decode and Worker services; 0: any free one."""

    transfer_port: int = 0
    """Port of the Transfer service, a listener of its own; 0: any free one."""

    advertise: str = ""
    """host:port that others reach the Decode service by; empty: the address it listens on."""

    advertise_transfer: str = ""
    """host:port that prefill workers reach the Transfer service by; empty: the address it listens on."""

    metrics_host: str = "127.0.0.1"
    """Interface of the metrics page; empty: the same as `host`. Anything but loopback needs rpc.allow_plaintext or
    certificates; with certificates the page is for operators' and routers' alone."""

    metrics_port: int = 0
    """Port of the metrics page, GET /metrics; 0: any free one; -1: no page."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Precision, page pool and threads."""

    rpc: RpcSettings = field(default_factory=RpcSettings)
    """Message size, keepalive, timeouts."""

    registry: RegistrySettings = field(default_factory=RegistrySettings)
    """Where the worker announces itself, and the lease it asks for."""

    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """Traces and logs; set for all parts under [telemetry]."""

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

    first_token_s: float = 0.0
    """Seconds within which first tokens are wanted: an objective, not a limit. A prompt that can still make it, and
    would not behind shorter ones, goes before them. 0: the shortest always goes first."""

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

    reap_s: float = 0.25
    """Seconds between two looks for deadlines that are over."""

    stall_s: float = 30.0
    """Seconds one engine step may take before health reports the worker as not serving."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters to serve from the start: name = directory, as PEFT wrote it. Set for both pools under [model]."""

    adapter_root: str = ""
    """Directory under which adapters may be loaded while the worker serves; empty: none may."""

    max_adapters: int = 16
    """Adapters that may be loaded at a time, replaced ones that are still used among them."""

    adapter_linger_s: float = 30.0
    """Seconds that a replaced adapter stays after its last use, for requests that began on it elsewhere."""

    grace_s: float = 30.0
    """Seconds that sequences in flight get to finish when the worker is told to stop."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        if self.max_adapters < max(1, len(self.adapters)):
            raise not_allowed("decode", "max_adapters", self.max_adapters, "at least 1, and one for each of adapters")
        if self.adapter_linger_s < 0:
            raise not_allowed("decode", "adapter_linger_s", self.adapter_linger_s, "0 seconds or more")
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
        for name in (
            "ticket_ttl_s",
            "idle_s",
            "receive_s",
            "handoff_s",
            "generate_s",
            "reader_s",
            "reap_s",
            "stall_s",
        ):
            if not getattr(self, name) > 0:
                raise not_allowed("decode", name, getattr(self, name), "more than 0 seconds")
        if not 0 <= self.first_token_s < float("inf"):
            raise not_allowed("decode", "first_token_s", self.first_token_s, "0 seconds or more")
        if self.grace_s < 0:
            raise not_allowed("decode", "grace_s", self.grace_s, "0 seconds or more")
        if not -1 <= self.metrics_port < 65536:
            raise not_allowed("decode", "metrics_port", self.metrics_port, "a port from 0 to 65535, or -1 for no page")
        check_advertised("decode.advertise", self.advertise, self.rpc)
        check_advertised("decode.advertise_transfer", self.advertise_transfer, self.rpc)
