"""What a decode worker refuses: by name, before any page, ticket or token, and without harm to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cache_transfer.contract import CachePlane, WorkerContract, check_compatible
from pdserve.errors import Incompatible, InvalidRequest, NotFound, PdserveError
from pdserve.request import SamplingParams
from pdserve.v1 import decode_pb2
from tests.decode_worker.rig import local, rig
from tests.engine.tiny import prompt, tiny_engine

PARAMS = SamplingParams(temperature=0, max_tokens=4, seed=0)
Change = Callable[[WorkerContract], WorkerContract]


def plane(name: str, heads: int, head_dim: int) -> Change:
    def change(c: WorkerContract) -> WorkerContract:
        layer = tuple(CachePlane(name, heads, head_dim) if p.name == name else p for p in c.planes[1])
        return replace(c, planes=(c.planes[0], layer, *c.planes[2:]))

    return change


def position(**changes: Any) -> Change:
    return lambda c: replace(c, positions=replace(c.positions, **changes))


def attention(**changes: Any) -> Change:
    return lambda c: replace(c, attention=replace(c.attention, **changes))


CONTRACTS: list[tuple[str, Change]] = [
    ("CONTRACT_VERSION", lambda c: replace(c, version=c.version + 1)),
    ("MODEL_DIGEST", lambda c: replace(c, model_digest=bytes(32))),
    ("POSITION_SCHEME.kind", position(kind="alibi")),
    ("POSITION_SCHEME.theta", position(theta=10000.5)),
    ("POSITION_SCHEME.dims", position(dims=4)),
    ("POSITION_SCHEME.scaling", position(scaling="llama3")),
    ("POSITION_SCHEME.scaling_parameters", position(scaling_parameters=(("factor", 8.0),))),
    ("POSITION_SCHEME.original_max_positions", position(original_max_positions=64)),
    ("POSITION_SCHEME.interleaved", position(interleaved=True)),
    ("POSITION_SCHEME.keys_cached_rotated", position(keys_cached_rotated=False)),
    ("ATTENTION.scale", attention(scale=0.5)),
    ("ATTENTION.soft_cap", attention(soft_cap=30.0)),
    ("ATTENTION.sliding_window", attention(sliding_window=(0, 0, 16))),
    ("LAYERS", lambda c: replace(c, planes=c.planes[:-1], attention=replace(c.attention, sliding_window=()))),
    ("PLANES[1].k.heads", plane("k", 4, 8)),
    ("PLANES[1].v.head_dim", plane("v", 2, 16)),
    ("VOCAB_SIZE", lambda c: replace(c, vocab_size=98)),
    ("TOKENIZER_DIGEST", lambda c: replace(c, tokenizer_digest=b"t" * 32)),
    ("KV_DTYPE", lambda c: replace(c, kv_dtype="bf16")),
    ("WEIGHT_DTYPE", lambda c: replace(c, weight_dtype="bf16")),
    ("ACTIVATION_DTYPE", lambda c: replace(c, activation_dtype="bf16")),
]


async def test_each_contract_field_that_differs_is_named() -> None:
    async with rig() as r:
        for code, change in CONTRACTS:
            contract = change(r.prefill.contract)
            with pytest.raises(Incompatible) as by_hand:
                check_compatible(contract, r.worker.contract)
            async with r.call(prompt(5), PARAMS, contract=contract) as call:
                with pytest.raises(Incompatible) as caught:
                    await call.event()
            assert code in [d.code for d in caught.value.differences]
            assert caught.value.field == by_hand.value.field
            assert r.worker.pipeline.quiet.is_set() and r.worker.blocks.held_count == 0
        assert (await r.generate(prompt(5), PARAMS)).ids == local([prompt(5)], PARAMS)[0].ids


REQUESTS: list[tuple[str, str, type[PdserveError], dict[str, Any]]] = [
    ("model", "UNKNOWN_MODEL", NotFound, {"model": "other"}),
    ("adapter_digest", "UNKNOWN_ADAPTER", NotFound, {"adapter_digest": bytes(32)}),
    ("request_id", "INVALID_REQUEST_ID", InvalidRequest, {"request_id": ""}),
    ("prompt_ids", "EMPTY_PROMPT", InvalidRequest, {"ids": ()}),
    ("prompt_ids", "TOKEN_OUT_OF_RANGE", InvalidRequest, {"ids": (1, 97)}),
    ("prompt_ids", "TOKEN_OUT_OF_RANGE", InvalidRequest, {"ids": (-1, 1)}),
    ("prompt_ids", "PROMPT_TOO_LONG", InvalidRequest, {"ids": (1,) * 512}),
    ("max_tokens", "PROMPT_TOO_LONG", InvalidRequest, {"params": replace(PARAMS, max_tokens=508)}),
    ("max_tokens", "POOL_TOO_SMALL", InvalidRequest, {"params": replace(PARAMS, max_tokens=253)}),
    ("prompt_ids", "POOL_TOO_SMALL", InvalidRequest, {"ids": (1,) * 300}),
    ("temperature", "INVALID_TEMPERATURE", InvalidRequest, {"params": replace(PARAMS, temperature=float("nan"))}),
    ("temperature", "INVALID_TEMPERATURE", InvalidRequest, {"params": replace(PARAMS, temperature=-0.1)}),
    ("logit_bias", "INVALID_LOGIT_BIAS", InvalidRequest, {"params": replace(PARAMS, logit_bias={97: 1.0})}),
    ("stop", "NO_TOKENIZER", InvalidRequest, {"params": replace(PARAMS, stop=("x",))}),
    ("sampling.seed", "MISSING_FIELD", InvalidRequest, {"params": replace(PARAMS, seed=None)}),
    ("output_ids", "TOKEN_OUT_OF_RANGE", InvalidRequest, {"output": (97,)}),
    ("output_ids", "INVALID_OUTPUT_IDS", InvalidRequest, {"output": (1,) * 5}),
    ("forwarded_tokens", "INVALID_OUTPUT_IDS", InvalidRequest, {"output": (1,), "forwarded": 2}),
    (
        "forwarded_tokens",
        "INVALID_OUTPUT_IDS",
        InvalidRequest,
        {"params": replace(PARAMS, logprobs=1), "output": (1, 2), "forwarded": 1},
    ),
    (
        "min_tokens",
        "INVALID_MIN_TOKENS",
        InvalidRequest,
        {"params": replace(PARAMS, max_tokens=None, min_tokens=253)},
    ),
]


async def test_each_bad_request_is_refused_by_name() -> None:
    async with rig() as r:
        for field, reason, kind, options in REQUESTS:
            ids, params, more = prompt(5), PARAMS, dict(options)
            ids, params = more.pop("ids", ids), more.pop("params", params)
            async with r.call(ids, params, **more) as call:
                with pytest.raises(kind) as caught:
                    await call.event()
            assert (caught.value.field, caught.value.reason) == (field, reason)
            assert r.worker.pipeline.quiet.is_set() and r.worker.blocks.held_count == 0
        assert (await r.generate(prompt(5), PARAMS)).ids == local([prompt(5)], PARAMS)[0].ids


async def test_what_just_fits_is_served() -> None:
    async with rig(decode=tiny_engine(deterministic=True, pages=4)) as r:
        assert len((await r.generate(prompt(9), replace(PARAMS, max_tokens=8))).ids) == 8
        # One token needs no page, so even a prompt beyond the pool gets its answer.
        assert len((await r.generate(prompt(40), replace(PARAMS, max_tokens=1))).ids) == 1


async def test_messages_out_of_order_are_refused() -> None:
    async with rig() as r:
        for message in ({"retry": decode_pb2.DecodeRetry()}, {}):
            call = r.call(prompt(5), PARAMS)
            await call.send(**message)
            with pytest.raises(InvalidRequest, match="first message"):
                await call.event()
        call = r.call(prompt(5), PARAMS)
        await call.call.done_writing()
        with pytest.raises(InvalidRequest, match="first message"):
            await call.event()
        async with r.call(prompt(5), PARAMS) as twice:
            await twice.admitted()
            await twice.send(open=decode_pb2.DecodeOpen())
            with pytest.raises(InvalidRequest, match="only `retry`"):
                await twice.answer()


async def test_the_contract_is_required() -> None:
    async with rig() as r:
        call = r.call(prompt(5), PARAMS)
        await call.send(open=decode_pb2.DecodeOpen(request_id="r", prompt_ids=[1]))
        with pytest.raises(InvalidRequest) as caught:
            await call.event()
        assert caught.value.field == "prefill_contract"
