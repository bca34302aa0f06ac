"""Channels with this project's settings, and a pool of them for one event loop."""

from __future__ import annotations

import asyncio

import grpc

from pdserve.errors import Internal
from pdserve.rpc.settings import Options, RpcSettings, channel_options, check_plaintext, split_address
from pdserve.rpc.tls import WORKER, Identity, Pem


def channel(
    address: str, settings: RpcSettings | None = None, *, peer: str = WORKER, extra_options: Options = ()
) -> grpc.aio.Channel:
    """A channel to `host:port` for the running event loop; connects on first use.

    Args:
        peer: the role that a server there must prove, where the settings have TLS.

    Raises ConfigError for a malformed address, one beyond this machine with neither TLS nor `allow_plaintext`,
    or certificates that cannot be used.
    """
    asyncio.get_running_loop()  # a channel made outside a loop would belong to none
    settings = settings or RpcSettings()
    pem = Identity(settings.tls).current() if settings.tls.enabled else None
    return _open(address, settings, peer, extra_options, pem)


def sync_channel(
    address: str, settings: RpcSettings | None = None, *, peer: str = WORKER, extra_options: Options = ()
) -> grpc.Channel:
    """The same for code without an event loop."""
    settings = settings or RpcSettings()
    options = _checked_options(address, settings, peer, extra_options)
    if settings.tls.enabled:
        return grpc.secure_channel(address, Identity(settings.tls).current().channel(), options=options)
    return grpc.insecure_channel(address, options=options)


class ChannelPool:
    """One channel per address, all owned by the event loop that made the pool.

    gRPC channels must not be used from another loop; `get` raises Internal if one tries. When the
    certificates have changed, `get` makes new channels. Old ones keep their calls, and are closed when
    the certificates change once more.
    """

    def __init__(self, settings: RpcSettings | None = None, *, peer: str = WORKER, extra_options: Options = ()) -> None:
        """`peer`: see `channel`."""
        self.settings = settings or RpcSettings()
        self._peer = peer
        self._extra_options = extra_options
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._identity = Identity(self.settings.tls) if self.settings.tls.enabled else None
        self._pem: Pem | None = None
        self._outdated: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, made if new. Raises ConfigError (see `channel`), Internal."""
        self._check_owner()
        if self._identity is not None:
            self._renew(self._identity.current())
        if address not in self._channels:
            self._channels[address] = _open(address, self.settings, self._peer, self._extra_options, self._pem)
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
        channels, self._channels, self._outdated = [*self._channels.values(), *self._outdated], {}, []
        for each in channels:
            await each.close()
        await asyncio.gather(*self._closing)

    def _renew(self, pem: Pem) -> None:
        if pem is self._pem:
            return
        for each in self._outdated:
            task = asyncio.create_task(each.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._outdated, self._channels, self._pem = list(self._channels.values()), {}, pem

    def _check_owner(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise Internal("a channel pool was used from another event loop than its own", reason="WRONG_EVENT_LOOP")
        if self._closed:
            raise Internal("the channel pool is closed", reason="POOL_CLOSED")


def _open(address: str, settings: RpcSettings, peer: str, extra: Options, pem: Pem | None) -> grpc.aio.Channel:
    options = _checked_options(address, settings, peer, extra)
    if pem is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, pem.channel(), options=options)


def _checked_options(address: str, settings: RpcSettings, peer: str, extra: Options) -> Options:
    host, _ = split_address(address)
    check_plaintext(host, settings)
    if settings.tls.enabled:
        # Certificates name roles, not places: a worker may come up anywhere.
        extra = (*extra, ("grpc.ssl_target_name_override", f"{peer}.{settings.tls.deployment}"))
    return channel_options(settings, extra)
