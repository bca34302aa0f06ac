"""What `pdserve doctor` makes of an observation: one that is real, with one figure changed at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from pdserve.client.status import Worker
from pdserve.doctor.ask import doctor as asks_of
from pdserve.doctor.canaries import choose, judge
from pdserve.doctor.observed import Observed
from pdserve.doctor.parts import adapters, clocks, disks, loads, versions, workers
from pdserve.doctor.ways import certificates, registry
from pdserve.rpc.self_report import Certificate
from pdserve.rpc.settings import RpcSettings
from tests.e2e.stack import stack


async def test_other_tokens_are_a_failure_beyond_what_rounding_can_do() -> None:
    """fp32: the best two of a near tie may change places, unless both sides compute in deterministic mode."""
    async with stack() as made:
        await made.add_prefill()
        for _ in range(2):
            await made.add_decode()
        async with asks_of(made.router.address, RpcSettings(), "", 5.0) as asks:
            seen = await asks.observe()
            choice = choose(seen, 16)
            first, second = [await asks.sing(*pair) for pair in choice.pairs]
        assert [finding.level for finding in judge(seen, choice, (first, second))] == ["ok"]
        other = replace(second, ids=(*second.ids[:3], second.ids[3] + 1, *second.ids[4:]))
        rounded = replace(seen, status=replace(seen.status, workers=tuple(map(undetermined, seen.status.workers))))
        for observed, gap, level in (
            (seen, 1e-6, "failure"),
            (rounded, 1e-6, "ok"),
            (rounded, 0.1, "failure"),
        ):
            near = replace(first, gaps=(9.0, 9.0, 9.0, gap, *(9.0 for _ in first.ids[4:])))
            (finding,) = judge(observed, choice, (near, replace(other, gaps=near.gaps)))
            assert finding.level == level and ("token 3" in finding.message) == (level == "failure")


async def test_what_parts_report_becomes_a_finding_beyond_its_limit() -> None:
    """One real observation, with one figure changed at a time."""
    async with stack() as made:
        await made.add_prefill()
        await made.add_decode()
        async with asks_of(made.router.address, RpcSettings(), "", 5.0) as asks:
            seen = await asks.observe()

    def with_worker(**changes: Any) -> Observed:
        workers = tuple(replace(w, **changes) if w.worker_id == "d0" else w for w in seen.status.workers)
        return replace(seen, status=replace(seen.status, workers=workers))

    def with_probe(**changes: Any) -> Observed:
        examined = seen.examined["d0"]
        assert examined.probe is not None
        changed = replace(examined, probe=replace(examined.probe, **changes))
        return replace(seen, examined={**seen.examined, "d0": changed})

    probe, load = seen.probes()["d0"], seen.status.workers[0].load
    now = int(time.time())

    def with_certificate(days: float, authority_days: float, *names: str) -> Observed:
        ends = int(now + 86400 * days), int(now + 86400 * authority_days)
        return with_probe(part=replace(probe.part, certificates=(Certificate("grpc", names, *ends),)))

    cases = [
        (versions, with_probe(part=replace(probe.part, version="0.0.9")), "warning", "d0 is of version 0.0.9"),
        (clocks, with_probe(part=replace(probe.part, clock_ms=probe.part.clock_ms + 9000)), "warning", "9.0 s ahead"),
        (clocks, with_probe(part=replace(probe.part, clock_ms=probe.part.clock_ms - 10**6)), "failure", "behind"),
        (disks, with_probe(cache_free_bytes=1 << 20), "warning", "1 MiB"),
        (loads, with_worker(load=replace(load, pages_held=load.pages_total)), "warning", "pages are held"),
        (loads, with_worker(load=replace(load, waiting=load.waiting_limit)), "warning", "more requests are refused"),
        (registry, with_worker(lease_left_s=0.5), "warning", "heartbeats come late"),
        (registry, with_probe(registry_ms=900.0), "warning", "900 ms"),
        (workers, with_worker(state="stalled"), "failure", "an engine step hangs"),
        (workers, with_worker(state="draining"), "warning", "draining"),
        (adapters, with_worker(adapters=(("legal", b"x" * 32),)), "warning", "none at p0"),
        (certificates, with_certificate(-1, 100, "worker.pdserve"), "failure", "has ended"),
        (certificates, with_certificate(100, 3, "worker.pdserve"), "warning", "authority ends in 3.0 days"),
        (certificates, with_certificate(100, 100, "client.pdserve"), "failure", "not worker.DEPLOYMENT"),
    ]
    for check, observed, level, told in cases:
        assert [finding.level for finding in check(seen)] == ["ok"]
        (finding,) = check(observed)
        assert finding.level == level and told in finding.message and finding.remedy, finding


def undetermined(worker: Worker) -> Worker:
    info = worker.contract.info | {"deterministic": "false"}
    return replace(worker, contract=replace(worker.contract, info=info))
