"""Trace context as W3C Trace Context and its test suite have it, and what of a call's metadata goes on."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.telemetry.context import (
    MAX_STATE,
    Scope,
    TraceContext,
    current,
    enter,
    is_request_id,
    outgoing,
    parse,
    received,
    update,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
KEY_256, TENANT_KEY = "a" * 256, f"{'t' * 241}@{'v' * 14}"


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        (PARENT, True),  # the specification's own examples
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" \t{PARENT}\t ", True),
        (f"00-{TRACE}-{SPAN}-ff", True),  # flags of the future
        (f"cc-{TRACE}-{SPAN}-01", True),  # versions of the future
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f"fe-{TRACE}-{SPAN}-00", False),
    ],
)
def test_a_good_traceparent_names_trace_and_span(given: str, sampled: bool) -> None:
    found = parse([given], [])
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled) == (TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01.",
        f"cc-{TRACE}-{SPAN}-01.what-the-future-will-not-be-like",
        f"0-{TRACE}-{SPAN}-01",
        f"000-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN[:-1]}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-001",
        f"00-{TRACE}-{SPAN}-.0",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-.{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00_{TRACE}_{SPAN}_01",
        f"{PARENT}\n",
        f"{PARENT}, {PARENT}",
        "00-" + "٤" * 32 + f"-{SPAN}-01",  # digits, but not these
    ],
)
def test_a_malformed_traceparent_is_as_good_as_none(given: str) -> None:
    assert parse([given], ["foo=1"]) is None


def test_no_traceparent_and_two_of_them_are_as_good_as_none() -> None:
    assert parse([], ["foo=1"]) is None
    assert parse([PARENT, PARENT], []) is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["foo=1"], "foo=1"),
        (["foo=1,bar=2"], "foo=1,bar=2"),
        (["foo=1", "bar=2"], "foo=1,bar=2"),
        (["foo=1 \t , \t bar=2, \t baz=3"], "foo=1,bar=2,baz=3"),
        (["foo=1,", ",bar=2"], "foo=1,bar=2"),
        (["", " "], ""),
        (["congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7"], "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"),
        (["fw529a3039@dt=FfQAAA,x/_-*=\t y"], ""),  # a tab in a value
        ([f"{KEY_256}=1"], f"{KEY_256}=1"),
        ([f"{TENANT_KEY}=1"], f"{TENANT_KEY}=1"),
        ([f"{KEY_256}a=1"], ""),
        ([f"t{TENANT_KEY}=1"], ""),
        ([f"{TENANT_KEY}v=1"], ""),
        (["foo@=1,bar=2"], ""),
        (["@foo=1,bar=2"], ""),
        (["foo@@bar=1,bar=2"], ""),
        (["foo@bar@baz=1,bar=2"], ""),
        (["foo =1"], ""),
        (["FOO=1"], ""),
        (["foo.bar=1"], ""),
        (["foo="], ""),
        (["foo"], ""),
        (["foo=1=2"], ""),
        (["foo=1,foo=2"], ""),
        (["foo=\u00e9"], ""),
        ([",".join(f"k{n}=1" for n in range(32))], ",".join(f"k{n}=1" for n in range(32))),
        ([",".join(f"k{n}=1" for n in range(33))], ""),
    ],
)
def test_tracestate_is_passed_on_whole_or_not_at_all(given: list[str], kept: str) -> None:
    found = parse([PARENT], given)
    assert found is not None and found.state == kept


def test_a_long_tracestate_is_cut_between_members() -> None:
    members = [f"k{n}={'v' * 100}" for n in range(9)]
    found = parse([PARENT], [",".join(members)])
    assert found is not None and found.state == ",".join(members[:4])
    assert len(found.state) <= MAX_STATE


def test_what_is_written_can_be_read() -> None:
    for sampled in (True, False):
        for random in (True, False):
            context = TraceContext(TRACE, SPAN, sampled, random, "foo=1")
            assert parse([context.traceparent], [context.state]) == context
    assert TraceContext(TRACE, SPAN, True).traceparent == PARENT


async def test_metadata_goes_on_as_it_was_understood_and_nothing_else_does() -> None:
    given = (
        ("x-request-id", "req-1"),
        ("traceparent", f"cc-{TRACE}-{SPAN}-ff-more"),
        ("tracestate", "foo=1,  bar=2"),
        ("baggage", "secret=1"),
        ("authorization", "Bearer key"),
        ("x-tenant", "other"),
        ("traceparent-bin", b"\x00"),
    )
    enter(received(given, "prefill", "p0"))
    assert (current().part, current().worker) == ("prefill", "p0")
    assert outgoing() == (
        ("x-request-id", "req-1"),
        ("traceparent", f"00-{TRACE}-{SPAN}-03"),
        ("tracestate", "foo=1,bar=2"),
    )


@pytest.mark.parametrize("bad", ["", " ", "a b", "a\nb", "\u00e9", "a" * 129, "\x7f"])
def test_a_request_id_is_short_printable_ascii(bad: str) -> None:
    assert not is_request_id(bad)
    assert received((("x-request-id", bad),), "decode", "").request_id == ""
    assert is_request_id("req-0123/ABC.def~")
    assert received((("x-request-id", "a"), ("x-request-id", "b")), "decode", "").request_id == ""


async def test_a_task_has_the_scope_it_was_started_in_and_changes_only_its_own() -> None:
    enter(Scope(request_id="outer"))

    async def inner() -> Scope:
        update(attempt=2)
        return current()

    assert await asyncio.create_task(inner()) == Scope(request_id="outer", attempt=2)
    assert current() == Scope(request_id="outer")
