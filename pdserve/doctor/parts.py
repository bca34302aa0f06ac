"""Findings about each part for itself: its version, clock, state, pages, kernels and disk."""

from __future__ import annotations

from collections import Counter, defaultdict

from pdserve import __version__
from pdserve.client.status import Worker
from pdserve.doctor.findings import Finding, failure, ok, unless_any, warning
from pdserve.doctor.observed import Examined, Observed
from pdserve.errors import DeadlineExceeded, PdserveError

ROUTER = "router"
SKEW_MS, MAX_SKEW_MS = 2_000, 300_000  # beyond the second a certificate issued now is refused
FULL = 0.95  # of pages, or of a queue
DISK_BYTES = 512 << 20
OLDER = "UNIMPLEMENTED"


def versions(o: Observed) -> list[Finding]:
    """Names every part that is of another version than the router."""
    mine = o.status.version
    of: dict[str, list[str]] = defaultdict(list)
    for name, probe in o.probes().items():
        of[probe.part.version].append(name)
    found = [
        warning(
            "version",
            ", ".join(names),
            f"{_are(names)} of version {version}, the router of {mine}",
            "finish the update, or roll back: old and new may serve side by side for a while",
        )
        for version, names in sorted(of.items())
        if version != mine
    ]
    if __version__ != mine:
        found.append(
            warning(
                "version",
                "this command",
                f"this command is of version {__version__}, the router of {mine}",
                "use the doctor of the deployment's own version",
            )
        )
    torches: dict[str, list[str]] = defaultdict(list)
    for worker in o.status.workers:
        torches[worker.contract.info.get("torch", "")].append(worker.worker_id)
    if len(torches) > 1:
        told = "; ".join(f"{version or 'unknown'} at {', '.join(names)}" for version, names in sorted(torches.items()))
        found.append(warning("version", "", f"workers have several versions of torch: {told}", "use one image for all"))
    return unless_any(found, ok("version", f"every part is of version {mine}"))


def clocks(o: Observed) -> list[Finding]:
    """Each against the router's, and the router's against this machine's."""
    found, worst = [], 0
    router_ms = o.router.part.clock_ms
    skews = {ROUTER: max(o.asked_ms - router_ms, 0) or min(o.answered_ms - router_ms, 0)}
    for name, probe in o.probes().items():
        skews[name] = o.examined[name].clock_ms - probe.part.clock_ms
    for name, late_ms in skews.items():
        worst = max(worst, abs(late_ms))
        if abs(late_ms) <= SKEW_MS:
            continue
        how = f"{abs(late_ms) / 1000:.1f} s {'behind' if late_ms > 0 else 'ahead of'}"
        whose = "this machine's" if name == ROUTER else "the router's"
        made = failure if abs(late_ms) > MAX_SKEW_MS else warning
        remedy = "set its clock (NTP): certificates, logs and traces are read by it"
        found.append(made("clock", name, f"its clock is {how} {whose}", remedy))
    return unless_any(found, ok("clock", f"clocks agree within {max(worst, 1) / 1000:.3f} s"))


def workers(o: Observed) -> list[Finding]:
    """Who answers, and in which state."""
    found = []
    for worker in o.status.workers:
        seen = o.examined.get(worker.worker_id, Examined(worker.worker_id))
        if not o.answers(worker):
            found.append(_silent(worker, seen.error))
        elif worker.state == "stalled":
            found.append(
                failure(
                    "worker",
                    worker.worker_id,
                    f"the watchdog of {worker.worker_id} says that an engine step hangs (stalled)",
                    "restart it, and keep its log; requests go to others meanwhile",
                )
            )
        elif worker.state != "ready":
            found.append(
                warning(
                    "worker",
                    worker.worker_id,
                    f"{worker.worker_id} is {worker.state}: it gets no new requests",
                    "wait until it is ready or gone; if it stays so, see its log",
                )
            )
        elif seen.suspect:
            found.append(
                warning(
                    "worker",
                    worker.worker_id,
                    f"the router has taken {worker.worker_id} out of rotation, since a call to it failed",
                    "nothing if its next heartbeat brings it back; otherwise see its log and the network between them",
                )
            )
    pools = Counter(worker.role for worker in o.status.workers)
    told = " and ".join(f"{count} {role}" for role, count in sorted(pools.items(), reverse=True))
    return unless_any(found, ok("worker", f"{told or 'no'} workers answer the router, and are ready"))


