"""Pools that change while requests are served: `pdserve scale`, a load that turns, and a new version."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from pdserve.cli.deployment import Deployment
from pdserve.cli.ray_pools import LOCAL_RAY_ENVIRONMENT
from pdserve.client import AsyncClient, Completion, Finish
from pdserve.cluster.notes import Notes
from pdserve.config import Config, load_config
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.engine.tiny import prompt
from tests.ray.asking import Asked, by_role, expected, requests, settled, tables, write_model
from tests.ray.conftest import local_runner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

MOVE_S = 90.0  # a worker drains, another one imports torch and loads the model


async def pdserve(*arguments: str) -> str:
    """Runs the command as from another shell; returns what it says."""
    others = {name: value for name, value in os.environ.items() if name not in LOCAL_RAY_ENVIRONMENT}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdserve.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=others,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


@asynccontextmanager
async def traffic(
    client: AsyncClient, streams: int, next_request: Callable[[], Asked]
) -> AsyncIterator[list[tuple[Asked, Completion]]]:
    """So many clients, each of which asks again when it has its answer. None of them may fail."""
    answered: list[tuple[Asked, Completion]] = []
    enough = asyncio.Event()

    async def one() -> None:
        while not enough.is_set():
            asked = next_request()
            done = await client.complete(token_ids=asked[0], sampling=asked[1], timeout_s=60.0, want_record=True)
            assert isinstance(done.finish, Finish)
            answered.append((asked, done))

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one())
        try:
            yield answered
        finally:
            enough.set()


def in_turn(asked: Sequence[Asked]) -> Callable[[], Asked]:
    numbers = count()
    return lambda: asked[next(numbers) % len(asked)]


async def until_sizes(client: AsyncClient, sizes: tuple[int, int]) -> None:
    async with asyncio.timeout(MOVE_S):
        while by_role([w for w in (await client.status()).workers if w.state == "ready"]) != sizes:
            await asyncio.sleep(0.1)  # Ray is watched from outside


async def test_scale_moves_a_worker_and_loses_no_request(deployment: Deployment, baseline: LocalRunner) -> None:
    asked = requests(12, tokens=60)
    answers = dict(zip([ids for ids, _ in asked], expected(baseline, asked), strict=True))
    async with AsyncClient(deployment.gateway) as client:
        await settled(client, 4)
        async with traffic(client, 8, in_turn(asked)) as answered:
            said = await pdserve("scale", "--prefill", "1", "--decode", "3", "--ray-address", deployment.ray_address)
        assert "1 prefill and 3 decode" in said
        assert by_role(await settled(client, 4)) == (1, 3)
    assert len(answered) > 20
    assert all(done.ids == answers[ids] for (ids, _), done in answered)


async def test_workers_follow_a_load_that_turns_from_prompts_to_outputs(deployment: Deployment) -> None:
    """The policy itself, on what the workers report: nobody tells it what comes."""
    numbers = count()

    def prompt_heavy() -> Asked:
        return prompt(480, seed=5000 + next(numbers)), SamplingParams(temperature=0.0, max_tokens=1)

    def output_heavy() -> Asked:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        return prompt(8, seed=9000 + next(numbers)), params

    async with AsyncClient(deployment.gateway) as client:
        await settled(client, 4)
        Notes("").ask(None)
        try:
            before = by_role(await settled(client, 4))
            async with traffic(client, 24, prompt_heavy):
                await until_sizes(client, (before[0] + 1, before[1] - 1))
            async with traffic(client, 40, output_heavy):
                await until_sizes(client, before)
            await settled(client, 4)
        finally:
            Notes("").ask({"prefill": 1, "decode": 1})


async def test_a_new_version_enters_while_the_old_one_serves(
    deployment: Deployment, config: Config, baseline: LocalRunner, tmp_path: Path
) -> None:
    new = tables(write_model(tmp_path / "tiny-2.pdmodel", seed=1))
    new["pools"] = {**new["pools"], "prefill": 1, "decode": 1}
    new["scaling"] = {}
    file = tmp_path / "new.toml"
    file.write_text(toml(new))
    asked = requests(6, tokens=40)
    old_answers, new_answers = expected(baseline, asked), expected(local_runner(load_config(file)), asked)
    assert old_answers != new_answers
    async with AsyncClient(deployment.gateway) as client:
        await settled(client, 2)
        async with traffic(client, 4, in_turn(asked)) as answered:
            where = ("--ray-address", deployment.ray_address, "--gateway", deployment.gateway)
            assert "updated" in await pdserve("update", "--config", str(file), *where)
        workers = await settled(client, 2)
        assert all(worker.worker_id.startswith(("prefill-v2-", "decode-v2-")) for worker in workers)
    versions = [check_answer(asked, old_answers, new_answers, one) for one in answered]
    assert {False, True} == set(versions), "both served"
    assert versions[-1], "the last answers are the new version's"


def check_answer(
    asked: list[Asked], old: list[tuple[int, ...]], new: list[tuple[int, ...]], one: tuple[Asked, Completion]
) -> bool:
    """Whether the new version answered; the answer is that version's, from a pair of its workers."""
    (ids, params), done = one
    assert done.record is not None
    pair = (done.record.prefill_worker.startswith("prefill-v2-"), done.record.decode_worker.startswith("decode-v2-"))
    assert pair[0] == pair[1], done.record
    assert done.ids == (new if pair[0] else old)[asked.index((ids, params))]
    return pair[0]


def toml(content: dict[str, dict[str, object]]) -> str:
    def value(of: object) -> str:
        if isinstance(of, dict):
            return "{" + ", ".join(f"{name} = {value(inner)}" for name, inner in of.items()) + "}"
        return str(of).lower() if isinstance(of, bool) else repr(of)

    return "\n".join(
        f"[{name}]\n" + "".join(f"{k} = {value(v)}\n" for k, v in t.items()) for name, t in content.items()
    )
