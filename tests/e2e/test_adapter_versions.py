"""A request keeps the version of an adapter that it was taken with: through replacement, recovery and handoff."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cache_transfer.contract import HandoffIdentity, prompt_digest
from cache_transfer.wire import identity_to_proto
from decode_worker.worker import DecodeWorker
from pdserve.client.events import Event, Tokens
from pdserve.errors import Incompatible, NotFound
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.status import from_rpc_error
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.e2e.adapted import Adapted, all_of, ask, greedy, prompt, serving
from tests.e2e.resuming import lose
from tests.e2e.stack import MODEL, Stack, read_tokens

COUNT = 60
IDS = prompt(20)
RED: dict[str, Any] = {"token_ids": IDS, "sampling": greedy(COUNT), "adapter": "red", "timeout_s": 60.0}


async def rest(events: Any) -> tuple[int, ...]:
    return tuple([token async for event in events if isinstance(event, Tokens) for token in event.ids])


def busy(it: Stack) -> DecodeWorker:
    (worker,) = [each for each in it.decodes if each.pipeline.count]
    return worker


async def test_an_answer_that_began_on_a_version_ends_on_it(made: Adapted) -> None:
    async with serving(made, "red") as it, aclosing(it.client.generate(**RED)) as events:
        begun = await read_tokens(events, 1)
        await it.client.load_adapter("red", "crimson")
        assert (await ask(it, IDS, "red", 8)).ids == made.answer(IDS, "crimson", 8)
        listed = [(a.name, a.users) for a in (await it.client.adapters())[0].adapters]
        assert listed == [("red", 0), ("", 1)]
        assert (*begun, *await rest(events)) == made.answer(IDS, "red", COUNT)


async def test_an_answer_that_loses_its_worker_goes_on_with_its_version(made: Adapted) -> None:
    """The name stands for another version by then, and both pairs still have the old one."""
    async with serving(made, "red", pairs=2) as it, aclosing(it.client.generate(**RED)) as events:
        begun = await read_tokens(events, 3)
        await it.client.load_adapter("red", "crimson")
        lose(busy(it))
        assert (*begun, *await rest(events)) == made.answer(IDS, "red", COUNT)


async def test_without_a_pair_that_has_its_version_an_answer_ends_with_an_error(made: Adapted) -> None:
    """Never on the version that has its name now, and never on the base model."""
    async with serving(made, "red", pairs=2, worker={"adapter_linger_s": 0.0}) as it:
        came: list[Event] = []
        with pytest.raises(NotFound, match="red") as gone:
            async with aclosing(it.client.generate(**RED)) as events:
                begun = await read_tokens(events, 3)
                holder = busy(it)
                await it.client.load_adapter("red", "crimson")
                others = [worker for worker in (*it.prefills, *it.decodes) if worker is not holder]
                await it.until(lambda: not any(made.digest("red") in worker.adapters for worker in others))
                await it.until(lambda: not any(_has(it, worker.worker_id, made.digest("red")) for worker in others))
                lose(holder)
                async for event in events:
                    came.append(event)
        assert gone.value.reason == "UNKNOWN_ADAPTER"
        tokens = [token for event in came if isinstance(event, Tokens) for token in event.ids]
        answer = made.answer(IDS, "red", COUNT)
        assert (*begun, *tokens) == answer[: len(begun) + len(tokens)]


def _has(it: Stack, worker_id: str, digest: bytes) -> bool:
    (member,) = [each for each in it.router.pool.members() if each.id == worker_id]
    return any(adapter.digest == digest for adapter in member.record.adapters)


async def test_only_pairs_that_have_the_adapter_are_given_its_requests(made: Adapted) -> None:
    """A worker that says nothing of adapters, as an older one, has none."""
    async with serving(made, "red") as it:
        for _ in range(2):
            await it.add_prefill(made.engine())
            await it.add_decode(made.engine())
        for number in range(6):
            answer = await ask(it, prompt(12, seed=number), "red", 4)
            assert answer.ids == made.answer(prompt(12, seed=number), "red", 4)
            assert answer.record is not None
            assert (answer.record.prefill_worker, answer.record.decode_worker) == ("p0", "d0")
        used = {(await ask(it, prompt(9, seed=n), None, 2)).record.decode_worker for n in range(12)}  # type: ignore[union-attr]
        assert len(used) > 1


async def test_a_handoff_between_two_versions_of_one_name_is_refused(made: Adapted) -> None:
    """Decode expects red's cache, prefill is asked for crimson's; and a cache of crimson is pushed for red's ticket."""
    async with serving(made, "red", "crimson") as it:
        prefill, decode = it.prefills[0], it.decodes[0]
        red, crimson = made.digest("red"), made.digest("crimson")
        opened = decode_pb2.DecodeOpen(
            request_id="r",
            model=MODEL,
            tenant="t",
            adapter_digest=red,
            prompt_ids=IDS,
            sampling=sampling_to_proto(replace(greedy(4), seed=1)),
            prefill_contract=_contract(it),
        )
        call: Any = decode_pb2_grpc.DecodeStub(it.channels.get(decode.address)).Generate(timeout=30)
        await call.write(decode_pb2.DecodeRequest(open=opened))
        admitted = (await call.read()).admitted
        assert admitted.identity.adapter_digest == red
        run = prefill_pb2.RunRequest(
            request_id="r",
            model=MODEL,
            tenant="t",
            adapter_digest=crimson,
            prompt_ids=IDS,
            ticket=admitted.ticket,
            identity=admitted.identity,
            decode_contract=admitted.contract,
        )
        assert (await _refusal(it, run)).field == "IDENTITY.adapter_digest"
        other = HandoffIdentity(decode.contract.digest(), crimson, "t", prompt_digest(IDS), 0, len(IDS))
        run.identity.CopyFrom(identity_to_proto(other))
        assert (await _refusal(it, run)).field == "IDENTITY.adapter_digest"
        run.adapter_digest = red
        run.identity.CopyFrom(admitted.identity)
        await _stub(it).Run(run, timeout=30)
        tokens: tuple[int, ...] = ()
        while (event := await call.read()).WhichOneof("event") != "finish":
            tokens += tuple(event.tokens.ids)
        assert tokens == made.answer(IDS, "red", 4)
        assert prefill.blocks.held_count == 0


