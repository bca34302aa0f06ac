"""Findings about what is between the parts: contracts, transfer paths, the registry, certificates."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime

from pdserve.client.status import Pair, Worker
from pdserve.doctor.findings import Finding, failure, ok, unless_any, warning
from pdserve.doctor.observed import Observed
from pdserve.errors import FieldDifference
from pdserve.rpc.self_report import Certificate
from pdserve.rpc.settings import is_loopback, split_address

PREFILL, DECODE = "prefill", "decode"
NEVER = "never"  # as in RouterSettings.disaggregate
LEAST_LEASE = 0.25  # of a lease, before a heartbeat renews it
SLOW_REGISTRY_MS = 500.0
EXPIRES_DAYS = 14.0
_TOLD = ("must_equal", "lossy")  # kinds of differences that can refuse a pair


def of_one_model(o: Observed) -> list[Pair]:
    """The pairs that a request could be given, if they fit."""
    models = {worker.worker_id: worker.model for worker in o.status.workers}
    return [p for p in o.status.pairs if models.get(p.prefill_worker) == models.get(p.decode_worker)]


def contracts(o: Observed) -> list[Finding]:
    """Which pairs fit, which do not, and the field; who has no partner at all."""
    mode, pairs = o.status.placement.disaggregate, of_one_model(o)
    partners: dict[str, int] = defaultdict(int)
    refused: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        for name in (pair.prefill_worker, pair.decode_worker):
            partners[name] += pair.fits
            if not pair.fits:
                refused[name].append(pair)
    found = _missing_pools(o)
    lonely = set()
    for worker in o.status.workers if mode != NEVER else ():
        if partners[worker.worker_id] or not refused[worker.worker_id]:
            continue
        lonely.add(worker.worker_id)
        found.append(
            failure(
                "contract",
                worker.worker_id,
                f"{worker.worker_id} fits no worker of the other pool: {_reasons(refused[worker.worker_id])}",
                "start it with the checkpoint and settings of the others, or give it another model.name",
            )
        )
    rest = [p for p in pairs if not p.fits and not {p.prefill_worker, p.decode_worker} & lonely]
    if rest and mode != NEVER:
        names = sorted({pair.prefill_worker for pair in rest}), sorted({pair.decode_worker for pair in rest})
        found.append(
            warning(
                "contract",
                " -> ".join(map(", ".join, names)),
                f"pairs that do not fit: {len(rest)} of {len(pairs)}: {_reasons(rest)}",
                "nothing during an update; otherwise give all workers of the model one checkpoint and precision",
            )
        )
    groups = len({worker.contract.digest for worker in o.status.workers})
    fitting = sum(pair.fits for pair in pairs)
    kinds = sorted({d.code for pair in pairs if pair.fits for d in pair.differences if d.kind != "informational"})
    told = f"; converted on the way: {', '.join(kinds)}" if kinds else ""
    told = f"pairs that fit: {fitting} of {len(pairs)}; contracts: {groups}{told}"
    return unless_any(found, ok("contract", told))


def paths(o: Observed) -> list[Finding]:
    """From each prefill worker to each decode worker, as the prefill worker finds it."""
    found, slowest, count = [], 0.0, 0
    decodes = {w.worker_id: w for w in o.status.workers if w.role == DECODE}
    roles = {worker.worker_id: worker.role for worker in o.status.workers}
    for name, probe in o.probes().items():
        if roles[name] == PREFILL and probe.registry_error is not None:
            told = "its transfer paths were not tried: it does not know now where decode workers listen"
            found.append(
                warning("path", name, told, "see the findings about the registry; canaries tell more meanwhile")
            )
        for way in probe.ways:
            count += 1
            slowest = max(slowest, way.ms)
            if way.error is None:
                continue
            to = decodes.get(way.decode_worker)
            if to is not None and not o.answers(to):
                remedy = f"mend {way.decode_worker} first: it does not answer the router either"
            else:
                remedy = f"open {way.address} to the machine of {name}; if {way.decode_worker} is reached by another "
                remedy += "address there, set decode.advertise_transfer"
            told = f"{name} does not reach the Transfer listener of {way.decode_worker}: {way.error.message}"
            found.append(failure("path", f"{name} -> {way.decode_worker}", told, remedy))
        if probe.ways_left_out:
            told = f"{name} has tried {len(probe.ways)} ways, and {probe.ways_left_out} were left out"
            found.append(warning("path", name, told, "see whether the registry holds records of workers long gone"))
    return unless_any(found, ok("path", f"{count} transfer paths can be used, the slowest within {slowest:.0f} ms"))


def registry(o: Observed) -> list[Finding]:
    """Whether every part reaches it, how long it takes, and whether records are renewed."""
    found = []
    remedy = f"bring {o.status.registry} back; serving goes on with the workers that are known"
    trouble = o.status.registry_warning
    if o.router.registry_error is not None:
        trouble = f"the registry is out of reach: {o.router.registry_error.message}"
    if trouble:
        found.append(failure("registry", "router", trouble, remedy))
    slowest = o.router.registry_ms
    prefills = {w.worker_id for w in o.status.workers if w.role == PREFILL}
    decodes = {w.worker_id for w in o.status.workers if w.role == DECODE and w.state == "ready"}
    for name, probe in o.probes().items():
        if probe.registry_error is not None:
            told = f"the registry is out of reach: {probe.registry_error.message}"
            found.append(failure("registry", name, told, probe.registry_error.remedy or remedy))
            continue
        slowest = max(slowest, probe.registry_ms)
        missing = decodes - {way.decode_worker for way in probe.ways}
        if name in prefills and missing and not probe.ways_left_out:
            told = f"the registry of {name} does not have {', '.join(sorted(missing))}, which the router knows"
            found.append(warning("registry", name, told, "give every part the same registry.url"))
    if slowest > SLOW_REGISTRY_MS:
        told = f"a snapshot took {slowest:.0f} ms"
        found.append(warning("registry", "", told, "see what else uses it, and the network to it"))
    if not found:
        found += _late(o)
    return unless_any(found, ok("registry", f"{o.status.registry}: every part reaches it within {slowest:.0f} ms"))


def certificates(o: Observed) -> list[Finding]:
    """When they end, whether they name the part's role, and their authority."""
    parts = {"this command": (o.own, ""), "router": (o.router.part.certificates, "router")}
    parts |= {name: (probe.part.certificates, "worker") for name, probe in o.probes().items()}
    now = datetime.now(UTC)
    found, days_left, count = [], [], 0
    for name, (held, role) in parts.items():
        for each in held:
            count += 1
            found += _certificate(each, name, role, now)
            days_left.append(_days(each.not_after_s, now))
    if not count and not is_loopback(split_address(o.gateway)[0]):
        remedy = "give every part certificates (docs/security.md), unless the network is yours alone"
        found.append(warning("certificate", "", "there is no TLS: prompts and caches travel in clear", remedy))
    told = f"{count} are good, the first ends in {min(days_left):.0f} days" if count else "there is no TLS"
    return unless_any(found, ok("certificate", told))