def accounts(o: Observed) -> list[Finding]:
    """Pages that nobody answers for."""
    found = []
    for name, seen in sorted(o.examined.items()):
        books = seen.books
        if books is not None and (books.fault or books.orphans):
            who = f"; nobody answers for {', '.join(books.orphans)}" if books.orphans else ""
            remedy = "restart it (its pages are lost otherwise), and report this with its log: it is a fault of ours"
            found.append(failure("accounts", name, f"its page books are not intact: {books.fault}{who}", remedy))
    asked = sum(seen.books is not None for seen in o.examined.values())
    return unless_any(found, ok("accounts", f"every page has an owner, or is free; workers that were asked: {asked}"))


def loads(o: Observed) -> list[Finding]:
    """Pools and queues that are nearly full."""
    found = []
    for worker in o.status.workers:
        load = worker.load
        if load.pages_total and load.pages_held >= FULL * load.pages_total:
            told = f"{load.pages_held} of {load.pages_total} pages are held: requests wait, or lose their pages"
            remedy = f"add {worker.role} workers, or give them more pages (engine.pages)"
            found.append(warning("load", worker.worker_id, told, remedy))
        if load.waiting_limit and load.waiting >= FULL * load.waiting_limit:
            told = f"{load.waiting} of {load.waiting_limit} places in its queue are taken: more requests are refused"
            found.append(warning("load", worker.worker_id, told, f"add {worker.role} workers"))
    return unless_any(found, ok("load", f"pages and queues have room; requests in flight: {o.status.active_requests}"))


def adapters(o: Observed) -> list[Finding]:
    """A name that stands for several versions, or that some workers of its model do not have."""
    found, names = [], 0
    for model in sorted({worker.model for worker in o.status.workers}):
        of_model = [worker for worker in o.status.workers if worker.model == model and worker.state == "ready"]
        served = [{name: digest for name, digest in worker.adapters if name} for worker in of_model]
        for name in sorted({name for each in served for name in each}):
            names += 1
            if len({each.get(name) for each in served}) == 1:
                continue
            told = ", ".join(
                f"{each[name].hex()[:8] if name in each else 'none'} at {worker.worker_id}"
                for worker, each in zip(of_model, served, strict=True)
            )
            remedy = (
                f"run the `pdserve adapters load {name} PATH` of the wanted version again: it repairs what is missing"
            )
            found.append(warning("adapter", f"{model}:{name}", f"workers serve several versions: {told}", remedy))
    return unless_any(found, ok("adapter", f"{names} adapters, each of one version everywhere" if names else "none"))


def kernels(o: Observed) -> list[Finding]:
    """Plain torch where native kernels were expected, and why."""
    states: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, probe in o.probes().items():
        states[probe.kernels, probe.kernels_why].append(name)
    found = [
        warning(
            "kernels",
            ", ".join(names),
            f"plain torch serves, slower, where native kernels were expected: {why}",
            "install a C++ compiler there, or make room and leave to write in its cache folder, and restart",
        )
        for (state, why), names in sorted(states.items())
        if state == "failed"
    ]
    told = "; ".join(
        f"{state}{f' ({why})' if why else ''} at {', '.join(names)}" for (state, why), names in sorted(states.items())
    )
    return unless_any(found, ok("kernels", told or "no worker told"))


def disks(o: Observed) -> list[Finding]:
    """Room for compiled kernels."""
    found, least = [], None
    for name, probe in o.probes().items():
        free = probe.cache_free_bytes
        least = free if least is None else min(least, free)
        if free < DISK_BYTES:
            told = f"{free >> 20} MiB are free on the disk of {probe.cache_folder}"
            found.append(
                warning("disk", name, told, "make room: kernels and digests that cannot be kept are made anew")
            )
    return unless_any(found, ok("disk", "no worker told" if least is None else f"at least {least >> 30} GiB are free"))


def _silent(worker: Worker, error: PdserveError | None) -> Finding:
    name, address = worker.worker_id, worker.addresses[0] if worker.addresses else "?"
    if error is None:
        return warning("worker", name, f"{name} has left while the doctor looked", "ask again")
    if error.reason == OLDER:
        told, remedy = f"{name} is of an older version that cannot be examined", "update it"
        return warning("worker", name, told, remedy)
    if error.reason == "STALE_RECORD":
        return failure("registry", name, f"the record of {name} is stale: {error.message}", error.remedy)
    if isinstance(error, DeadlineExceeded):
        remedy = "its process hangs or is frozen: see its log, then restart it"
    else:
        remedy = f"see whether its process lives and listens at {address}, and what stands between router and it"
    return failure("worker", name, f"{name} does not answer the router: {error.message}", remedy)


def _are(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
