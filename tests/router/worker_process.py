"""`python -m tests.router.worker_process ROLE ID REGISTRY [LEASE]`: a worker in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import torch

from decode_worker.settings import DecodeSettings
from decode_worker.worker import DecodeWorker
from pdserve.registry.open import open_registry
from pdserve.registry.records import PREFILL
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.router.support import ENGINE, LONG_CONTEXT, MODEL, REGISTRY, bundle, model

LONG_ENGINE = replace(ENGINE, pages=LONG_CONTEXT // ENGINE.page_size)


async def main(role: str, worker_id: str, url: str, lease_s: str = "") -> None:
    leased = replace(REGISTRY, lease_s=float(lease_s)) if lease_s else REGISTRY
    registry = open_registry(url, leased)
    shared = {"worker_id": worker_id, "name": MODEL, "engine": LONG_ENGINE, "registry": leased}
    loaded = model(context=LONG_CONTEXT)
    worker: PrefillWorker | DecodeWorker
    if role == PREFILL:
        worker = PrefillWorker(loaded, bundle(), PrefillSettings(**shared), registry)  # type: ignore[arg-type]
    else:
        worker = DecodeWorker(loaded, bundle(), DecodeSettings(**shared), registry)  # type: ignore[arg-type]
    await worker.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()  # until killed


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
