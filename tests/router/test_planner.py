"""What a request is given next: room, blame, retries, and what it costs to find out."""

from __future__ import annotations

import random
import sys
import time
from types import FrameType
from typing import Any

import pytest

from cache_transfer.contract import WorkerContract
from pdserve.errors import Exhausted, Incompatible, Unavailable
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.records import DECODE, PREFILL, Load
from pdserve.request import SamplingParams
from pdserve.rpc.events import TokenBatch
from router.channels import WorkerChannels
from router.gate import Gate, Pair
from router.intake import Intake
from router.planner import ENOUGH, Planner
from router.pool import Pool
from router.record import Account
from router.request import Ask, Request, TokenPrompt
from router.settings import RouterSettings
from router.tokens import BundleCache
from tests.router.support import MODEL, contract, record

PROMPT = tuple(range(40))
SMALL = Load(pages_total=4)  # of 16 tokens
WIDE = Load(pages_total=64)


def request_for(max_tokens: int, least_tokens: int | None = None) -> Request:
    return Request(
        id="req-1",
        model=MODEL,
        tenant="t",
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        least_tokens=max_tokens if least_tokens is None else least_tokens,
        contract_digest=contract().digest(),
        received=time.monotonic(),
        deadline=time.monotonic() + 60,
    )


async def pool_of(of: WorkerContract | None = None, /, **loads: Load) -> Pool:
    """Workers by id; those whose names begin with p prefill."""
    registry = MemoryRegistry()
    for worker_id, load in loads.items():
        await registry.register(record(worker_id, PREFILL if worker_id[0] == "p" else DECODE, of, load=load))
    pool = Pool(registry, Gate(), refresh_s=60.0)
    await pool.refresh()
    return pool


def planner(pool: Pool, max_attempts: int = 16) -> Planner:
    return Planner(pool, 100, max_attempts, random.Random(1))


async def test_every_pair_is_tried_once_and_the_last_error_surfaces() -> None:
    plan = planner(await pool_of(p0=WIDE, p1=WIDE, d0=WIDE, d1=WIDE))
    account = Account(request_for(8))
    seen = set()
    for _ in range(4):
        pair = plan.choose(account)
        seen.add((pair.prefill.id, pair.decode.id))
        account.attempt(pair)
        account.failed(pair.decode, Exhausted("full"))
    assert len(seen) == 4
    with pytest.raises(Exhausted):
        plan.choose(account)


async def test_workers_that_have_not_failed_come_first() -> None:
    plan = planner(await pool_of(p0=WIDE, p1=WIDE, d0=WIDE, d1=WIDE))
    account = Account(request_for(8))
    first = plan.choose(account)
    account.attempt(first)
    account.failed(first.prefill, Exhausted("full"))
    account.failed(first.decode, Exhausted("full"))
    second = plan.choose(account)
    assert {first.prefill.id, second.prefill.id} == {"p0", "p1"}
    assert {first.decode.id, second.decode.id} == {"d0", "d1"}
    # A decode worker that has admitted the request is no question any more.
    same = plan.find(account, first.decode)
    assert same is None or same.decode.id == first.decode.id


async def test_room_for_everything_comes_first_and_less_is_better_than_nothing() -> None:
    plan = planner(await pool_of(p0=WIDE, wide=WIDE, small=SMALL))
    account = Account(request_for(200, least_tokens=1))
    for expected in ("wide", "small"):
        pair = plan.choose(account)
        assert pair.decode.id == expected
        account.attempt(pair)
        account.failed(pair.decode, Exhausted("full"))
    # 4 pages of 16 hold 64 tokens, and the last one is never cached.
    fitted = account.fitted(pair)
    assert (fitted.max_tokens, account.max_tokens) == (64 + 1 - 40, 25)
    assert any("cut from 200 to 25" in note for note in account.notes)
    assert account.request.max_tokens == 200


