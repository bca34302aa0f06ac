"""The engine's thread: one at a time, errors come back, closing joins."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.runner import EngineThread
from pdserve.errors import InvalidRequest, Refused
from tests.engine.tiny import prompt, tiny_engine


async def test_steps_run_in_one_thread_and_count() -> None:
    runner, engine = EngineThread(threads=1, name="engine-under-test"), tiny_engine()
    try:
        plan = StepPlan((Chunk("r", prompt(6), 0, (0, 1)),))
        seen: list[str] = []
        outs = [
            runner.run(engine.step, plan, on_layer=lambda _: seen.append(threading.current_thread().name)) for _ in "ab"
        ]
        first, second = await asyncio.gather(*outs)
        assert torch.equal(first.logits["r"], second.logits["r"])
        assert set(seen) == {"engine-under-test_0"} and len(seen) == 6
        assert await runner.run(torch.get_num_threads) == 1
        with pytest.raises(InvalidRequest):
            await runner.run(engine.step, StepPlan(()))
        assert (runner.steps, runner.busy_s) == (4, 0.0)
    finally:
        runner.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("engine-under-test")]
    with pytest.raises(Refused):
        await runner.run(torch.get_num_threads)


def test_what_other_threads_compute_for_the_engine_takes_as_many_threads_as_it_has() -> None:
    runner, tasks = EngineThread(threads=1), Path("/proc/self/task")

    def helpers() -> int:
        x, before = torch.randn(256, 576), len(list(tasks.iterdir()))
        assert (x @ x.T).shape == (256, 256)
        return len(list(tasks.iterdir())) - before

    try:
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(runner.alike(helpers)).result() == 0
        with ThreadPoolExecutor(1) as older:
            older.submit(torch.set_num_threads, 2).result()
            assert older.submit(runner.alike(torch.get_num_threads)).result() == 1
    finally:
        runner.close()


async def test_busy_time_grows_while_a_function_runs_and_close_waits_for_it() -> None:
    runner, begun, release = EngineThread(), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        release.wait(10)
        return "done"

    task = asyncio.ensure_future(runner.run(work))
    await asyncio.to_thread(begun.wait, 10)
    assert runner.busy_s > 0 and runner.steps == 0
    closing = asyncio.ensure_future(asyncio.to_thread(runner.close))
    release.set()
    await closing
    assert await task == "done" and runner.steps == 1


async def test_a_cancelled_caller_withdraws_work_not_begun() -> None:
    runner, begun, release, ran = EngineThread(), threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        release.wait(10)

    first = asyncio.ensure_future(runner.run(work))
    await asyncio.to_thread(begun.wait, 10)
    second = asyncio.ensure_future(runner.run(ran.append, "second"))
    await asyncio.wait({second}, timeout=0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    await asyncio.to_thread(runner.close)
    assert not ran and runner.steps == 1


async def test_close_leaves_behind_what_does_not_end() -> None:
    runner, begun, release, ran = EngineThread(), threading.Event(), threading.Event(), list[str]()

    def hang() -> None:
        begun.set()
        release.wait(10)

    stuck = asyncio.ensure_future(runner.run(hang))
    await asyncio.to_thread(begun.wait, 10)
    waiting = asyncio.ensure_future(runner.run(ran.append, "waiting"))
    await asyncio.wait({waiting}, timeout=0)
    assert not await asyncio.to_thread(runner.close, 0.05)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await stuck
    assert await asyncio.to_thread(runner.close, 10) and not ran
