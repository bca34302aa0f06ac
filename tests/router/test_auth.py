"""Every door asks who is there: gRPC and HTTP, through our clients, the official one and by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai import AsyncOpenAI

from pdserve.client import AsyncClient, Client
from pdserve.errors import Internal, Unauthenticated
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc, registry_pb2, registry_pb2_grpc
from router.request import Ask, TokenPrompt
from router.tenants import Tenant
from tests.router.support import MODEL, House, house

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACME, ZETA, WRONG = (f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta", "nobody"))
TENANTS = (Tenant.of("acme", ACME), Tenant.of("zeta", ZETA))
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
REFUSED = (None, WRONG, ACME[:-1], ACME.upper())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house(tenants=TENANTS) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(made: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=20) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(made: House) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(made.router.address) as it:
        yield it


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def untouched(made: House) -> tuple[int, ...]:
    return tuple(worker.record().load.steps for worker in made.workers)


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("method", ["Generate", "ListModels", "Status"])
async def test_grpc_refuses_whoever_has_no_key(
    made: House, channel: grpc.aio.Channel, method: str, key: str | None
) -> None:
    """Raw bytes that are no message: the key is asked for before anything is even parsed."""
    before = untouched(made)
    metadata = [(name.lower(), value) for name, value in bearer(key).items()]
    for data in (b"", b"\xff\xff\xff"):
        ask: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = ask(f"/pdserve.v1.Gateway/{method}")(data, timeout=10, metadata=metadata)
        with pytest.raises(grpc.RpcError) as caught:
            await (call.read() if method == "Generate" else call)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        error = from_rpc_error(caught.value)
        assert isinstance(error, Unauthenticated)
        assert error.reason == ("MISSING_API_KEY" if key is None else "INVALID_API_KEY")
        assert "Authorization: Bearer" in error.remedy and not (key and key in str(error))
    assert untouched(made) == before


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}")]
)
async def test_http_refuses_whoever_has_no_key(
    made: House, http: httpx.AsyncClient, method: str, path: str, key: str | None
) -> None:
    before = untouched(made)
    for content in (b"", b"no json", b'{"model": "unknown"}'):
        answer = await http.request(method, path, headers=bearer(key), content=content)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer ")
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == "authorization"
        assert error["code"] == ("missing_api_key" if key is None else "invalid_api_key")
        assert not (key and key in answer.text)
    assert untouched(made) == before


async def test_http_refuses_two_credentials_at_once(http: httpx.AsyncClient) -> None:
    for keys in ((ACME, ZETA), (ACME, ACME)):
        headers = [("Authorization", f"Bearer {key}") for key in keys]
        assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def test_a_refusal_does_not_wait_for_the_body(made: House) -> None:
    reader, writer = await asyncio.open_connection(*made.router.http_address.split(":"))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(10):
        assert b" 401 " in await reader.readline()
    writer.close()


async def test_a_key_opens_every_door(made: House, http: httpx.AsyncClient) -> None:
    for key in (ACME, ZETA):
        answer = await http.post("/v1/chat/completions", headers=bearer(key), json=BODY)
        assert answer.status_code == 200, answer.text
        assert (await http.get("/v1/models", headers=bearer(key))).json()["data"][0]["id"] == MODEL
        assert (await http.get(f"/v1/models/{MODEL}", headers=bearer(key))).status_code == 200
        async with AsyncClient(made.router.address, api_key=key) as client:
            assert len((await client.complete(token_ids=[1, 2], max_tokens=2, ignore_eos=True)).ids) == 2
            assert (await client.models())[0].name == MODEL
            assert len((await client.status()).workers) == 2


async def test_the_synchronous_client_brings_its_key_too(made: House) -> None:
    def talk(key: str) -> int:
        with Client(made.router.address, api_key=key) as client:
            return len(client.models()) + len(client.status().workers) + len(client.complete("the", max_tokens=1).ids)

    assert await asyncio.to_thread(talk, ACME) == 4
    with pytest.raises(Unauthenticated):
        await asyncio.to_thread(talk, WRONG)
    with pytest.raises(Unauthenticated):
        await asyncio.to_thread(talk, "")


async def test_the_official_client_knows_the_refusal(made: House) -> None:
    url = f"http://{made.router.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key=WRONG, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(**BODY)
        assert caught.value.code == "invalid_api_key"
    async with AsyncOpenAI(base_url=url, api_key=ACME, max_retries=0) as client:
        answer = await client.chat.completions.create(**BODY)
        assert answer.usage is not None and answer.usage.completion_tokens == 2


async def test_probes_and_workers_need_no_key(http: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
    """Who is healthy, which services there are, and the Registry, to which workers come without keys."""
    assert (await http.get("/healthz")).status_code == (await http.get("/readyz")).status_code == 200
    health: Any = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
    registry: Any = registry_pb2_grpc.RegistryStub(channel)
    assert len((await registry.Snapshot(registry_pb2.SnapshotRequest(), timeout=10)).records) == 2
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection.ServerReflectionInfo(timeout=10)
    await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert "pdserve.v1.Gateway" in {s.name for s in (await asked.read()).list_services_response.service}
    asked.cancel()


async def test_no_key_is_ever_written_down(
    made: House, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for key in (ACME, WRONG):
        answer = await http.post("/v1/chat/completions", headers=bearer(key), json=BODY)
        status = await http.get("/readyz", headers=bearer(key))
        assert key not in answer.text + status.text
        async with AsyncClient(made.router.address, api_key=key) as client:
            assert key not in repr(client)
            try:
                await client.complete(token_ids=[1], max_tokens=1)
                assert key not in repr(await client.status())
            except Unauthenticated as error:
                assert key not in f"{error!r}{error.__context__!r}"
    ours = [record for record in caplog.records if not record.name.startswith(("httpcore", "httpx", "hpack"))]
    assert ours and not any(key in record.getMessage() for record in ours for key in (ACME, ZETA, WRONG))


async def test_a_request_that_came_past_the_doors_is_a_fault_of_ours(made: House) -> None:
    with pytest.raises(Internal) as caught:
        await made.router.intake.take(Ask(TokenPrompt((1, 2))))
    assert caught.value.reason == "NO_TENANT"


async def test_without_tenants_any_key_and_none_will_do() -> None:
    async with house() as open_to_all:
        url = f"http://{open_to_all.router.http_address}/v1/models"
        async with httpx.AsyncClient() as http:
            for key in (None, WRONG):
                assert (await http.get(url, headers=bearer(key))).status_code == 200
                async with AsyncClient(open_to_all.router.address, api_key=key or "") as client:
                    assert len(await client.models()) == 1


async def test_the_stub_needs_no_more_than_metadata(channel: grpc.aio.Channel) -> None:
    """Any gRPC client can do it."""
    stub: Any = gateway_pb2_grpc.GatewayStub(channel)
    metadata = (("authorization", f"Bearer {ZETA}"),)
    assert (await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=10, metadata=metadata)).models
