"""What a really running system exports: two pools and a router under mutual TLS, after traffic of every kind.

Read over the wire with the Prometheus project's own parser.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from pdserve.client import AsyncClient
from pdserve.errors import Internal, PdserveError
from pdserve.request import SamplingParams
from pdserve.rpc.tls import CLIENT, OPERATOR, ROUTER, WORKER
from router.tenants import Tenant
from tests.e2e.stack import Stack, read_tokens, stack
from tests.engine.tiny import prompt
from tests.rpc.certificates import rpc_of

KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("acme", "zeta")}
TENANTS = (Tenant.of("acme", KEYS["acme"]), replace(Tenant.of("zeta", KEYS["zeta"]), requests_per_minute=1))
GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=0, ignore_eos=True)
PROMPT = prompt(41, seed=1)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
KNOWN_TO_PROMETHEUS = {
    "job",
    "instance",
    "worker",
    "model",
}  # labels of a target: its own, and those of /metrics/targets

Families = dict[str, Metric]


@dataclass
class Observed:
    """The system, and how an operator looks at it."""

    made: Stack
    http: httpx.AsyncClient  # with an operator's certificate, and an operator's key for the router

    async def get(self, path: str, role: str = ROUTER, address: str = "", **options: Any) -> httpx.Response:
        """From the router, or the worker at an address."""
        return await get(self.http, f"{address or self.made.router.http_address}{path}", role, **options)

    async def router(self, accept: str = "") -> Families:
        return read(await self.get("/metrics", headers={"accept": accept}), accept)

    async def workers(self) -> dict[str, Families]:
        """By the worker's name, from where the router says they are."""
        pages = {}
        for target in (await self.get("/metrics/targets")).json():
            labels, (address,) = target["labels"], target["targets"]
            assert labels["__scheme__"] == "https" and labels.keys() - {"__scheme__"} <= KNOWN_TO_PROMETHEUS
            pages[labels["worker"]] = read(await self.get("/metrics", WORKER, address))
        return pages

    async def everything(self) -> list[Families]:
        return [await self.router(), *(await self.workers()).values()]


async def get(http: httpx.AsyncClient, address: str, role: str, **options: Any) -> httpx.Response:
    """Expects the certificate of that role, whatever the address, as Prometheus does with `server_name`."""
    return await http.get(f"https://{address}", extensions={"sni_hostname": f"{role}.pdserve"}, **options)


def read(page: httpx.Response, accept: str = "") -> Families:
    assert page.status_code == 200, page.text
    parse = openmetrics if page.headers["content-type"].startswith("application/openmetrics") else plain
    assert (parse is openmetrics) == (accept == OPENMETRICS)
    return {family.name: family for family in parse(page.text)}


@asynccontextmanager
async def observed(folder: Path) -> AsyncIterator[Observed]:
    """A prefill worker and two decode workers, idle so far.

    Args:
        folder: of certificates.
    """
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    trusting.load_cert_chain(folder / OPERATOR / "tls.crt", folder / OPERATOR / "tls.key")
    roles = {role: rpc_of(folder, role) for role in (CLIENT, OPERATOR, ROUTER, WORKER)}
    async with (
        stack(
            caller=roles[CLIENT], operator=roles[OPERATOR], rpc=roles[ROUTER], tenants=TENANTS, operators=("acme",)
        ) as made,
        httpx.AsyncClient(verify=trusting, headers={"authorization": f"Bearer {KEYS['acme']}"}) as http,
    ):
        await made.add_prefill(rpc=roles[WORKER])
        for _ in range(2):
            await made.add_decode(rpc=roles[WORKER])
        yield Observed(made, http)


@asynccontextmanager
async def client(made: Stack, folder: Path, key: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(made.router.address, rpc_of(folder, CLIENT), api_key=key) as it:
        yield it


async def traffic(made: Stack, folder: Path) -> None:
    """Five answers of 12 tokens for acme, one for zeta; then refusals of several kinds."""
    async with client(made, folder, KEYS["acme"]) as acme:
        for _ in range(2):
            await acme.complete(token_ids=PROMPT, sampling=GREEDY)
        await acme.complete(token_ids=PROMPT, sampling=GREEDY, n=2)
        await moved(made, acme)
        with suppress(PdserveError):
            await acme.complete(token_ids=(10**6,), sampling=GREEDY)
    async with client(made, folder, KEYS["zeta"]) as zeta:
        await zeta.complete(token_ids=PROMPT, sampling=GREEDY)
        with suppress(PdserveError):
            await zeta.complete(token_ids=PROMPT, sampling=GREEDY)
    async with client(made, folder, "sk-nobody-0123456789abcdef") as nobody:
        with suppress(PdserveError):
            await nobody.complete(token_ids=PROMPT, sampling=GREEDY)


async def moved(made: Stack, acme: AsyncClient) -> None:
    """One answer whose decode worker fails in the middle, and that goes on at the other."""
    events = acme.generate(token_ids=PROMPT, sampling=GREEDY)
    await read_tokens(events, 3)
    (at,) = [worker for worker in made.decodes if worker.pipeline.count]
    at.pipeline.end_all(Internal("a fault for this test", retryable=True))
    await read_tokens(events, GREEDY.max_tokens - 3 if GREEDY.max_tokens else 0)
    async for _ in events:
        pass
