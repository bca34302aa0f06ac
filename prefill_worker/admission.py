"""Everything that is checked before a prompt may wait: no page, no step and no connection before it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from cache_transfer.contract import (
    HandoffIdentity,
    Ticket,
    WorkerContract,
    check_compatible,
    check_identity,
    prompt_digest,
)
from pdserve.errors import InvalidRequest
from pdserve.request import check_served, check_token_ids


@dataclass(frozen=True)
class PrefillRequest:
    """`Prefill/Run` as the worker reads it."""

    request_id: str
    model: str  # empty: whatever this worker serves
    tenant: str
    adapter: bytes | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # delivered by an earlier attempt; computed after the prompt
    ticket: Ticket
    identity: HandoffIdentity  # what decode expects
    logits_only: bool
    decode_contract: WorkerContract

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True)
class Limits:
    """What one worker can take."""

    model: str  # served name
    contract: WorkerContract
    context_limit: int  # tokens
    pages: int
    page_size: int  # tokens
    adapters: Container[bytes] = ()  # digests that new requests may use


def check_request(request: PrefillRequest, limits: Limits) -> None:
    """Refuses what this worker can never compute, or what its receiver would not take.

    Raises:
        NotFound: another model (UNKNOWN_MODEL), or an adapter that is not here (UNKNOWN_ADAPTER).
        InvalidRequest: EMPTY_PROMPT, TOKEN_OUT_OF_RANGE, PROMPT_TOO_LONG, POOL_TOO_SMALL, INVALID_TICKET.
        Incompatible: the receiver's contract or expected identity differs; names the field.
    """
    check_served(limits.model, request.model, request.adapter, limits.adapters)
    check_token_ids(request.prompt_ids, limits.contract.vocab_size, "prompt_ids")
    if request.output_ids:
        check_token_ids(request.output_ids, limits.contract.vocab_size, "output_ids")
    _check_length(len(request.ids), limits)
    check_compatible(limits.contract, request.decode_contract)
    if not 0 <= request.ticket.held_tokens < len(request.ids):
        raise InvalidRequest(
            f"decode cannot hold {request.ticket.held_tokens} of {len(request.ids)} tokens",
            reason="INVALID_TICKET",
            field="ticket.held_tokens",
            remedy="send the ticket that decode issued for this prompt",
        )
    check_identity(request.identity, expected_identity(request, limits.contract))
    receiver_address(request.ticket)


def expected_identity(request: PrefillRequest, contract: WorkerContract) -> HandoffIdentity:
    """The handoff's identity, from what this worker itself knows and is about to compute."""
    return HandoffIdentity(
        contract_digest=contract.digest(),
        adapter_digest=request.adapter,
        tenant=request.tenant,
        prompt_digest=prompt_digest(request.ids),
        start=request.ticket.held_tokens,
        end=len(request.ids),
    )


def receiver_address(ticket: Ticket) -> str:
    """Where to push. Raises InvalidRequest for a ticket that names nothing this worker can reach."""
    for endpoint in ticket.endpoints:
        whole = not (endpoint.first_layer or endpoint.end_layer or endpoint.first_head or endpoint.end_head)
        if endpoint.transport == "grpc" and whole:
            return endpoint.address
    raise InvalidRequest(
        "no endpoint takes all layers and heads over grpc",
        reason="NO_ENDPOINT",
        field="ticket.endpoints",
        remedy="send the ticket as decode issued it",
    )


def _check_length(tokens: int, limits: Limits) -> None:
    if tokens > limits.context_limit:
        raise InvalidRequest(
            f"{tokens} tokens are more than the context of {limits.context_limit}",
            reason="PROMPT_TOO_LONG",
            field="prompt_ids",
            remedy=f"send at most {limits.context_limit} tokens",
        )
    room = limits.pages * limits.page_size
    if tokens > room:
        raise InvalidRequest(
            f"{tokens} tokens are more than the {room} that fit the page pool",
            reason="POOL_TOO_SMALL",
            field="prompt_ids",
            remedy=f"send at most {room} tokens, or give the worker more pages",
        )
