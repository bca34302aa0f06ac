"""Which pairs get a canary, and what their tokens say when they are laid side by side.

Every pair of one contract and one way to compute must give the same tokens: the same bits in deterministic mode, and
otherwise the same up to a step at which the two best tokens are nearer to each other than rounding can move them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.client.status import Worker
from pdserve.doctor.findings import Finding, failure, ok, warning
from pdserve.doctor.observed import Observed, Song
from pdserve.doctor.ways import DECODE, NEVER, of_one_model, working
from pdserve.errors import DataLoss, PdserveError

# What rounding may move a log probability by: twice the engine's tolerance for the dtype, of logits up to about 16.
MARGINS = {"float64": 4e-10, "fp32": 7e-4, "fp16": 0.32, "bf16": 2.0, "int8": 2.0}


@dataclass(frozen=True)
class Choice:
    """The pairs to try, the fewest of which every worker is part of, and how many fitting ones are left out."""

    pairs: tuple[tuple[Worker | None, Worker], ...]  # None: the decode worker computes the prompt
    left_out: int
    unfit: int  # fitting pairs of which a worker does not answer, or is not ready


def choose(o: Observed, limit: int) -> Choice:
    """At most `limit` fitting pairs of workers that answer, those first whose workers had none yet."""
    by_id = {worker.worker_id: worker for worker in o.status.workers}
    fitting: list[tuple[Worker | None, Worker]] = []
    mode = o.status.placement.disaggregate
    if mode != NEVER:
        fitting += [(by_id[p.prefill_worker], by_id[p.decode_worker]) for p in of_one_model(o) if p.fits]
    if mode not in ("", "always"):
        fitting += [(None, w) for w in o.status.workers if w.role == DECODE and w.takes_prompts]
    able = [pair for pair in fitting if all(worker is None or working(o, worker) for worker in pair)]
    used: Counter[str] = Counter()
    chosen: list[tuple[Worker | None, Worker]] = []
    left = list(able)
    while left and len(chosen) < limit:
        best = min(left, key=lambda pair: sum(used[_id(worker)] for worker in pair))
        left.remove(best)
        chosen.append(best)
        used.update(_id(worker) for worker in best)
    return Choice(tuple(chosen), len(left), len(fitting) - len(able))


def judge(o: Observed, choice: Choice, songs: Sequence[Song]) -> list[Finding]:
    """One finding per pair that failed or gave other tokens, one about what was not tried, and one about the rest."""
    found = [_failed(song, song.error) for song in songs if song.error is not None]
    good = [song for song in songs if song.error is None]
    groups: dict[tuple[object, ...], list[Song]] = defaultdict(list)
    workers = {worker.worker_id: worker for worker in o.status.workers}
    for song in good:
        groups[_way(workers, song)].append(song)
    near = 0
    for way, alike in groups.items():
        for song in alike[1:]:
            odd, gap = _differs(alike[0], song)
            if odd < 0:
                continue
            if not _exact(workers, alike) and gap <= _margin(way):
                near += 1
                continue
            found.append(
                failure(
                    "canary",
                    song.pair,
                    f"its token {odd} is not that of {alike[0].pair}, of the same contract (best two: {gap:.2g} apart)",
                    "take both decode workers out, and compare the workers with `pdserve verify`",
                )
            )
    if choice.left_out:
        told = f"fitting pairs that were not tried: {choice.left_out}"
        found.append(
            warning("canary", "", told, f"give --pairs {len(choice.pairs) + choice.left_out} to try them, too")
        )
    if choice.unfit:
        told = f"fitting pairs that were not tried: {choice.unfit}; a worker of theirs does not answer or is not ready"
        found.append(warning("canary", "", told, "see the findings about those workers"))
    if not songs and not found:
        return [failure("canary", "", "there is no pair to try", "see the findings about contracts and workers")]
    if good and len(good) == len(songs) and not any(f.level == "failure" for f in found):
        slowest = max(song.attempt.first_token_ms for song in good)
        told = f"all pairs that were tried ({len(good)}) answered with equal tokens"
        told += f" within each of {len(groups)} ways to compute" if len(groups) > 1 else ""
        told += f" ({near} by the margin)" if near else ""
        found.append(ok("canary", f"{told}; the slowest first token after {slowest:.0f} ms"))
    return found


def _failed(song: Song, error: PdserveError) -> Finding:
    at = song.attempt.failed_worker
    told = f"the canary failed{f' at {at}' if at else ''}: {error.reason}: {error.message}"
    remedy = error.remedy or f"see the logs of {song.pair.replace(' -> ', ' and ')}"
    if isinstance(error, DataLoss):
        remedy = "bytes changed on the way: replace what is between these two machines, or their memory"
    return failure("canary", song.pair, told, remedy)


def _id(worker: Worker | None) -> str:
    return worker.worker_id if worker is not None else ""


def _computed_by(workers: dict[str, Worker], song: Song) -> tuple[Worker, Worker]:
    return workers[song.prefill_worker or song.decode_worker], workers[song.decode_worker]


def _way(workers: dict[str, Worker], song: Song) -> tuple[object, ...]:
    """Equal for pairs whose tokens must be equal."""
    both = [worker.contract for worker in _computed_by(workers, song)]
    model = workers[song.decode_worker].model, both[1].digest
    return (*model, *((c.device, c.kv_dtype, c.weight_dtype, c.activation_dtype) for c in both))


def _exact(workers: dict[str, Worker], songs: Sequence[Song]) -> bool:
    """All of them compute in deterministic mode."""
    computed = (worker for song in songs for worker in _computed_by(workers, song))
    return all(worker.contract.info.get("deterministic") == "true" for worker in computed)


def _margin(way: tuple[object, ...]) -> float:
    names = {name for part in way if isinstance(part, tuple) for name in part}
    return max((MARGINS[name] for name in names if name in MARGINS), default=0.0)


def _differs(first: Song, other: Song) -> tuple[int, float]:
    """The first token that is another one, and the gap of the best two there; -1: none is."""
    for at, (x, y) in enumerate(zip(first.ids, other.ids, strict=False)):
        if x != y:
            return at, min((song.gaps[at] for song in (first, other) if at < len(song.gaps)), default=0.0)
    return (-1, 0.0) if len(first.ids) == len(other.ids) else (min(len(first.ids), len(other.ids)), float("inf"))
