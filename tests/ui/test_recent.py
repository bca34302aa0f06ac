"""The ring of last requests: bounded, and it lets go of what a request held."""

from __future__ import annotations

import gc
import weakref

from pdserve.errors import Incompatible, InvalidRequest, Unavailable
from pdserve.request import SamplingParams
from router.recent import KEPT, KEPT_REFUSALS, Recent
from router.record import Account
from router.request import Ask, Request, TextPrompt

SECRET = "a prompt that nobody else may read"


def request(name: str, tenant: str = "t", **more: object) -> Request:
    given = {
        "id": name,
        "model": "m",
        "tenant": tenant,
        "prompt_ids": (11, 12, 13),
        "sampling": SamplingParams(),
        "least_tokens": 1,
        "contract_digest": b"c" * 32,
        "received": 0.0,
        "deadline": 1e9,
    }
    return Request(**(given | more))  # type: ignore[arg-type]


def test_only_the_last_ones_are_kept_and_nothing_of_their_accounts() -> None:
    recent = Recent()
    accounts = []
    for number in range(KEPT + 30):
        account = Account(request(f"r{number}"))
        accounts.append(weakref.ref(account))
        recent.begin(account)
        assert recent.find(f"r{number}").state == "running"  # type: ignore[union-attr]
        account.end("stop")
        recent.end(account, account.record())
    del account
    gc.collect()
    assert not [one for one in accounts if one() is not None]
    assert recent.find("r29") is None and recent.find("r30") is not None
    change, changed = recent.since(0)
    assert len(changed) == KEPT and recent.since(change) == (change, [])
    assert {seen.state for seen in changed} == {"done"} and not recent.running()


def test_refusals_have_a_bound_of_their_own_and_drive_nothing_out() -> None:
    recent = Recent()
    account = Account(request("kept"))
    recent.begin(account)
    account.end("INTERNAL")
    recent.end(account, account.record())
    for _ in range(KEPT_REFUSALS + KEPT):
        recent.refused(Ask(TextPrompt(SECRET), SamplingParams()), "t", Unavailable("no worker", reason="NO_WORKER"))
    told = recent.latest(1000)
    assert len(told) == KEPT_REFUSALS + 1
    assert {seen.state for seen in told} == {"refused", "failed"}


def test_what_quotes_a_request_is_left_out() -> None:
    recent = Recent()
    bad = InvalidRequest(f"not an option: {SECRET}", reason="BAD", field="stop", remedy=SECRET)
    recent.refused(Ask(TextPrompt(SECRET), SamplingParams(), model="m\ud800"), "t", bad)
    recent.refused(Ask(TextPrompt(SECRET), SamplingParams()), "t", Incompatible("no pair fits", field="model"))
    told = recent.latest(10)
    assert SECRET not in repr(told)
    assert "no pair fits" in told[0].record.notes[0]
    assert told[1].record.notes == ("stop: BAD",) and told[1].model == "m?"


def test_a_tenant_is_told_of_its_own_only_and_a_running_one_has_no_outcome_yet() -> None:
    recent = Recent()
    for name, tenant in (("a", "acme"), ("z", "zeta")):
        recent.begin(Account(request(name, tenant)))
    assert [seen.id for seen in recent.latest(10, "zeta")] == ["z"]
    (one,) = recent.latest(10, "acme")
    assert (one.state, one.record.outcome) == ("running", "") and one.age_ms > 0
