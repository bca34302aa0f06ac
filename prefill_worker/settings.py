"""What an operator may set on a prefill worker. Standard library only besides the owners' settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.engine.plan import EngineConfig
from pdserve.errors import not_allowed
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, check_advertised
from pdserve.telemetry.settings import TelemetrySettings


@dataclass(frozen=True)
class PrefillSettings:
    """Settings of one prefill worker; each has a default that works on a laptop."""

    model: str = ""
    """Path of the checkpoint: a Hugging Face directory, a .gguf file or a ModelSpec checkpoint."""

    name: str = ""
    """Served model name; empty: the checkpoint's own."""

    worker_id: str = ""
    """Name in the registry, unique in the pool; empty: made at start."""

    host: str = "127.0.0.1"
    """Interface to listen on. Anything but loopback needs rpc.allow_plaintext."""

    port: int = 0
    """Port to listen on; 0: any free one."""

    advertise: str = ""
    """host:port that others reach this worker by; empty: the address it listens on."""

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
    """Tokens of the longest prompt served; 0: the model's own limit."""

    allow_lossy: bool = False
    """Consents to decode workers whose KV, weight and activation precision is another,
    with loss. Counts only if the other worker and the router consent too; each response then says so."""

    max_queue: int = 64
    """Prompts that may wait for pages; one more is refused with RESOURCE_EXHAUSTED."""

    max_running: int = 16
    """Prompts that may hold pages at a time, those waiting for decode's acknowledgement included."""

    chunk_tokens: int = 256
    """Tokens of one engine step, over all prompts in it. Smaller: other prompts and cancellation come sooner."""

    batch_tokens: int = 64
    """Tokens up to which a step of short prompts is filled with parts of others. Larger: each step's fixed cost is
    shared by more tokens; smaller: short prompts wait for less that is not theirs."""

    step_ms: float = 500.0
    """Milliseconds that one engine step should take at most. Far into a long prompt, or on a slow machine, steps get
    fewer tokens, by halves, but not fewer than batch_tokens."""

    first_token_s: float = 0.0
    """Seconds within which first tokens are wanted: an objective, not a limit. A prompt that can still make it, and
    would not behind shorter ones, goes before them. 0: the shortest always goes first."""

    shared_memory: str = "auto"
    """Offers payloads in shared memory to decode workers on this machine, if both agree; off: they
    always travel over gRPC. Both run as the same user and see each other's processes, or gRPC it is."""

    lease_s: float = 60.0
    """Seconds a prompt may hold pages, from leaving the queue to decode's acknowledgement."""

    reap_s: float = 0.25
    """Seconds between two looks for leases and deadlines that are over."""

    stall_s: float = 30.0
    """Seconds one engine step may take before health reports the worker as not serving."""

    allow_trace: bool = False
    """Lets `pdserve verify worker:HOST:PORT` see what this model computes for its own test prompts, layer by layer.
    No request's data is shown, but whoever reaches the port can use the engine and learn about the weights."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters to serve from the start: name = directory, as PEFT wrote it. Set for both pools under [model]."""

    adapter_root: str = ""
    """Directory under which adapters may be loaded while the worker serves; empty: none may."""

    max_adapters: int = 16
    """Adapters that may be loaded at a time, replaced ones that are still used among them."""

    adapter_linger_s: float = 30.0
    """Seconds that a replaced adapter stays after its last use, for requests that began on it elsewhere."""

    grace_s: float = 30.0
    """Seconds that prompts in flight get to finish when the worker is told to stop."""

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        if self.max_adapters < max(1, len(self.adapters)):
            raise not_allowed("prefill", "max_adapters", self.max_adapters, "at least 1, and one for each of adapters")
        if self.adapter_linger_s < 0:
            raise not_allowed("prefill", "adapter_linger_s", self.adapter_linger_s, "0 seconds or more")
        if self.shared_memory not in ("auto", "off"):
            raise not_allowed("prefill", "shared_memory", self.shared_memory, "auto or off")
        if self.max_queue < 1:
            raise not_allowed("prefill", "max_queue", self.max_queue, "at least 1")
        if self.max_running < 1:
            raise not_allowed("prefill", "max_running", self.max_running, "at least 1")
        if self.chunk_tokens < 4:
            raise not_allowed("prefill", "chunk_tokens", self.chunk_tokens, "at least 4")
        if self.batch_tokens < 4:
            raise not_allowed("prefill", "batch_tokens", self.batch_tokens, "at least 4")
        if self.context_limit < 0:
            raise not_allowed("prefill", "context_limit", self.context_limit, "0 or a number of tokens")
        for name in ("lease_s", "reap_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise not_allowed("prefill", name, getattr(self, name), "more than 0 seconds")
        if not self.step_ms > 0:
            raise not_allowed("prefill", "step_ms", self.step_ms, "more than 0 milliseconds")
        if not 0 <= self.first_token_s < float("inf"):
            raise not_allowed("prefill", "first_token_s", self.first_token_s, "0 seconds or more")
        if self.grace_s < 0:
            raise not_allowed("prefill", "grace_s", self.grace_s, "0 seconds or more")
        if not -1 <= self.metrics_port < 65536:
            raise not_allowed("prefill", "metrics_port", self.metrics_port, "a port from 0 to 65535, or -1 for no page")
        check_advertised("prefill.advertise", self.advertise, self.rpc)
