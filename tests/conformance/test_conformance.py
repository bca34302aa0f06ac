"""Our decode worker under `pdserve conformance`, and workers with a planted fault, which must fail the right case."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from typer.testing import CliRunner

import cache_transfer.checks
import cache_transfer.intake
import cache_transfer.opening
import cache_transfer.receiver
import cache_transfer.writers
import decode_worker.admission
import decode_worker.sampling
from cache_transfer import digests
from cache_transfer.codec import Coverage
from cache_transfer.contract import WorkerContract, cache_identity
from cache_transfer.receiver import Receiver
from cache_transfer.tickets import TicketBook
from decode_worker.sampling import Choice
from pdserve.cli.main import app
from pdserve.conformance.bench import Limits
from pdserve.conformance.cases import Outcome, Result
from pdserve.conformance.runner import all_cases, run, select
from pdserve.engine.blocks import BlockManager
from pdserve.engine.spec import LayerShape
from pdserve.errors import ConfigError
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.decode_worker.rig import Rig, rig
from tests.engine.test_layer_shapes import CONVOLUTIONS
from tests.engine.tiny import ROPE, SEVEN, seven_model, spec, tiny_engine
from tests.rpc.gateway import ScriptedGateway, serving

LIMITS = Limits(timeout_s=10.0, settle_s=2.0)
WHOLE = "a whole cache"
CLOCKED = ("an expired ticket", "the sender stalls between two frames")
LOSS = ("loss is reported, where both sides allow it", "other numerics than were announced")


async def examine(r: Rig, *only: str, limits: Limits = LIMITS) -> list[Result]:
    """The tool is synchronous, and this loop serves the worker: so it runs in a thread."""
    return await asyncio.to_thread(run, r.worker.address, limits, select(only))


def others(results: list[Result]) -> dict[str, str]:
    """Cases that did not pass, with why."""
    return {
        result.name: f"{result.outcome}: {result.detail}" for result in results if result.outcome is not Outcome.PASS
    }


async def test_our_worker_passes_every_case() -> None:
    async with rig() as r:
        results = await examine(r)
    assert len(results) == len(all_cases())
    assert others(results).keys() == {*CLOCKED, *LOSS}, others(results)
    assert all(result.outcome is not Outcome.FAIL for result in results)
    assert sum(result.hostile_inputs for result in results) > 350


async def test_our_worker_passes_the_cases_that_wait_for_its_clocks() -> None:
    async with rig(ticket_ttl_s=0.4, idle_s=0.2) as r:
        results = await examine(r, *CLOCKED, limits=Limits(10.0, 2.0, wait_s=2.0))
    assert [result.name for result in results] == list(CLOCKED)
    assert others(results) == {}


async def test_a_worker_that_allows_loss_passes() -> None:
    async with rig(decode=tiny_engine(dtype="bf16", deterministic=True), allow_lossy=True) as r:
        results = await examine(r, "good", "contracts")
    assert others(results) == {}


@pytest.mark.parametrize("dtype", ["fp16", "float64"])
async def test_workers_of_other_dtypes_pass(dtype: str) -> None:
    async with rig(decode=tiny_engine(dtype=dtype, deterministic=True)) as r:
        results = await examine(r, "good", "logits")
    assert others(results).keys() == {LOSS[0]}, others(results)


async def test_a_model_with_one_head_and_few_tokens_passes() -> None:
    """A vocabulary of six, one KV head, a context of 64."""
    from pdserve.engine.engine import Engine
    from pdserve.engine.plan import EngineConfig

    engine = Engine(seven_model(), EngineConfig(dtype="float64", pages=64, page_size=4, deterministic=True))
    assert engine.spec == SEVEN
    async with rig(decode=engine) as r:
        results = await examine(r, "good", "contracts", "frames", "damage")
    assert others(results).keys() == {CLOCKED[1], *LOSS}, others(results)


async def test_a_model_whose_layers_cache_differently_or_nothing_passes() -> None:
    nothing = LayerShape(0, 0, 0)
    layers = {"layers": 5, "layer_shapes": (nothing, *CONVOLUTIONS["layer_shapes"], nothing)}
    windows = {"sliding_window": (0, 3, 0, 5, 0), "layer_positions": (ROPE, *CONVOLUTIONS["layer_positions"], ROPE)}
    async with rig(decode=tiny_engine(spec(**layers, **windows), deterministic=True)) as r:
        results = await examine(r, "good", "contracts")
    assert others(results).keys() == set(LOSS), others(results)


# What a worker could do wrong, and a case that must notice.

Plant = Callable[[pytest.MonkeyPatch], None]


def _no_frame_digests(patch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(frame_digest=digests.frame_digest, same=lambda left, right: True)
    patch.setattr(cache_transfer.writers, "digests", blind)


def _no_other_digests(patch: pytest.MonkeyPatch) -> None:
    """Of logits and manifest."""
    blind = SimpleNamespace(logits_digest=digests.logits_digest, same=lambda left, right: True)
    patch.setattr(cache_transfer.checks, "digests", blind)


def _no_proof(patch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(proof=digests.proof, same=lambda left, right: True)
    patch.setattr(cache_transfer.opening, "digests", blind)


def _replay(patch: pytest.MonkeyPatch) -> None:
    find = TicketBook._find

    def lenient(self: TicketBook, opening: Any) -> Any:
        entry = self._entries.get(opening.handoff_id)
        if entry is not None:
            entry.claimed = False
        return find(self, opening)

    patch.setattr(TicketBook, "_find", lenient)


def _any_attempt(patch: pytest.MonkeyPatch) -> None:
    """Old attempts count as the current one."""
    find = TicketBook._find

    def lenient(self: TicketBook, opening: Any) -> Any:
        entry = self._entries.get(opening.handoff_id)
        if entry is not None and 1 <= opening.attempt < entry.ticket.attempt:
            return entry
        return find(self, opening)

    patch.setattr(TicketBook, "_find", lenient)
    patch.setattr(TicketBook, "is_current", lambda self, handoff_id, attempt: True)


def _any_incarnation(patch: pytest.MonkeyPatch) -> None:
    find = TicketBook._find

    def lenient(self: TicketBook, opening: Any) -> Any:
        object.__setattr__(opening, "incarnation", self.incarnation)
        return find(self, opening)

    patch.setattr(TicketBook, "_find", lenient)


def _no_coverage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coverage, "complete", property(lambda self: True))
    patch.setattr(Coverage, "_check_order", lambda self, received, header: None)


def _no_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_transfer.opening, "check_identity", lambda expected, got: None)


def _no_contract_at_the_push(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_transfer.opening, "check_compatible", lambda left, right: ())


def _no_contract_at_admission(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode_worker.admission, "check_compatible", lambda *contracts, **options: ())


def _no_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_transfer.intake, "check_commit", lambda *arguments: None)


def _deaf_before_the_grant(patch: pytest.MonkeyPatch) -> None:
    """What comes early is only read when its turn comes."""

    async def deaf(self: Receiver, attempt: Any, reading: Any) -> Any:
        return await self._pages(attempt, ())

    patch.setattr(Receiver, "_wait_for_pages", deaf)


def _highest_of_equals(patch: pytest.MonkeyPatch) -> None:
    def greedy(row: Tensor) -> Choice:
        scores = row.detach().cpu().numpy()
        return Choice(int(np.flatnonzero(scores == scores.max())[-1]))

    patch.setattr(decode_worker.sampling, "_greedy", greedy)


def _shared_prefixes(patch: pytest.MonkeyPatch) -> None:
    """The tenant is no part of the cache's name."""

    def shared(contract: WorkerContract, adapter: bytes | None, tenant: str, *rest: Any) -> bytes:
        return cache_identity(contract, adapter, "", *rest)

    patch.setattr("decode_worker.opening.cache_identity", shared)


