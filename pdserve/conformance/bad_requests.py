"""Requests and contracts that a decode worker must refuse before it issues a ticket or takes a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc

from cache_transfer.wire import contract_to_proto
from pdserve.conformance import variants
from pdserve.conformance.bench import Bench, expect, refuses, skip
from pdserve.conformance.cases import Case
from pdserve.conformance.hostile import garbage
from pdserve.conformance.peer import opening_for
from pdserve.v1 import common_pb2, decode_pb2

_S = grpc.StatusCode


def cases() -> Iterator[Case]:
    for name, run in _CONTRACTS.items():
        yield Case(name, "contracts", run, hostile=True)
    for name, run in _ADMISSION.items():
        yield Case(name, "admission", run, hostile=True)


def _must_equal_at_admission(bench: Bench) -> None:
    for code, other in (*variants.must_equal(bench.contract), *variants.lossy(bench.contract)):
        bench.hostile_inputs += 1
        failure = refuses(partial(_admit, bench, contract=other), _S.FAILED_PRECONDITION, "CONTRACT_MISMATCH")
        codes = [difference.code for difference in failure.error.differences]
        expect(code in codes, f"a contract with another {code} was refused for {codes}")


def _must_equal_at_the_push(bench: Bench) -> None:
    for code, other in (*variants.must_equal(bench.contract), *variants.lossy(bench.contract)):
        first = bench.token()
        with bench.handoff() as handoff:
            draft = handoff.draft(bench.other_token(first))
            draft.opening.contract.CopyFrom(contract_to_proto(other))
            draft.opening.kv_dtype = other.kv_dtype
            bench.refused(draft.ticket, draft.messages(), ("CONTRACT_MISMATCH",), (code,))
            handoff.complete(first)


def _must_equal_at_a_retry(bench: Bench) -> None:
    """It ends the request."""
    code, other = next(iter(variants.must_equal(bench.contract)))
    with bench.handoff() as handoff:
        bench.hostile_inputs += 1
        handoff.request.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(other)))
        failure = refuses(handoff.request.answer, _S.FAILED_PRECONDITION, "CONTRACT_MISMATCH")
        expect(failure.error.differences[0].code == code, f"refused for {failure.error.differences}")


def _other_numerics(bench: Bench) -> None:
    """Allowed with loss, but not what was announced at admission: neither at the push nor at a retry."""
    other = variants.castable(bench.contract)
    if other is None:
        skip("the worker allows no loss")
    first = bench.token()
    with bench.handoff() as handoff:
        draft = handoff.draft(bench.other_token(first))
        draft.opening.contract.CopyFrom(contract_to_proto(other))
        draft.opening.kv_dtype = other.kv_dtype
        bench.refused(draft.ticket, draft.messages(), ("CONTRACT_MISMATCH",), ("KV_DTYPE",))
        handoff.complete(first)
    with bench.handoff() as handoff:
        bench.hostile_inputs += 1
        handoff.request.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(other)))
        refuses(handoff.request.answer, _S.FAILED_PRECONDITION, "NUMERICS_CHANGED")


_CONTRACTS: dict[str, Callable[[Bench], None]] = {
    "each field that must be equal, at admission": _must_equal_at_admission,
    "each field that must be equal, at the push": _must_equal_at_the_push,
    "a field that must be equal, at a retry": _must_equal_at_a_retry,
    "other numerics than were announced": _other_numerics,
}


def _admit(bench: Bench, **changes: Any) -> None:
    """Asks for admission and returns at the first event."""
    prompt = changes.pop("prompt", None) or bench.prompt()
    contract = changes.pop("contract", None) or bench.contract
    opening = opening_for(contract, prompt, tenant=bench.tenant(), max_tokens=2)
    for name, value in changes.items():
        if value is None:
            opening.ClearField(name)
        elif isinstance(value, list):
            opening.ClearField(name)
            getattr(opening, name).extend(value)
        elif name == "sampling":
            opening.sampling.CopyFrom(value)
        else:
            setattr(opening, name, value)
    with bench.peer.request(opening) as request:
        request.take("admitted")


def _bad_openings(bench: Bench) -> None:
    vocab = bench.contract.vocab_size
    greedy = {"temperature": 0.0, "seed": 1, "max_tokens": 2}

    def sampling(**values: Any) -> common_pb2.SamplingOptions:
        return common_pb2.SamplingOptions(**{**greedy, **values})

    table: list[tuple[grpc.StatusCode, str, str, dict[str, Any]]] = [
        (_S.INVALID_ARGUMENT, "INVALID_REQUEST_ID", "request_id", {"request_id": None}),
        (_S.INVALID_ARGUMENT, "INVALID_REQUEST_ID", "request_id", {"request_id": "x" * 300}),
        (_S.INVALID_ARGUMENT, "MISSING_FIELD", "prefill_contract", {"prefill_contract": None}),
        (_S.INVALID_ARGUMENT, "MISSING_FIELD", "sampling.seed", {"sampling": common_pb2.SamplingOptions(max_tokens=2)}),
        (_S.INVALID_ARGUMENT, "EMPTY_PROMPT", "prompt_ids", {"prompt_ids": []}),
        (_S.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", "prompt_ids", {"prompt_ids": [0, vocab]}),
        (_S.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", "prompt_ids", {"prompt_ids": [0, -1]}),
        (_S.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", "output_ids", {"output_ids": [vocab]}),
        (_S.INVALID_ARGUMENT, "INVALID_OUTPUT_IDS", "output_ids", {"output_ids": [0, 0, 0]}),
        (_S.INVALID_ARGUMENT, "INVALID_OUTPUT_IDS", "forwarded_tokens", {"forwarded_tokens": 1}),
        (_S.INVALID_ARGUMENT, "INVALID_TEMPERATURE", "temperature", {"sampling": sampling(temperature=float("nan"))}),
        (_S.INVALID_ARGUMENT, "INVALID_TOP_P", "top_p", {"sampling": sampling(top_p=0.0)}),
        (_S.INVALID_ARGUMENT, "INVALID_MAX_TOKENS", "max_tokens", {"sampling": sampling(max_tokens=0)}),
        (_S.NOT_FOUND, "UNKNOWN_MODEL", "model", {"model": f"{bench.model}-2"}),
        (_S.NOT_FOUND, "UNKNOWN_ADAPTER", "adapter_digest", {"adapter_digest": bytes(32)}),
    ]
    if bench.contract.context_limit:
        long = [0] * bench.contract.context_limit
        table.append((_S.INVALID_ARGUMENT, "PROMPT_TOO_LONG|POOL_TOO_SMALL", "", {"prompt_ids": long}))
    for status, reason, field, changes in table:
        bench.hostile_inputs += 1
        refuses(partial(_admit, bench, **changes), status, reason, field)


def _bad_order(bench: Bench) -> None:
    """Streams that do not begin with their opening, one that opens twice, and bytes that are no message."""
    bench.hostile_inputs += 3 + len(garbage())
    with bench.peer.request(None) as request:
        request.send(retry=decode_pb2.DecodeRetry(prefill_contract=contract_to_proto(bench.contract)))
        refuses(request.event, _S.INVALID_ARGUMENT, "MISSING_FIELD", "open")
    with bench.peer.request(None) as request:
        request.send()
        refuses(request.event, _S.INVALID_ARGUMENT, "MISSING_FIELD", "open")
    with bench.handoff() as handoff:
        handoff.request.send(open=decode_pb2.DecodeOpen())
        refuses(handoff.request.answer, _S.INVALID_ARGUMENT, "UNEXPECTED_MESSAGE", "request")
    for data in garbage().values():
        refuses(partial(bench.peer.generate_raw, data), _S.INVALID_ARGUMENT, "MALFORMED_MESSAGE|MISSING_FIELD")


_ADMISSION: dict[str, Callable[[Bench], None]] = {
    "openings that can never be served": _bad_openings,
    "messages of a Decode stream out of order": _bad_order,
}