async def test_in_a_large_pool_the_one_worker_that_will_do_is_found_and_a_held_prefix_too() -> None:
    """A request looks at some of them, at random; what only one of them has must not depend on luck."""
    many = {f"d{number}": SMALL for number in range(3 * ENOUGH)}
    pool = await pool_of(p0=WIDE, wide=WIDE, **many)
    for _ in range(3):
        assert planner(pool).choose(Account(request_for(200))).decode.id == "wide"
    plan = planner(pool)
    account = Account(request_for(8))
    drawn = {plan.choose(Account(request_for(8))).decode.id for _ in range(80)}
    assert len(drawn) > ENOUGH, "not always the same ones"
    account.attempt(plan.choose(account))
    plan.remember(account)
    holder = account.trials[-1].pair.decode.id
    assert {plan.choose(Account(request_for(8))).decode.id for _ in range(8)} == {holder}
    # Every worker has failed this request but one.
    account = Account(request_for(8))
    account.blamed |= {m.record.incarnation for m in pool.members() if m.id not in ("p0", "d7")}
    assert plan.choose(account).decode.id == "d7"


async def test_what_was_asked_for_by_name_is_not_cut() -> None:
    pool = await pool_of(p0=WIDE, wide=WIDE, small=SMALL)
    wide = next(m for m in pool.members() if m.id == "wide")
    assert planner(pool).choose(Account(request_for(200))).decode.id == "wide"
    pool.suspect(wide)
    with pytest.raises(Unavailable) as caught:
        planner(pool).choose(Account(request_for(200)))
    assert caught.value.reason == "WORKERS_CHANGED" and caught.value.retryable
    assert planner(pool).choose(Account(request_for(20))).decode.id == "small"


async def test_the_end_of_an_answer_may_come_nearer_but_never_moves_away() -> None:
    """A worker lets go of the text it held back at the end it knows of, and text cannot be taken back."""
    pool = await pool_of(p0=WIDE, wide=WIDE, small=SMALL)
    pairs = {pair.decode.id: pair for match in pool.verdict(MODEL).matches for pair in match.pairs()}
    account = Account(request_for(200, least_tokens=1))
    assert (give(account, pairs["wide"], 3).max_tokens, account.limit) == (200, 200)
    # A pair that gave nothing decides nothing.
    account.attempt(pairs["small"])
    assert account.fitted(pairs["small"]).max_tokens == account.max_tokens == 25
    assert account.fitted(pairs["wide"]).max_tokens == 200
    assert give(account, pairs["small"], 2).output_ids == (0, 1, 2)
    assert account.fitted(pairs["wide"]).max_tokens == account.limit == 25
    # Nor does it come nearer than to one token more.
    give(account, pairs["wide"], 20)
    assert (account.output_tokens, account.least_tokens, account.prefill_tokens) == (25, 25, 40 + 24)


def give(account: Account, pair: Pair, tokens: int) -> Request:
    """An attempt that gives so many tokens and then fails; what the pair was sent."""
    account.attempt(pair)
    sent = account.fitted(pair)
    first = account.output_tokens
    account.tokens(TokenBatch(first, tuple(range(first, first + tokens))))
    account.failed(pair.decode, Exhausted("full"))
    return sent


async def test_after_tokens_the_pairs_that_had_failed_before_them_are_tried_again() -> None:
    plan = planner(await pool_of(p0=WIDE, d0=WIDE, d1=WIDE))
    account = Account(request_for(8))
    first = plan.choose(account)
    account.attempt(first)
    account.failed(first.decode, Exhausted("full"))
    second = plan.choose(account)
    give(account, second, 2)
    assert plan.choose(account).decode.id == first.decode.id != second.decode.id
    give(account, plan.choose(account), 1)
    assert plan.choose(account).decode.id == second.decode.id
    account.attempt(second)
    account.failed(second.decode, Exhausted("full"))
    with pytest.raises(Exhausted):  # neither has given a token since
        plan.choose(account)


