"""The HTTPS port: handshakes are bounded in time and number, on the event loop of asyncio and on the one of Ray."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from pdserve.rpc.tls import http_context
from tests.router.test_http_abuse import REQUEST, connection, server
from tests.rpc.certificates import make_certificates, rpc_of

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs to its end, on one of the two loops."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def to_its_end(work: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20):
                await work

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())

    return to_its_end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls(folder: Path) -> ssl.SSLContext:
    return http_context(rpc_of(folder, "router").tls, client_certificates=False)


@pytest.fixture
def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.crt")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_does_not_come_ends_the_connection(run: Run, tls: ssl.SSLContext, sent: bytes) -> None:
    async def work() -> None:
        async with server(tls=tls, header_s=0.2) as to, connection(to) as (reader, writer):
            writer.write(sent)
            assert await reader.read() == b""

    run(work())


def test_silent_clients_keep_nobody_out(run: Run, tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    async def work() -> None:
        async with server(tls=tls, connections=3) as to, AsyncExitStack() as held:
            silent = [await held.enter_async_context(connection(to)) for _ in range(9)]
            url = f"https://localhost:{to.address.rpartition(':')[2]}"
            for _ in range(2):
                async with httpx.AsyncClient(verify=trusting) as http:
                    assert (await http.get(url)).status_code == 200
            for reader, _ in silent[:6]:
                assert await reader.read() == b""

    run(work())


def test_connections_that_are_only_to_close_keep_nobody_out(
    run: Run, tls: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    """A client that is answered and told goodbye, and says nothing: closing waits for it, and holds no place."""

    def refused(port: int) -> ssl.SSLSocket:
        client = trusting.wrap_socket(socket.create_connection(("localhost", port), 5), server_hostname="localhost")
        client.sendall(b"nonsense\r\n\r\n")
        assert client.recv(64).startswith(b"HTTP/1.1 400")  # the goodbye is a record of its own, and is not read
        return client

    async def work() -> None:
        async with server(tls=tls, connections=3, header_s=15) as to:
            port = int(to.address.rpartition(":")[2])
            closing = [await asyncio.to_thread(refused, port) for _ in range(3)]
            try:
                async with httpx.AsyncClient(verify=trusting) as http:
                    assert (await http.get(f"https://localhost:{port}")).status_code == 200
            finally:
                for client in closing:
                    client.close()

    run(work())


def test_what_is_sent_right_behind_a_handshake_is_read(run: Run, tls: ssl.SSLContext, trusting: ssl.SSLContext) -> None:
    """The last bytes of the handshake and the request come as one piece."""

    async def work() -> None:
        async with server(tls=tls) as to:
            for _ in range(20):
                assert (await ask_in_one_piece(to.address, trusting)).startswith(b"HTTP/1.1 200 OK")

    run(work())


async def ask_in_one_piece(address: str, trusting: ssl.SSLContext) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def until_done(step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))

    await until_done(client.do_handshake)
    client.write(REQUEST)
    writer.write(outgoing.read())
    answer: bytes = await until_done(client.read)
    writer.close()
    return answer


def test_stopping_does_not_wait_for_silent_connections(run: Run, tls: ssl.SSLContext) -> None:
    async def work() -> None:
        async with server(tls=tls) as to, connection(to), asyncio.timeout(5):
            await to.stop()

    run(work())
