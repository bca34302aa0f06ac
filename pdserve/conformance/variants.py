"""Contracts that differ from a worker's in one field each, by class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cache_transfer.contract import KV_CASTS, WorkerContract

_OTHER = {"fp32": "bf16", "bf16": "fp32", "fp16": "fp32", "float64": "fp32"}


def must_equal(c: WorkerContract) -> Iterator[tuple[str, WorkerContract]]:
    """(code of the difference, contract) for every must-equal field."""
    positions, attention = c.positions, c.attention

    def position(**changes: Any) -> WorkerContract:
        return replace(c, positions=replace(positions, **changes))

    def attend(**changes: Any) -> WorkerContract:
        return replace(c, attention=replace(attention, **changes))

    yield "CONTRACT_VERSION", replace(c, version=c.version + 1)
    yield "MODEL_DIGEST", replace(c, model_digest=_flipped(c.model_digest))
    yield "POSITION_SCHEME.kind", position(kind="alibi" if positions.kind != "alibi" else "none")
    yield "POSITION_SCHEME.theta", position(theta=positions.theta + 0.5)
    yield "POSITION_SCHEME.dims", position(dims=positions.dims + 2)
    yield "POSITION_SCHEME.scaling", position(scaling=f"{positions.scaling}-2")
    yield (
        "POSITION_SCHEME.scaling_parameters",
        position(scaling_parameters=(*positions.scaling_parameters, ("zeta", 2.0))),
    )
    yield (
        "POSITION_SCHEME.original_max_positions",
        position(original_max_positions=positions.original_max_positions + 1),
    )
    yield "POSITION_SCHEME.interleaved", position(interleaved=not positions.interleaved)
    yield "POSITION_SCHEME.keys_cached_rotated", position(keys_cached_rotated=not positions.keys_cached_rotated)
    others = c.layer_positions or (positions,) * len(c.planes)
    changed = replace(others[0], kind="none" if others[0].kind != "none" else "learned")
    yield "LAYER_POSITIONS[0]", replace(c, layer_positions=(changed, *others[1:]))
    yield "ATTENTION.scale", attend(scale=attention.scale * 2)
    yield "ATTENTION.soft_cap", attend(soft_cap=attention.soft_cap + 1.0)
    window = attention.sliding_window or (0,) * len(c.planes)
    yield "ATTENTION.sliding_window", attend(sliding_window=(*window[:-1], window[-1] + 1))
    yield (
        "LAYERS",
        replace(c, planes=(*c.planes, c.planes[-1]), attention=_windows(c, extra=True), layer_positions=_more(c)),
    )
    last = max(layer for layer, planes in enumerate(c.planes) if planes)
    first = c.planes[last][0]
    yield f"PLANES[{last}]", _planes(c, last, replace(first, name=f"{first.name}2"))
    yield f"PLANES[{last}].{first.name}.heads", _planes(c, last, replace(first, heads=first.heads + 1))
    yield f"PLANES[{last}].{first.name}.head_dim", _planes(c, last, replace(first, head_dim=first.head_dim + 1))
    yield "VOCAB_SIZE", replace(c, vocab_size=c.vocab_size + 1)
    yield "TOKENIZER_DIGEST", replace(c, tokenizer_digest=_flipped(c.tokenizer_digest or bytes(32)))


def lossy(c: WorkerContract) -> Iterator[tuple[str, WorkerContract]]:
    """Of a sender that does not allow loss, so that the difference refuses whatever the worker allows."""
    c = replace(c, allow_lossy=False)
    yield "KV_DTYPE", replace(c, kv_dtype=_OTHER[c.kv_dtype])
    yield "WEIGHT_DTYPE", replace(c, weight_dtype=f"{c.weight_dtype}2")
    yield "ACTIVATION_DTYPE", replace(c, activation_dtype=f"{c.activation_dtype}2")


def castable(c: WorkerContract) -> WorkerContract | None:
    """A sender whose cache this worker casts as it takes it; None when it allows no loss, or casts nothing."""
    sender = next((sender for sender, own in sorted(KV_CASTS) if own == c.kv_dtype), "")
    return replace(c, kv_dtype=sender) if sender and c.allow_lossy else None


def convertible(c: WorkerContract) -> Iterator[tuple[str, WorkerContract]]:
    yield "PAGE_SIZE", replace(c, page_size=c.page_size + 3)
    yield "PAGE_AXIS_ORDER", replace(c, page_axis_order="nhd" if c.page_axis_order == "hnd" else "hnd")
    yield "DEVICE", replace(c, device="cuda" if c.device != "cuda" else "cpu")


def informational(c: WorkerContract) -> Iterator[tuple[str, WorkerContract]]:
    yield "CONTEXT_LIMIT", replace(c, context_limit=c.context_limit + 1)
    yield "INFO.conformance", replace(c, info={**c.info, "conformance": "1"})


def _planes(c: WorkerContract, layer: int, first: Any) -> WorkerContract:
    """The first plane of a layer replaced."""
    return replace(c, planes=(*c.planes[:layer], (first, *c.planes[layer][1:]), *c.planes[layer + 1 :]))


def _windows(c: WorkerContract, extra: bool) -> Any:
    window = c.attention.sliding_window
    return replace(c.attention, sliding_window=(*window, 0) if window and extra else window)


def _more(c: WorkerContract) -> Any:
    return (*c.layer_positions, *c.layer_positions[-1:])


def _flipped(digest: bytes) -> bytes:
    return bytes([digest[0] ^ 1]) + digest[1:]
