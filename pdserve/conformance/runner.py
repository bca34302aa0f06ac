"""Runs the cases against one worker, one after another, and never lets one hide another."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc

from pdserve.conformance import attacks, bad_requests, damage, full_pool, good, shared
from pdserve.conformance.bench import Bench, CaseFailed, CaseSkipped, Limits
from pdserve.conformance.cases import Case, Outcome, Result
from pdserve.conformance.peer import CallFailed, Peer
from pdserve.errors import ConfigError, PdserveError
from pdserve.rpc.settings import RpcSettings


def all_cases() -> tuple[Case, ...]:
    """Good ones first: what refuses everything refuses every attack."""
    groups = (good, bad_requests, attacks, shared, full_pool, damage)
    return tuple(case for group in groups for case in group.cases())


def select(only: Sequence[str]) -> tuple[Case, ...]:
    """Cases whose name or group matches one of the patterns (with * and ?); all without patterns."""
    return tuple(
        case
        for case in all_cases()
        if not only or any(fnmatch.fnmatchcase(text, pattern) for text in (case.name, case.group) for pattern in only)
    )


def run(
    address: str,
    limits: Limits | None = None,
    cases: Iterable[Case] | None = None,
    rpc: RpcSettings | None = None,
    push_rpc: RpcSettings | None = None,
    told: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Runs cases against the worker at `address`, which must have no other work.

    Args:
        rpc, push_rpc: see Peer.
        told: called with each result as it comes.

    Raises ConfigError when no decode worker answers there, and a PdserveError when it describes itself wrongly.
    """
    limits = limits or Limits()
    peer = Peer(address, limits.timeout_s, rpc, push_rpc)
    try:
        _check_decode_worker(peer)
        bench = Bench.connect(peer, limits)
        results = []
        for result in _results(bench, all_cases() if cases is None else cases):
            told(result)
            results.append(result)
        return results
    finally:
        peer.close()


def _check_decode_worker(peer: Peer) -> None:
    try:
        role = peer.describe().role
    except CallFailed as failed:
        told = failed.failure
        if told.status is grpc.StatusCode.UNIMPLEMENTED:
            raise _wrong_endpoint(
                f"{peer.address} is no worker", "give the address of a decode worker; `pdserve status` lists them"
            ) from None
        raise _wrong_endpoint(
            f"{peer.address}: {told.error.message}",
            "give the address of a decode worker that runs; `pdserve status` lists them",
        ) from None
    if role == "prefill":
        raise _wrong_endpoint(
            f"{peer.address} is a prefill worker", "give a decode worker's address; `pdserve status` lists them"
        )


def _wrong_endpoint(problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, reason="WRONG_ENDPOINT", field="endpoint", remedy=remedy)


def _results(bench: Bench, cases: Iterable[Case]) -> Iterator[Result]:
    for case in cases:
        before, began = bench.hostile_inputs, time.monotonic()
        outcome, detail = _outcome(bench, case)
        yield Result(case.name, case.group, outcome, detail, bench.hostile_inputs - before, time.monotonic() - began)


def _outcome(bench: Bench, case: Case) -> tuple[Outcome, str]:
    """Whatever the case found, the worker must hold nothing afterwards."""
    outcome, detail = _attempt(bench, case.run)
    settled, problem = _attempt(bench, Bench.settle)
    if settled is not Outcome.PASS and outcome is not Outcome.FAIL:
        return Outcome.FAIL, problem
    return outcome, detail


def _attempt(bench: Bench, step: Callable[[Bench], None]) -> tuple[Outcome, str]:
    try:
        step(bench)
    except CaseSkipped as skipped:
        return Outcome.SKIP, skipped.message
    except CaseFailed as failed:
        return Outcome.FAIL, failed.message
    except CallFailed as failed:
        return Outcome.FAIL, f"a call failed: {failed.failure}"
    except PdserveError as error:  # a message of the worker that the protocol does not have
        return Outcome.FAIL, f"{error.reason}: {error}"
    return Outcome.PASS, ""
