"""Any order of events on a small pool, without an engine: nobody stalls, and no wrong page is read."""

from __future__ import annotations

import random

import pytest

from decode_worker.sequence import HANDOFF, Sequence, State
from pdserve.errors import Refused
from tests.decode_worker.pool import Pool


@pytest.mark.parametrize(
    ("seed", "watermark", "several"),
    [(0, 0.0, False), (15, 0.0, False), (22, 0.1, False), (12, 0.3, False), (3, 0.0, True), (4, 0.2, True)],
)
def test_random_traffic_on_eight_pages_stalls_nobody_and_never_reads_a_wrong_page(
    seed: int, watermark: float, several: bool
) -> None:
    """Requests come, wait, are pushed, abandoned, cancelled, paused and preempted in any order; some have `several`
    outputs, and some prompts are computed here.
    """
    draw = random.Random(seed)
    pool = Pool(pages=8, growth_watermark=watermark, recompute_tokens=3)
    wanted: dict[str, tuple[Sequence, list[int]]] = {}
    for number in range(4000):
        waiting = pool.scheduler.waiting
        action = draw.random()
        if action < 0.12 and len(waiting) < 6:
            ids = tuple(draw.randrange(2) for _ in range(draw.randrange(1, 15)))
            if wanted and draw.random() < 0.5:  # what was said before, and more
                earlier = draw.choice([s for s, _ in wanted.values()])
                ids = (*earlier.tokens(0, draw.randrange(1, 13)), 1)
            output = draw.randrange(1, 19)
            choices = draw.choice((0, 0, 1, 2, 3)) if several else 0
            made = pool.sequence(f"s{number}", ids, output, draw.choice("tu"), choices)
            for one in made.choices or (made,):
                wanted[one.key] = (one, pool.expected(ids, output, one.generation.choice))
            if several and draw.random() < 0.3:
                pool.scheduler.compute_here(made, len(ids) + output - 1, pool.wake)
        elif action < 0.3 and (handed := [s for s in waiting if not s.here]):
            pool_turn(pool, draw.choice(handed), draw)
        elif action < 0.31 and (here := [*waiting, *pool.scheduler.running]):
            pool.scheduler.leave(draw.choice(here), State.ABORTED, Refused("gone"))
        elif action < 0.5 and pool.scheduler.running:
            pool.read(draw.choice(pool.scheduler.running))
        else:
            pool.step()
        pool.blocks.check_integrity()
    for _ in range(400):
        if pool.scheduler.idle:
            break
        for sequence in [s for s in pool.scheduler.waiting if not s.here]:
            pool_turn(pool, sequence, None)
        pool.read()
        pool.step()
    assert pool.scheduler.idle and pool.blocks.held_count == 0 and not pool.blocks.holdings()
    done = [(s.generation.output, expected) for s, expected in wanted.values() if s.state is State.DONE]
    assert all(output == expected for output, expected in done)
    assert len(done) > 60
    counters = pool.scheduler.counters
    assert not several or (counters.forks > 60 and 0 < counters.copied_pages < counters.shared_pages)
    assert watermark or (pool.scheduler.counters.preemptions > 30 and pool.scheduler.recomputed_tokens > 200)


def pool_turn(pool: Pool, sequence: Sequence, draw: random.Random | None) -> None:
    """The next thing that happens to one that waits: its push opens, its cache comes whole, or breaks off."""
    assert sequence.state in HANDOFF
    pushed = any(request.sequence is sequence for request in pool.scheduler.grants)
    if sequence.pages and draw is not None and draw.random() < 0.2:
        pool.scheduler.ungrant(sequence)
    elif sequence.pages or sequence.logits_only:
        pool.verify(sequence)
    elif not pushed:
        pool.open(sequence)
