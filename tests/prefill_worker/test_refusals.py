"""What is refused before any page, step or connection; and that a refusal costs nobody else anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cache_transfer.contract import WorkerContract
from cache_transfer.wire import contract_to_proto
from pdserve.errors import DataLoss, Incompatible, InvalidRequest, NotFound, PdserveError, Unavailable
from pdserve.v1 import common_pb2
from tests.engine.tiny import prompt, spec, tiny_engine
from tests.prefill_worker.rig import Rig, check_equal, local, rig


async def refused(made: Rig, kind: type[PdserveError], request: Any) -> PdserveError:
    """Sends a request that must be refused without a trace; returns the error."""
    with pytest.raises(kind) as failure:
        await made.send(request)
    assert type(failure.value) is kind
    load = made.worker.record().load
    assert (load.steps, load.running, load.waiting, load.pages_held) == (0, 0, 0, 0)
    assert not made.decode.granting.is_set() and not made.decode.received
    return failure.value


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"prompt_ids": []}, "EMPTY_PROMPT", "prompt_ids"),
        ({"prompt_ids": [1, 97]}, "TOKEN_OUT_OF_RANGE", "prompt_ids"),
        ({"prompt_ids": [-1]}, "TOKEN_OUT_OF_RANGE", "prompt_ids"),
        ({"output_ids": [3, 97]}, "TOKEN_OUT_OF_RANGE", "output_ids"),
        ({"request_id": ""}, "INVALID_REQUEST_ID", "request_id"),
        ({"request_id": "r" * 257}, "INVALID_REQUEST_ID", "request_id"),
        ({"ticket": None}, "MISSING_FIELD", "ticket"),
        ({"identity": None}, "MISSING_FIELD", "identity"),
        ({"decode_contract": None}, "MISSING_FIELD", "decode_contract"),
    ],
)
async def test_an_invalid_request_names_the_field(changes: dict[str, Any], reason: str, field: str) -> None:
    async with rig() as made:
        error = await refused(made, InvalidRequest, made.request(prompt(9), **changes))
        assert (error.reason, error.field) == (reason, field)
        assert error.remedy


@pytest.mark.parametrize(
    ("tokens", "output", "reason"), [(65, 0, "PROMPT_TOO_LONG"), (60, 5, "PROMPT_TOO_LONG"), (49, 0, "POOL_TOO_SMALL")]
)
async def test_what_never_fits_is_refused_at_once(tokens: int, output: int, reason: str) -> None:
    engine = tiny_engine(spec(context_limit=64), pages=12)
    decode = tiny_engine(spec(context_limit=64), pages=64)
    async with rig(prefill=engine, decode=decode) as made:
        error = await refused(made, InvalidRequest, made.request(prompt(tokens), output=prompt(output)))
        assert error.reason == reason
        if reason == "POOL_TOO_SMALL":
            await made.run(prompt(48))  # exactly the pool


async def test_a_configured_context_limit_counts_output_of_earlier_attempts() -> None:
    async with rig(context_limit=20) as made:
        error = await refused(made, InvalidRequest, made.request(prompt(15), output=prompt(6)))
        assert error.reason == "PROMPT_TOO_LONG"
        await made.run(prompt(15), output=prompt(5))


async def test_another_model_and_adapters_are_not_found() -> None:
    async with rig() as made:
        error = await refused(made, NotFound, made.request(prompt(9), model="other"))
        assert (error.reason, error.field) == ("UNKNOWN_MODEL", "model")
        error = await refused(made, NotFound, made.request(prompt(9), adapter_digest=bytes(32)))
        assert (error.reason, error.field) == ("UNKNOWN_ADAPTER", "adapter_digest")
        await made.run(prompt(9), model="tiny")


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("MODEL_DIGEST", {"model_digest": bytes(32)}),
    ("VOCAB_SIZE", {"vocab_size": 96}),
    ("TOKENIZER_DIGEST", {"tokenizer_digest": bytes(32)}),
    ("KV_DTYPE", {"kv_dtype": "bf16"}),
    ("WEIGHT_DTYPE", {"weight_dtype": "bf16"}),
    ("CONTRACT_VERSION", {"version": 2}),
]


@pytest.mark.parametrize(("code", "changes"), CHANGES)
async def test_a_contract_that_differs_is_refused_by_the_sender_too(code: str, changes: dict[str, Any]) -> None:
    async with rig() as made:
        contract: WorkerContract = replace(made.decode.contract, **changes)
        request = made.request(prompt(9), decode_contract=contract_to_proto(contract))
        error = await refused(made, Incompatible, request)
        assert error.field == code and [d.code for d in error.differences] == [code]


async def test_rope_and_planes_are_compared_field_by_field() -> None:
    async with rig() as made:
        own = made.decode.contract
        theta = replace(own, positions=replace(own.positions, theta=500000.0))
        heads = replace(own, planes=(*own.planes[:2], (replace(own.planes[2][0], heads=1), own.planes[2][1])))
        for contract, code in ((theta, "POSITION_SCHEME.theta"), (heads, "PLANES[2].k.heads")):
            request = made.request(prompt(9), decode_contract=contract_to_proto(contract))
            assert (await refused(made, Incompatible, request)).field == code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("contract_digest", bytes(32)),
        ("adapter_digest", bytes(32)),
        ("tenant", "other"),
        ("prompt_digest", bytes(32)),
        ("start", 4),
        ("end", 8),
    ],
)
async def test_an_identity_other_than_its_own_is_refused(field: str, value: Any) -> None:
    async with rig() as made:
        request = made.request(prompt(9))
        setattr(request.identity, field, value)
        error = await refused(made, Incompatible, request)
        assert (error.reason, error.field) == ("IDENTITY_MISMATCH", f"IDENTITY.{field}")


async def test_the_tenant_of_the_request_must_be_the_one_decode_expects() -> None:
    async with rig() as made:
        request = made.request(prompt(9), tenant="a")
        request.tenant = "b"
        assert (await refused(made, Incompatible, request)).field == "IDENTITY.tenant"


async def test_decode_cannot_hold_the_whole_prompt() -> None:
    async with rig() as made:
        request = made.request(prompt(9), held=8)
        request.ticket.held_tokens = request.identity.start = 9
        error = await refused(made, InvalidRequest, request)
        assert (error.reason, error.field) == ("INVALID_TICKET", "ticket.held_tokens")


@pytest.mark.parametrize(
    ("endpoint", "kind", "reason"),
    [
        (common_pb2.Endpoint(transport="rdma", address="127.0.0.1:1"), InvalidRequest, "NO_ENDPOINT"),
        (common_pb2.Endpoint(transport="grpc", address="127.0.0.1:1", end_layer=1), InvalidRequest, "NO_ENDPOINT"),
        (common_pb2.Endpoint(transport="grpc", address="nowhere"), Unavailable, "BAD_ADDRESS"),
        # no plaintext beyond here
        (common_pb2.Endpoint(transport="grpc", address="192.0.2.1:5000"), Unavailable, "BAD_ADDRESS"),
    ],
)
async def test_a_ticket_that_leads_nowhere_is_refused(
    endpoint: common_pb2.Endpoint, kind: type[PdserveError], reason: str
) -> None:
    async with rig() as made:
        request = made.request(prompt(9))
        del request.ticket.endpoints[:]
        request.ticket.endpoints.append(endpoint)
        error = await refused(made, kind, request)
        assert (error.reason, error.field) == (reason, "ticket.endpoints")


async def test_a_wrong_secret_is_refused_by_decode_and_harms_nobody() -> None:
    ids = prompt(12)
    async with rig() as made:
        request = made.request(ids)
        request.ticket.secret = bytes(32)
        with pytest.raises(DataLoss) as failure:
            await made.send(request)
        assert failure.value.reason == "PROOF" and not made.decode.received
        _, handoff = await made.run(ids)
        check_equal(made, handoff, local(tiny_engine(deterministic=True), ids))
