"""Who may change which adapters are served, from where, and what the operator is told."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pdserve.cli.main import app
from pdserve.client import AsyncClient
from pdserve.errors import CheckpointError, ConfigError, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from router.tenants import Tenant
from tests.e2e.adapted import Adapted, ask, prompt, serving
from tests.e2e.stack import MODEL, Stack

KEYS = {name: f"{name}-0123456789abcdef" for name in ("owner", "guest")}
TENANTS = tuple(Tenant.of(name, key) for name, key in KEYS.items())


async def test_with_tenants_only_operators_change_anything(made: Adapted) -> None:
    async with serving(made, "red", tenants=TENANTS, operators=("owner",)) as it:
        with pytest.raises(Unauthenticated):
            await it.client.load_adapter("blue", "blue")
        async with AsyncClient(it.router.address, api_key=KEYS["guest"]) as guest:
            for change in (guest.load_adapter("blue", "blue"), guest.unload_adapter("red"), guest.adapters()):
                with pytest.raises(PermissionDenied) as refused:
                    await change
                assert refused.value.reason == "NOT_OPERATOR"
            assert [model.adapters for model in await guest.models()] == [("red",)]
        async with AsyncClient(it.router.address, api_key=KEYS["owner"]) as owner:
            assert [[a.name for a in worker.adapters] for worker in await owner.adapters()] == [["red"]] * 2
            assert not [worker.error for worker in await owner.load_adapter("blue", "blue") if worker.error]


async def test_each_worker_says_why_it_did_not_load(made: Adapted, tmp_path: Path) -> None:
    """The others did, and the name is served as soon as a pair has it."""
    shutil.copytree(made.path("red"), tmp_path / "red")
    (tmp_path / "red" / "adapter_model.safetensors").unlink()
    async with serving(made) as it:
        await it.add_prefill(made.engine(), adapter_root=str(tmp_path))
        await it.add_prefill(made.engine())
        loaded = {worker.worker_id: worker.error for worker in await it.client.load_adapter("red", "red")}
        assert loaded["d0"] is loaded["p0"] is None
        incomplete, off = loaded["p1"], loaded["p2"]
        assert isinstance(incomplete, InvalidRequest) and incomplete.field == "adapter_model.safetensors"
        assert isinstance(off, PermissionDenied) and off.reason == "ADAPTERS_OFF"
        assert (await ask(it, prompt(9), "red", 3)).ids == made.answer(prompt(9), "red", 3)
        gone = {worker.worker_id: worker.error for worker in await it.client.unload_adapter("red", wait_s=5.0)}
        assert gone["d0"] is gone["p0"] is None
        assert isinstance(gone["p1"], NotFound) and isinstance(gone["p2"], NotFound)


async def test_a_worker_answers_for_itself(made: Adapted) -> None:
    async with serving(made) as it:
        async with AsyncClient(it.prefills[0].address) as worker:
            (loaded,) = await worker.load_adapter("red", "red", model=MODEL)
            assert (loaded.worker_id, loaded.role, [a.name for a in loaded.adapters]) == ("p0", "prefill", ["red"])
            with pytest.raises(NotFound, match="other"):
                await worker.load_adapter("red", "red", model="other")
            with pytest.raises(PermissionDenied):
                await worker.load_adapter("red", "/etc")
            with pytest.raises(InvalidRequest, match="no directory"):
                await worker.load_adapter("red", "nothing")
        assert [[a.name for a in each.adapters] for each in await it.client.adapters(MODEL)] == [[], ["red"]]


async def test_a_worker_whose_settings_name_a_bad_adapter_does_not_start(made: Adapted) -> None:
    settings = PrefillSettings(name=MODEL, adapters={"red": str(made.root / "nothing")})
    worker = PrefillWorker(made.engine(), None, settings)
    with pytest.raises(CheckpointError, match="nothing"):
        await worker.start()
    assert worker.state == "draining"


async def test_a_worker_that_the_registry_forgot_comes_back_with_its_adapters(made: Adapted) -> None:
    async with serving(made) as it:
        await it.client.load_adapter("red", "red")
        for worker in it.workers:
            await it.router.registry.deregister(worker.worker_id, worker.incarnation)
        await it.router.pool.refresh()
        await it.until(lambda: len(it.router.pool.ready(MODEL)) == 2)
        assert (await ask(it, prompt(9), "red", 3)).ids == made.answer(prompt(9), "red", 3)


async def pdserve(it: Stack, *arguments: str) -> Result:
    """The command in a thread of its own: a process would spend seconds on imports."""
    given = [*arguments, "--gateway", it.router.address]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, given))


async def test_the_command_line_loads_lists_and_unloads(made: Adapted) -> None:
    async with serving(made) as it:
        loaded = await pdserve(it, "adapters", "load", "red", "red", "--json")
        assert loaded.exit_code == 0, loaded.stderr
        workers: list[dict[str, Any]] = json.loads(loaded.stdout)["workers"]
        assert [[a["digest"] for a in worker["adapters"]] for worker in workers] == [[made.digest("red").hex()]] * 2
        listed = await pdserve(it, "adapters", "list")
        rows = [line.split() for line in listed.stdout.splitlines()[1:]]
        assert [row[:4] for row in rows] == [["d0", "decode", MODEL, "red"], ["p0", "prefill", MODEL, "red"]]
        assert (await ask(it, prompt(9), "red", 3)).ids == made.answer(prompt(9), "red", 3)
        refused = await pdserve(it, "adapters", "load", "blue", "../base")
        assert refused.exit_code == 1
        assert "d0" in refused.stderr and "adapter_root" in refused.stderr
        gone = await pdserve(it, "adapters", "unload", "red", "--wait-s", "5")
        assert gone.exit_code == 0, gone.stderr
        assert "none" in gone.stdout


def test_settings_name_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="max_adapters"):
        replace(PrefillSettings(), max_adapters=0).check()
