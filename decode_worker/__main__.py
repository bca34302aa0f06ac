"""`python -m decode_worker`: one decode worker in this process, until SIGTERM or SIGINT drains it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.worker_main import Flags, worker_main

FLAGS: Flags = (
    ("--transfer-port", int, "PORT", "port of the Transfer service; 0 takes any free one"),
    ("--advertise-transfer", str, "HOST:PORT", "address that prefill workers reach the Transfer service by"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; see `pdserve.rpc.process.run`."""
    return worker_main(
        "decode_worker",
        "A decode worker: receives caches, samples every token, streams text.",
        _settings,
        DecodeWorker,
        lambda worker: f"decode worker ready: {worker.address} transfer {worker.transfer_address}",
        FLAGS,
        arguments,
    )


def _settings(config: str | None) -> DecodeSettings:
    if config is None:
        return DecodeSettings()
    # Imported only on request: it knows the settings of every package, this one included.
    from pdserve.config import load_config

    return load_config(config).decode


if __name__ == "__main__":
    sys.exit(main())
