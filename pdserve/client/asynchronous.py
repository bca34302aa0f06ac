"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self, Unpack

import grpc

from pdserve.client.adapters import (
    LOAD_TIMEOUT_S,
    UNLOAD_WAIT_S,
    WorkerAdapters,
    adapters_from_proto,
    load_request,
    unload_request,
    unload_timeout_s,
)
from pdserve.client.events import Completion, Event, EventReader, collect
from pdserve.client.failures import typed_errors
from pdserve.client.request import GenerateOptions, build, credentials, outputs_of
from pdserve.client.status import Model, Status, models_from_proto, status_from_proto
from pdserve.errors import Cancelled, Refused
from pdserve.rpc.channel import ChannelPool
from pdserve.rpc.later_fields import later_fields
from pdserve.rpc.settings import RpcSettings, check_plaintext, split_address
from pdserve.rpc.tls import ROUTER
from pdserve.v1 import adapters_pb2, gateway_pb2
from pdserve.v1.adapters_pb2_grpc import AdaptersStub
from pdserve.v1.gateway_pb2_grpc import GatewayStub


class AsyncClient:
    """Talks to one router, from the event loop of its first call. Connects on first use."""

    def __init__(self, address: str, settings: RpcSettings | None = None, *, api_key: str = "") -> None:
        """`address` is host:port, `api_key` what a router with tenants knows the caller by.

        Raises ConfigError for an address that is malformed or that plaintext may not reach, and for a key that
        no header can carry.
        """
        self.address = address
        self._metadata = credentials(api_key)
        self._settings = settings or RpcSettings()
        check_plaintext(split_address(address)[0], self._settings)
        self._pool: ChannelPool | None = None
        self._closed = False

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event]:
        """Yields Accepted, Tokens ..., HandoffRecord if wanted, Finish; or the record and an error. With `n` outputs
        each has its Finish, and Tokens of different choices come mixed.

        Leaving the loop early cancels the request at the server; to do so at a definite
        moment, iterate within `contextlib.aclosing`.

        Raises:
            InvalidRequest: before anything is sent, or from the server, naming the field.
            Unavailable: nothing listens at the address, or no worker can answer.
            Refused: the router is older than this client, and would ignore an option that is given.
            PdserveError: whatever else the server reports, with its diff and remedy.
        """
        request, timeout_s = build(prompt, options)
        reader = EventReader(outputs_of(request), later_fields(request))
        call = self._stub().Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async with self._typed_errors(timeout_s):
                # Not `async for`: gRPC never frees a call whose loop was left (1.83 and later).
                while (message := await call.read()) is not grpc.aio.EOF:
                    for event in reader.read(message):
                        yield event
            reader.end()
        finally:
            call.cancel()

    async def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer. Arguments and errors as for `generate`."""
        return collect([event async for event in self.generate(prompt, **options)])

    async def models(self, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Models that can be asked for now."""
        return models_from_proto(await self._unary("ListModels", gateway_pb2.ListModelsRequest(), timeout_s))

    async def status(self, timeout_s: float | None = None, *, recent: int = 0) -> Status:
        """Pools, contracts, load, which pairs of workers fit, and the last `recent` requests (at most 200)."""
        return status_from_proto(await self._unary("Status", gateway_pb2.StatusRequest(recent=recent), timeout_s))

    async def adapters(self, model: str = "", timeout_s: float | None = None) -> tuple[WorkerAdapters, ...]:
        """Which LoRA adapters each ready worker serves, and how many requests use them; of one model, or of all."""
        request = adapters_pb2.ListAdaptersRequest(model=model)
        return adapters_from_proto(await self._unary("List", request, timeout_s, AdaptersStub))

    async def load_adapter(
        self, name: str, path: str, *, model: str = "", timeout_s: float = LOAD_TIMEOUT_S
    ) -> tuple[WorkerAdapters, ...]:
        """Serves the adapter at `path`, on the workers' machines, under a name; replaces another version of it.

        What a worker could not do is in its entry; the same call again tries again.
        """
        request = load_request(name, path, model)
        return adapters_from_proto(await self._unary("Load", request, timeout_s, AdaptersStub))

    async def unload_adapter(
        self, name: str, *, model: str = "", wait_s: float = UNLOAD_WAIT_S
    ) -> tuple[WorkerAdapters, ...]:
        """Serves a name no longer; a worker where requests use it beyond `wait_s` says so, and serves it as before."""
        request, timeout_s = unload_request(name, model, wait_s), unload_timeout_s(wait_s)
        return adapters_from_proto(await self._unary("Unload", request, timeout_s, AdaptersStub))

    async def close(self) -> None:
        """Cancels what is running. Idempotent."""
        self._closed = True
        if self._pool is not None:
            await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _unary(self, method: str, request: Any, timeout_s: float | None, kind: Any = GatewayStub) -> Any:
        stub, deadline_s = self._stub(kind), timeout_s or self._settings.call_timeout_s
        async with self._typed_errors(deadline_s):
            return await getattr(stub, method)(request, timeout=deadline_s, metadata=self._metadata)

    def _stub(self, kind: Any = GatewayStub) -> Any:
        if self._closed:
            raise client_closed()
        if self._pool is None:
            self._pool = ChannelPool(self._settings, peer=ROUTER)
        return kind(self._pool.get(self.address))

    @asynccontextmanager
    async def _typed_errors(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            with typed_errors(self.address, timeout_s):
                yield
        except asyncio.CancelledError:
            # gRPC raises this for calls that close() ended, although nobody cancelled this task.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise Cancelled("the client was closed during the call", reason="CLIENT_CLOSED") from None
            raise


def client_closed() -> Refused:
    return Refused("the client is closed", reason="CLIENT_CLOSED", remedy="make a new client")
