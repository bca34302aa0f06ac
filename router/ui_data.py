"""What the live page shows, as JSON: the pools, the gate's matrix, requests as stages. Names in it are data only.

Sizes are bounded whatever the pools hold: workers, kinds of workers, ids in a heading, characters of a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pdserve import __version__
from pdserve.errors import FieldDifference
from pdserve.registry.records import READY
from router.compatibility import Kind, Matrix
from router.gate import Member
from router.outcomes import BOUNDS, Outcomes
from router.pool import Pool
from router.recent import Seen
from router.settings import RouterSettings
from router.waterfall import stages

Json = dict[str, Any]

MAX_WORKERS = 256  # shown; the rest is counted
_MAX_IDS = 8  # in a heading of the matrix
_MAX_VALUE = 200  # characters of one side of a difference
_LOAD = (
    "running",
    "waiting",
    "waiting_limit",
    "queued_tokens",
    "queued_prefill_tokens",
    "pages_total",
    "pages_held",
    "pages_cached",
    "tokens_per_s",
    "prefill_tokens_per_s",
    "transfer_bytes_per_s",
    "decode_step_ms",
    "predicted_wait_s",
)


def about(settings: RouterSettings, registry: str) -> Json:
    """What does not change while this router runs."""
    return {
        "version": __version__,
        "registry": registry,
        "disaggregate": settings.disaggregate,
        "allow_lossy": settings.allow_lossy,
        "max_active": settings.max_active,
        "tenants": bool(settings.tenants),
    }


def state(pool: Pool, active: int, outcomes: Outcomes) -> Json:
    """Pools and load as this router knows them now."""
    members = pool.members()
    return {
        "active": active,
        "warning": pool.warning,
        "workers": [worker(pool, member) for member in members[:MAX_WORKERS]],
        "more_workers": max(0, len(members) - MAX_WORKERS),
        "placement": {
            "handed_over": outcomes.handed_over,
            "computed_at_decode": outcomes.computed_at_decode,
            "split": outcomes.split,
            "fallbacks": outcomes.fallbacks,
            "cheaper": outcomes.cheaper,
            "bounds": list(BOUNDS),
            "ratios": list(outcomes.ratios),
        },
    }


def worker(pool: Pool, member: Member) -> Json:
    record, load = member.record, pool.load(member)
    c = record.contract
    suspect = record.state == READY and not pool.is_ready(member)
    return {
        "id": record.worker_id,
        "role": record.role,
        "state": "suspect" if suspect else record.state,
        "model": record.model,
        "address": member.address,
        "device": c.device,
        "dtypes": [c.kv_dtype, c.weight_dtype, c.activation_dtype],
        "pages": [c.page_size, c.page_axis_order],
        "contract": member.contract_digest.hex()[:12],
        "info": {name: text[:_MAX_VALUE] for name, text in c.info.items()},
        "takes_prompts": record.takes_prompts,
        "adapters": sorted({adapter.name for adapter in record.adapters if adapter.name})[:_MAX_IDS],
        "load": {name: _number(getattr(load, name)) for name in _LOAD},
    }


def matrix_json(matrix: Matrix) -> Json:
    return {
        "rows": [_kind(row) for row in matrix.rows],
        "columns": [_kind(column) for column in matrix.columns],
        "cells": [
            [{"verdict": cell.verdict, "differences": differences(cell.differences)} for cell in row]
            for row in matrix.cells
        ],
    }


def differences(found: Iterable[FieldDifference]) -> list[Json]:
    return [{"code": d.code, "left": d.left[:_MAX_VALUE], "right": d.right[:_MAX_VALUE], "kind": d.kind} for d in found]


def request(seen: Seen) -> Json:
    """One line of the list."""
    r = seen.record
    last = r.history[-1] if r.history else None
    return {
        "id": seen.id,
        "tenant": seen.tenant,
        "model": f"{seen.model}:{seen.adapter}" if seen.adapter else seen.model,
        "began_s": round(seen.began_s, 3),
        "state": seen.state,
        "outcome": r.outcome,
        "prefill": r.prefill_worker,
        "decode": r.decode_worker,
        "here": bool(last and last.placement == "decode"),
        "attempts": r.attempts,
        "prompt_tokens": r.prompt_tokens,
        "output_tokens": r.output_tokens,
        "first_token_ms": _number(r.first_token_ms),
        "total_ms": _number(seen.age_ms),
        "stages": [[s.name, _number(s.start_ms), _number(s.ms), s.attempt] for s in stages(r, seen.age_ms)],
    }


def decision(seen: Seen) -> Json:
    """The whole record of one request, in the names of the wire schema."""
    return request(seen) | {"label": seen.label, "record": asdict(seen.record)}


def _kind(kind: Kind) -> Json:
    return {
        "ids": [member.id for member in kind.members[:_MAX_IDS]],
        "count": len(kind.members),
        "model": kind.first.record.model,
        "contract": kind.first.contract_digest.hex()[:12],
    }


def _number(value: float) -> float:
    """Four digits are enough for a page, and keep what is sent small."""
    return value if isinstance(value, int) else float(f"{value:.4g}")
