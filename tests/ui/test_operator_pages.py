"""Who may see operators' pages, and what else their door promises."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pdserve.client import AsyncClient, Placement, Worker
from pdserve.client.status import Contract, WorkerLoad
from pdserve.errors import PdserveError, PermissionDenied
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.rpc.tls import CLIENT, OPERATOR, WORKER
from pdserve.v1 import operator_pb2, operator_pb2_grpc
from router.app import Router
from router.tenants import Tenant
from router.ui_pages import MAX_VIEWERS, _Viewing
from tests.engine.tiny import prompt
from tests.router.support import VOCAB, House, house, router_settings
from tests.rpc.certificates import make_certificates, rpc_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACME, ZETA, WRONG = (f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta", "nobody"))
TENANTS = (Tenant.of("acme", ACME), Tenant.of("zeta", ZETA))
PAGES = ("/ui/events", "/ui/requests/req-1", "/metrics")
SECRET = "never shown to anybody"
NOTHING_MORE = ((), Contract(0, b"", b"", b"", 0, 0, 0, "", 0, "", "", "", "", ""), WorkerLoad(*[0] * 9), 0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house(tenants=TENANTS, operators=("acme",)) as it:
        yield it


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def first_event(http: httpx.AsyncClient, **options: Any) -> tuple[int, bytes]:
    """Status and first bytes of the events."""
    async with http.stream("GET", "/ui/events", **options) as answer:
        return answer.status_code, await anext(answer.aiter_bytes())


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("key", "status"), [(None, 401), (WRONG, 401), (ZETA, 403)])
async def test_where_keys_are_known_nobody_but_an_operator_sees_anything(
    made: House, page: str, key: str | None, status: int
) -> None:
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}") as http:
        answer = await http.get(page, headers=bearer(key))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == {401: "invalid_api_key" if key else "missing_api_key", 403: "not_operator"}[status]
    assert "d0" not in answer.text and not (key and key in answer.text)


async def test_an_operators_key_opens_them_and_the_page_itself_holds_no_data(made: House) -> None:
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}") as http:
        status, begun = await first_event(http, headers=bearer(ACME))
        assert status == 200 and begun.startswith(b"event: hello\n")
        assert (await http.get("/ui/requests/req-1", headers=bearer(ACME))).status_code == 404
        assert (await http.get("/metrics", headers=bearer(ACME))).status_code == 200
        moved = await http.get("/ui")
        assert (moved.status_code, moved.headers["location"]) == (307, "ui/")
        for name in ("", "index.html", "app.js", "page.css"):
            page = await http.get(f"/ui/{name}")
            assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
            assert not any(word in page.text for word in ("acme", "zeta", "tiny", "d0"))
        for name in ("nothing.js", "../app.py", "..%2fapp.py", "%2e%2e/app.py"):
            assert (await http.get(f"/ui/{name}")).status_code == 404


async def test_only_operators_are_told_where_workers_are_and_what_they_do(made: House) -> None:
    """At every door that tells of workers: gRPC Status and adapters, HTTP readiness."""
    addresses = {address for worker in made.workers for address in (worker.address, worker.record().metrics) if address}
    async with AsyncClient(made.router.address, api_key=ACME) as operator:
        everything = await operator.status()
        assert not everything.reduced and {w.addresses[0] for w in everything.workers} <= addresses
        assert everything.registry and everything.pairs[0].differences is not None
        assert len(await operator.adapters()) == 2
    async with AsyncClient(made.router.address, api_key=ZETA) as tenant:
        told = await tenant.status()
        assert told.reduced and [(w.worker_id, w.role, w.state) for w in told.workers] == [
            (w.worker_id, w.role, w.state) for w in everything.workers
        ]
        assert [pair.fits for pair in told.pairs] == [True]
        assert {w.model for w in told.workers} == {model.name for model in await tenant.models()}
        for worker in told.workers:
            assert worker == Worker(worker.worker_id, worker.role, worker.state, worker.model, *NOTHING_MORE)
        assert (told.registry, told.active_requests, told.placement) == ("", 0, Placement())
        with pytest.raises(PermissionDenied) as refused:
            await tenant.adapters()
        assert refused.value.reason == "NOT_OPERATOR"
    async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}") as http:
        for key in (None, ZETA, WRONG):
            answer = await http.get("/readyz", headers=bearer(key))
            assert (answer.status_code, answer.json()) == (200, {"ready": True})
        assert (await http.get("/readyz", headers=bearer(ACME))).json()["models"]


async def test_who_may_not_use_a_model_is_not_told_of_its_workers() -> None:
    strangers = (TENANTS[0], replace(TENANTS[1], models=("another",)))
    async with (
        house(tenants=strangers, operators=("acme",)) as it,
        AsyncClient(it.router.address, api_key=ZETA) as stranger,
    ):
        told = await stranger.status()
    assert told.reduced and (told.workers, told.pairs) == ((), ())


@pytest.mark.parametrize("role", [OPERATOR, CLIENT])
async def test_without_tenants_a_certificate_says_who_sees_the_workers(tmp_path: Path, role: str) -> None:
    folder = make_certificates(tmp_path)
    router = Router(router_settings(rpc=rpc_of(folder, "router")))
    await router.start()
    try:
        async with AsyncClient(router.address, rpc_of(folder, role)) as client:
            assert (await client.status()).reduced == (role == CLIENT)
    finally:
        await router.stop()


async def test_without_tenants_whoever_reaches_the_port_may_look() -> None:
    router = Router(router_settings())
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as http:
            assert (await first_event(http))[0] == 200
            assert (await http.get("/metrics")).status_code == 200
    finally:
        await router.stop()


async def test_a_prometheus_without_a_key_may_read_metrics_where_that_is_set_and_nothing_else() -> None:
    router = Router(router_settings(tenants=TENANTS, operators=("acme",), metrics_open=True))
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as http:
            assert (await http.get("/metrics")).status_code == 200
            assert (await http.get("/ui/events")).status_code == 401
    finally:
        await router.stop()


@pytest.mark.parametrize("tenants", [(), TENANTS])
async def test_an_operators_certificate_opens_them_and_another_one_alone_does_not(
    tmp_path: Path, tenants: tuple[Tenant, ...]
) -> None:
    folder = make_certificates(tmp_path)
    settings = router_settings(rpc=rpc_of(folder, "router"), http_client_certificates=True, tenants=tenants)
    router = Router(settings)
    await router.start()
    try:
        for role, expected in ((OPERATOR, 200), (CLIENT, 401 if tenants else 403), (WORKER, 401 if tenants else 403)):
            trusting = ssl.create_default_context(cafile=folder / "ca.crt")
            trusting.load_cert_chain(folder / role / "tls.crt", folder / role / "tls.key")
            url = f"https://localhost:{router.http_address.rpartition(':')[2]}"
            async with httpx.AsyncClient(base_url=url, verify=trusting) as http:
                assert (await first_event(http))[0] == expected, role
    finally:
        await router.stop()


async def test_an_operators_certificate_does_for_adapters_and_the_doctor_as_it_does_for_status(tmp_path: Path) -> None:
    """Beside any key: gRPC asks everybody for one."""
    folder = make_certificates(tmp_path)
    settings = router_settings(rpc=rpc_of(folder, "router"), tenants=TENANTS, operators=("acme",))
    router = Router(settings)
    await router.start()
    try:
        for role, key, reason in (
            (OPERATOR, ZETA, None),
            (OPERATOR, WRONG, "INVALID_API_KEY"),
            (OPERATOR, "", "MISSING_API_KEY"),
            (CLIENT, ACME, "ROLE"),
            (WORKER, ACME, "ROLE"),
        ):
            async with AsyncClient(router.address, rpc_of(folder, role), api_key=key) as client:
                assert await reason_of(client.adapters()) == reason, (role, key)
            async with channel(router.address, rpc_of(folder, role), peer="router") as link:
                stub: Any = operator_pb2_grpc.OperatorStub(link)
                metadata = (("authorization", f"Bearer {key}"),) if key else ()
                call = stub.Examine(operator_pb2.ExamineRequest(), timeout=10.0, metadata=metadata)
                assert await reason_of(first_of(call, router.address)) == reason, (role, key)
    finally:
        await router.stop()


async def reason_of(work: Awaitable[object]) -> str | None:
    try:
        await work
    except PdserveError as error:
        return error.reason
    return None


async def first_of(call: AsyncIterator[Any], address: str) -> None:
    try:
        await anext(call.__aiter__())
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from None


async def test_a_request_is_told_of_without_its_text_and_other_tenants_are_only_an_operators_to_see(
    made: House,
) -> None:
    ids = prompt(9, seed=4, vocab=VOCAB)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    clients = {key: AsyncClient(made.router.address, api_key=key) for key in (ACME, ZETA)}
    try:
        for client in clients.values():
            await client.complete(SECRET, sampling=params)
            await client.complete(token_ids=ids, sampling=params)
            with pytest.raises(PdserveError):
                await client.complete(SECRET, model="none", sampling=params)
        told = {key: (await client.status(recent=200)).recent for key, client in clients.items()}
        assert [one.tenant for one in told[ZETA]] == ["zeta"] * 3
        assert {one.tenant for one in told[ACME]} == {"acme", "zeta"} and len(told[ACME]) == 6
        assert [one.state for one in told[ZETA]] == ["refused", "done", "done"]
        assert told[ZETA][1].record.output_tokens == 3 and told[ZETA][0].record.outcome == "UNKNOWN_MODEL"
        assert len((await clients[ACME].status(recent=2)).recent) == 2
        assert not (await clients[ACME].status()).recent
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", headers=bearer(ACME)) as http:
            details = [(await http.get(f"/ui/requests/{one.request_id}")).text for one in told[ACME]]
            async with http.stream("GET", "/ui/events") as answer:
                events = b""
                async for piece in answer.aiter_bytes():
                    events += piece
                    if b"event: state" in events:
                        break
        everything = "".join(details) + events.decode()
        assert all(one.request_id in everything for one in told[ACME])
        assert SECRET not in everything and json.dumps(list(ids), separators=(",", ":")) not in everything
    finally:
        for client in clients.values():
            await client.close()


async def test_viewers_are_few_and_end_with_the_router_or_when_they_take_nothing() -> None:
    router = Router(router_settings())
    await router.start()
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as http:
        for _ in range(2 * MAX_VIEWERS):
            assert (await http.head("/ui/events")).status_code == 200  # and is no viewer
        open_pages = [http.stream("GET", "/ui/events") for _ in range(MAX_VIEWERS)]
        streams = [(await page.__aenter__()).aiter_bytes() for page in open_pages]
        for stream in streams:
            await anext(stream)
        refused = await http.get("/ui/events")
        assert refused.status_code in (429, 503) and refused.json()["error"]["code"] == "too_many_viewers"
        async with asyncio.timeout(5):
            await router.stop()
            for page, stream in zip(open_pages, streams, strict=True):
                async for _ in stream:
                    continue
                await page.__aexit__(None, None, None)
    assert router.ui.viewers == 0

    never = asyncio.Event().wait

    async def receive() -> dict[str, Any]:
        await never()
        return {}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    stuck = Router(router_settings(client_stall_s=0.05))
    async with asyncio.timeout(5):
        await _Viewing(stuck.ui, 0.05)({"type": "http"}, receive, send)
    assert stuck.ui.viewers == 0
    await stuck.stop()
