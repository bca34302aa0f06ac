"""Several contracts under one served name: which of them a request is read by, and when it may move to another."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cache_transfer.contract import WorkerContract
from pdserve.client import Accepted, AsyncClient, Finish, HandoffRecord, Tokens
from pdserve.engine.plan import EngineConfig
from pdserve.errors import Exhausted, InvalidRequest, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, PREFILL, Load
from pdserve.request import SamplingParams
from pdserve.rpc.events import TokenBatch
from router.gate import Gate
from router.planner import Planner
from router.pool import Pool
from router.record import Account
from router.request import Ask, Request, TokenPrompt
from tests.engine.tiny import prompt
from tests.router.support import CONTEXT, MODEL, VOCAB, House, contract, house, ids_of, model, record
from tests.router.test_planner import request_for

OLD, NEW = contract(), contract(model_digest=b"n" * 32)
WIDE = Load(pages_total=64)


def request(**changes: Any) -> Request:
    return replace(request_for(8), tokenizer_digest=OLD.tokenizer_digest, vocab_size=VOCAB, **changes)


async def planner_of(**contracts: WorkerContract) -> Planner:
    """A pair of workers for each contract."""
    registry = MemoryRegistry()
    for name, of in contracts.items():
        await registry.register(record(f"p-{name}", PREFILL, of, load=WIDE))
        await registry.register(record(f"d-{name}", DECODE, of, load=WIDE))
    pool = Pool(registry, Gate(), refresh_s=60.0)
    await pool.refresh()
    return Planner(pool, 100, 16, random.Random(1))


async def test_a_request_stays_with_its_contract_while_a_pair_of_it_is_left() -> None:
    plan = await planner_of(old=OLD, new=NEW)
    account = Account(request())
    for expected in ("d-old", "d-new"):
        pair = plan.choose(account)
        assert pair.decode.id == expected
        account.attempt(pair)
        account.failed(pair.decode, Exhausted("full"))
    assert account.request.contract_digest == NEW.digest()
    (note,) = [note for note in account.notes if "moved" in note]
    assert OLD.digest().hex()[:16] in note and NEW.digest().hex()[:16] in note
    with pytest.raises(Exhausted):
        plan.choose(account)
    assert account.request.contract_digest == NEW.digest()


async def test_it_moves_when_its_workers_are_gone() -> None:
    plan = await planner_of(new=NEW)
    account = Account(request())
    assert plan.choose(account).decode.id == "d-new"


@pytest.mark.parametrize(
    "other",
    [
        replace(NEW, tokenizer_digest=b"u" * 32),
        replace(NEW, tokenizer_digest=b""),
        replace(NEW, vocab_size=VOCAB + 1),
        replace(NEW, vocab_size=VOCAB - 1),
    ],
)
async def test_it_does_not_move_to_where_its_ids_mean_something_else(other: WorkerContract) -> None:
    plan = await planner_of(other=other)
    account = Account(request())
    with pytest.raises(Unavailable) as caught:
        plan.choose(account)
    assert caught.value.reason == "WORKERS_CHANGED"
    assert account.request.contract_digest == OLD.digest() and not account.notes


async def test_it_does_not_move_once_there_are_tokens() -> None:
    plan = await planner_of(old=OLD, new=NEW)
    account = Account(request())
    pair = plan.choose(account)
    account.attempt(pair)
    account.fitted(pair)
    account.tokens(TokenBatch(0, (1,)))
    account.failed(pair.decode, Unavailable("gone", reason="WORKER_LOST"))
    with pytest.raises(Unavailable) as caught:
        plan.choose(account)
    assert caught.value.reason == "WORKER_LOST" and account.request.contract_digest == OLD.digest()


async def test_a_request_that_fits_only_the_minority_goes_there() -> None:
    long = prompt(CONTEXT + 44, seed=1, vocab=VOCAB)
    async with house(prefills=2, decodes=1) as made:  # two pairs against one
        wide = EngineConfig(dtype="fp32", pages=128, page_size=4)
        await made.add_prefill("p-long", of=model(seed=1, context=512), engine=wide)
        await made.add_decode("d-long", of=model(seed=1, context=512), engine=wide)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        taken = await made.router.intake.take(Ask(TokenPrompt(long), params, want_record=True))
        events = [event async for event in made.router.orchestrator.generate(taken)]
        assert len(ids_of(events)) == 3
        short = await made.router.intake.take(Ask(TokenPrompt(long[:9]), params))
        assert short.contract_digest == made.prefills[0].contract.digest() != taken.contract_digest
        with pytest.raises(InvalidRequest, match=str(CONTEXT)) as caught:  # the majority's word
            await made.router.intake.take(Ask(TokenPrompt(long * 2), params))
        assert caught.value.reason == "PROMPT_TOO_LONG"


async def of_two_versions(made: House) -> None:
    """The older one has more pairs, and nobody listens at its addresses."""
    await made.add_prefill("p0", of=model(seed=1))
    await made.add_decode("d0", of=model(seed=1))
    older = replace(made.prefills[0].contract, model_digest=b"o" * 32)
    for name, role in (("gone-p0", PREFILL), ("gone-p1", PREFILL), ("gone-d", DECODE)):
        await made.add_ghost(name, role, contract=older)


@pytest.mark.parametrize("stream", [False, True])
async def test_http_names_the_version_that_answered(stream: bool) -> None:
    async with house(prefills=0, decodes=0) as made:
        await of_two_versions(made)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "the"}], "max_tokens": 2, "stream": stream}
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=20) as http:
            answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
        served = f"fp_{made.prefills[0].contract.digest().hex()[:12]}"
        assert {json.loads(line)["system_fingerprint"] for line in lines} == {served}


async def test_grpc_tells_of_the_move_in_the_record_alone() -> None:
    async with house(prefills=0, decodes=0) as made:
        await of_two_versions(made)
        async with AsyncClient(made.router.address) as client:
            options: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
            events = [event async for event in client.generate(**options, want_record=True)]
        assert {type(event) for event in events} == {Accepted, Tokens, HandoffRecord, Finish}
        (told,) = [event for event in events if isinstance(event, HandoffRecord)]
        assert told.attempts > 1 and told.decode_worker == "d0"
        assert any("moved to contract" in note for note in told.notes)
