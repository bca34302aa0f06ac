"""Connections to decode workers: made on first use, kept while in use, and a bounded number after that."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

from cache_transfer.rings import Rings
from cache_transfer.transport import GrpcTransport
from pdserve.errors import ConfigError, Unavailable
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.settings import RpcSettings

MAX_IDLE = 64  # connections without a handoff; decode workers come and go, and addresses with them


class Peers:
    """One channel per decode worker, for the event loop that first uses it."""

    def __init__(self, settings: RpcSettings, *, shares_memory: bool = False) -> None:
        """`shares_memory`: payloads may be read from this process's memory, by workers on this machine."""
        self._settings = settings
        self._rings = Rings() if shares_memory else None
        self._pool: ChannelPool | None = None
        self._busy: Counter[str] = Counter()  # address -> handoffs
        self._idle: OrderedDict[str, None] = OrderedDict()  # longest idle first

    def take(self, address: str) -> GrpcTransport:
        """A transport for one handoff; `give_back` ends its use. Raises Unavailable (BAD_ADDRESS)."""
        asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ChannelPool(self._settings)
        try:
            channel = self._pool.get(address)
        except ConfigError as error:
            raise Unavailable(  # another prefill or decode worker may do
                f"cannot push to {address!r}: {error.message}",
                reason="BAD_ADDRESS",
                field="ticket.endpoints",
                remedy=error.remedy,
            ) from error
        self._busy[address] += 1
        self._idle.pop(address, None)
        return GrpcTransport(channel, address, self._rings)

    async def give_back(self, address: str) -> None:
        """The handoff is over. Closes the connection that has been idle longest when there are too many."""
        self._busy[address] -= 1
        if self._busy[address]:
            return
        del self._busy[address]
        self._idle[address] = None
        if len(self._idle) > MAX_IDLE and self._pool is not None:
            oldest, _ = self._idle.popitem(last=False)
            await self._pool.drop(oldest)

    async def close(self) -> None:
        if self._rings is not None:
            self._rings.close()
        if self._pool is not None:
            await self._pool.close()