def _wrong_status(patch: pytest.MonkeyPatch) -> None:
    """Everything that is lost is reported as if it could never work."""
    patch.setattr(cache_transfer.writers, "data_loss", _as_invalid)


def _as_invalid(problem: str, reason: str, field: str) -> Exception:
    from pdserve.errors import InvalidRequest

    return InvalidRequest(problem, reason=reason, field=field)


FAULTS: dict[Plant, tuple[str, ...]] = {
    _no_frame_digests: (
        "payload with a flipped bit",
        "a frame of another request",
        "bits of the last frame flipped",
    ),
    _no_other_digests: ("scores with a flipped bit", "manifest digest of another handoff"),
    _no_proof: ("proof made with another secret",),
    _replay: ("a ticket is used while its stream is open",),
    _any_attempt: ("a ticket that was replaced before any push",),
    _any_incarnation: ("another incarnation",),
    _no_coverage: ("one token sent twice", "the last frame missing, renumbered"),
    _no_identity: ("another tenant", "a ticket of another request"),
    _no_contract_at_the_push: ("each field that must be equal, at the push",),
    _no_contract_at_admission: ("each field that must be equal, at admission",),
    _no_manifest: ("manifest with one byte more",),
    _deaf_before_the_grant: ("a frame before the grant", "an end before the grant"),
    _highest_of_equals: ("equal best scores: the lowest id",),
    _shared_prefixes: ("a prefix that is held stays where it is",),
    _wrong_status: ("digest with a flipped bit",),
}