def _certificate(c: Certificate, name: str, role: str, now: datetime) -> list[Finding]:
    subject = f"{name} ({c.listener})"
    if c.error is not None:
        remedy = f"{c.error.remedy}; what was read before serves until then"
        return [failure("certificate", subject, f"its files cannot be used: {c.error.message}", remedy)]
    found = []
    for what, ends in (("certificate", c.not_after_s), ("authority", c.authority_not_after_s)):
        left = _days(ends, now)
        if left >= EXPIRES_DAYS:
            continue
        if what == "certificate":
            remedy = "replace its files (`pdserve certificates`, or your authority); no restart is needed"
        else:
            remedy = "put the next authority beside it into every ca.crt, then issue new certificates"
        on = datetime.fromtimestamp(ends, UTC).strftime("%Y-%m-%d %H:%M")
        told = f"its {what} {'has ended' if left < 0 else f'ends in {left:.1f} days'}, on {on} UTC"
        found.append((failure if left < 0 else warning)("certificate", subject, told, remedy))
    if role and c.listener == "grpc" and not any(dns.startswith(f"{role}.") for dns in c.names):
        told = f"it names {', '.join(c.names) or 'nothing'}, not {role}.DEPLOYMENT"
        found.append(failure("certificate", subject, told, f"issue it for the role {role}: callers expect that"))
    return found


def _days(unix_s: int, now: datetime) -> float:
    return (unix_s - now.timestamp()) / 86400


def _missing_pools(o: Observed) -> list[Finding]:
    """Per model: a pool without a worker that is ready."""
    found = []
    ready: dict[str, set[str]] = {worker.model: set() for worker in o.status.workers}
    prompts_at_decode = o.status.placement.disaggregate not in ("", "always")
    for worker in o.status.workers:
        if worker.state == "ready":
            ready[worker.model].add(worker.role)
            if prompts_at_decode and worker.takes_prompts:
                ready[worker.model].add(PREFILL)
    if not ready:
        return [
            failure("contract", "", "no worker is registered: nothing can be served", "start workers of both pools")
        ]
    for model, roles in sorted(ready.items()):
        for role in sorted({PREFILL, DECODE} - roles):
            told = f"no {role} worker is ready for model {model!r}: nothing can be served"
            found.append(failure("contract", model, told, f"start a {role} worker, or see why they are not ready"))
    return found


def _late(o: Observed) -> list[Finding]:
    """Leases that are nearly over although the registry is well."""
    found = []
    for worker in o.status.workers:
        seen = o.examined.get(worker.worker_id)
        lease_s = seen.probe.lease_s if seen and seen.probe else 0.0
        if worker.lease_left_s < LEAST_LEASE * lease_s:
            told = f"its lease of {lease_s:g} s has {worker.lease_left_s:.1f} s left: its heartbeats come late"
            remedy = "see what keeps its process busy or its network slow; lengthen registry.lease_s"
            found.append(warning("registry", worker.worker_id, told, remedy))
    return found


def _reasons(pairs: list[Pair]) -> str:
    """Every difference that can refuse, once."""
    told: dict[FieldDifference, None] = {}
    for pair in pairs:
        told |= dict.fromkeys(d for d in pair.differences if d.kind in _TOLD)
    return "; ".join(map(str, told)) or "their fields differ"


def working(o: Observed, worker: Worker) -> bool:
    return worker.state == "ready" and o.answers(worker)
