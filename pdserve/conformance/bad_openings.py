"""Openings that must be refused. None of them spends the ticket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from cache_transfer.wire import identity_to_proto
from pdserve.conformance.hostile import FOREIGN, OPENING, Hostile, Make, flip_first, garbage
from pdserve.conformance.streams import Draft, wire


def openings() -> Iterator[Hostile]:
    def refuse(name: str, reason: str, make: Make, *differences: str) -> Hostile:
        return Hostile(name, OPENING, (reason,), make, differences)

    yield refuse("proof with a flipped bit", "PROOF", _opening(proof=flip_first))
    yield refuse("proof made with another secret", "PROOF", _foreign_proof)
    yield refuse("identity changed after the proof", "PROOF", _unproved_tenant)
    yield refuse("proof of 31 bytes", "MALFORMED_MESSAGE", _opening(proof=lambda proof: proof[:-1]))
    yield refuse("another tenant", "IDENTITY_MISMATCH", _identity(tenant="someone else"), "IDENTITY.tenant")
    yield refuse("an adapter", "IDENTITY_MISMATCH", _identity(adapter_digest=bytes(32)), "IDENTITY.adapter_digest")
    yield refuse("another prompt", "IDENTITY_MISMATCH", _identity(prompt_digest=bytes(32)), "IDENTITY.prompt_digest")
    yield refuse(
        "another contract digest", "IDENTITY_MISMATCH", _identity(contract_digest=bytes(32)), "IDENTITY.contract_digest"
    )
    yield refuse("a longer prompt", "IDENTITY_MISMATCH", _moved(end=1), "IDENTITY.end")
    yield refuse("a later first token", "IDENTITY_MISMATCH", _moved(start=1), "IDENTITY.start")
    yield refuse("an empty adapter digest", "MALFORMED_IDENTITY", _identity(adapter_digest=b""))
    yield refuse("a prompt digest of 31 bytes", "MALFORMED_IDENTITY", _identity(prompt_digest=bytes(31)))
    yield refuse("an empty prompt", "MALFORMED_IDENTITY", _identity(start=0, end=0))
    yield refuse("another incarnation", "INCARNATION", _opening(incarnation=flip_first))
    yield refuse("an unknown handoff", "TICKET_UNKNOWN", _opening(handoff_id=flip_first))
    yield refuse("an attempt that was never issued", "TICKET_UNKNOWN", _opening(attempt=lambda n: n + 1))
    yield refuse("an attempt before the current", "ATTEMPT_STALE", _opening(attempt=lambda n: n - 1))
    yield refuse("no integrity", "INTEGRITY", _opening(integrity=lambda _: ""))
    yield refuse("another integrity", "INTEGRITY", _opening(integrity=lambda _: "crc32"))
    another = _opening(kv_dtype=lambda old: "fp16" if old != "fp16" else "fp32")
    yield refuse("another frame dtype", "KV_DTYPE", another, "KV_DTYPE")
    yield refuse("logits only, where a cache is due", "LOGITS_ONLY", _opening(logits_only=lambda old: not old))
    for name in ("identity", "contract"):
        yield refuse(f"no {name}", "MALFORMED_MESSAGE", _without(name))
    for name, change in _malformed_contracts().items():
        yield refuse(f"contract with {name}", "MALFORMED_CONTRACT", _contract(change))
    for name, data in garbage().items():
        yield refuse(f"{name} in place of the opening", "MALFORMED_MESSAGE", lambda _, data=data: [data])  # type: ignore[misc]
    for name, place in (("a frame", 1), ("logits", -2), ("the commit", -1)):
        yield refuse(f"{name} in place of the opening", "MESSAGE_ORDER", lambda d, place=place: [d.messages()[place]])  # type: ignore[misc]
    yield refuse("no message at all", "SENDER_GONE", lambda _: [])


def _opening(**changes: Callable[[Any], Any]) -> Make:
    """Fields of the opening changed after it was made."""

    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        for name, change in changes.items():
            setattr(requests[0].open, name, change(getattr(requests[0].open, name)))
        return wire(requests)

    return make


def _identity(**changes: Any) -> Make:
    """Another identity, with the proof that fits it."""

    def make(draft: Draft) -> list[bytes]:
        draft.identity = replace(draft.identity, **changes)
        draft.opening.identity.CopyFrom(identity_to_proto(draft.identity))
        return draft.messages()

    return make


def _moved(**by: int) -> Make:
    return lambda draft: _identity(**{name: getattr(draft.identity, name) + step for name, step in by.items()})(draft)


def _without(name: str) -> Make:
    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        requests[0].open.ClearField(name)
        return wire(requests)

    return make


def _unproved_tenant(draft: Draft) -> list[bytes]:
    requests = draft.seal()
    requests[0].open.identity.tenant += "2"
    return wire(requests)


def _foreign_proof(draft: Draft) -> list[bytes]:
    draft.ticket = replace(draft.ticket, secret=FOREIGN)
    return draft.messages()


def _contract(change: Callable[[Any], None]) -> Make:
    def make(draft: Draft) -> list[bytes]:
        requests = draft.seal()
        change(requests[0].open.contract)
        return wire(requests)

    return make


def _malformed_contracts() -> dict[str, Callable[[Any], None]]:
    def put(name: str, value: Any) -> Callable[[Any], None]:
        return lambda contract: setattr(contract, name, value)

    def put_positions(name: str, value: Any) -> Callable[[Any], None]:
        return lambda contract: setattr(contract.positions, name, value)

    return {
        "no layers": lambda contract: contract.ClearField("layers"),
        "no position scheme": lambda contract: contract.ClearField("positions"),
        "no attention": lambda contract: contract.ClearField("attention"),
        "a model digest of 31 bytes": put("model_digest", bytes(31)),
        "version 0": put("version", 0),
        "page size 0": put("page_size", 0),
        "an unknown axis order": put("page_axis_order", "dhn"),
        "an unknown dtype": put("kv_dtype", "int4"),
        "an unknown kind of positions": put_positions("kind", "spiral"),
        "a theta that is no number": put_positions("theta", float("nan")),
        "one window too many": lambda contract: contract.attention.sliding_window.extend(
            [0] * (len(contract.layers) + 1 - len(contract.attention.sliding_window))
        ),
        "a plane twice": lambda contract: _layer(contract).planes.append(_layer(contract).planes[0]),
        "a plane without heads": lambda contract: setattr(_layer(contract).planes[0], "heads", 0),
        "heads beyond the limit": lambda contract: setattr(_layer(contract).planes[0], "heads", 2**32 - 1),
        "a head beyond the limit": lambda contract: setattr(_layer(contract).planes[0], "head_dim", 2**32 - 1),
        "a name beyond the limit": put("device", "x" * 257),
    }


def _layer(contract: Any) -> Any:
    """The first layer that caches anything."""
    return next(layer for layer in contract.layers if layer.planes)
