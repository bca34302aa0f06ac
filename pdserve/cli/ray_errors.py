"""What Ray reports, as our errors."""

from __future__ import annotations

import re

from pdserve.errors import ConfigError

_CLASS_NAME = re.compile(r"^(?:pdserve\.errors\.\w+|[\w.]*(?:Error|Exception)): ")


def pool_failure(pool: str, message: str) -> ConfigError:
    """From the traceback that Ray reports: its last line is the error, after the name of a class."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    cause = _CLASS_NAME.sub("", lines[-1]) if lines else "no reason given"
    own_remedy = cause.endswith(")")  # our errors bring theirs
    return ConfigError(
        f"the pool did not start: {cause}",
        reason="POOL_FAILED",
        field=pool,
        remedy="" if own_remedy else "correct the configuration and start again",
    )
