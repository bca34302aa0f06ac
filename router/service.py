"""The Gateway over gRPC: protobuf in, the router's own types inside, protobuf out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice, product
from typing import Any

import grpc

from pdserve import __version__
from pdserve.errors import Cancelled, InvalidRequest, PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.registry.wire import status_to_proto
from pdserve.rpc.convert import (
    accepted_to_proto,
    finish_to_proto,
    record_to_proto,
    sampling_from_proto,
    tokens_to_proto,
    usage_to_proto,
)
from pdserve.rpc.events import Accepted, Finish, HandoffRecord, TokenBatch, Usage
from pdserve.rpc.server import Server
from pdserve.rpc.status import difference_to_proto, to_detail
from pdserve.tokenizer.bundle import SAMPLING_NAMES
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from router.adapters import adapters_of
from router.auth import Authenticator, credentials
from router.backlog import Moved
from router.gate import Member
from router.intake import Intake
from router.orchestrate import Orchestrator
from router.outcomes import BOUNDS, Outcomes
from router.placement import widest
from router.pool import Pool
from router.request import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.settings import RouterSettings
from router.tokens import check_message_count

Context = grpc.aio.ServicerContext[Any, Any]

GATEWAY = "pdserve.v1.Gateway"  # the service's full name
MAX_LABEL = 256  # characters
MAX_PAIRS = 1024  # told by Status


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Serve it behind a `router.auth.Doorkeeper`, which refuses whoever has no good key."""

    def __init__(
        self,
        intake: Intake,
        orchestrator: Orchestrator,
        pool: Pool,
        settings: RouterSettings,
        registry_name: str,
        authenticator: Authenticator,
    ) -> None:
        self._intake = intake
        self._orchestrator = orchestrator
        self._pool = pool
        self._settings = settings
        self._registry_name = registry_name
        self._authenticator = authenticator

    # A coroutine that writes, not a generator: so the time a client takes for a message is ours to bound.
    async def Generate(self, message: gateway_pb2.GenerateRequest, context: Context) -> None:
        """Before the first token a failure is the status alone, afterwards an error event comes first. If asked for,
        the record comes before either.
        """
        tenant = self._authenticator.tenant(credentials(context.invocation_metadata()))
        request = await self._intake.take(ask_from_proto(message, context.time_remaining()), tenant)
        streaming, delivered = False, 0
        async with aclosing(self._orchestrator.generate(request)) as events:
            while True:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                except PdserveError as error:
                    if streaming:
                        usage = usage_to_proto(Usage(len(request.prompt_ids), delivered))
                        await self._write(context, gateway_pb2.GenerateEvent(error=to_detail(error), usage=usage))
                    raise
                if isinstance(event, Moved):
                    continue
                await self._write(context, event_to_proto(event))
                if isinstance(event, TokenBatch):
                    streaming, delivered = True, delivered + len(event.ids)

    async def ListModels(
        self, message: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        models = self._pool.models()
        found = [await self._model_info(name, created) for name, created in models.items()]
        return gateway_pb2.ListModelsResponse(models=found)

    async def Status(self, message: gateway_pb2.StatusRequest, context: Context) -> gateway_pb2.StatusResponse:
        members = self._pool.members()
        now = asyncio.get_running_loop().time()
        return gateway_pb2.StatusResponse(
            workers=[
                status_to_proto(replace(m.record, load=self._pool.load(m)), max(0.0, m.expires_at - now))
                for m in members
            ],
            pairs=pairs_to_proto(self._pool, members),
            registry=self._registry_name,
            registry_warning=self._pool.warning,
            active_requests=self._orchestrator.active,
            version=__version__,
            placement=placement_to_proto(self._orchestrator.outcomes),
        )

    async def _model_info(self, name: str, created: int) -> gateway_pb2.ModelInfo:
        members = [member for member in self._pool.members() if member.record.model == name]
        matches = self._pool.verdict(name).matches
        contract = (matches[0].prefills[0] if matches else members[0]).record.contract
        return gateway_pb2.ModelInfo(
            name=name,
            context_limit=widest(matches).total if matches else contract.context_limit,
            vocab_size=contract.vocab_size,
            model_digest=contract.model_digest,
            has_tokenizer=bool(contract.tokenizer_digest),
            has_chat_template=await self._has_template(members, contract.tokenizer_digest),
            created_s=created,
            adapters=adapters_of(self._pool, name),
        )

    async def _has_template(self, members: Sequence[Member], digest: bytes) -> bool:
        """False too while no worker delivers the tokenizer: a list of models should not fail for that."""
        try:
            tokenizer = await self._intake.tokenizer(members, digest)
        except Unavailable:
            return False
        return tokenizer is not None and tokenizer.has_chat_template

    async def _write(self, context: Context, event: gateway_pb2.GenerateEvent) -> None:
        try:
            async with asyncio.timeout(self._settings.client_stall_s):
                await context.write(event)
        except TimeoutError as error:
            raise Cancelled(f"the client took nothing for {self._settings.client_stall_s:g} s") from error


def add_gateway(server: Server, gateway: GatewayService) -> None:
    """Adds the service to a server that has not started yet."""
    server.add(gateway_pb2_grpc.add_GatewayServicer_to_server, gateway)


def ask_from_proto(message: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Ask:
    return Ask(
        prompt=prompt_from_proto(message),
        sampling=sampling_from_proto(message.sampling),
        model=message.model,
        adapter=message.adapter,
        label=_label(message.request_id),
        want_record=message.want_record,
        timeout_s=timeout_s,
        unset=frozenset(name for name in SAMPLING_NAMES if not message.sampling.HasField(name)),
        n=message.n or 1,
    )


def _label(request_id: str) -> str:
    """The caller's name for its request, which goes to the logs."""
    if len(request_id) > MAX_LABEL:
        raise InvalidRequest(
            f"it has {len(request_id)} characters",
            reason="INVALID_REQUEST_ID",
            field="request_id",
            remedy=f"use at most {MAX_LABEL}",
        )
    return request_id


def prompt_from_proto(message: gateway_pb2.GenerateRequest) -> Prompt:
    """Raises InvalidRequest when there is none."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "chat":
        return chat_from_proto(message.chat)
    if kind == "tokens":
        return TokenPrompt(tuple(message.tokens.ids))
    raise InvalidRequest(
        "there is no prompt", reason="EMPTY_PROMPT", field="prompt", remedy="send text, chat messages or token ids"
    )


def chat_from_proto(chat: gateway_pb2.ChatPrompt) -> ChatPrompt:
    """Raises InvalidRequest naming the field that is no JSON."""
    check_message_count(len(chat.messages))
    tools, variables = _json(chat.tools_json, "tools_json", list), _json(chat.variables_json, "variables_json", dict)
    if not all(isinstance(tool, dict) for tool in tools or ()):
        raise _not_json("tools_json", "not every tool is an object")
    return ChatPrompt(
        messages=tuple(_message(m, f"messages[{n}]") for n, m in enumerate(chat.messages)),
        tools=tuple(tools or ()),
        add_generation_prompt=not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        variables=variables or {},
    )


def _message(message: gateway_pb2.ChatMessage, where: str) -> dict[str, object]:
    """Besides role and content only what is set: a template may ask whether a name is there."""
    calls = _json(message.tool_calls_json, f"{where}.tool_calls_json", list)
    content = message.content if message.content or not calls else None
    more = {"name": message.name, "tool_calls": calls, "tool_call_id": message.tool_call_id}
    return {"role": message.role, "content": content, **{key: value for key, value in more.items() if value}}


def _json(text: str, where: str, kind: type) -> Any:
    """None for no text."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(where, f"not JSON: {error}") from error
    if not isinstance(value, kind):
        raise _not_json(where, f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _not_json(where: str, problem: str) -> InvalidRequest:
    return InvalidRequest(problem, reason="INVALID_JSON", field=where, remedy="send JSON as the field documents it")


def event_to_proto(event: Accepted | TokenBatch | HandoffRecord | Finish) -> gateway_pb2.GenerateEvent:
    if isinstance(event, TokenBatch):
        return gateway_pb2.GenerateEvent(tokens=tokens_to_proto(event))
    if isinstance(event, Accepted):
        return gateway_pb2.GenerateEvent(accepted=accepted_to_proto(event))
    if isinstance(event, HandoffRecord):
        return gateway_pb2.GenerateEvent(record=record_to_proto(event))
    return gateway_pb2.GenerateEvent(finish=finish_to_proto(event))


def placement_to_proto(outcomes: Outcomes) -> gateway_pb2.PlacementCounts:
    return gateway_pb2.PlacementCounts(
        disaggregate=outcomes.disaggregate,
        handed_over=outcomes.handed_over,
        computed_at_decode=outcomes.computed_at_decode,
        fallbacks=outcomes.fallbacks,
        cheaper=outcomes.cheaper,
        predictions=outcomes.predictions,
        bounds=BOUNDS,
        ratios=outcomes.ratios,
    )


def pairs_to_proto(pool: Pool, members: tuple[Member, ...]) -> list[gateway_pb2.Pair]:
    """Every pair, with every difference whether or not it refuses; in a large pool one pair for all that are alike.

    Contracts are compared once for all workers that share them.
    """
    prefills, decodes = (tuple(m for m in members if m.record.role == role) for role in (PREFILL, DECODE))
    if len(prefills) * len(decodes) > MAX_PAIRS:
        prefills, decodes = (tuple({_kind(m): m for m in reversed(side)}.values()) for side in (prefills, decodes))
    known: dict[tuple[object, object], tuple[bool, list[Any]]] = {}
    pairs = []
    for prefill, decode in islice(product(prefills, decodes), MAX_PAIRS):
        kinds = _kind(prefill), _kind(decode)
        if kinds not in known:
            differences = [difference_to_proto(d) for d in pool.gate.differences(prefill, decode)]
            known[kinds] = pool.gate.fits(prefill, decode), differences
        fits, told = known[kinds]
        pairs.append(gateway_pb2.Pair(prefill_worker=prefill.id, decode_worker=decode.id, fits=fits, differences=told))
    return pairs


def _kind(member: Member) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Equal for workers that differ from others in the same way."""
    return member.group, tuple(sorted(member.record.contract.info.items()))
