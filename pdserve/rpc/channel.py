"""Channels with this project's settings, and a pool of them for one event loop."""

from __future__ import annotations

import asyncio

import grpc

from pdserve.errors import Internal, Unavailable
from pdserve.rpc.settings import Options, RpcSettings, channel_options, check_plaintext, split_address


def channel(address: str, settings: RpcSettings | None = None, *, extra_options: Options = ()) -> grpc.aio.Channel:
    """A channel to `host:port` for the running event loop; connects on first use.

    Raises ConfigError for a malformed address, or one beyond this machine without `allow_plaintext`.
    """
    asyncio.get_running_loop()  # a channel made outside a loop would belong to none
    return grpc.aio.insecure_channel(address, options=_checked_options(address, settings, extra_options))


def sync_channel(address: str, settings: RpcSettings | None = None, *, extra_options: Options = ()) -> grpc.Channel:
    """The same for code without an event loop."""
    return grpc.insecure_channel(address, options=_checked_options(address, settings, extra_options))


async def wait_ready(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Returns once connected. Raises Unavailable after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        raise Unavailable(
            f"{address}: no connection within {timeout_s:g} s", remedy=f"check that a server listens at {address}"
        ) from None


class ChannelPool:
    """One channel per address, all owned by the event loop that made the pool.

    gRPC channels must not be used from another loop; `get` raises Internal if one tries.
    """

    def __init__(self, settings: RpcSettings | None = None, *, extra_options: Options = ()) -> None:
        self.settings = settings or RpcSettings()
        self._extra_options = extra_options
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, made if new. Raises ConfigError (see `channel`), Internal."""
        self._check_owner()
        if address not in self._channels:
            self._channels[address] = channel(address, self.settings, extra_options=self._extra_options)
        return self._channels[address]

    async def drop(self, address: str) -> None:
        """Closes the channel of a peer that is gone; its calls are cancelled."""
        self._check_owner()
        found = self._channels.pop(address, None)
        if found is not None:
            await found.close()

    async def close(self) -> None:
        """Closes all; `get` raises from now on. Idempotent."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for each in channels:
            await each.close()

    def _check_owner(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise Internal("a channel pool was used from another event loop than its own", reason="WRONG_EVENT_LOOP")
        if self._closed:
            raise Internal("the channel pool is closed", reason="POOL_CLOSED")


def _checked_options(address: str, settings: RpcSettings | None, extra: Options) -> Options:
    settings = settings or RpcSettings()
    host, _ = split_address(address)
    check_plaintext(host, settings)
    return channel_options(settings, extra)
