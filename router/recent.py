"""The last requests, for those who look after this router. Never a text of theirs, nor a token.

    begin --> running --end--> ended, until KEPT others have ended
    refused before any worker was asked, until KEPT_REFUSALS others were

Bound: the requests in flight (`max_active`) and those two numbers, a few kilobytes each.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import islice

from pdserve.errors import InvalidRequest, PdserveError
from pdserve.rpc.events import GroupPair, HandoffRecord
from router.record import Account
from router.request import Ask

KEPT = 200
KEPT_REFUSALS = 50
_MAX_NOTE = 600  # characters
_MAX_WORD = 256
_MAX_DIFFERENCES = 64

RUNNING, DONE, CANCELLED, FAILED, REFUSED = "running", "done", "cancelled", "failed", "refused"


@dataclass(frozen=True)
class Seen:
    """One request, as far as it has come."""

    id: str
    tenant: str
    model: str
    adapter: str
    label: str  # the caller's own name for it
    began_s: float  # Unix seconds, by this machine's clock
    age_ms: float  # since it was received; of one that has ended, when it did
    state: str  # running | done | cancelled | failed | refused
    record: HandoffRecord


@dataclass(frozen=True)
class _Running:
    account: Account
    began_s: float

    def now(self) -> Seen:
        return _seen(self, RUNNING, replace(self.account.record(), outcome=""))


@dataclass(frozen=True)
class _Ended:
    number: int  # of this change
    seen: Seen


class Recent:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._changes = 0
        self._running: dict[str, _Running] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._refused: OrderedDict[str, _Ended] = OrderedDict()

    def begin(self, account: Account) -> None:
        """The caller must `end` it."""
        began_s = time.time() - (time.monotonic() - account.request.received)
        self._running[account.request.id] = _Running(account, began_s)

    def end(self, account: Account, record: HandoffRecord) -> None:
        """`record` is the account's last."""
        running = self._running.pop(account.request.id)
        record = replace(record, notes=tuple(note[:_MAX_NOTE] for note in record.notes))
        self._keep(self._ended, KEPT, _seen(running, state_of(record.outcome), record))

    def refused(self, ask: Ask, tenant: str, error: PdserveError) -> None:
        """No worker was asked for it."""
        # What is wrong with a request itself may quote it.
        told = f"{error.field}: {error.reason}" if isinstance(error, InvalidRequest) else str(error)
        groups = (GroupPair((), (), 0, 0, error.differences[:_MAX_DIFFERENCES]),) if error.differences else ()
        record = HandoffRecord(outcome=error.reason, notes=(told[:_MAX_NOTE],), rejected=groups)
        model, adapter, label = map(_plain, (ask.model, ask.adapter, ask.label))
        name = f"refused-{self._changes + 1}"
        seen = Seen(name, tenant, model, adapter, label, time.time(), 0.0, REFUSED, record)
        self._keep(self._refused, KEPT_REFUSALS, seen)

    def latest(self, count: int, tenant: str = "") -> list[Seen]:
        """The last ones that began, newest first; of one tenant only, or of all."""
        running = [one.now() for one in self._running.values() if tenant in ("", one.account.request.tenant)]
        ended = [one.seen for kept in (self._ended, self._refused) for one in kept.values()]
        mine = [seen for seen in (*running, *ended) if tenant in ("", seen.tenant)]
        return sorted(mine, key=lambda seen: -seen.began_s)[:count]

    def running(self) -> list[Seen]:
        """The newest KEPT of those that run: some 0.1 ms for each."""
        return [one.now() for one in islice(reversed(self._running.values()), KEPT)]

    def since(self, change: int) -> tuple[int, list[Seen]]:
        """The last change's number, and those that have ended after this change."""
        kept = (*self._ended.values(), *self._refused.values())
        return self._changes, [one.seen for one in kept if one.number > change]

    def find(self, request_id: str) -> Seen | None:
        if running := self._running.get(request_id):
            return running.now()
        ended = self._ended.get(request_id) or self._refused.get(request_id)
        return ended.seen if ended else None

    def _keep(self, kept: OrderedDict[str, _Ended], limit: int, seen: Seen) -> None:
        self._changes += 1
        kept[seen.id] = _Ended(self._changes, seen)
        if len(kept) > limit:
            kept.popitem(last=False)


def state_of(outcome: str) -> str:
    """Of a request that has ended: reasons of errors are in upper case, those of a finish are not."""
    if outcome == "CANCELLED":
        return CANCELLED
    return FAILED if outcome.isupper() else DONE


def _seen(running: _Running, state: str, record: HandoffRecord) -> Seen:
    request = running.account.request
    age_ms = record.total_ms or 1000 * (time.monotonic() - request.received)
    label = _plain(request.label)
    return Seen(
        request.id, request.tenant, request.model, request.adapter, label, running.began_s, age_ms, state, record
    )


def _plain(text: str) -> str:
    """A caller's word, short and fit for any encoding."""
    return text[:_MAX_WORD].encode("utf-8", "replace").decode()
