"""Any order of events on a small pool, without an engine: nobody stalls, and no wrong page is read."""

from __future__ import annotations

import random

import pytest

from decode_worker.sequence import HANDOFF, Sequence, State
from pdserve.errors import Refused
from tests.decode_worker.pool import Pool


@pytest.mark.parametrize(("seed", "watermark"), [(0, 0.0), (15, 0.0), (22, 0.1), (12, 0.3)])
def test_random_traffic_on_eight_pages_stalls_nobody_and_never_reads_a_wrong_page(seed: int, watermark: float) -> None:
    """Requests come, wait, are pushed, abandoned, cancelled, paused and preempted in any order."""
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
            made = pool.sequence(f"s{number}", ids, output, draw.choice("tu"))
            wanted[made.key] = (made, pool.expected(ids, output))
        elif action < 0.3 and waiting:
            pool_turn(pool, draw.choice(waiting), draw)
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
        for sequence in list(pool.scheduler.waiting):
            pool_turn(pool, sequence, None)
        pool.read()
        pool.step()
    assert pool.scheduler.idle and pool.blocks.held_count == 0 and not pool.blocks.holdings()
    done = [(s.generation.output, expected) for s, expected in wanted.values() if s.state is State.DONE]
    assert all(output == expected for output, expected in done)
    assert len(done) > 60
    assert watermark or (pool.scheduler.preemptions > 30 and pool.scheduler.recomputed_tokens > 200)


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
