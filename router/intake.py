"""From what a caller asked to a checked request: every check that can be made before a worker is called."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import Internal, InvalidRequest, PdserveError, Unavailable
from pdserve.registry.records import CHOICES
from pdserve.request import SamplingParams, check_choices, check_token_ids
from pdserve.telemetry.context import current
from pdserve.telemetry.traces import OFF, Traces
from pdserve.tokenizer import Tokenizer
from router.adapters import named, only_with, served_names, split_name, version_of
from router.door import new_id
from router.gate import Match, Member, Verdict, explain
from router.placement import check_prompt_length, widest
from router.planner import able
from router.pool import Pool
from router.quotas import Quotas
from router.recent import Recent
from router.refused import log_refused, trace_refused
from router.request import Ask, Request, needs, router_full
from router.room import Room
from router.settings import RouterSettings
from router.tokens import BundleCache, encode, holders, unknown_model
from router.tracing import operation


@dataclass(frozen=True)
class _Reading:
    """A request as the workers of one contract understand it."""

    contract_digest: bytes
    tokenizer_digest: bytes
    vocab_size: int
    tokenizer: Tokenizer | None
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    least_tokens: int


class Intake:
    def __init__(
        self,
        pool: Pool,
        bundles: BundleCache,
        settings: RouterSettings,
        quotas: Quotas | None = None,
        recent: Recent | None = None,
        traces: Traces = OFF,
    ) -> None:
        self._traces = traces
        self._recent = recent or Recent()
        self._quotas = quotas or Quotas(settings.tenants, settings.max_active)
        self._pool = pool
        self._bundles = bundles
        self._settings = settings
        self._taking = 0  # requests that are being checked and tokenized now

    async def take(self, ask: Ask, tenant: str = "") -> Request:
        """Checks, chooses the contract, tokenizes once, fixes seed and output limit.

        Args:
            tenant: what the caller's key stands for; empty only where the router has no tenants.

        Raises:
            NotFound: unknown model or adapter. PermissionDenied: one that this tenant may not use.
            InvalidRequest: an option or token id out of range, an empty or too long prompt.
            Unavailable, Incompatible: no pair of workers can serve the model now.
            Exhausted: as many requests as may be active are being checked already.
        """
        if self._taking >= self._settings.max_active:
            raise router_full(self._taking)
        self._taking += 1
        received = time.monotonic()
        try:
            return await self._take(ask, self._tenant(tenant), received)
        except PdserveError as error:
            log_refused(ask, error)
            trace_refused(self._traces, ask, tenant or self._settings.tenant, received, error)
            self._recent.refused(ask, tenant or self._settings.tenant, error)
            raise
        finally:
            self._taking -= 1

    async def take_all(self, asks: Sequence[Ask], tenant: str = "") -> tuple[Request, ...]:
        """`take` for each, all of them by one version of an adapter. The first that is refused refuses them all, and so
        does a limit that would stop some of them: Exhausted.
        """
        requests: list[Request] = []
        name, label = current().request_id or new_id(), current().label
        for number, ask in enumerate(asks):
            own = name if len(asks) == 1 else f"{name}-{number}"
            version = requests[0].adapter_digest if requests else None
            given = replace(ask, version=version, id=own, label=ask.label or label)
            try:
                requests.append(await self.take(given, tenant))
            except InvalidRequest as error:
                if len(asks) > 1 and error.field == "prompt":
                    error.field = f"prompt[{number}]"  # which of them
                raise
        if len(requests) > 1:
            self._quotas.check_together(requests)
        return tuple(requests)

    def _tenant(self, known: str) -> str:
        if self._settings.tenants and not known:
            raise Internal("a request without a tenant came past the doors", reason="NO_TENANT", field="tenant")
        return known or self._settings.tenant

    async def _take(self, ask: Ask, tenant: str, received: float) -> Request:
        ask.sampling.check()
        check_choices(ask.n)
        asked = named(self._pool, ask.model, ask.adapter)
        model = self.model(asked.model)
        self._quotas.check_model(tenant, model, asked.adapter)
        ready = self._pool.ready(model)
        verdict = self._pool.verdict(model)
        digest = None
        if asked.adapter:
            digest = ask.version or version_of(ready, verdict.matches, model, asked.adapter)
            verdict = only_with(verdict, asked.adapter, digest)
        reading = await self._read(ask, ready, verdict, model)
        timeout_s = min(self._settings.request_timeout_s, ask.timeout_s or float("inf"))
        return Request(
            id=ask.id or new_id(),
            model=model,
            tenant=tenant,
            prompt_ids=reading.prompt_ids,
            sampling=reading.sampling,
            least_tokens=reading.least_tokens,
            contract_digest=reading.contract_digest,
            received=received,
            deadline=received + timeout_s,
            label=ask.label,
            want_record=ask.want_record,
            notes=(*verdict.notes, *_cut(ask.sampling, reading.sampling)),
            tokenizer_digest=reading.tokenizer_digest,
            vocab_size=reading.vocab_size,
            tokenizer=reading.tokenizer,
            n=ask.n,
            operation=operation(ask),
            adapter=asked.adapter,
            adapter_digest=digest,
        )

    async def _read(self, ask: Ask, ready: Sequence[Member], verdict: Verdict, model: str) -> _Reading:
        """By the contract that most pairs share, or else by another: one that fits is enough."""
        failure: PdserveError | None = None
        for matches in by_contract(verdict):
            try:
                return await self._read_by(ask, ready, matches)
            except (InvalidRequest, Unavailable) as error:
                failure = failure or error
        raise failure or explain(ready, verdict, model)

    async def _read_by(self, ask: Ask, ready: Sequence[Member], matches: tuple[Match, ...]) -> _Reading:
        contract = matches[0].prefills[0].record.contract
        tokenizer = await self.tokenizer(ready, contract.tokenizer_digest)
        limit = widest(matches)
        ids = await encode(ask.prompt, tokenizer, limit)
        check_prompt_length(len(ids), limit)
        check_token_ids(ids, contract.vocab_size)
        asked = with_defaults(ask, tokenizer)
        asked = asked if ask.tools is None else ask.tools.adapt(tokenizer, asked)
        asked.check(contract.vocab_size)
        check_able(matches, needs(asked, ask.n))
        sampling, least = complete(asked, len(ids), limit)
        return _Reading(
            contract_digest=matches[0].contract_digest,
            tokenizer_digest=contract.tokenizer_digest,
            vocab_size=contract.vocab_size,
            tokenizer=tokenizer,
            prompt_ids=ids,
            sampling=sampling,
            least_tokens=least,
        )

    def names(self, tenant: str) -> dict[str, tuple[str, int]]:
        """`served_names`, those that this tenant may use."""
        served = served_names(self._pool)
        return {name: it for name, it in served.items() if self._quotas.may_use(tenant, *split_name(name, it[0]))}

    async def text_of(self, name: str, tenant: str) -> tuple[Tokenizer, Room]:
        """The tokenizer that requests for this model are read with, and the room they have; counts as a look.

        Raises NotFound, PermissionDenied, Exhausted, Unavailable or Incompatible as `take` does, and InvalidRequest for
        a model without tokenizer.
        """
        asked = named(self._pool, name, "")
        model = self.model(asked.model)
        self._quotas.check_model(tenant, model, asked.adapter)
        self._quotas.look(tenant)
        ready, verdict = self._pool.ready(model), self._pool.verdict(model)
        matches = next(by_contract(verdict), ())
        if not matches:
            raise explain(ready, verdict, model)
        tokenizer = await self.tokenizer(ready, matches[0].prefills[0].record.contract.tokenizer_digest)
        if tokenizer is None:
            raise InvalidRequest(
                "this model has no tokenizer", reason="NO_TOKENIZER", field="model", remedy="send token ids"
            )
        return tokenizer, widest(matches)

    async def tokenizer(self, members: Sequence[Member], digest: bytes) -> Tokenizer | None:
        """None for models without one (an empty digest)."""
        return await self._bundles.get(digest, holders(members, digest)) if digest else None

    def model(self, name: str) -> str:
        """The served model of that name; empty: the only one. Raises NotFound, InvalidRequest or Unavailable."""
        served = list(self._pool.models())
        if not served:
            raise Unavailable(
                "no worker has registered with this router",
                reason="NO_WORKER",
                field="model",
                remedy="start a prefill and a decode worker, or wait until they are ready",
            )
        if not name and len(served) == 1:
            return served[0]
        if not name:
            raise InvalidRequest(
                "several models are served",
                reason="MODEL_REQUIRED",
                field="model",
                remedy=f"name one of: {', '.join(served)}",
            )
        if name not in served:
            raise unknown_model(name, served)
        return name


def with_defaults(ask: Ask, tokenizer: Tokenizer | None) -> SamplingParams:
    """The sampling, with the model's own defaults where the caller left it to them."""
    return ask.sampling if tokenizer is None else tokenizer.bundle.with_defaults(ask.sampling, ask.unset)


