"""A cache that decode keeps in another precision: only where all three agree, exactly cast, and said aloud."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_transfer.receiver import ReceivedLogits, ReceiveReport
from cache_transfer.tickets import Claim
from pdserve.engine.checks import TOLERANCES
from pdserve.engine.plan import Chunk
from pdserve.errors import Incompatible
from pdserve.request import SamplingParams
from tests.e2e.stack import Answer, Stack, alone, stack
from tests.e2e.watched import WatchedHost, engine
from tests.engine.tiny import prompt, run, tiny_engine

IDS = prompt(37, seed=9)
GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=0)
Layers = list[tuple[Tensor, Tensor]]  # k, v [heads, tokens, head_dim] of each layer


@asynccontextmanager
async def lossy(
    prefill: dict[str, Any], decode: dict[str, Any], *, router: bool = True, left: bool = True, right: bool = True
) -> AsyncIterator[Stack]:
    async with stack(allow_lossy=router) as made:
        await made.add_prefill(engine(**prefill), allow_lossy=left)
        await made.add_decode(engine(**decode), allow_lossy=right)
        yield made


class Both(WatchedHost):
    """Keeps both sides' caches of every handoff as they are when decode has verified it."""

    def __init__(self, made: Stack) -> None:
        super().__init__(made.hosts[0])
        self.sent: Layers = []
        self.taken: Layers = []
        self._made = made
        made.decodes[0].pipeline.handoffs.receiver._host = self

    def verified(self, claim: Claim, logits: ReceivedLogits, report: ReceiveReport) -> None:
        prefill, decode = self._made.prefills[0], self._made.decodes[0]
        (job,) = prefill.pipeline.jobs
        pages = decode.pipeline.handoffs._sequences[claim.handoff_id].pages
        for layer in range(prefill.engine.spec.layers):
            self.sent.append(prefill.engine.cache.sequence(layer, job.pages, claim.end))
            self.taken.append(decode.engine.cache.sequence(layer, pages, claim.end))
        super().verified(claim, logits, report)


def split_by_hand(ids: Sequence[int], prefill: dict[str, Any], decode: dict[str, Any], count: int) -> Answer:
    """Two engines in one process: torch casts what one has computed, and the other goes on greedily."""
    first = tiny_engine(deterministic=True, **{"pages": 128, **prefill})
    second = tiny_engine(deterministic=True, **{"pages": 128, **decode})
    pages = tuple(range(60))
    rows = [run(first, Chunk("r", tuple(ids), 0, pages)).logits["r"][0].clone()]
    slots = torch.tensor(second.cache.slots((0, len(ids)), pages))
    for layer in range(first.spec.layers):
        k, v = first.cache.sequence(layer, pages, len(ids))
        cast = [x.transpose(0, 1).to(second.cache.dtype) for x in (k, v)]
        second.cache.write(layer, slots, *cast)
    out = [int(rows[0].argmax())]
    while len(out) < count:
        position = len(ids) + len(out) - 1
        rows.append(run(second, Chunk("r", (out[-1],), position, pages)).logits["r"][0].clone())
        out.append(int(rows[-1].argmax()))
    return Answer(tuple(out), rows)


def check_margin(got: Sequence[int], exact: Answer, dtype: str) -> None:
    """Equal up to a step at which the two best scores are nearer than rounding can move them."""
    for token, expected, row in zip(got, exact.ids, exact.logits, strict=True):
        if token != expected:
            best = row.float().topk(2).values
            assert float(best[0] - best[1]) < 2 * TOLERANCES[dtype] * float(row.abs().max())
            return


CASES = [
    ({}, {"kv_dtype": "bf16"}, ("KV_DTYPE",), "bf16"),
    ({"axis_order": "nhd", "page_size": 8}, {"kv_dtype": "bf16", "page_size": 3}, ("KV_DTYPE",), "bf16"),
    ({}, {"dtype": "bf16"}, ("KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE"), "bf16"),
    ({"dtype": "bf16"}, {}, ("KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE"), "bf16"),
    ({"dtype": "fp16"}, {"dtype": "bf16"}, ("KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE"), "bf16"),
    ({"dtype": "bf16", "kv_dtype": "fp32"}, {}, ("WEIGHT_DTYPE", "ACTIVATION_DTYPE"), "bf16"),
]


