"""Which prefill worker may hand a cache to which decode worker, and why the others may not.

Pure: worker records in, matches and reasons out. Workers of one group have equal contracts in
everything a handoff depends on, so groups are compared and matched, never single workers: the
work grows with the number of workers, not with the number of pairs.

A decode worker that computes a prompt itself is a pair with itself (`here`): whatever asks a pair for
its prefill worker then finds the worker that prefills.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from cache_transfer.contract import (
    INFORMATIONAL,
    WorkerContract,
    arithmetic,
    both_allow_lossy,
    diff,
    numerics,
    refusals,
    remedy_for,
)
from cache_transfer.encoding import sha256
from pdserve.errors import FieldDifference, Incompatible, PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL, WorkerRecord
from router.room import Room, worker_room
from router.settings import ALWAYS, NEVER

_REMEMBERED_COMPARISONS = 1024


@dataclass(frozen=True)
class Member:
    """A worker as the router last heard of it."""

    record: WorkerRecord
    group: bytes  # equal for workers whose contracts agree in all but informational fields
    contract_digest: bytes  # over the must-equal fields; kept, because it takes a while to compute
    renewed_at: float = 0.0  # router's monotonic seconds; never later than the true renewal
    expires_at: float = float("inf")

    @property
    def id(self) -> str:
        return self.record.worker_id

    @property
    def address(self) -> str:
        return self.record.endpoints[0].address

    @cached_property
    def room(self) -> Room:
        return worker_room(self.record)


@dataclass(frozen=True)
class Choice:
    """Why a pair was given a request: from how many it was chosen, and what placement predicted. Times are seconds
    from the choice to the first token; 0: not predicted.
    """

    prefill_candidates: int = 0
    decode_candidates: int = 0
    prefill_cost: float = 0.0  # tokens to compute before the prompt is done
    decode_cost: float = 0.0  # slowness, in running sequences
    reason: str = "mode"  # mode | only | refused | cheaper | unmeasured, as in the wire schema's AttemptRecord
    handoff_s: float = 0.0
    here_s: float = 0.0
    split_s: float = 0.0
    penalty_s: float = 0.0  # what the latter was held to cost the streams there
    wait_s: float = 0.0  # for others' prompts, on the way that was chosen
    queue_s: float = 0.0  # to compute all that waits there
    measured: bool = False  # the prediction of the way that was chosen is made of rates, not of guesses


@dataclass(frozen=True)
class Pair:
    prefill: Member
    decode: Member
    conversions: tuple[FieldDifference, ...] = ()  # what the receiver will convert
    choice: Choice = Choice()
    handoff_tokens: int = 0  # that the prefill worker computes, the decode worker the rest; 0: it computes all

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Names this pair of boots: a restarted worker makes a new pair."""
        return (self.prefill.record.incarnation, self.decode.record.incarnation)

    @property
    def here(self) -> bool:
        """No handoff: the decode worker computes the prompt."""
        return self.prefill.record.incarnation == self.decode.record.incarnation

    @property
    def split(self) -> bool:
        """Both compute: the prefill worker the beginning of the prompt, the decode worker its end."""
        return self.handoff_tokens > 0

    @property
    def placement(self) -> str:
        """handoff | decode | split, as in the wire schema's AttemptRecord."""
        return "split" if self.split else "decode" if self.here else "handoff"

    @property
    def predicted_s(self) -> float:
        choice = self.choice
        return choice.split_s if self.split else choice.here_s if self.here else choice.handoff_s


@dataclass(frozen=True)
class Match:
    """Two groups that fit: each of these prefill workers may hand to each of these decode workers.

    `here`: one group of decode workers, which is both; each of them pairs with itself alone.
    """

    prefills: tuple[Member, ...]
    decodes: tuple[Member, ...]
    conversions: tuple[FieldDifference, ...] = ()  # what the receivers will convert
    here: bool = False

    @property
    def contract_digest(self) -> bytes:
        """Of every worker in it: groups that differ in a must-equal field never match."""
        return self.prefills[0].contract_digest

    @cached_property
    def members(self) -> dict[bytes, Member]:
        """By incarnation."""
        return {member.record.incarnation: member for member in (*self.prefills, *self.decodes)}

    @property
    def count(self) -> int:
        """Pairs in it."""
        return len(self.decodes) * (1 if self.here else len(self.prefills))

    def pairs(self) -> Iterator[Pair]:
        """Every pair: a product, not for the path of a request."""
        if self.here:
            return (Pair(d, d) for d in self.decodes)
        return (Pair(p, d, self.conversions) for p in self.prefills for d in self.decodes)


@dataclass(frozen=True)
class Rejection:
    """Two groups that may not be paired."""

    prefill_ids: tuple[str, ...]
    decode_ids: tuple[str, ...]
    differences: tuple[FieldDifference, ...]  # only those that refuse

    def __str__(self) -> str:
        reasons = "; ".join(str(difference) for difference in self.differences)
        return f"{', '.join(self.prefill_ids)} -> {', '.join(self.decode_ids)} refused: {reasons}"


@dataclass(frozen=True)
class Verdict:
    """What the gate lets through of one model's ready workers."""

    matches: tuple[Match, ...]
    rejections: tuple[Rejection, ...]
    handoffs: bool = True  # they are wanted; otherwise no prefill worker is missing

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(str(rejection) for rejection in self.rejections)


def group_key(contract: WorkerContract, digest: bytes) -> bytes:
    """32 bytes over every field that decides or changes a handoff; `digest` is the contract's own."""
    c = contract
    fields = (digest, c.page_size, c.page_axis_order, c.device, *numerics(c), c.allow_lossy)
    return sha256("group", fields)


