"""The state file of a running `pdserve up`, by which the other commands find it.

The file is locked for as long as its owner lives, so a stale file is told from a live one
without trusting process ids: whoever can take the lock knows that the owner is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pdserve.errors import ConfigError


@dataclass(frozen=True)
class Running:
    """A deployment that `pdserve up` started on this machine."""

    pid: int
    gateway: str  # host:port of the gRPC gateway
    http: str  # host:port of the OpenAI endpoint
    ray: str = ""  # host:port of the Ray cluster's head


def state_path() -> Path:
    """`$PDSERVE_STATE`, or one file per user in the system's folder for run-time files."""
    if chosen := os.environ.get("PDSERVE_STATE"):
        return Path(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"pdserve-{os.getuid()}" / "up.json"


def read_running() -> Running | None:
    """The live deployment, or None when nobody holds the state file."""
    path = state_path()
    try:
        with path.open("r+") as file:
            if _try_lock(file):
                return None
            return Running(**json.load(file))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


@contextmanager
def hold() -> Iterator[IO[str]]:
    """Takes the state file for this process; raises ConfigError when another `up` has it."""
    path = state_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _try_lock(file):
            raise ConfigError(
                "another `pdserve up` is running",
                reason="ALREADY_UP",
                remedy="stop it with `pdserve down`, or set PDSERVE_STATE to another file",
            )
        file.truncate(0)
        try:
            yield file
        finally:
            path.unlink(missing_ok=True)


def publish(file: IO[str], running: Running) -> None:
    file.truncate(0)
    file.write(json.dumps(asdict(running)))
    file.flush()


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
