"""One examination from beginning to end: look, try canaries, judge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.doctor import canaries, parts, ways
from pdserve.doctor.ask import doctor
from pdserve.doctor.findings import Finding
from pdserve.doctor.observed import Observed, Song
from pdserve.rpc.settings import RpcSettings

CHECKS: Sequence[Callable[[Observed], list[Finding]]] = (
    parts.versions,
    ways.contracts,
    parts.workers,
    ways.paths,
    ways.certificates,
    parts.clocks,
    ways.registry,
    parts.loads,
    parts.accounts,
    parts.adapters,
    parts.kernels,
    parts.disks,
)


@dataclass(frozen=True)
class Report:
    """What was found, in the order of `CHECKS`, canaries last."""

    gateway: str
    version: str  # of the router
    findings: tuple[Finding, ...]
    songs: tuple[Song, ...] = ()


def examine(gateway: str, rpc: RpcSettings, api_key: str = "", *, timeout_s: float = 10.0, pairs: int = 16) -> Report:
    """Looks at the deployment behind a gateway. Nothing of it is changed but for a few cached pages.

    Args:
        timeout_s: for each answer, and for each canary.
        pairs: canaries, at most; 0: none.

    Raises what keeps the router itself from answering: Unavailable, PermissionDenied, another PdserveError.
    """
    return asyncio.run(_examine(gateway, rpc, api_key, timeout_s, pairs))


async def _examine(gateway: str, rpc: RpcSettings, api_key: str, timeout_s: float, pairs: int) -> Report:
    async with doctor(gateway, rpc, api_key, timeout_s) as asks:
        seen = await asks.observe()
        found = [finding for check in CHECKS for finding in check(seen)]
        if not pairs:
            return Report(gateway, seen.status.version, tuple(found))
        choice = canaries.choose(seen, pairs)
        songs = [await asks.sing(prefill, decode) for prefill, decode in choice.pairs]
        found += canaries.judge(seen, choice, songs)
        return Report(gateway, seen.status.version, tuple(found), tuple(songs))
