"""What an operator may set on a worker of either pool; `PrefillSettings` and `DecodeSettings` add their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.errors import not_allowed
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, check_advertised
from pdserve.telemetry.settings import TelemetrySettings


@dataclass(frozen=True)
class CommonSettings:
    """Each has a default that works on a laptop."""

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

    rpc: RpcSettings = field(default_factory=RpcSettings)
    """Message size, keepalive, timeouts."""

    registry: RegistrySettings = field(default_factory=RegistrySettings)
    """Where the worker announces itself, and the lease it asks for."""

    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """Traces and logs; set for all parts under [telemetry]."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters to serve from the start: name = directory, as PEFT wrote it. Set for both pools under [model]."""

    adapter_root: str = ""
    """Directory under which adapters may be loaded while the worker serves; empty: none may."""

    max_adapters: int = 16
    """Adapters that may be loaded at a time, replaced ones that are still used among them."""

    adapter_linger_s: float = 30.0
    """Seconds that a replaced adapter stays after its last use, for requests that began on it elsewhere."""

    first_token_s: float = 0.0
    """Seconds within which first tokens are wanted: an objective, not a limit. A prompt that can still make it, and
    would not behind shorter ones, goes before them. 0: the shortest always goes first."""

    reap_s: float = 0.25
    """Seconds between two looks for leases and deadlines that are over."""

    stall_s: float = 30.0
    """Seconds one engine step may take before health reports the worker as not serving."""

    grace_s: float = 30.0
    """Seconds that requests in flight get to finish when the worker is told to stop."""

    def check_common(self, section: str) -> None:
        """Raises ConfigError naming the first of these that cannot work, as a key of `section`."""
        if self.max_adapters < max(1, len(self.adapters)):
            raise not_allowed(section, "max_adapters", self.max_adapters, "at least 1, and one for each of adapters")
        for name in ("adapter_linger_s", "grace_s"):
            if getattr(self, name) < 0:
                raise not_allowed(section, name, getattr(self, name), "0 seconds or more")
        if not 0 <= self.first_token_s < float("inf"):
            raise not_allowed(section, "first_token_s", self.first_token_s, "0 seconds or more")
        for name in ("reap_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise not_allowed(section, name, getattr(self, name), "more than 0 seconds")
        if not -1 <= self.metrics_port < 65536:
            raise not_allowed(section, "metrics_port", self.metrics_port, "a port from 0 to 65535, or -1 for no page")
        check_advertised(f"{section}.advertise", self.advertise, self.rpc)
