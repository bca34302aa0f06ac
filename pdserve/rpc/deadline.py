"""How long a call may still take."""

from __future__ import annotations

from typing import Any

import grpc


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default: float) -> float:
    """Seconds until the caller's deadline, never negative; `default` if the caller set none."""
    left = context.time_remaining()
    return default if left is None else max(0.0, float(left))


def limit_of(timeout_ms: int, default_s: float, most_s: float) -> float:
    """Seconds that a caller allows; 0: the default."""
    return min(timeout_ms / 1000, most_s) if timeout_ms else default_s
