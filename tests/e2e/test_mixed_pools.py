"""Two versions of a model, or two precisions, under one served name: only pairs that fit, and no request fails.

Every answer is compared with what one process computes for the version that its record names, so
one token from a mixed pair would show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.client import Completion, Tokens
from pdserve.errors import PdserveError, Unavailable
from pdserve.request import SamplingParams
from tests.e2e.stack import Answer, Stack, Worker, alone, stack, streaming
from tests.e2e.watched import WatchedEngine, engine
from tests.engine.tiny import prompt

GREEDY = SamplingParams(temperature=0, max_tokens=5, seed=0, ignore_eos=True)
IDS = [prompt(length, seed=length) for length in (5, 19, 33, 40)]
CLIENTS = 3


class Expected:
    """What one process answers; `model` are the engine's options."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Answer] = {}

    def __call__(self, ids: tuple[int, ...], **model: Any) -> Answer:
        key = (ids, *sorted(model.items()))
        if key not in self._known:
            self._known[key] = alone(ids, GREEDY, **model)
        return self._known[key]


EXPECTED = Expected()


@dataclass
class Traffic:
    """Clients that ask without a pause. `versions` says what each worker id computes with."""

    made: Stack
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: list[Completion] = field(default_factory=list)

    async def add(self, model: dict[str, Any], *roles: str, **settings: Any) -> list[Worker]:
        """Workers named after their version and role."""
        added: list[Worker] = []
        for role in roles:
            name = f"{role}{len(self.versions)}"
            self.versions[name] = model
            add = self.made.add_prefill if role == "p" else self.made.add_decode
            added.append(await add(engine(**model), worker_id=name, **settings))
        return added

    async def leave(self, *workers: Worker) -> None:
        """As an orderly rollout does it: no new work, what is there may finish, gone."""
        for worker in workers:
            await worker.drain(5.0)
            await self.made.remove(worker)

    async def more(self, count: int = 2 * CLIENTS + 1) -> list[Completion]:
        """Waits for further answers: the last of them were asked for after this call."""
        seen = len(self.answers)
        await self.made.until(lambda: len(self.answers) >= seen + count)
        return self.answers[seen + CLIENTS :]

    async def client(self, number: int) -> None:
        turn = number
        while True:
            ids = IDS[turn % len(IDS)]
            turn += 1
            answer = await self.made.ask(ids, GREEDY)
            check(answer, ids, self.versions)
            self.answers.append(answer)


def check(answer: Completion, ids: tuple[int, ...], versions: dict[str, dict[str, Any]]) -> None:
    record = answer.record
    assert record is not None
    version = versions[record.decode_worker]
    assert versions[record.prefill_worker] == version, "a pair of two versions"
    assert answer.ids == EXPECTED(ids, **version).ids


@asynccontextmanager
async def traffic(*first: tuple[dict[str, Any], str]) -> AsyncIterator[Traffic]:
    """Clients at work in front of these workers; at the end none of them has failed."""
    async with stack() as made:
        going = Traffic(made)
        for model, roles in first:
            await going.add(model, *roles)
        async with asyncio.TaskGroup() as group:  # one that fails ends the test
            clients = [group.create_task(going.client(number)) for number in range(CLIENTS)]
            yield going
            for task in clients:
                task.cancel()


V1: dict[str, Any] = {"seed": 0}
V2: dict[str, Any] = {"seed": 1}


def versions_of(going: Traffic, answers: list[Completion]) -> set[int]:
    return {going.versions[answer.record.decode_worker]["seed"] for answer in answers if answer.record}


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_worker_that_fits_nobody_joins_and_leaves_and_nobody_notices(role: str) -> None:
    async with traffic((V1, "pd")) as going:
        await going.more()
        strangers = await going.add(V2, role)
        before = strangers[0].record().load.steps
        assert versions_of(going, await going.more()) == {0}
        (status,) = [p for p in (await going.made.client.status()).pairs if not p.fits]
        assert [d.code for d in status.differences if d.kind == "must_equal"] == ["MODEL_DIGEST"]
        assert any("refused: MODEL_DIGEST" in note for note in going.answers[-1].record.notes)  # type: ignore[union-attr]
        await going.made.remove(strangers[0])  # at once, not in order
        assert versions_of(going, await going.more()) == {0}
        assert strangers[0].record().load.steps == before


async def test_the_majority_of_pairs_turns_from_one_version_to_the_next() -> None:
    async with traffic((V1, "ppd")) as going:
        old = going.made.workers
        await going.add(V2, "p", "d")
        assert versions_of(going, await going.more()) == {0}  # two pairs against one
        await going.add(V2, "p", "d")
        await going.more()
        assert versions_of(going, await going.more()) == {1}  # two against four
        await going.leave(*old)
        assert versions_of(going, await going.more()) == {1}
    assert all(answer.record and answer.record.attempts == 1 for answer in going.answers[-3:])


