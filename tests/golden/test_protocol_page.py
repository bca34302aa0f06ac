"""docs/protocol.md against the code: its tables of reasons, fields, limits and defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cache_transfer import contract, messages, wire
from cache_transfer.contract import KV_CASTS, HandoffIdentity, _flatten
from cache_transfer.fields import MAX_TEXT
from cache_transfer.receiver import ReceiverSettings
from decode_worker.settings import DecodeSettings
from pdserve import errors
from pdserve.conformance.reasons import PUSH_REASONS
from pdserve.errors import PdserveError
from pdserve.registry.records import DRAINING, STALLED, STARTING
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import ERROR_KEY, MAX_TRAILER_BYTES, grpc_code
from pdserve.v1 import decode_pb2, prefill_pb2, transfer_pb2, worker_pb2
from prefill_worker.settings import PrefillSettings
from tests.golden.generate import worked_example
from tests.golden.page import PAGE, ROOT, code_of, table, tables
from tests.golden.vectors import make_contract

# Reasons.


def raised(paths: Sequence[Path]) -> dict[str, set[tuple[type[PdserveError], bool]]]:
    """reason -> (class, retryable) of every error that these files make with a reason of their own."""
    found: dict[str, set[tuple[type[PdserveError], bool]]] = {}
    for path in paths:
        tree = ast.parse(path.read_text())
        names = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            kind = getattr(errors, node.func.id, None)
            values = {k.arg: names.get(k.value.id) if isinstance(k.value, ast.Name) else k.value for k in node.keywords}
            given = {name: getattr(value, "value", None) for name, value in values.items()}
            reason = given.get("reason")
            if isinstance(kind, type) and issubclass(kind, PdserveError) and isinstance(reason, str):
                retry = given.get("retryable", kind.default_retryable)
                found.setdefault(reason, set()).add((kind, bool(retry)))
    return found


def sources(package: str, *names: str) -> list[Path]:
    return [ROOT / package / f"{name}.py" for name in names] or sorted((ROOT / package).glob("*.py"))


def documented() -> dict[str, set[tuple[str, bool]]]:
    """reason -> (status, retryable) in any of the page's tables."""
    found: dict[str, set[tuple[str, bool]]] = {}
    for reason, status, retry, _ in tables("reason | status | retry | what is wrong"):
        found.setdefault(code_of(reason), set()).add((status, {"yes": True, "no": False}[retry]))
    return found


def test_the_reasons_of_a_push_are_those_that_conformance_expects() -> None:
    rows = PAGE.split("Reasons of `Transfer/Push`:")[1].split("\n\n")[1].splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    said = {code_of(reason): (status, retry == "yes") for reason, status, retry, _ in cells}
    assert said == {reason: (status.name, retry) for reason, (status, retry) in PUSH_REASONS.items()}


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("decode_worker", ()),
        ("prefill_worker", ()),
        ("cache_transfer", ()),
        ("pdserve", ("request",)),
    ],
)
def test_every_reason_that_a_worker_gives_is_on_the_page(package: str, names: tuple[str, ...]) -> None:
    said, made = documented(), raised(sources(package, *names))
    assert made
    for reason, kinds in made.items():
        if reason in ("NO_PAGES_GRANTED",):  # a fault inside the receiver, never sent
            continue
        for kind, retry in kinds:
            assert (grpc_code(kind("")).name, retry) in said.get(reason, set()), f"{reason} of {package}"


def test_no_reason_on_the_page_is_made_up() -> None:
    """What only helpers raise is in the vectors, which give every reason of a push."""
    paths = [path for package in ("decode_worker", "prefill_worker", "cache_transfer") for path in sources(package)]
    made = raised([*paths, *sources("pdserve", "request")]).keys() | PUSH_REASONS.keys()
    states = {state.upper() for state in (STARTING, STALLED, DRAINING)}
    assert documented().keys() <= made | states


