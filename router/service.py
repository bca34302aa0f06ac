"""The Gateway over gRPC: protobuf in, the router's own types inside, protobuf out."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice, product
from typing import Any

import grpc

from pdserve import __version__
from pdserve.errors import Cancelled, PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.registry.wire import status_to_proto
from pdserve.rpc.convert import record_to_proto
from pdserve.rpc.later_fields import later_fields
from pdserve.rpc.server import Server
from pdserve.rpc.status import difference_to_proto, to_detail
from pdserve.telemetry.context import values
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc
from router.adapters import adapters_of
from router.auth import Authenticator, certificate_names, credentials, is_operator
from router.backlog import Moved
from router.compatibility import compare, key, kinds
from router.door import answer_headers, come_in
from router.gate import Member
from router.gateway_answer import GatewayAnswer
from router.gateway_ask import asks_from_proto
from router.intake import Intake
from router.merging import merged
from router.openai_text import echo_of
from router.orchestrate import Orchestrator
from router.outcomes import BOUNDS, Outcomes
from router.placement import widest
from router.pool import Pool
from router.recent import KEPT, Recent, Seen
from router.settings import RouterSettings

Context = grpc.aio.ServicerContext[Any, Any]

GATEWAY = "pdserve.v1.Gateway"  # the service's full name
MAX_PAIRS = 1024  # told by Status
MAX_RECENT_BYTES = 1 << 20  # of requests told by Status


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
        recent: Recent | None = None,
    ) -> None:
        self._intake = intake
        self._orchestrator = orchestrator
        self._pool = pool
        self._settings = settings
        self._registry_name = registry_name
        self._recent = recent or Recent()
        self._authenticator = authenticator

    # A coroutine that writes, not a generator: so the time a client takes for a message is ours to bound.
    async def Generate(self, message: gateway_pb2.GenerateRequest, context: Context) -> None:
        """Before the first token a failure is the status alone, afterwards an error event comes first. If asked for,
        the record comes before either.
        """
        metadata = tuple(context.invocation_metadata() or ())
        come_in(lambda key: values(metadata, key))
        context.set_trailing_metadata(tuple(answer_headers().items()))
        with self._authenticator.refusals.counting():
            tenant = self._authenticator.tenant(credentials(metadata))
            asks = asks_from_proto(message, context.time_remaining())
            requests = await self._intake.take_all(asks, tenant)
        # Token ids become text again, which takes long for many of them.
        echoes = await asyncio.to_thread(lambda: list(map(echo_of, asks, requests))) if message.echo else ()
        answer = GatewayAnswer(requests, asks[0].tools, echoes, later_fields(message))
        async with aclosing(merged([self._orchestrator.generate(request) for request in requests])) as events:
            while True:
                try:
                    number, event = await anext(events)
                except StopAsyncIteration:
                    return
                except PdserveError as error:
                    if answer.streaming:
                        failed = gateway_pb2.GenerateEvent(error=to_detail(error), usage=answer.usage)
                        await self._write(context, failed)
                    raise
                if isinstance(event, Moved):
                    continue
                for message_out in answer.messages(number, event):
                    await self._write(context, message_out)

    async def ListModels(
        self, message: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        names = self._intake.names(self._authenticator.tenant(credentials(context.invocation_metadata())))
        models = {base or name: created for name, (base, created) in names.items()}
        found = [await self._model_info(name, created, names) for name, created in models.items()]
        return gateway_pb2.ListModelsResponse(models=found)

    async def Status(self, message: gateway_pb2.StatusRequest, context: Context) -> gateway_pb2.StatusResponse:
        tenant = self._authenticator.tenant(credentials(context.invocation_metadata()))
        if not is_operator(self._settings, tenant, certificate_names(context)):
            return self._reduced_status(tenant, self._recent_to_proto(message.recent, tenant))
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
            recent=self._recent_to_proto(message.recent),
        )

    def _reduced_status(self, tenant: str, recent: Sequence[gateway_pb2.RecentRequest]) -> gateway_pb2.StatusResponse:
        """What a caller needs who is no operator: whether workers of its models are ready, and fit."""
        models = {base or name for name, (base, _) in self._intake.names(tenant).items()}
        members = tuple(member for member in self._pool.members() if member.record.model in models)
        records = [member.record for member in members]
        return gateway_pb2.StatusResponse(
            workers=[
                gateway_pb2.WorkerStatus(worker_id=r.worker_id, role=r.role, state=r.state, model=r.model)
                for r in records
            ],
            pairs=[
                gateway_pb2.Pair(prefill_worker=p.prefill_worker, decode_worker=p.decode_worker, fits=p.fits)
                for p in pairs_to_proto(self._pool, members)
            ],
            version=__version__,
            recent=recent,
            reduced=True,
        )

    def _recent_to_proto(self, count: int, only: str = "") -> list[gateway_pb2.RecentRequest]:
        """The last ones; `only`: of this tenant."""
        told, size = [], 0
        for seen in self._recent.latest(min(count, KEPT), only):
            told.append(seen_to_proto(seen))
            size += told[-1].ByteSize()
            if size > MAX_RECENT_BYTES:
                return told[:-1]
        return told

    async def _model_info(self, name: str, created: int, names: Container[str]) -> gateway_pb2.ModelInfo:
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
            adapters=[each for each in adapters_of(self._pool, name) if f"{name}:{each}" in names],
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


def seen_to_proto(seen: Seen) -> gateway_pb2.RecentRequest:
    """Without what can be long."""
    return gateway_pb2.RecentRequest(
        request_id=seen.id,
        tenant=seen.tenant,
        model=seen.model,
        adapter=seen.adapter,
        label=seen.label,
        began_s=seen.began_s,
        age_ms=seen.age_ms,
        state=seen.state,
        record=record_to_proto(replace(seen.record, candidates=(), rejected=(), notes=())),
    )


def placement_to_proto(outcomes: Outcomes) -> gateway_pb2.PlacementCounts:
    return gateway_pb2.PlacementCounts(
        disaggregate=outcomes.disaggregate,
        handed_over=outcomes.handed_over,
        computed_at_decode=outcomes.computed_at_decode,
        split=outcomes.split,
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
        prefills, decodes = (tuple(kind.first for kind in kinds(members, role)) for role in (PREFILL, DECODE))
    known: dict[tuple[object, object], tuple[bool, list[Any]]] = {}
    pairs = []
    for prefill, decode in islice(product(prefills, decodes), MAX_PAIRS):
        alike = key(prefill), key(decode)
        if alike not in known:
            cell = compare(pool.gate, prefill, decode)
            known[alike] = cell.fits, [difference_to_proto(d) for d in cell.differences]
        fits, told = known[alike]
        pairs.append(gateway_pb2.Pair(prefill_worker=prefill.id, decode_worker=decode.id, fits=fits, differences=told))
    return pairs
