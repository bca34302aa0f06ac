"""What an operator may set on a router. Standard library only besides the owners' settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from pdserve.errors import ConfigError, not_allowed
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings, TlsSettings
from pdserve.telemetry.settings import TelemetrySettings
from router.tenants import Tenant, check_tenants

_SECONDS = (
    "request_timeout_s",
    "admit_timeout_s",
    "first_token_timeout_s",
    "inter_token_timeout_s",
    "refresh_s",
    "share_s",
    "client_stall_s",
    "settle_s",
    "http_header_s",
)
_COUNTS = (
    "max_active",
    "max_attempts",
    "backlog_tokens",
    "max_body_bytes",
    "max_bundles",
    "prefix_blocks",
)

_IDLE_CONNECTIONS = 256
_ORIGIN = re.compile(r"https?://[^/?#@\s]+")

ALWAYS, NEVER, AUTO = DISAGGREGATE = ("always", "never", "auto")


@dataclass(frozen=True)
class RouterSettings:
    """Settings of one router; each has a default that works on a laptop."""

    host: str = "127.0.0.1"
    """Interface of the gRPC gateway. Anything but loopback needs rpc.allow_plaintext."""

    port: int = 8470
    """Port of the gRPC gateway, which also serves the embedded registry; 0: any free one."""

    http_host: str = ""
    """Interface of the OpenAI HTTP API; empty: the same as `host`."""

    http_port: int = 8471
    """Port of the OpenAI HTTP API; 0: any free one."""

    http_cert_file: str = ""
    """Certificate that HTTP clients see, in PEM, such as a public authority's for your domain, where [rpc.tls] is
    set; empty: the router's own. Read again when it changes."""

    http_key_file: str = ""
    """Private key of `http_cert_file`."""

    http_client_certificates: bool = False
    """HTTP clients, too, must show a certificate of [rpc.tls]'s authority. gRPC clients always must."""

    cors_origins: tuple[str, ...] = ()
    """Web pages that may call the HTTP API from a browser, by origin, such as ["https://chat.example.org"]; "*": any.
    Empty: none. Where there are no tenants, whoever can make your browser open such a page can use the models."""

    tenant: str = "default"
    """Tenant of every caller when `tenants` is empty. Never taken from a request."""

    tenants: tuple[Tenant, ...] = ()
    """Who may call, by API key, such as [{name = "acme", keys_env = "ACME_KEYS"}]. The keys, or sha256:HEX of each,
    come from a variable (keys_env), from a file (keys_file) or from here (keys = ["..."]). Empty: anyone may, without
    a key."""

    operators: tuple[str, ...] = ()
    """Tenants who may load and unload adapters through this router, and see its workers (status) and pages (/ui,
    /metrics). Without `tenants`, whoever reaches it may, adapters as far as the workers' adapter_root lets them."""

    metrics_open: bool = False
    """Whoever reaches the HTTP port may read /metrics, without a key or certificate of an operator's: for a Prometheus
    that has none."""

    allow_lossy: bool = False
    """Does not refuse pairs that differ in KV, weight and activation precision, if both workers consent, too."""

    disaggregate: str = ALWAYS
    """Who computes prompts. always: a prefill worker, without which nothing is served. never: the decode worker that
    goes on with them. auto: whichever is predicted to be cheaper, or both together (the prefill worker
    the beginning, the decode worker the end), from the rates that workers measure; the decode worker, too, where no
    prefill worker is left. For the operator to set: a request cannot choose."""

    request_timeout_s: float = 600.0
    """Longest life of one request, all attempts and the whole answer included."""

    admit_timeout_s: float = 10.0
    """A decode worker that has not answered the opening of a request by then is given up."""

    first_token_timeout_s: float = 60.0
    """An attempt that has a decode worker's ticket and no token by then is given up; its request moves
    to another pair of workers. Queues, prefill and transfer count: allow for the longest prompt."""

    inter_token_timeout_s: float = 30.0
    """A decode worker that streams, then says nothing for so long, is given up, and its request goes on
    at another pair. One whose engine has stepped in the second half of that time is only busy with
    others, and is waited for. Allow for its slowest step, and for several heartbeats, which tell the steps."""

    max_active: int = 256
    """Requests in flight at a time; one more is refused with RESOURCE_EXHAUSTED."""

    max_wait_s: float = 30.0
    """A request that is predicted to wait longer than this for others is refused at once with RESOURCE_EXHAUSTED, and
    told when to come again. Of several tenants, each may fill a part of that time. 0: nothing is refused for it."""

    max_attempts: int = 16
    """Handoffs begun for one request: the first, others in its place, and resumptions in mid-stream."""

    backlog_tokens: int = 1024
    """Unread tokens kept for a slow client before its decode worker is made to wait."""

    client_stall_s: float = 20.0
    """A client that takes nothing for this long while there is something to take is disconnected.
    Keep it below the decode workers' reader_s (30), or they end the answer first, as SLOW_READER."""

    http_header_s: float = 10.0
    """An HTTP connection that has not sent the whole header of a request by then is closed; a TLS handshake before
    it has as long."""

    settle_s: float = 1.0
    """How long a finished answer waits for the prefill worker's own numbers."""

    grace_s: float = 30.0
    """Seconds that requests in flight get to finish when the router is told to stop."""

    refresh_s: float = 0.25
    """Seconds between two snapshots of the registry."""

    share_s: float = 1.0
    """Seconds between two exchanges with other routers on the same Redis: what was sent where, what tenants used."""

    max_body_bytes: int = 4 << 20
    """Largest HTTP request body."""

    max_bundles: int = 8
    """Tokenizers kept in memory."""

    prefix_blocks: int = 65536
    """Prompt blocks of 32 tokens whose last workers are remembered for placement."""

    rpc: RpcSettings = field(default_factory=RpcSettings)
    """Message size, keepalive, timeouts; allow_plaintext holds for HTTP too."""

    registry: RegistrySettings = field(default_factory=RegistrySettings)
    """Where workers announce themselves; memory:// embeds the registry in this process."""

    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    """Traces and logs; set for all parts under [telemetry]."""

    @property
    def http_connections(self) -> int:
        """HTTP connections open at a time; those without a request in flight are few, or soon closed."""
        return self.max_active + _IDLE_CONNECTIONS

    @property
    def http_interface(self) -> str:
        return self.http_host or self.host

    @property
    def http_tls(self) -> TlsSettings:
        """The files of the HTTP listener."""
        if not self.http_cert_file:
            return self.rpc.tls
        return replace(self.rpc.tls, cert_file=self.http_cert_file, key_file=self.http_key_file)

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot work."""
        self._check_http_tls()
        for name in ("port", "http_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise not_allowed("router", name, getattr(self, name), "a port from 0 to 65535")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < float("inf"):
                raise not_allowed("router", name, getattr(self, name), "more than 0 seconds")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise not_allowed("router", name, getattr(self, name), "at least 1")
        for name in ("grace_s", "max_wait_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise not_allowed("router", name, getattr(self, name), "0 seconds or more")
        if self.disaggregate not in DISAGGREGATE:
            raise not_allowed("router", "disaggregate", self.disaggregate, f"one of {', '.join(DISAGGREGATE)}")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise not_allowed("router", "cors_origins", origin, '"*", or origins like https://chat.example.org')
        if not self.tenant:
            raise not_allowed("router", "tenant", self.tenant, "a name")
        check_tenants(self.tenants)

    def _check_http_tls(self) -> None:
        wanted = self.http_cert_file or self.http_key_file or self.http_client_certificates
        if wanted and not self.rpc.tls.enabled:
            raise ConfigError(
                "HTTP is asked to use certificates and there are none for gRPC",
                field="rpc.tls.cert_file",
                remedy="set [rpc.tls], or leave out http_cert_file, http_key_file and http_client_certificates",
            )
        if bool(self.http_cert_file) != bool(self.http_key_file):
            missing = "http_key_file" if self.http_cert_file else "http_cert_file"
            raise ConfigError("a certificate needs its key", field=f"router.{missing}", remedy="name both PEM files")