def test_claims_are_checked_in_the_order_of_the_page() -> None:
    """Each fault with every later one planted too: the earlier must win."""
    import dataclasses

    from cache_transfer import digests
    from cache_transfer.opening import make_opening
    from cache_transfer.tickets import TicketBook

    vector = worked_example()
    own, expected = vector.contract, vector.identity
    now = [0.0]
    book = TicketBook(b"i" * 16, 60.0, (), lambda: now[0])
    ticket = book.issue("r", expected, 0, False)
    opening = make_opening(ticket, expected, own, logits_only=False)
    book.claim(opening, own)
    second = book.reissue(ticket.handoff_id)
    wrong = dataclasses.replace(expected, tenant="other")
    other = dataclasses.replace(own, vocab_size=9)
    worst = dataclasses.replace(
        make_opening(second, wrong, other, logits_only=True),
        attempt=1, incarnation=b"x" * 16, proof=bytes(32), integrity="none", kv_dtype="fp16",
    )  # fmt: skip
    order = [re.findall(r"`([A-Z_]{4,})`", reason)[0] for _, reason in table("check | error, reason")][1:]
    repairs: list[dict[str, Any]] = [
        {"incarnation": b"i" * 16, "handoff_id": b"u" * 16},
        {"handoff_id": ticket.handoff_id},
        {"attempt": 2},
        {"claimed": False},
        {"now": 0.0},
        {"proof": digests.proof(second.secret, wrong)},
        {"integrity": messages.INTEGRITY},
        {"contract": own},
        {},
        {"identity": expected, "proof": digests.proof(second.secret, expected)},
        {"kv_dtype": own.kv_dtype},
        {"logits_only": False},
    ]
    book._entries[ticket.handoff_id].claimed = True
    now[0] = 60.0
    for reason, repair in zip(order, repairs, strict=True):
        if repair:
            with pytest.raises(PdserveError) as caught:
                book.claim(worst, own)
            assert caught.value.reason == reason
        if "claimed" in repair:
            book._entries[ticket.handoff_id].claimed = False
        now[0] = repair.get("now", now[0])
        changes = {name: value for name, value in repair.items() if name not in ("claimed", "now")}
        worst = dataclasses.replace(worst, **changes)
    book.claim(worst, own)


# Fields, limits, defaults.


def test_the_contract_table_has_every_code_with_its_class() -> None:
    own = make_contract(layers=1, info={"name": "x"}, layer_positions=(contract.PositionScheme("none"),))
    rows = {re.sub(r"\.[kv]\.", ".<plane>.", name): kind for name, _, kind in _flatten(own)}
    rows = {name.replace("S[0]", "S[i]").replace("INFO.name", "INFO.<name>"): kind for name, kind in rows.items()}
    said = {
        code_of(code): kind.replace(" ", "_") for code, _, kind in table("code | field of `WorkerContract` | class")
    }
    assert list(said.items()) == list(rows.items())


def test_the_tables_of_ticket_and_identity_have_every_field() -> None:
    names = [name for cells in tables("field | meaning") for name in re.findall(r"`(\w+)`", cells[0])]
    assert names[-6:] == [field.name for field in fields(HandoffIdentity)]
    assert names[:-6] == [field.name for field in fields(contract.Ticket)]


def test_the_casts_are_those_of_the_code() -> None:
    assert {(code_of(sender), code_of(receiver)) for sender, receiver in table("sender | receiver")} == KV_CASTS


def test_the_limits_are_those_of_the_code() -> None:
    assert [int(limit) for _, limit in table("of | at most")] == [
        wire.MAX_LAYERS,
        wire.MAX_PLANES,
        wire.MAX_PLANES_IN_ALL,
        wire.MAX_HEADS,
        wire.MAX_HEAD_DIM,
        wire.MAX_ENTRIES,
        MAX_TEXT,
        wire.MAX_INFO_TEXT,
    ]


def test_the_times_are_the_defaults() -> None:
    settings, rpc = DecodeSettings(), RpcSettings()
    for name, seconds, _ in table("setting | seconds | bounds"):
        assert getattr(settings, code_of(name)) == float(seconds), name
    receiver = ReceiverSettings()
    assert receiver.open_timeout_s == rpc.call_timeout_s == 10.0 and "is due within 10 s" in PAGE
    assert settings.max_attempts == 16 and "at most 16 attempts" in PAGE
    assert PrefillSettings().lease_s == 60.0 and "to a prompt for 60 s" in PAGE
    assert (rpc.keepalive_s, rpc.keepalive_timeout_s, rpc.min_ping_interval_s) == (20.0, 10.0, 1.0)
    assert "every 20 s and give it up 10 s after" in PAGE
    assert rpc.max_message_bytes == (4 << 20) + (64 << 10) and rpc.max_metadata_bytes == 16 << 10
    assert f"`{ERROR_KEY}`" in PAGE and f"at most {MAX_TRAILER_BYTES} bytes" in PAGE


def test_the_version_is_the_last_of_the_history() -> None:
    versions = [int(version) for version, _ in table("version | what changed")]
    assert versions == list(range(1, contract.VERSION + 1))
    assert f"`version` of the contract is {contract.VERSION}." in PAGE


def test_every_call_in_the_first_table_exists() -> None:
    services = {
        service.name: {method.name for method in service.methods}
        for module in (decode_pb2, prefill_pb2, transfer_pb2, worker_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    for call, *_ in table("call | caller | answers | what it is for"):
        service, method = code_of(call).split("/")
        assert method in services[service], call


def test_links_and_sections_exist() -> None:
    sections = {int(number) for number in re.findall(r"^## (\d+)\.", PAGE, re.MULTILINE)}
    assert sections == set(range(1, len(sections) + 1))
    assert {int(number) for number in re.findall(r"[Ss]ection (\d+)", PAGE)} <= sections
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
