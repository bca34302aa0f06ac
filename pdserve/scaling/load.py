"""From what workers report to one number per pool: its pressure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.registry.records import PREFILL, Load
from pdserve.scaling.settings import ScalingSettings

_BUSY = 0.5  # of pressure: at work, with nothing waiting


def pressure(role: str, loads: Sequence[Load], settings: ScalingSettings) -> float | None:
    """Load of a pool over what is intended: 1 is as it should be. None without a report.

    The mean over workers counts, not the worst: whoever places requests has spread them already.
    """
    if not loads:
        return None
    each = _prefill if role == PREFILL else _decode
    return sum(each(load, settings) for load in loads) / len(loads)


def _prefill(load: Load, settings: ScalingSettings) -> float:
    """Queued tokens, and the time they will take. A worker that only computes is not idle."""
    queued = load.queued_tokens / settings.queued_tokens
    rate = load.prefill_tokens_per_s or load.tokens_per_s
    wait = max(load.predicted_wait_s, load.queued_tokens / rate if rate > 0 else 0.0)
    return max(queued, wait / settings.wait_s, _BUSY if load.running else 0.0)


def _decode(load: Load, settings: ScalingSettings) -> float:
    """Page use, and running sequences. Those that wait have no cache yet, for which prefill is to blame; where pages
    are what they wait for, page use says so."""
    held = load.pages_held / load.pages_total / settings.page_use if load.pages_total else 0.0
    return max(held, load.running / settings.running)