def _contract(it: Stack) -> Any:
    from cache_transfer.wire import contract_to_proto

    return contract_to_proto(it.prefills[0].contract)


def _stub(it: Stack) -> Any:
    return prefill_pb2_grpc.PrefillStub(it.channels.get(it.prefills[0].address))


async def _refusal(it: Stack, run: prefill_pb2.RunRequest) -> Incompatible:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _stub(it).Run(run, timeout=30)
    error = from_rpc_error(refused.value)
    assert isinstance(error, Incompatible)
    assert error.reason == "IDENTITY_MISMATCH"
    return error


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_what_is_computed_again_or_at_decode_has_its_adapter_too(made: Adapted, disaggregate: str) -> None:
    """Pages for two answers and a half: the others are preempted, and compute what they had again."""
    async with serving(made, "red", "blue", engine={"pages": 26}, disaggregate=disaggregate) as it:
        asked: Sequence[tuple[tuple[int, ...], str | None]] = [
            (prompt(16, seed=n), ("red", None, "blue", "red")[n]) for n in range(4)
        ]
        answers = await all_of(*(ask(it, tokens, adapter, 24) for tokens, adapter in asked))
        for (tokens, adapter), answer in zip(asked, answers, strict=True):
            assert answer.ids == made.answer(tokens, adapter, 24), adapter
        assert it.decodes[0].accounts().preemptions


async def test_two_outputs_of_one_prompt_have_one_adapter(made: Adapted) -> None:
    async with serving(made, "red") as it:
        answer = await ask(it, IDS, "red", 6, n=2)
        assert [choice.ids for choice in answer.choices] == [made.answer(IDS, "red", 6)] * 2
