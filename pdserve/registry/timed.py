"""Asking a registry how long it takes to answer, and why it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from pdserve.errors import PdserveError, Unavailable
from pdserve.registry.records import LiveRecord, Registry


async def timed_snapshot(registry: Registry, limit_s: float) -> tuple[Sequence[LiveRecord], float, PdserveError | None]:
    """The records, the milliseconds that they took, and why there are none."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            return await registry.snapshot(), _ms_since(began), None
    except PdserveError as error:
        return (), _ms_since(began), error
    except TimeoutError:
        late = Unavailable(
            f"the registry did not answer within {limit_s:g} s",
            reason="REGISTRY_UNAVAILABLE",
            field="registry.url",
            remedy="check that it runs and is reached from there",
        )
        return (), _ms_since(began), late


def _ms_since(began: float) -> float:
    return 1000 * (time.monotonic() - began)