def check_able(matches: Sequence[Match], needed: frozenset[str]) -> None:
    """Raises Unavailable naming the option that no decode worker follows: older ones would ignore it."""
    if able(matches, needed):
        return
    missing = next((name for name in sorted(needed) if not able(matches, frozenset({name}))), min(needed))
    raise Unavailable(
        f"no decode worker of this model follows {missing}: they are of an older version",
        reason="NOT_CAPABLE",
        field={CHOICES: "n"}.get(missing, missing),
        remedy="update the decode workers, or leave it out",
    )


def _cut(asked: SamplingParams, given: SamplingParams) -> tuple[str, ...]:
    """An answer that ends before the length its caller named should not look as if that length were reached."""
    if asked.max_tokens == given.max_tokens or asked.max_tokens is None:
        return ()
    return (f"max_tokens cut from {asked.max_tokens} to {given.max_tokens}, the most that any pair has room for",)


def by_contract(verdict: Verdict) -> Iterator[tuple[Match, ...]]:
    """The matches of each contract, that which most pairs share first: a request keeps to one model and tokenizer."""
    votes: Counter[bytes] = Counter()
    for match in verdict.matches:
        votes[match.contract_digest] += match.count
    for winner in sorted(votes, key=lambda digest: (-votes[digest], digest)):
        yield tuple(match for match in verdict.matches if match.contract_digest == winner)


def complete(sampling: SamplingParams, prompt_tokens: int, limit: Room) -> tuple[SamplingParams, int]:
    """Options with a seed and a max_tokens, and the fewest output tokens a pair must have room for.

    A max_tokens that the caller named and that some pair has room for is kept whatever happens. One
    that it did not name, or that is more than any pair has room for, is cut to what the pair leaves.

    Args:
        limit: the widest pair's.

    Raises InvalidRequest for a min_tokens beyond the room.
    """
    left = limit.total - prompt_tokens
    max_tokens = min(sampling.max_tokens or left, left)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"{sampling.min_tokens} is not allowed",
            reason="INVALID_MIN_TOKENS",
            field="min_tokens",
            remedy=f"use at most {max_tokens}, which is what the context leaves after {prompt_tokens} prompt tokens",
        )
    firm = sampling.max_tokens is not None and sampling.max_tokens <= left
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed, max_tokens=max_tokens), max_tokens if firm else max(1, sampling.min_tokens)
