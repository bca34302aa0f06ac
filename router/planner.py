"""Which pair a request is given next, over the pool as it is now and what the request has been through.

Preferred in this order: for an answer that goes on, workers that compute as those it began on;
room for all the tokens asked for; workers that have not failed this request. Among those,
`placement` decides. In a large pool a request looks at a few workers only, and at all when none of them will do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from pdserve.errors import PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from router.adapters import UNKNOWN_ADAPTER, adapter_gone, with_adapter
from router.failures import for_client
from router.gate import Match, Member, Pair, computes_like, explain, narrowed, without
from router.placement import Demand, cache_tokens, place
from router.pool import Pool
from router.prefixes import BLOCK_TOKENS, PrefixRecord, chain
from router.record import Account
from router.request import Request

ENOUGH = 32  # workers of a group that a request is placed among; a pool must be larger for it to matter


class Planner:
    """Belongs to one event loop. `rng` makes the random choices."""

    def __init__(self, pool: Pool, prefix_blocks: int, max_attempts: int, rng: random.Random) -> None:
        self._pool = pool
        self.prefixes = PrefixRecord(prefix_blocks)
        self._max_attempts = max_attempts
        self._rng = rng

    def choose(self, account: Account) -> Pair:
        """An untried pair, of another contract if need be and as long as no token was given.

        Raises the last attempt's error when none is left, or why there never was one.
        """
        pair = self.find(account) or self._find_elsewhere(account)
        if pair is None:
            raise self._no_pair(account)
        return pair

    def find(self, account: Account, decode: Member | None = None) -> Pair | None:
        """An untried pair, or None.

        Args:
            decode: only pairs with this worker, which has admitted the request already.
        """
        if account.attempts >= self._max_attempts:
            return None
        account.verdict = self._pool.verdict(account.request.model)
        matches = self._matches(account.request)
        if decode is None:
            few = self._few(matches, account.request)
            if few is not matches and (pair := self._best_of(few, account, None, first_only=True)):
                return pair
        return self._best_of(matches, account, decode)

    def _best_of(
        self, matches: tuple[Match, ...], account: Account, decode: Member | None, first_only: bool = False
    ) -> Pair | None:
        """`first_only`: None where only something less than preferred is there."""
        request = account.request
        matches = without(matches, account.tried)
        sizes = [account.limit, account.least_tokens]
        if decode is not None:
            only = decode.record.incarnation
            matches = narrowed(matches, lambda m: m.record.role != DECODE or m.record.incarnation == only)
            sizes = [account.max_tokens]
        matches = able(with_adapter(matches, request.adapter_digest), request.needs)
        options = [alike(matches, account.began_on), matches] if account.began_on else [matches]
        wishes = [(candidates, size) for candidates in options for size in dict.fromkeys(sizes)]
        for candidates, max_tokens in wishes[:1] if first_only else wishes:
            roomy = with_room(candidates, account.prefill_tokens, len(request.prompt_ids) + max_tokens)
            unblamed = self._unblamed(roomy, account, decode)
            if unblamed or (roomy and not first_only):
                return self._place(unblamed or roomy, account, max_tokens)
        return None

    def _few(self, matches: tuple[Match, ...], request: Request) -> tuple[Match, ...]:
        """Of each large group some at random, and those who probably hold some of the prompt: placement draws two,
        and looking at every worker for it would make each request slower with the size of the pool.
        """
        if all(len(side) <= ENOUGH for match in matches for side in (match.prefills, match.decodes)):
            return matches
        held = self.prefixes.held_tokens(links(request))

        def few(side: tuple[Member, ...], match: Match) -> tuple[Member, ...]:
            drawn = self._rng.sample(side, min(ENOUGH, len(side)))
            role = side[0].record.role
            holders = (match.members[who] for who in held if who in match.members)
            return tuple({m.record.incarnation: m for m in (*drawn, *holders) if m.record.role == role}.values())

        smaller = []
        for match in matches:
            decodes = few(match.decodes, match)
            smaller.append(
                replace(match, prefills=decodes if match.here else few(match.prefills, match), decodes=decodes)
            )
        return tuple(smaller)

    def _find_elsewhere(self, account: Account) -> Pair | None:
        """A pair of another contract by which the prompt's ids mean the same; the request then moves to it."""
        request = account.request
        for match in () if account.started else self._pool.verdict(request.model).matches:
            contract = match.prefills[0].record.contract
            same = (contract.tokenizer_digest, contract.vocab_size) == (request.tokenizer_digest, request.vocab_size)
            if not same or match.contract_digest == request.contract_digest:
                continue
            account.request = replace(request, contract_digest=match.contract_digest)
            if pair := self.find(account):
                account.note(
                    f"no pair of contract {request.contract_digest.hex()[:16]} is left: "
                    f"moved to contract {match.contract_digest.hex()[:16]}"
                )
                return pair
        account.request = request
        return None

    def remember(self, account: Account) -> None:
        """Both workers of the account's last attempt now hold its prompt, or the one its beginning."""
        pair, blocks = account.trials[-1].pair, links(account.request)
        prefill, decode = pair.prefill.record.incarnation, pair.decode.record.incarnation
        if not pair.split:
            self.prefixes.record(blocks, prefill, decode)
            return
        self.prefixes.record(blocks[: pair.handoff_tokens // BLOCK_TOKENS], prefill)
        self.prefixes.record(blocks, decode)

    def _matches(self, request: Request) -> tuple[Match, ...]:
        matches = self._pool.verdict(request.model).matches
        return tuple(match for match in matches if match.contract_digest == request.contract_digest)

    def _unblamed(self, matches: tuple[Match, ...], account: Account, admitted_by: Member | None) -> tuple[Match, ...]:
        """Without those that have failed this request; who has admitted it stays."""
        if not account.blamed:
            return matches
        stays = admitted_by.record.incarnation if admitted_by is not None else b""

        def unblamed(member: Member) -> bool:
            return member.record.incarnation == stays or member.record.incarnation not in account.blamed

        return narrowed(matches, unblamed)

    def _place(self, matches: tuple[Match, ...], account: Account, max_tokens: int) -> Pair:
        request = account.request
        prompt_tokens = account.prefill_tokens
        held = self.prefixes.held_tokens(links(request))
        size = cache_tokens(prompt_tokens, max_tokens - account.prefilled_output)
        demand = Demand(prompt_tokens, size, held, failed=any(not trial.pair.here for trial in account.trials))
        return place(matches, demand, self._pool.load, self._rng, self._pool.prompts)

    def _no_pair(self, account: Account) -> PdserveError:
        error, request = account.last_error, account.request
        if request.adapter and not with_adapter(self._pool.verdict(request.model).matches, request.adapter_digest):
            return adapter_gone(request.adapter, request.adapter_digest)
        if error is not None and error.reason == UNKNOWN_ADAPTER:  # its worker said so before its record did
            return adapter_gone(request.adapter, request.adapter_digest)
        return for_client(error) if error is not None else self._nothing_for(request)

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


def alike(matches: tuple[Match, ...], pair: Pair) -> tuple[Match, ...]:
    """The members that compute in the same way as this pair."""
    prefill, decode = computes_like(pair.prefill), computes_like(pair.decode)
    if prefill != decode:  # what one worker computes alone is not alike
        matches = tuple(match for match in matches if not match.here)
    ways = {PREFILL: prefill, DECODE: decode}
    return narrowed(matches, lambda member: computes_like(member) == ways[member.record.role])


def able(matches: Iterable[Match], needs: frozenset[str]) -> tuple[Match, ...]:
    """The decode workers that follow all that is asked: one of an older version would answer something else."""
    return narrowed(matches, lambda member: member.record.role != DECODE or needs <= member.record.capabilities)


def with_room(matches: Iterable[Match], prefill_tokens: int, total: int) -> tuple[Match, ...]:
    """The members that can take a request with so many tokens to prefill, and so many in the end."""
    return narrowed(matches, lambda member: member.room.takes(prefill_tokens, total))


def links(request: Request) -> tuple[bytes, ...]:
    return chain(request.prompt_ids, request.contract_digest, request.adapter_digest, request.tenant)
