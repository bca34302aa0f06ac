"""Who may bring which precision once a request was admitted: the one that was announced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_transfer.wire import contract_to_proto
from pdserve.errors import Incompatible, Refused
from pdserve.request import SamplingParams
from pdserve.v1 import decode_pb2
from tests.decode_worker.rig import rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=4, seed=0)
IDS = prompt(11)


async def test_a_retry_may_not_change_the_numerics() -> None:
    """The prefix that is held, and what the caller was told, belong to the first worker's."""
    async with rig(decode=tiny_engine(kv_dtype="bf16", deterministic=True), allow_lossy=True) as r:
        exact = replace(r.prefill.contract, allow_lossy=True)
        async with r.call(IDS, PARAMS, contract=exact) as call:
            await call.admitted()
            other = replace(exact, kv_dtype="bf16")
            await call.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(other)))
            with pytest.raises(Refused) as caught:
                await call.answer()
        assert (caught.value.reason, caught.value.retryable) == ("NUMERICS_CHANGED", True)


async def test_a_push_may_not_bring_other_numerics_than_were_admitted() -> None:
    """Both precisions are allowed here; only one of them was announced, and its conversion reported."""
    async with rig(decode=tiny_engine(kv_dtype="bf16", deterministic=True), allow_lossy=True) as r:
        exact = replace(r.prefill.contract, allow_lossy=True)
        async with r.call(IDS, PARAMS, contract=replace(exact, kv_dtype="bf16")) as call:
            admitted = await call.admitted()
            assert [d.code for d in admitted.conversions] == []
            computed = r.prefill.compute(IDS)
            with pytest.raises(Incompatible) as caught:
                await r.push(admitted, computed, contract=exact)
            assert caught.value.field == "KV_DTYPE"
            assert r.worker.blocks.held_count == 0
        async with r.call(IDS, PARAMS, contract=exact) as call:
            admitted = await call.admitted()
            assert [d.code for d in admitted.conversions] == ["KV_DTYPE"]
            await r.push(admitted, computed, contract=exact)
            assert len((await call.answer()).ids) == 4


async def test_a_push_without_the_senders_own_consent_is_refused() -> None:
    async with (
        rig(decode=tiny_engine(kv_dtype="bf16", deterministic=True), allow_lossy=True) as r,
        r.call(IDS, PARAMS, contract=replace(r.prefill.contract, allow_lossy=True)) as call,
    ):
        admitted = await call.admitted()
        with pytest.raises(Incompatible) as caught:
            await r.push(admitted, r.prefill.compute(IDS))  # says that it does not allow it
        assert caught.value.field == "KV_DTYPE" and "allow_lossy" in caught.value.remedy
