"""The client for code without an event loop. Threads may share one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Self, Unpack

from pdserve.client.adapters import (
    LOAD_TIMEOUT_S,
    UNLOAD_WAIT_S,
    WorkerAdapters,
    adapters_from_proto,
    load_request,
    unload_request,
    unload_timeout_s,
)
from pdserve.client.asynchronous import client_closed
from pdserve.client.events import Completion, Event, EventReader, collect
from pdserve.client.failures import typed_errors
from pdserve.client.request import GenerateOptions, build, credentials, outputs_of
from pdserve.client.status import Model, Status, models_from_proto, status_from_proto
from pdserve.rpc.channel import sync_channel
from pdserve.rpc.later_fields import later_fields
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.tls import ROUTER
from pdserve.v1 import adapters_pb2, gateway_pb2
from pdserve.v1.adapters_pb2_grpc import AdaptersStub
from pdserve.v1.gateway_pb2_grpc import GatewayStub


class Client:
    """Talks to one router. Connects on first use."""

    def __init__(self, address: str, settings: RpcSettings | None = None, *, api_key: str = "") -> None:
        """`address` is host:port, `api_key` what a router with tenants knows the caller by.

        Raises ConfigError for an address that is malformed or that plaintext may not reach, and for a key that
        no header can carry.
        """
        self.address = address
        self._metadata = credentials(api_key)
        self._settings = settings or RpcSettings()
        self._channel = sync_channel(address, self._settings, peer=ROUTER)
        self._closed = False

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[Event]:
        """Yields Accepted, Tokens ..., HandoffRecord if wanted, Finish; or the record and an error. With `n` outputs
        each has its Finish, and Tokens of different choices come mixed.

        Leaving the loop early cancels the request at the server.

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
            with typed_errors(self.address, timeout_s):
                for message in call:
                    yield from reader.read(message)
            reader.end()
        finally:
            call.cancel()

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer. Arguments and errors as for `generate`."""
        return collect(self.generate(prompt, **options))

    def models(self, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Models that can be asked for now."""
        return models_from_proto(self._unary("ListModels", gateway_pb2.ListModelsRequest(), timeout_s))

    def status(self, timeout_s: float | None = None, *, recent: int = 0) -> Status:
        """Pools, contracts, load, which pairs of workers fit, and the last `recent` requests (at most 200)."""
        return status_from_proto(self._unary("Status", gateway_pb2.StatusRequest(recent=recent), timeout_s))

    def adapters(self, model: str = "", timeout_s: float | None = None) -> tuple[WorkerAdapters, ...]:
        """Which LoRA adapters each ready worker serves, and how many requests use them; of one model, or of all."""
        request = adapters_pb2.ListAdaptersRequest(model=model)
        return adapters_from_proto(self._unary("List", request, timeout_s, AdaptersStub))

    def load_adapter(
        self, name: str, path: str, *, model: str = "", timeout_s: float = LOAD_TIMEOUT_S
    ) -> tuple[WorkerAdapters, ...]:
        """Serves the adapter at `path`, on the workers' machines, under a name; replaces another version of it.

        What a worker could not do is in its entry; the same call again tries again.
        """
        request = load_request(name, path, model)
        return adapters_from_proto(self._unary("Load", request, timeout_s, AdaptersStub))

    def unload_adapter(
        self, name: str, *, model: str = "", wait_s: float = UNLOAD_WAIT_S
    ) -> tuple[WorkerAdapters, ...]:
        """Serves a name no longer; a worker where requests use it beyond `wait_s` says so, and serves it as before."""
        request, timeout_s = unload_request(name, model, wait_s), unload_timeout_s(wait_s)
        return adapters_from_proto(self._unary("Unload", request, timeout_s, AdaptersStub))

    def close(self) -> None:
        """Cancels what is running. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unary(self, method: str, request: Any, timeout_s: float | None, kind: Any = GatewayStub) -> Any:
        stub, deadline_s = self._stub(kind), timeout_s or self._settings.call_timeout_s
        with typed_errors(self.address, deadline_s):
            return getattr(stub, method)(request, timeout=deadline_s, metadata=self._metadata)

    def _stub(self, kind: Any = GatewayStub) -> Any:
        if self._closed:
            raise client_closed()
        return kind(self._channel)
