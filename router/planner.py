"""Which pair a request is given next, over the pool as it is now and what the request has been through.

Preferred in this order: room for all the tokens asked for, then workers that have not failed
this request; among those, `placement` decides. Linear in the number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from pdserve.errors import PdserveError, Unavailable
from pdserve.registry.records import DECODE
from router.gate import Match, Member, Pair, explain, narrowed, without
from router.placement import Demand, cache_tokens, member_room, place
from router.pool import Pool
from router.prefixes import PrefixRecord, chain
from router.record import Account
from router.request import Request


class Planner:
    """Belongs to one event loop. `rng` makes the random choices."""

    def __init__(self, pool: Pool, prefix_blocks: int, max_attempts: int, rng: random.Random) -> None:
        self._pool = pool
        self._prefixes = PrefixRecord(prefix_blocks)
        self._max_attempts = max_attempts
        self._rng = rng

    def choose(self, account: Account) -> Pair:
        """An untried pair. Raises the last attempt's error when none is left, or why there never was one."""
        pair = self.find(account)
        if pair is None:
            raise account.last_error or self._nothing_for(account.request)
        return pair

    def find(self, account: Account, decode: Member | None = None) -> Pair | None:
        """An untried pair, or None.

        Args:
            decode: only pairs with this worker, which has admitted the request already.
        """
        if account.attempts >= self._max_attempts:
            return None
        request = account.request
        matches = without(self._matches(request), account.tried)
        sizes = [request.max_tokens, request.least_tokens]
        if decode is not None:
            only = decode.record.incarnation
            matches = narrowed(matches, lambda m: m.record.role != DECODE or m.record.incarnation == only)
            sizes = [account.max_tokens]
        for max_tokens in dict.fromkeys(sizes):
            roomy = with_room(matches, len(request.prompt_ids), max_tokens)
            if roomy:
                return self._place(roomy, account, max_tokens, decode)
        return None

    def remember(self, account: Account) -> None:
        """Both workers of the account's last attempt now hold its prompt."""
        prefixes = links(account.request)
        for member in self._pool.members():
            if member.id in (account.prefill_worker, account.decode_worker):
                self._prefixes.record(prefixes, member.record.incarnation)

    def _matches(self, request: Request) -> Iterable[Match]:
        matches = self._pool.verdict(request.model).matches
        return [match for match in matches if match.contract_digest == request.contract_digest]

    def _place(self, matches: tuple[Match, ...], account: Account, max_tokens: int, admitted_by: Member | None) -> Pair:
        def unblamed(member: Member) -> bool:
            incarnation = member.record.incarnation
            admitted = admitted_by is not None and admitted_by.record.incarnation == incarnation
            return admitted or incarnation not in account.blamed

        request = account.request
        prompt_tokens = len(request.prompt_ids)
        held = self._prefixes.held_tokens(links(request))
        demand = Demand(prompt_tokens, cache_tokens(prompt_tokens, max_tokens), held)
        return place(narrowed(matches, unblamed) or matches, demand, self._pool.load, self._rng)

    def _nothing_for(self, request: Request) -> PdserveError:
        """Why not even a first attempt can be made."""
        verdict = self._pool.verdict(request.model)
        if not verdict.matches:
            return explain(self._pool.ready(request.model), verdict, request.model)
        return Unavailable(
            "the workers that could serve this request have left since it was taken",
            reason="WORKERS_CHANGED",
            field="model",
            remedy="send the request again",
        )


def with_room(matches: Iterable[Match], prompt_tokens: int, max_tokens: int) -> tuple[Match, ...]:
    """The members that can take such a request."""
    total = prompt_tokens + max_tokens
    return narrowed(matches, lambda member: member_room(member).takes(prompt_tokens, total))


def links(request: Request) -> tuple[bytes, ...]:
    return chain(request.prompt_ids, request.contract_digest, None, request.tenant)