@pytest.mark.parametrize(("prefill", "decode", "codes", "dtype"), CASES)
async def test_a_cache_is_cast_as_torch_casts_and_the_response_says_so(
    prefill: dict[str, Any], decode: dict[str, Any], codes: tuple[str, ...], dtype: str
) -> None:
    expected = split_by_hand(IDS, prefill, decode, GREEDY.max_tokens or 0)
    async with lossy(prefill, decode) as made:
        both = Both(made)
        got = await made.ask(IDS, GREEDY)
        kept = made.decodes[0].engine.cache.dtype
        for sent, taken in zip(both.sent, both.taken, strict=True):
            for left, right in zip(sent, taken, strict=True):
                assert torch.equal(left.to(kept), right) and bool(left.any())
        assert got.ids == expected.ids
        assert got.record is not None
        assert tuple(d.code for d in got.record.conversions if d.kind == "lossy") == codes
    check_margin(got.ids, alone(IDS, GREEDY), dtype)


@pytest.mark.parametrize("consent", [c for c in itertools.product([False, True], repeat=3) if not all(c)])
async def test_every_missing_consent_refuses_before_any_work(consent: tuple[bool, bool, bool]) -> None:
    router, left, right = consent
    async with lossy({}, {"kv_dtype": "bf16"}, router=router, left=left, right=right) as made:
        with pytest.raises(Incompatible) as caught:
            await made.ask(IDS, GREEDY)
        assert caught.value.field == "KV_DTYPE" and [d.code for d in caught.value.differences] == ["KV_DTYPE"]
        assert "allow_lossy" in caught.value.remedy
        (matrix,) = (await made.client.status()).pairs
        assert not matrix.fits
        assert not any(worker.record().load.steps for worker in made.workers)


@pytest.mark.parametrize("liar", ["prefill", "decode"])
async def test_a_worker_that_did_not_consent_refuses_whatever_the_registry_says(liar: str) -> None:
    async with stack(allow_lossy=True) as made:
        await made.add_prefill(engine(), announced=False, allow_lossy=liar != "prefill")
        await made.add_decode(engine(kv_dtype="bf16"), announced=False, allow_lossy=liar != "decode")
        for worker in made.workers:
            record = worker.record()
            await made.router.registry.register(replace(record, contract=replace(record.contract, allow_lossy=True)))
        await made.router.pool.refresh()
        with pytest.raises(Incompatible) as caught:
            await made.ask(IDS, GREEDY)
        assert caught.value.field == "KV_DTYPE"
        assert not any(worker.record().load.steps for worker in made.workers)


async def test_float64_is_paired_with_nothing_else() -> None:
    async with lossy({"dtype": "float64"}, {}) as made:
        with pytest.raises(Incompatible) as caught:
            await made.ask(IDS, GREEDY)
        assert [d.code for d in caught.value.differences] == ["KV_DTYPE", "WEIGHT_DTYPE", "ACTIVATION_DTYPE"]
        assert "allow_lossy" not in caught.value.remedy  # it would not help


async def test_pools_of_mixed_precision_lose_no_request() -> None:
    """One willing worker among others: what the router pairs, no worker refuses."""
    expected = alone(IDS, GREEDY).ids
    async with stack(allow_lossy=True) as made:
        await made.add_prefill(engine())
        await made.add_prefill(engine(), allow_lossy=True)
        await made.add_decode(engine())
        await made.add_decode(engine(kv_dtype="bf16"))
        await made.add_decode(engine(kv_dtype="bf16"), allow_lossy=True)
        seen = set()
        for _ in range(12):
            got = await made.ask(IDS, GREEDY)
            assert got.record is not None and got.record.attempts == 1
            loss = {d.code for d in got.record.conversions if d.kind == "lossy"}
            pair = (got.record.prefill_worker, got.record.decode_worker)
            assert loss == ({"KV_DTYPE"} if pair == ("p1", "d2") else set()) and pair[1] != "d1"
            if not loss:
                assert got.ids == expected
            seen.add(pair)
        assert {decode for _, decode in seen} <= {"d0", "d2"} and ("p0", "d2") not in seen


async def test_a_cache_that_came_with_loss_serves_no_request_without() -> None:
    """The same prompt, first from a prefill worker whose cache is cast, then from one that needs no cast."""
    bf16: dict[str, Any] = {"dtype": "bf16"}
    expected = alone(IDS, GREEDY, dtype="bf16")
    async with lossy({}, bf16) as made:
        first = await made.ask(IDS, GREEDY)
        assert first.record is not None and first.record.conversions
        again = await made.ask(IDS, GREEDY)
        assert again.record is not None and again.record.sent_tokens < len(IDS)  # pages are found again
        assert again.ids == first.ids
        await made.remove(made.prefills[0])
        await made.add_prefill(engine(**bf16))
        got = await made.ask(IDS, GREEDY)
        assert got.record is not None and got.record.conversions == ()
        assert got.record.sent_tokens == len(IDS)
        assert got.ids == expected.ids and made.first_logits(got) == expected.first_logits
