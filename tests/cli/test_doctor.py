"""`pdserve doctor` in front of real routers and workers, well and ill."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.main import app
from pdserve.engine.native import build
from pdserve.registry.records import DECODE
from pdserve.rpc.channel import channel
from pdserve.rpc.tls import OPERATOR
from pdserve.v1 import operator_pb2, operator_pb2_grpc, worker_pb2
from router.tenants import Tenant
from tests.e2e.relay import Relay
from tests.e2e.stack import LEASE, stack
from tests.e2e.test_tls import secured
from tests.e2e.watched import engine
from tests.engine.tiny import spec
from tests.redis_server import running_redis
from tests.router.support import LONG_CONTEXT, house, model
from tests.router.test_dead_workers import process
from tests.router.worker_process import LONG_ENGINE
from tests.rpc.certificates import make_certificates, rpc_of

KEY, OTHER = "sk-acme-0123456789abcdef", "sk-zeta-0123456789abcdef"
CHECKS = [
    *("version", "contract", "worker", "path", "certificate", "clock", "registry", "load", "accounts"),
    *("adapter", "kernels", "disk", "canary"),
]


@dataclass(frozen=True)
class Said:
    """What the command said with --json."""

    code: int
    report: dict[str, Any]

    def bad(self, check: str) -> list[dict[str, str]]:
        """Findings of this check that are not ok; each says what to do."""
        found = [f for f in self.report["findings"] if f["check"] == check and f["level"] != "ok"]
        assert all(f["message"] and f["remedy"] for f in found), found
        return found

    def well(self) -> list[str]:
        return [f["check"] for f in self.report["findings"] if f["level"] == "ok"]


async def run(*arguments: str) -> tuple[int, str, str]:
    """In a thread, with an event loop of its own: exit code, standard output, standard error."""
    done = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


async def doctor(*arguments: str) -> Said:
    code, out, err = await run(*arguments, "--json")
    assert out, err
    report = json.loads(out)
    assert report["exit_code"] == code
    return Said(code, report)


async def test_a_healthy_deployment_is_told_so_and_no_figure_of_its_router_moves() -> None:
    async with stack() as made:
        for _ in range(2):
            await made.add_prefill()
            await made.add_decode()
        before = await made.client.status()
        said = await doctor(made.router.address)
        assert said.code == 0 and said.well() == CHECKS, said.report
        assert set(said.report) == {"gateway", "version", "exit_code", "counts", "findings", "canaries"}
        assert {"check", "subject", "level", "message", "remedy"} == set(said.report["findings"][0])

        canaries = said.report["canaries"]
        assert {(c["prefill_worker"], c["decode_worker"]) for c in canaries} == {
            (prefill, decode) for prefill in ("p0", "p1") for decode in ("d0", "d1")
        }
        assert len({tuple(c["token_ids"]) for c in canaries}) == 1 and len(canaries[0]["token_ids"]) == 8
        assert (
            min(c["bytes_sent"] for c in canaries) == max(c["bytes_sent"] for c in canaries) > 0
        )  # nothing was cached
        after = await made.client.status()
        assert after.placement == before.placement
        assert not made.router.orchestrator.outcomes.traffic.requests.values
        assert made.router.canaries.counts == {"length": 4}

        code, out, err = await run(made.router.address, "--no-canary")
        assert (code, err.strip()) == (0, "examining ...")
        assert [line.split()[:2] for line in out.splitlines()[:-1]] == [["ok", check] for check in CHECKS[:-1]]
        assert out.splitlines()[-1] == f"{made.router.address}, pdserve 0.1.0: 12 ok, 0 warning, 0 failure"

        few = await doctor(made.router.address, "--pairs", "2")
        assert few.code == 1 and {c["decode_worker"] for c in few.report["canaries"]} == {"d0", "d1"}
        assert "fitting pairs that were not tried: 2" in few.bad("canary")[0]["message"]


async def test_decode_workers_that_compute_prompts_are_tried_without_a_prefill_worker() -> None:
    async with stack(disaggregate="never") as made:
        await made.add_decode()
        said = await doctor(made.router.address)
        assert said.code == 0 and set(said.well()) == set(CHECKS), said.report
        (canary,) = said.report["canaries"]
        assert (canary["prefill_worker"], canary["decode_worker"], canary["bytes_sent"]) == ("", "d0", 0)


@pytest.fixture
def unknown_compiler() -> Iterator[None]:
    """As in a process that has not looked for one yet."""
    build.find_recipe.cache_clear()
    yield
    build.find_recipe.cache_clear()


@pytest.mark.usefixtures("unknown_compiler")
async def test_kernels_that_could_not_be_built_are_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with stack() as made:
        await made.add_decode()
        monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
        monkeypatch.delenv("CXX", raising=False)
        await made.add_prefill(engine(deterministic=False))
        (plain,) = (await doctor(made.router.address, "--no-canary")).bad("kernels")
        assert (plain["subject"], plain["level"]) == ("p0", "warning") and "without g++" in plain["message"]


async def test_a_frozen_worker_is_a_finding_and_no_hang() -> None:
    async with house(prefills=0, decodes=0) as made, process(made, DECODE, "frozen", lease_s=60.0) as frozen:
        for add, name in ((made.add_prefill, "p0"), (made.add_decode, "d0")):
            await add(name, of=model(context=LONG_CONTEXT), engine=LONG_ENGINE)
        frozen.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                said = await doctor(made.router.address, "--timeout", "1.5")
        finally:
            frozen.send_signal(signal.SIGCONT)
        assert said.code == 2
        (silent,) = said.bad("worker")
        assert silent["subject"] == "frozen" and "hangs or is frozen" in silent["remedy"]
        (path,) = said.bad("path")
        assert path["subject"] == "p0 -> frozen" and "mend frozen first" in path["remedy"]
        (skipped,) = said.bad("canary")
        assert skipped["message"].startswith("fitting pairs that were not tried: 1; a worker")
        assert [c["decode_worker"] for c in said.report["canaries"]] == ["d0"]  # the others are served


async def test_a_transfer_port_that_only_its_prefill_worker_cannot_reach_is_found_there() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as wall:  # it never answers
        blocked = f"127.0.0.1:{wall.getsockname()[1]}"
        async with stack() as made:
            await made.add_prefill()
            decode = await made.add_decode(advertise_transfer=blocked)
            async with channel(decode._transfer.address) as link:  # whoever asks from here is answered
                async with asyncio.timeout(5):
                    await link.channel_ready()
            said = await doctor(made.router.address, "--timeout", "1", "--no-canary")
            assert said.code == 2 and not said.bad("worker")
            (path,) = said.bad("path")
            assert path["subject"] == "p0 -> d0" and blocked in path["message"] + path["remedy"]
            assert "decode.advertise_transfer" in path["remedy"]


async def test_a_path_that_changes_bytes_is_found_by_its_canary_alone() -> None:
    relay = Relay()
    address = await relay.start()
    try:
        async with stack() as made:
            await made.add_prefill(engine())
            await made.add_decode(engine(), advertise_transfer=address, shared_memory="off")
            relay.target = made.decodes[0]._transfer.address
            assert (await doctor(made.router.address)).code == 0
            relay.arm(5_000, every=2_000)
            said = await doctor(made.router.address)
            assert said.code == 2 and set(said.well()) == set(CHECKS[:-1])
            (canary,) = said.bad("canary")
            assert canary["subject"] == "p0 -> d0" and canary["level"] == "failure" and relay.flips
            relay.arm(None)
            assert (await doctor(made.router.address)).code == 0  # it left nothing behind
    finally:
        await relay.stop()


async def test_another_model_names_the_field_and_whom_it_leaves_without_a_partner() -> None:
    async with stack() as made:
        await made.add_prefill()
        await made.add_decode()
        await made.add_decode(engine(seed=1))
        await made.add_decode(engine(of=spec(layers=1)), name="another")
        said = await doctor(made.router.address)
        assert said.code == 2
        stranger, other = said.bad("contract")
        assert (stranger["subject"], stranger["level"]) == ("another", "failure")  # its model has no prefill worker
        assert (other["subject"], other["level"]) == ("d1", "failure") and "MODEL_DIGEST: " in other["message"]
        assert [c["decode_worker"] for c in said.report["canaries"]] == ["d0"]


async def test_pages_without_an_owner_and_a_record_of_somebody_else_are_found() -> None:
    async with stack() as made:
        await made.add_prefill()
        await made.add_decode()
        record = made.decodes[0].record()
        stale = replace(record, worker_id="stale", incarnation=bytes(16))
        await made.router.registry.register(stale)
        await made.router.pool.refresh()
        made.decodes[0].blocks.allocate("lost", 1)
        said = await doctor(made.router.address, "--no-canary")
        made.decodes[0].blocks.release("lost")
        await made.router.registry.deregister("stale", stale.incarnation)
        assert said.code == 2
        (books,) = [f for f in said.bad("accounts") if f["subject"] == "d0"]
        assert "nobody answers for lost" in books["message"]
        assert [f["subject"] for f in said.bad("registry")] == ["stale"]


async def test_certificates_that_end_soon_are_counted_in_days_and_roles_are_kept(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path, "--days", "9")
    async with secured(folder) as made:
        said = await doctor(made.router.address, "--tls", str(folder / OPERATOR))
        assert said.code == 1 and set(said.well()) == set(CHECKS) - {"certificate"}, said.report
        ending = said.bad("certificate")
        assert [f["subject"] for f in ending] == [
            *("this command (grpc)", "router (grpc)", "router (http)", "d0 (grpc)", "p0 (grpc)")
        ]
        assert all("ends in 9.0 days" in f["message"] and "no restart" in f["remedy"] for f in ending)

        code, out, err = await run(made.router.address, "--tls", str(folder / "client"), "--json")
        assert (code, out) == (2, "") and err.splitlines()[-1].startswith(
            "error: certificate: the caller's certificate"
        )
        async with channel(made.router.address, rpc_of(folder, OPERATOR), peer="router") as link:
            stub: Any = operator_pb2_grpc.OperatorStub(link)
            odd = await stub.Canary(operator_pb2.CanaryRequest(prefill_worker="p0", decode_worker="d0"), timeout=10)
            assert len(odd.token_ids) == 8 and not odd.HasField("error")


async def test_a_registry_that_is_gone_is_found_by_every_part_and_canaries_still_pass() -> None:
    with running_redis() as redis:
        settings = replace(LEASE, url=redis.url, timeout_s=0.5)
        async with stack(registry=settings) as made:
            await made.add_prefill()
            await made.add_decode()
            assert (await doctor(made.router.address)).code == 0
            redis.kill()
            said = await doctor(made.router.address, "--timeout", "3")
            assert said.code == 2
            assert {f["subject"] for f in said.bad("registry")} == {"router", "p0", "d0"}
            assert "canary" in said.well() and "worker" in said.well()
            redis.start()
            await made.router.pool.refresh()


async def test_only_operators_may_examine_where_tenants_have_keys() -> None:
    tenants = (Tenant.of("acme", KEY), Tenant.of("zeta", OTHER))
    async with house(tenants=tenants, operators=("acme",)) as made:
        address = made.router.address
        assert (await doctor(address, "--api-key", KEY)).code == 0
        for key, told in ((OTHER, "may not examine"), ("", "there is no API key"), (f"{KEY}x", "not known")):
            code, out, err = await run(address, "--api-key", key, "--json")
            assert (code, out) == (2, "") and told in err.splitlines()[-1] and "sk-" not in err


async def test_what_is_no_gateway_is_one_error() -> None:
    async with stack() as made:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            silent = f"127.0.0.1:{nobody.getsockname()[1]}"
            for address in (made.router.http_address, silent, "nonsense"):
                code, out, err = await run(address, "--json", "--timeout", "1")
                errors = [line for line in err.splitlines() if line.startswith("error: ")]
                assert (code, out, len(errors)) == (2, "", 1), (address, err)
        alone = await doctor(made.router.address)
        assert alone.code == 2 and "no worker is registered" in alone.bad("contract")[0]["message"]


async def test_a_probe_goes_nowhere_but_to_listeners_of_the_registry() -> None:
    """The one message that makes a worker connect somewhere carries no address."""
    assert [field.name for field in worker_pb2.ProbeRequest.DESCRIPTOR.fields] == ["timeout_ms"]
    async with stack() as made:
        prefill = await made.add_prefill()
        decode = await made.add_decode()
        await made.add_decode(announced=False)
        reached = await prefill.prober.probe(2.0)
        assert [(path.decode_worker, path.address, path.error) for path in reached.paths] == [
            ("d0", decode.transfer_address, None)
        ]
        assert not (await decode.prober.probe(2.0)).paths