async def test_an_answer_goes_on_where_it_is_computed_in_the_same_way() -> None:
    registry = MemoryRegistry()
    for precision in ("fp32", "bf16"):
        of = contract(kv_dtype=precision, weight_dtype=precision, activation_dtype=precision)
        for number in range(2):
            await registry.register(record(f"p-{precision}-{number}", PREFILL, of))
            await registry.register(record(f"d-{precision}-{number}", DECODE, of))
    pool = Pool(registry, Gate(), refresh_s=60.0)
    await pool.refresh()
    plan = planner(pool)
    for _ in range(10):
        account = Account(request_for(8))
        first = plan.choose(account)
        precision = first.decode.record.contract.kv_dtype
        give(account, first, 1)
        for _ in range(3):  # the other pairs of that precision
            pair = plan.choose(account)
            assert pair.decode.record.contract.kv_dtype == precision
            account.attempt(pair)
            account.failed(pair.decode, Exhausted("full"))
        assert not any("precision" in note for note in account.notes)
        other = plan.choose(account)
        assert other.decode.record.contract.kv_dtype != precision
        account.attempt(other)
        assert any("precision" in note for note in account.notes)


async def test_why_a_pair_was_chosen_is_told() -> None:
    plan = planner(await pool_of(p0=WIDE, p1=WIDE, d0=WIDE, d1=WIDE, d2=SMALL))
    pair = plan.choose(Account(request_for(100)))
    # d2 has no room for it; an idle prefill worker has the prompt's 40 tokens to compute.
    assert (pair.choice.prefill_candidates, pair.choice.decode_candidates) == (2, 2)
    assert (pair.choice.prefill_cost, pair.choice.decode_cost) == (40.0, 0.0)


async def test_the_reason_for_no_pair_at_all_is_the_pools() -> None:
    with pytest.raises(Unavailable) as missing:
        planner(await pool_of(p0=WIDE)).choose(Account(request_for(8)))
    assert missing.value.reason == "NO_DECODE_WORKER"
    registry = MemoryRegistry()
    await registry.register(record("p0", PREFILL))
    await registry.register(record("d0", DECODE, contract(model_digest=b"x" * 32)))
    pool = Pool(registry, Gate(), refresh_s=60.0)
    await pool.refresh()
    with pytest.raises(Incompatible) as caught:
        planner(pool).choose(Account(request_for(8)))
    assert [d.code for d in caught.value.differences] == ["MODEL_DIGEST"]
    # The pools fit again, but the request was read with another model's tokenizer.
    await registry.register(record("p0", PREFILL, contract(model_digest=b"x" * 32), incarnation=b"another boot of."))
    await pool.refresh()
    with pytest.raises(Unavailable) as changed:
        planner(pool).choose(Account(request_for(8)))
    assert changed.value.reason == "WORKERS_CHANGED"


async def test_modes_that_differ_are_noted_once() -> None:
    registry = MemoryRegistry()
    await registry.register(record("p0", PREFILL, contract(info={"deterministic": "true"})))
    await registry.register(record("d0", DECODE, contract(info={"deterministic": "false"})))
    await registry.register(record("d1", DECODE, contract(info={"deterministic": "true"})))
    pool = Pool(registry, Gate(), refresh_s=60.0)
    await pool.refresh()
    (match,) = pool.verdict(MODEL).matches
    pairs = {pair.decode.id: pair for pair in match.pairs()}
    account = Account(request_for(8))
    account.attempt(pairs["d1"])
    assert account.notes == []
    account.attempt(pairs["d0"])
    account.attempt(pairs["d0"])
    (note,) = account.notes
    assert "deterministic mode" in note and "last bits" in note


async def calls_for_one_request(workers: int) -> int:
    """Python calls from what the caller asks to the chosen pair, with so many workers on each side."""
    pool = await pool_of(
        contract(tokenizer_digest=b""), **{f"{side}{i}": WIDE for side in "pd" for i in range(workers)}
    )
    channels = WorkerChannels()
    intake = Intake(pool, BundleCache(channels, 1, 1.0), RouterSettings())
    plan = planner(pool)
    pool.verdict(MODEL)  # as good as any earlier request since the snapshot
    count = 0

    def counting(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counting)
    try:
        plan.choose(Account(await intake.take(Ask(TokenPrompt(PROMPT)))))
    finally:
        sys.setprofile(None)
        await channels.close()
    return count


async def test_the_cost_of_a_request_grows_no_faster_than_the_pool() -> None:
    few, many = await calls_for_one_request(16), await calls_for_one_request(64)
    assert many < 5 * few
