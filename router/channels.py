"""Channels to workers, closed when the worker has left the pool and its last call is over.

Without this a router in front of an autoscaled pool would keep one channel for every
address that ever was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import grpc

from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.settings import RpcSettings


class WorkerChannels(ChannelPool):
    """A ChannelPool that counts the calls on each address. Belongs to one event loop."""

    def __init__(self, settings: RpcSettings | None = None) -> None:
        super().__init__(settings)
        self._calls: Counter[str] = Counter()
        self._known: set[str] = set()  # in the pool now, or gone with calls in flight

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """The channel for one call, which keeps it open until the block is left."""
        self._calls[address] += 1
        try:
            yield self.get(address)
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Closes idle channels of addresses that were in an earlier call and are not in this one.

        Those still in use are closed by a later call.
        """
        gone = self._known.difference(addresses)
        idle = {address for address in gone if address not in self._calls}
        self._known = gone - idle | set(addresses)
        for address in idle:
            await self.drop(address)