@pytest.mark.parametrize("plant", FAULTS, ids=[plant.__name__.strip("_") for plant in FAULTS])
async def test_a_worker_with_a_planted_fault_fails_the_right_cases(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    async with rig() as r:
        results = await examine(r, WHOLE, *FAULTS[plant], limits=Limits(timeout_s=2.0, settle_s=2.0))
    assert others(results).keys() == set(FAULTS[plant]), others(results)
    assert all(result.outcome is not Outcome.SKIP for result in results)


@contextlib.contextmanager
def leaking(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages are never given back, until the end."""
    forgotten: list[tuple[BlockManager, str]] = []
    release = BlockManager.release
    patch.setattr(BlockManager, "release", lambda self, owner: forgotten.append((self, owner)))
    yield
    patch.undo()
    for blocks, owner in forgotten:
        release(blocks, owner)


async def test_a_worker_that_keeps_pages_fails_whatever_case_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        with leaking(monkeypatch):
            results = await examine(r, WHOLE, limits=Limits(10.0, settle_s=0.2))
    assert "page" in others(results)[WHOLE]


def test_case_names_are_unique_and_can_be_chosen() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert [case.name for case in select([WHOLE])] == [WHOLE]
    assert {case.group for case in select(["fra?es"])} == {"frames"}
    assert {case.group for case in cases if not case.hostile} == {"good"}


# The command.


async def command(*arguments: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, app, ["conformance", *arguments])


async def test_the_command_reports_passes_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    async with rig() as r:
        result = await command(r.worker.address, "--only", WHOLE, "--only", "header: *", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    cases = select([WHOLE, "header: *"])
    assert (report["passed"], report["failed"], report["skipped"]) == (len(cases), 0, 0)
    assert report["hostile_inputs"] == len(cases) - 1
    assert [case["name"] for case in report["cases"]] == [case.name for case in cases]
    assert f"{len(cases)} passed, 0 failed, 0 skipped; {len(cases) - 1} hostile inputs tried" in result.output
    assert f"pass  good       {WHOLE}" in result.output


async def test_the_command_fails_when_a_case_does(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_identity(monkeypatch)
    async with rig() as r:
        result = await command(r.worker.address, "--only", "another tenant")
    assert result.exit_code == 1
    assert "fail  opening    another tenant: refused with DATA_LOSS MANIFEST" in result.output
    assert "0 passed, 1 failed, 0 skipped; 1 hostile inputs tried" in result.output


async def test_an_endpoint_that_is_no_decode_worker_is_refused_before_any_case() -> None:
    worker = PrefillWorker(tiny_engine(), None, PrefillSettings(grace_s=1.0))
    await worker.start()
    try:
        async with serving(ScriptedGateway()) as gateway:
            prefill, other = await command(worker.address), await command(gateway.address)
    finally:
        await worker.stop()
    for result, told in ((prefill, f"{worker.address} is a prefill worker"), (other, "is no worker")):
        assert isinstance(result.exception, ConfigError) and result.exception.field == "endpoint"
        assert told in result.exception.message and "pdserve status" in result.exception.remedy
        assert result.output == ""


@pytest.mark.parametrize(
    "arguments", [["nowhere"], ["127.0.0.1:1", "--only", "no such case"], ["127.0.0.1:1", "--wait", "40"]]
)
async def test_wrong_usage_is_a_configuration_error(arguments: list[str]) -> None:
    result = await command(*arguments)
    assert isinstance(result.exception, ConfigError), result.output  # `main` turns it into exit code 2