async def test_the_majority_leaves_while_its_requests_wait() -> None:
    """What it has taken and not begun goes to the version that stays; nobody is told to come again."""
    async with traffic((V1, "ppd")) as going:
        old, first, second = going.made.workers, *going.made.prefills
        one, other = (worker.engine for worker in (first, second) if isinstance(worker.engine, WatchedEngine))
        await going.add(V2, "p", "d")
        assert versions_of(going, await going.more()) == {0}
        with one.held(), other.held():
            await going.made.until(lambda: one.inside.is_set() or other.inside.is_set())
            asked = [asyncio.create_task(going.made.ask(IDS[0], GREEDY)) for _ in range(3)]
            # Each begins one prompt at most, or those that it had before.
            await going.made.until(lambda: first.record().load.waiting + second.record().load.waiting > 0)
            leaving = asyncio.create_task(going.leave(*reversed(old)))
            await going.made.until(lambda: 1 in versions_of(going, [t.result() for t in asked if t.done()]))
        await leaving
        assert versions_of(going, await going.more()) == {1}
        late = await asyncio.gather(*asked)
        for answer in late:
            check(answer, IDS[0], going.versions)
        notes = [note for answer in (*late, *going.answers) if answer.record for note in answer.record.notes]
        assert any("moved to contract" in note for note in notes)


async def test_each_precision_has_pairs_of_its_own() -> None:
    fp32: dict[str, Any] = {"dtype": "fp32"}
    bf16: dict[str, Any] = {"dtype": "bf16"}
    async with traffic((fp32, "pd"), (bf16, "pd")) as going:
        await going.made.until(lambda: len({a.record.decode_worker for a in going.answers if a.record}) == 2)
        for pair in (await going.made.client.status()).pairs:
            alike = going.versions[pair.prefill_worker] == going.versions[pair.decode_worker]
            refused = {d.code for d in pair.differences if d.kind == "lossy"}
            assert pair.fits == alike
            assert refused == (set() if alike else {"KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE"})
        await going.leave(going.made.prefills[0])
        await going.more()
        assert {a.record.prefill_worker for a in await going.more() if a.record} == {"p2"}


@pytest.mark.parametrize("lost", ["p", "d"])
async def test_a_request_whose_last_pair_vanishes_before_its_first_token_is_served_by_the_other_version(
    lost: str,
) -> None:
    ids = IDS[2]
    async with stack() as made:
        going = Traffic(made)
        workers = await going.add(V1, "p", "d")
        old = made.prefills[0].engine
        assert isinstance(old, WatchedEngine)
        with old.held():
            asking = asyncio.create_task(made.ask(ids, GREEDY))
            async with asyncio.timeout(10):
                await old.inside.wait()  # it is being prefilled by the first version
            await going.add(V2, "p", "d")
            removing = asyncio.create_task(made.remove(workers["pd".index(lost)]))
            async with asyncio.timeout(20):
                answer = await asking
        await removing
        check(answer, ids, going.versions)
        assert answer.record is not None and answer.record.decode_worker == "d3"
        assert made.first_logits(answer) == EXPECTED(ids, **V2).first_logits
        assert answer.record.attempts == 2 and any("moved to contract" in note for note in answer.record.notes)


async def test_a_request_that_has_tokens_keeps_its_version_or_fails() -> None:
    ids, long = IDS[1], SamplingParams(temperature=0, max_tokens=300, seed=0, ignore_eos=True)
    expected = alone(ids, long)
    async with stack() as made:
        going = Traffic(made)
        _, decode = await going.add(V1, "p", "d")
        old = made.decodes[0].engine
        assert isinstance(old, WatchedEngine)
        batches: list[Tokens] = []
        with pytest.raises(PdserveError) as caught:
            async with streaming(made, ids, long) as events:
                with old.held():
                    await going.add(V2, "p", "d")
                removing = asyncio.create_task(made.remove(decode))
                try:
                    async for event in events:
                        if isinstance(event, Tokens):
                            batches.append(event)
                finally:
                    await removing
        assert isinstance(caught.value, Unavailable)
        given = sum(len(batch.ids) for batch in batches)
        assert given < 299
        assert all(b.ids == expected.ids[b.first_index : b.first_index + len(b.ids)] for b in batches)
        check(await made.ask(ids, GREEDY), ids, going.versions)


async def test_when_no_pair_is_left_the_last_failure_is_told() -> None:
    """And not a wrong version: the ids of a prompt mean something else to another vocabulary."""
    async with stack() as made:
        going = Traffic(made)
        (prefill, _) = await going.add(V1, "p", "d")
        old = made.prefills[0].engine
        assert isinstance(old, WatchedEngine)
        with old.held():
            asking = asyncio.create_task(made.ask(IDS[0], GREEDY))
            async with asyncio.timeout(10):
                await old.inside.wait()
            removing = asyncio.create_task(made.remove(prefill))
            with pytest.raises(PdserveError) as caught:
                async with asyncio.timeout(20):
                    await asking
        await removing
        assert caught.value.retryable
