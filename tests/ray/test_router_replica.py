"""The router as one more deployment: workers without another registry find it, again when it was replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from ray import serve

from pdserve.cli.deployment import Deployment
from pdserve.client import AsyncClient
from pdserve.cluster.notes import Notes
from pdserve.config import Config
from pdserve.errors import PdserveError
from pdserve.local import LocalRunner
from pdserve.ray_app import application, pools, router_application
from tests.ray.asking import ANYWHERE, ask, by_role, expected, requests, settled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def run(target: Any, name: str) -> None:
    serve.run(target, name=name, route_prefix=None)


async def test_a_whole_installation_of_deployments_survives_its_router(
    deployment: Deployment, config: Config, baseline: LocalRunner
) -> None:
    one = replace(config, pools=replace(config.pools, prefill=1, decode=1, prefill_cpus=0.5, decode_cpus=0.5))
    names = ["pdserve-router", "own-prefill", "own-decode"]
    asked = requests(4, tokens=12)
    try:
        await asyncio.to_thread(run, router_application(one), names[0])
        targets = [
            serve.RunTarget(application(one, pool, "own"), name=name, route_prefix=None)
            for pool, name in zip(pools(one), names[1:], strict=True)
        ]
        await asyncio.to_thread(serve.run_many, targets)
        old = Notes("").router()
        async with AsyncClient(old, ANYWHERE) as client:
            await settled(client, 2)
            assert [await ask(client, ids, params) for ids, params in asked] == expected(baseline, asked)
        os.kill(await serve.get_app_handle(names[0]).describe.remote(), signal.SIGKILL)
        async with asyncio.timeout(60.0):
            while (new := Notes("").router()) == old:
                await asyncio.sleep(0.1)  # Serve is watched from outside
            while True:
                async with AsyncClient(new, ANYWHERE) as client:
                    try:
                        assert by_role(await settled(client, 2)) == (1, 1)
                        assert [await ask(client, ids, params) for ids, params in asked] == expected(baseline, asked)
                        break
                    except PdserveError:
                        await asyncio.sleep(0.1)
    finally:
        for name in names:
            await asyncio.to_thread(serve.delete, name)
