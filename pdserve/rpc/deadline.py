"""How long a call may still take."""

from __future__ import annotations

from typing import Any

import grpc


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default: float) -> float:
    """Seconds until the caller's deadline, never negative; `default` if the caller set none."""
    left = context.time_remaining()
    return default if left is None else max(0.0, float(left))
