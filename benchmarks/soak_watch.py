"""What the processes of a soak hold, from outside: memory, open descriptors, threads; and whether that grows.

Memory is what is a process's alone and not of a file (RssAnon of proc(5)): weights, page pool, heap. A page pool is
touched by and by, and a heap grows to the largest batch it has seen, hence the warm-up. So it is with descriptors
and threads: connections to peers and the threads of a pool are made when they are first needed. What comes after the
warm-up is judged, in every life that is long enough:

    memory                 the slope of a line through it
    descriptors, threads   the lowest count of its last quarter over the lowest of its first: what a request in
                           flight holds comes and goes, and what is never given back is in the lowest count, too

Rings of shared memory are counted apart. A prefill worker keeps some for a minute, as many as its busiest moment in
that minute needed, so their number rises and falls. At a rest it may be no higher than what it keeps.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP_S, WARM_UP_SHARE = 60.0, 0.4  # of a process's life, whichever is longer
SPAN_S = 60.0  # of samples after it, at least, to speak of growth
BLOCKS, QUARTERS = 8, 4
RING = "/memfd:pdserve-handoff"

MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    at: float  # monotonic seconds
    memory: int  # bytes
    descriptors: int  # but those of rings
    threads: int
    kinds: Mapping[str, int] = field(default_factory=dict)  # of all: how many of each kind

    @property
    def rings(self) -> int:
        """Descriptors."""
        return self.kinds.get(RING, 0)


@dataclass(frozen=True)
class Growth:
    """Of a line through the samples: `slope` per minute, of which `bound` is uncertain (95 %)."""

    slope: float
    bound: float
    level: float  # mean
    minutes: float  # that were seen

    @property
    def sure(self) -> float:
        """The least of it in a minute, as a share of the level; 0: it may be flat, or fall."""
        return max(0.0, self.slope - self.bound) / self.level

    @property
    def in_ten_minutes(self) -> float:
        """The same for ten minutes, or for as long as was seen: a life of four minutes, whose heap still settles in its
        third, says nothing of its tenth.
        """
        return min(10.0, self.minutes) * self.sure


@dataclass(frozen=True)
class Gained:
    """By which counts are higher at the end of a life than after its warm-up."""

    descriptors: int
    threads: int
    kinds: Mapping[str, int]  # those that are more


@dataclass
class Watch:
    """Samples of every process by its life, every `every_s`."""

    lives: Callable[[], Mapping[str, int]]  # life -> process id
    every_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            for life, pid in self.lives().items():
                if (found := sample(pid)) is not None:
                    self.samples.setdefault(life, []).append(found)
            await asyncio.sleep(self.every_s)

    def write(self, file: Path, began: float) -> None:
        """[seconds since `began`, memory, descriptors, threads, kinds of both] of each sample, by life."""
        shown = {
            life: [
                [round(each.at - began, 1), each.memory, each.descriptors, each.threads, dict(each.kinds)]
                for each in mine
            ]
            for life, mine in self.samples.items()
        }
        file.write_text(json.dumps(shown) + "\n")

    def warm(self, life: str) -> list[Sample]:
        """Of one process, those after its warm-up; none if it did not live long enough to tell."""
        mine = self.samples.get(life, [])
        warm_up_s = max(WARM_UP_S, WARM_UP_SHARE * (mine[-1].at - mine[0].at)) if mine else 0.0
        warm = [each for each in mine if each.at - mine[0].at >= warm_up_s]
        return warm if len(warm) >= 2 * BLOCKS and warm[-1].at - warm[0].at >= SPAN_S else []

    def grown(self, life: str) -> Growth | None:
        """Of its memory, once it was warm; None for one that did not live long enough to tell."""
        warm = self.warm(life)
        return growth([(each.at, each.memory) for each in warm]) if warm else None

    def gained(self, life: str) -> Gained | None:
        """The same of what is counted."""
        warm = self.warm(life)
        if not warm:
            return None
        size = len(warm) // QUARTERS
        first, last = warm[:size], warm[-size:]
        kinds = {kind for each in warm for kind in each.kinds}
        return Gained(
            _lowest(last, lambda each: each.descriptors) - _lowest(first, lambda each: each.descriptors),
            _lowest(last, lambda each: each.threads) - _lowest(first, lambda each: each.threads),
            {kind: more for kind in sorted(kinds) if (more := _lowest_of(kind, last) - _lowest_of(kind, first)) > 0},
        )


def sample(pid: int) -> Sample | None:
    """None for a process that has ended."""
    place = Path(f"/proc/{pid}")
    try:
        told = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        if "RssAnon" not in told:
            return None
        kib = int(told["RssAnon"].split()[0])
        descriptors = [_kind(each) for each in (place / "fd").iterdir()]
        threads = [f"thread {(each / 'comm').read_text().strip()}" for each in (place / "task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return None
    count = sum(each != RING for each in descriptors)
    return Sample(time.monotonic(), kib * 1024, count, len(threads), Counter(descriptors + threads))


def _kind(descriptor: Path) -> str:
    """What it leads to, without its number: socket, /memfd:pdserve-handoff, a file's name."""
    try:
        return descriptor.readlink().as_posix().split(":[")[0].removesuffix(" (deleted)")
    except FileNotFoundError:
        return "closed meanwhile"


def _lowest(samples: Sequence[Sample], count: Callable[[Sample], int]) -> int:
    return min(map(count, samples))


def _lowest_of(kind: str, samples: Sequence[Sample]) -> int:
    return _lowest(samples, lambda each: each.kinds.get(kind, 0))


def growth(points: Sequence[tuple[float, float]]) -> Growth:
    """A line through the medians of BLOCKS stretches: neighbouring samples are alike, so they are not counted apart.

    Args:
        points: (seconds, value), in order; at least BLOCKS.
    """
    size = len(points) / BLOCKS
    blocks = [points[int(k * size) : int((k + 1) * size)] for k in range(BLOCKS)]
    x = [statistics.mean(at for at, _ in block) / 60 for block in blocks]
    y = [statistics.median(value for _, value in block) for block in blocks]
    slope, intercept = statistics.linear_regression(x, y)
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (BLOCKS - 2)
    spread = sum((a - statistics.mean(x)) ** 2 for a in x)
    minutes = (points[-1][0] - points[0][0]) / 60
    return Growth(slope, _T95 * math.sqrt(left / spread), statistics.mean(y), minutes)


_T95 = 2.447  # Student's t of BLOCKS - 2 = 6 degrees of freedom, 0.975
