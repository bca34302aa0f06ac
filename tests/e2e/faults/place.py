"""The places of the installation, and the settings of who lives there: times are small, so that faults show soon."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass

from decode_worker.settings import DecodeSettings
from pdserve.engine.plan import EngineConfig
from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from tests.e2e.faults.process import Child, Settings
from tests.e2e.faults.relay import Relay
from tests.e2e.faults.table import Part
from tests.e2e.stack import MODEL

LEASE_S = 2.0  # of everything that holds pages: tickets, receipts, prompts

RPC = RpcSettings(
    keepalive_s=0.4,
    keepalive_timeout_s=1.2,
    min_ping_interval_s=0.1,
    connect_timeout_s=1.0,
    call_timeout_s=1.0,
    max_reconnect_backoff_s=0.2,
)
ENGINE = EngineConfig(dtype="fp32", pages=80, page_size=4, deterministic=True)
DECODE_ENGINE = EngineConfig(dtype="fp32", pages=64, page_size=8, axis_order="nhd", deterministic=True)

NAMES = {Part.PREFILL: ("p0", "p1"), Part.DECODE: ("d0", "d1"), Part.ROUTER: ("router",)}
WORKERS = (*NAMES[Part.DECODE], *NAMES[Part.PREFILL])  # as a status lists them


@dataclass
class Place:
    """Where one process of the installation lives: its ports, what stands before them, who is there now."""

    name: str
    part: Part
    relays: tuple[Relay, ...]  # one per port; none in a house without
    ports: tuple[int, ...] = ()
    child: Child | None = None
    frozen: bool = False

    @property
    def here(self) -> Child:
        assert self.child is not None, f"{self.name} is not running"
        return self.child

    @property
    def living(self) -> bool:
        return self.child is not None and not self.frozen

    @property
    def addresses(self) -> tuple[str, ...]:
        """As others are told."""
        if self.relays:
            return tuple(relay.address for relay in self.relays)
        return tuple(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def own_address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def settings(self, url: str) -> Settings:
        """What it starts with now; `url`: of the registry."""
        registry = RegistrySettings(url=url, lease_s=5.0, heartbeat_s=0.15, timeout_s=4.0)
        if self.part is Part.ROUTER:
            return RouterSettings(
                port=self.ports[0],
                http_port=self.ports[1],
                rpc=RPC,
                registry=registry,
                refresh_s=0.05,
                admit_timeout_s=1.0,
                first_token_timeout_s=LEASE_S,
                settle_s=0.3,
            )
        shown = self.addresses if self.relays else ("", "")
        if self.part is Part.PREFILL:
            return PrefillSettings(
                name=MODEL,
                worker_id=self.name,
                port=self.ports[0],
                advertise=shown[0],
                engine=ENGINE,
                rpc=RPC,
                registry=registry,
                chunk_tokens=16,
                max_running=4,
                lease_s=LEASE_S,
                reap_s=0.05,
            )
        return DecodeSettings(
            name=MODEL,
            worker_id=self.name,
            port=self.ports[0],
            transfer_port=self.ports[1],
            advertise=shown[0],
            advertise_transfer=shown[1],
            engine=DECODE_ENGINE,
            rpc=RPC,
            registry=registry,
            max_unread_tokens=8,
            ticket_ttl_s=LEASE_S,
            idle_s=LEASE_S,
            receive_s=LEASE_S,
            handoff_s=3 * LEASE_S,
            reader_s=LEASE_S,
            reap_s=0.05,
        )


def free_ports(count: int) -> tuple[int, ...]:
    """Outside the range from which the system takes ports for outgoing connections, so that nobody takes
    them while a process restarts."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as test, contextlib.suppress(OSError):
            test.bind(("127.0.0.1", port))
            found.add(port)
    return tuple(found)
