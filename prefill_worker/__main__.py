"""`python -m prefill_worker`: one prefill worker in this process, until SIGTERM or SIGINT drains it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdserve.worker_main import worker_main
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; see `pdserve.rpc.process.run`."""
    return worker_main(
        "prefill_worker",
        "A prefill worker: computes prompts in chunks and pushes their caches.",
        _settings,
        PrefillWorker,
        lambda worker: f"prefill worker ready: {worker.address}",
        arguments=arguments,
    )


def _settings(config: str | None) -> PrefillSettings:
    if config is None:
        return PrefillSettings()
    # Imported only on request: it knows the settings of every package, this one included.
    from pdserve.config import load_config

    return load_config(config).prefill


if __name__ == "__main__":
    sys.exit(main())
