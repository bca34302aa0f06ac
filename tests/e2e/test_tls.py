"""The whole service with mutual TLS: answers as without it, and nobody else is let in anywhere."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from typer.testing import CliRunner, Result

from pdserve.cli.main import app
from pdserve.errors import ConfigError, PermissionDenied
from pdserve.registry.open import open_registry
from pdserve.request import SamplingParams
from pdserve.rpc.channel import channel
from pdserve.rpc.status import from_rpc_error
from pdserve.rpc.tls import CLIENT, OPERATOR, ROUTER, WORKER
from pdserve.rpc.writing import write
from tests.e2e.stack import LEASE, Stack, alone, stack
from tests.engine.tiny import prompt
from tests.rpc.certificates import make_certificates, rpc_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_the_whole_service_answers_as_without_certificates(folder: Path) -> None:
    """Every connection is encrypted: registry, admission, prefill, transfer, tokens, accounts, HTTP."""
    async with secured(folder) as made:
        ids = prompt(41, seed=1)
        expected = alone(ids, GREEDY)
        answer = await made.ask(ids, GREEDY)
        assert answer.ids == expected.ids
        assert made.first_logits(answer) == expected.first_logits
        for worker in made.workers:
            assert not await speaks_plaintext(worker.address)
        assert not await speaks_plaintext(made.decodes[0].transfer_address)
        assert not await speaks_plaintext(made.router.address)

        trusting = ssl.create_default_context(cafile=folder / "ca.crt")
        port = made.router.http_address.rpartition(":")[2]
        async with (
            DefaultAsyncHttpxClient(verify=trusting) as http,
            AsyncOpenAI(base_url=f"https://localhost:{port}/v1", api_key="none", http_client=http) as peer,
        ):
            text = await peer.completions.create(
                model="tiny", prompt=list(ids), max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
            )
            assert text.usage is not None and text.usage.completion_tokens == 6
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(f"http://{made.router.http_address}/healthz")


async def test_the_ports_of_workers_refuse_whoever_is_not_a_part_that_needs_them(folder: Path) -> None:
    """Even with a certificate of this deployment, and before anything that was sent is looked at."""
    async with secured(folder) as made:
        decode, prefill = made.decodes[0], made.prefills[0]
        for role, address, method in (
            (CLIENT, decode.transfer_address, "/pdserve.v1.Transfer/Push"),
            (ROUTER, decode.transfer_address, "/pdserve.v1.Transfer/Push"),
            (CLIENT, decode.address, "/pdserve.v1.Decode/Generate"),
            (WORKER, decode.address, "/pdserve.v1.Decode/Generate"),
            (CLIENT, prefill.address, "/pdserve.v1.Prefill/Run"),
            (WORKER, prefill.address, "/pdserve.v1.Prefill/Run"),
            (CLIENT, made.router.address, "/pdserve.v1.Registry/Register"),
            (CLIENT, prefill.address, "/pdserve.v1.Worker/Accounts"),
        ):
            peer = ROUTER if address == made.router.address else WORKER
            async with channel(address, rpc_of(folder, role), peer=peer) as link:
                attempt: Any = link.stream_stream(method)
                call = attempt(timeout=5.0)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await write(call, b"not even a message")
                    async for _ in call:
                        pass
            error = from_rpc_error(caught.value, address)
            assert isinstance(error, PermissionDenied) and error.reason == "ROLE", (role, method, error)
        assert (await made.ask(prompt(9, seed=2), GREEDY)).ids == alone(prompt(9, seed=2), GREEDY).ids


async def test_a_worker_that_uses_tls_can_be_examined_by_who_has_the_certificates_of_both_parts(folder: Path) -> None:
    async with secured(folder) as made:
        worker, router = ["--worker-tls", str(folder / WORKER)], ["--tls", str(folder / ROUTER)]

        async def examine(*flags: str) -> Result:
            command = ["conformance", made.decodes[0].address, "--only", "a whole cache", *flags]
            return await asyncio.to_thread(lambda: CliRunner().invoke(app, command))

        examined = await examine(*router, *worker)
        assert examined.exit_code == 0 and "1 passed, 0 failed" in examined.output, examined.output
        examined = await examine(*router)  # may ask, and may not push
        assert examined.exit_code == 1 and "PERMISSION_DENIED" in examined.output, examined.output
        for flags in ([], worker):
            refused = await examine(*flags)
            assert isinstance(refused.exception, ConfigError) and not refused.output, refused.output


async def test_http_clients_show_certificates_where_they_must(folder: Path) -> None:
    async with secured(folder, http_client_certificates=True) as made:
        url = f"https://localhost:{made.router.http_address.rpartition(':')[2]}/healthz"
        trusting = ssl.create_default_context(cafile=folder / "ca.crt")
        async with httpx.AsyncClient(verify=trusting) as nobody:
            with pytest.raises(httpx.HTTPError):
                await nobody.get(url)
        trusting.load_cert_chain(folder / CLIENT / "tls.crt", folder / CLIENT / "tls.key")
        async with httpx.AsyncClient(verify=trusting) as somebody:
            assert (await somebody.get(url)).status_code == 200


async def test_http_takes_new_files_without_a_restart(folder: Path, tmp_path: Path) -> None:
    own = make_certificates(tmp_path / "public")
    cert, key = own / ROUTER / "tls.crt", own / ROUTER / "tls.key"
    async with secured(folder, http_cert_file=str(cert), http_key_file=str(key)) as made:
        url = f"https://localhost:{made.router.http_address.rpartition(':')[2]}/healthz"
        assert await reached(url, own / "ca.crt") and not await reached(url, folder / "ca.crt")
        for file in (cert, key):
            shutil.copy(folder / ROUTER / file.name, file)
        assert await reached(url, folder / "ca.crt") and not await reached(url, own / "ca.crt")


async def reached(url: str, authority: Path) -> bool:
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=authority)) as http:
        try:
            return (await http.get(url)).status_code == 200
        except httpx.ConnectError:
            return False


@asynccontextmanager
async def secured(folder: Path, **settings: Any) -> AsyncIterator[Stack]:
    """One worker of each pool, which find the router over TLS as other machines' would."""
    options = {"caller": rpc_of(folder, CLIENT), "operator": rpc_of(folder, OPERATOR), "rpc": rpc_of(folder, ROUTER)}
    async with stack(**options, **settings) as made:
        mine = rpc_of(folder, WORKER)
        registry = open_registry(f"grpc://{made.router.address}", LEASE, mine)
        try:
            await made.add_prefill(rpc=mine, through=registry)
            await made.add_decode(rpc=mine, through=registry)
            yield made
            await made.check_free()
            for worker in made.workers:
                await made.remove(worker)
        finally:
            await registry.close()


async def speaks_plaintext(address: str) -> bool:
    async with channel(address) as link:
        try:
            await health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True
