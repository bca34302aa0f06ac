"""Binding, health, reflection, limits and the keepalive agreement of real servers and channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.errors import ConfigError, Exhausted, Internal, InvalidRequest, NotFound, Unavailable
from pdserve.rpc.channel import ChannelPool, channel, sync_channel
from pdserve.rpc.server import Server
from pdserve.rpc.settings import Options, RpcSettings, is_loopback, join_address, split_address
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from tests.rpc.gateway import ScriptedGateway, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def no_models(request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
    return gateway_pb2.ListModelsResponse()


async def test_a_port_in_use_is_named() -> None:
    async with serving(ScriptedGateway()) as first:
        _, port = split_address(first.address)
        second = Server(port=port)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}") as caught:
            await second.start()
        assert caught.value.field == "port"
        await second.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
async def test_plaintext_beyond_loopback_needs_leave(host: str) -> None:
    with pytest.raises(ConfigError, match="allow_plaintext"):
        Server(host=host)
    with pytest.raises(ConfigError, match="allow_plaintext"):
        channel(join_address(host, 1))
    with pytest.raises(ConfigError, match="allow_plaintext"):
        sync_channel(join_address(host, 1))


async def test_allow_plaintext_binds_all_interfaces() -> None:
    server = Server(RpcSettings(allow_plaintext=True), host="0.0.0.0")
    address = await server.start()
    assert address.startswith("0.0.0.0:")
    await server.stop()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("localhost.example.org", False),
        ("192.168.0.1", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":80", "localhost:0", "localhost:65536", "a:x"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(address)


def test_ipv6_addresses_round_trip() -> None:
    assert split_address(join_address("::1", 80)) == ("::1", 80)
    assert join_address("::1", 80) == "[::1]:80"


@pytest.mark.parametrize("field", ["max_message_bytes", "keepalive_s", "call_timeout_s"])
def test_settings_name_the_bad_field(field: str) -> None:
    given: dict[str, Any] = {field: 0}
    with pytest.raises(ConfigError, match=f"rpc.{field}"):
        RpcSettings(**given)


async def test_health_follows_set_serving_and_stop() -> None:
    async with serving(ScriptedGateway()) as server, channel(server.address) as connection:
        stub = health_pb2_grpc.HealthStub(connection)

        async def check(service: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            return int(answer.status)

        assert [await check(""), await check("pdserve.v1.Gateway")] == [SERVING, SERVING]
        await server.set_serving(False)
        assert [await check(""), await check("pdserve.v1.Gateway")] == [NOT_SERVING, NOT_SERVING]
        await server.set_serving(True)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=20)
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(0.5))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        async with asyncio.timeout(10):
            await stopping


async def test_start_can_begin_not_serving() -> None:
    server = Server()
    async with channel(await server.start(serving=False)) as connection:
        answer = await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == NOT_SERVING
    await server.stop()


async def test_reflection_lists_the_services() -> None:
    async with serving(ScriptedGateway()) as server, channel(server.address) as connection:
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await stub.ServerReflectionInfo(iter([request]), timeout=5).read()
        names = {service.name for service in answer.list_services_response.service}
    assert {"pdserve.v1.Gateway", "grpc.health.v1.Health"} <= names


async def test_a_started_server_takes_no_more_services() -> None:
    async with serving(ScriptedGateway()) as server:
        with pytest.raises(ConfigError, match="started"):
            server.add(gateway_pb2_grpc.add_GatewayServicer_to_server, ScriptedGateway())
        with pytest.raises(ConfigError, match="started"):
            await server.start()


async def test_messages_beyond_the_limit_are_refused_and_named() -> None:
    settings = RpcSettings(max_message_bytes=1000)
    async with serving(ScriptedGateway(models=no_models), settings) as server, channel(server.address) as connection:
        stub = gateway_pb2_grpc.GatewayStub(connection)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="x" * 2000), timeout=5):
                pass
        error = from_rpc_error(caught.value)
        assert type(error) is InvalidRequest
        assert error.reason == "MESSAGE_TOO_LARGE"
        await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5)  # others are unaffected


async def test_a_message_of_four_mebibytes_passes() -> None:
    async def echo(request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateEvent]:
        yield gateway_pb2.GenerateEvent(accepted=gateway_pb2.Accepted(request_id=str(len(request.text))))

    async with serving(ScriptedGateway(generate=echo)) as server, channel(server.address) as connection:
        stub = gateway_pb2_grpc.GatewayStub(connection)
        request = gateway_pb2.GenerateRequest(text="x" * (4 << 20))
        answers = [a async for a in stub.Generate(request, timeout=20)]
    assert answers[0].accepted.request_id == str(4 << 20)


async def test_calls_beyond_the_limit_are_refused() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        entered.set()
        await leave.wait()
        return gateway_pb2.ListModelsResponse()

    settings = RpcSettings(max_concurrent_calls=1)
    async with serving(ScriptedGateway(models=wait), settings) as server, channel(server.address) as connection:
        stub = gateway_pb2_grpc.GatewayStub(connection)
        first = stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=10)
        waiting = asyncio.ensure_future(first)
        async with asyncio.timeout(5):
            await entered.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
        assert type(from_rpc_error(caught.value)) is Exhausted
        leave.set()
        await waiting


async def silent_stream(extra_options: Options) -> int:
    """Messages a client gets over a stream that is silent for three pings (gRPC sends one a second at most)."""

    async def slow(request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateEvent]:
        yield gateway_pb2.GenerateEvent()
        with suppress(TimeoutError):
            async with asyncio.timeout(3.5):
                await asyncio.Event().wait()
        yield gateway_pb2.GenerateEvent()

    patient = RpcSettings(min_ping_interval_s=60.0)  # every ping after the first comes too early
    eager = RpcSettings(keepalive_s=0.1)
    async with (
        serving(ScriptedGateway(generate=slow), patient, extra_options) as server,
        channel(server.address, eager) as line,
    ):
        stub = gateway_pb2_grpc.GatewayStub(line)
        return len([a async for a in stub.Generate(gateway_pb2.GenerateRequest(), timeout=20)])


async def test_a_client_may_ping_a_silent_stream() -> None:
    """The control shows that the pings are real: a server that counts strikes ends the stream."""
    strict: Options = (("grpc.http2.max_ping_strikes", 1),)
    ours, control = await asyncio.gather(silent_stream(()), silent_stream(strict), return_exceptions=True)
    assert ours == 2
    assert isinstance(control, grpc.aio.AioRpcError)
    assert "pings" in str(control.details())


async def test_a_proxy_from_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serving(ScriptedGateway(models=no_models)) as server, channel(server.address) as connection:
        await gateway_pb2_grpc.GatewayStub(connection).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)


async def test_an_unreachable_address_is_unavailable_in_bounded_time(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    async with channel(address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayStub(connection).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
        error = from_rpc_error(caught.value, address)
    assert type(error) is Unavailable
    assert error.remedy == f"check that a server listens at {address}"


async def test_the_pool_shares_drops_and_closes_channels() -> None:
    async with serving(ScriptedGateway(models=no_models)) as server:
        pool = ChannelPool()
        first = pool.get(server.address)
        assert pool.get(server.address) is first
        await gateway_pb2_grpc.GatewayStub(first).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
        await pool.drop(server.address)
        second = pool.get(server.address)
        assert second is not first
        await gateway_pb2_grpc.GatewayStub(second).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
        await pool.close()
        await pool.close()
        with pytest.raises(Internal, match="closed"):
            pool.get(server.address)


async def test_the_pool_refuses_another_event_loop() -> None:
    pool = ChannelPool()

    async def use() -> None:
        pool.get("127.0.0.1:1")

    def elsewhere() -> None:
        with pytest.raises(Internal) as caught:
            asyncio.run(use())
        assert caught.value.reason == "WRONG_EVENT_LOOP"

    await asyncio.to_thread(elsewhere)
    await pool.close()


async def test_the_status_text_names_the_field() -> None:
    async def unknown(request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        raise NotFound("no such thing", field="model")

    async with serving(ScriptedGateway(models=unknown)) as server, channel(server.address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayStub(connection).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
    assert caught.value.details() == "model: no such thing"
    assert type(from_rpc_error(caught.value)) is NotFound