def computes_like(member: Member) -> tuple[object, ...]:
    """Equal for workers whose results should be equal, to the last bit in deterministic mode."""
    contract = member.record.contract
    return contract.device, *arithmetic(contract)


class Gate:
    """Compares groups, and remembers comparisons (bounded, least recently used goes first).

    Args:
        disaggregate: as in RouterSettings: whether there are handoffs, and decode workers that compute prompts.
    """

    def __init__(self, allow_lossy: bool = False, disaggregate: str = ALWAYS) -> None:
        self._allow_lossy = allow_lossy
        self._disaggregate = disaggregate
        self._known: OrderedDict[tuple[bytes, bytes], tuple[FieldDifference, ...]] = OrderedDict()

    def judge(self, members: Iterable[Member]) -> Verdict:
        """Matches prefill groups with the decode groups that fit them. Mutates only the memory."""
        prefills: dict[bytes, list[Member]] = {}
        decodes: dict[bytes, list[Member]] = {}
        for member in members:
            side = prefills if member.record.role == PREFILL else decodes
            side.setdefault(member.group, []).append(member)
        matches: list[Match] = []
        rejections: list[Rejection] = []
        for left in prefills.values() if self._disaggregate != NEVER else ():
            for right in decodes.values():
                differences = self._compare(left[0], right[0])
                refused = refusals(differences, self._may_lose(left[0], right[0]))
                if refused:
                    rejections.append(Rejection(tuple(m.id for m in left), tuple(m.id for m in right), refused))
                else:
                    matches.append(Match(tuple(left), tuple(right), differences))
        for right in decodes.values() if self._disaggregate != ALWAYS else ():
            able = tuple(member for member in right if member.record.takes_prompts)
            if able:
                matches.append(Match(able, able, here=True))
        return Verdict(tuple(matches), tuple(rejections), self._disaggregate != NEVER)

    def differences(self, prefill: Member, decode: Member) -> tuple[FieldDifference, ...]:
        """All differences of two workers, informational ones too (those are not remembered)."""
        left, right = (replace(m.record.contract, planes=()) for m in (prefill, decode))
        informational = tuple(d for d in diff(left, right) if d.kind == INFORMATIONAL)
        return self._compare(prefill, decode) + informational

    def fits(self, prefill: Member, decode: Member) -> bool:
        return not refusals(self._compare(prefill, decode), self._may_lose(prefill, decode))

    def _may_lose(self, prefill: Member, decode: Member) -> bool:
        """Whether this router and both workers consent to a handoff with loss."""
        return self._allow_lossy and both_allow_lossy(prefill.record.contract, decode.record.contract)

    def _compare(self, prefill: Member, decode: Member) -> tuple[FieldDifference, ...]:
        key = (prefill.group, decode.group)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        found = diff(prefill.record.contract, decode.record.contract)
        self._known[key] = tuple(d for d in found if d.kind != INFORMATIONAL)
        if len(self._known) > _REMEMBERED_COMPARISONS:
            self._known.popitem(last=False)
        return self._known[key]


def narrowed(matches: Iterable[Match], keep: Callable[[Member], bool]) -> tuple[Match, ...]:
    """The matches with only the members that `keep` likes."""
    kept = [
        replace(match, prefills=tuple(filter(keep, match.prefills)), decodes=tuple(filter(keep, match.decodes)))
        for match in matches
    ]
    return tuple(match for match in kept if match.prefills and match.decodes)


def without(matches: Iterable[Match], tried: Collection[tuple[bytes, bytes]]) -> tuple[Match, ...]:
    """The matches less the pairs with these keys (`Pair.key`)."""
    if not tried:
        return tuple(matches)
    touched = {prefill for prefill, _ in tried}
    left = []
    for match in matches:
        if match.here:
            able = tuple(d for d in match.decodes if Pair(d, d).key not in tried)
            left.append(replace(match, prefills=able, decodes=able))
            continue
        untouched = tuple(p for p in match.prefills if p.record.incarnation not in touched)
        left.append(replace(match, prefills=untouched))
        for prefill in match.prefills:
            if prefill.record.incarnation in touched:
                decodes = tuple(d for d in match.decodes if Pair(prefill, d).key not in tried)
                left.append(Match((prefill,), decodes, match.conversions))
    return tuple(match for match in left if match.prefills and match.decodes)


def explain(members: Iterable[Member], verdict: Verdict, model: str) -> PdserveError:
    """The error for a model without a match; names the missing pool or the diff."""
    roles = {member.record.role for member in members}
    missing = [role for role in ((PREFILL, DECODE) if verdict.handoffs else (DECODE,)) if role not in roles]
    if not missing and not verdict.handoffs:
        return Unavailable(
            f"no decode worker of model {model!r} computes prompts itself",
            reason="NO_DECODE_WORKER",
            field="router.disaggregate",
            remedy="update the decode workers, or let prefill workers compute the prompts",
        )
    if missing:
        pools = " and no ".join(missing)
        return Unavailable(
            f"no {pools} worker is ready for model {model!r}",
            reason="NO_WORKER" if len(missing) == 2 else f"NO_{missing[0].upper()}_WORKER",
            field="model",
            remedy=f"start a {' and a '.join(missing)} worker, or wait until one is ready",
        )
    differences = tuple(dict.fromkeys(d for rejection in verdict.rejections for d in rejection.differences))
    return Incompatible(
        f"no prefill worker of model {model!r} fits a decode worker: {'; '.join(verdict.notes)}",
        field=differences[0].code if differences else "model",
        remedy=remedy_for(differences),
        differences=differences,
    )
