"""How a prefill worker stops, or does not start, and what is left of it then: nothing."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.errors import ConfigError, Unavailable
from pdserve.worker import pool_worker
from prefill_worker.scheduler import State
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.decode_worker.small_bundle import small_bundle
from tests.engine.tiny import prompt, spec, tiny_engine
from tests.prefill_worker.rig import gated_engine, rig
from tests.prefill_worker.test_lifecycle import soon


async def test_a_stuck_step_does_not_keep_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_worker, "SETTLE_S", 0.2)
    engine = gated_engine()
    async with rig(prefill=engine, grace_s=0.0) as made:
        call = made.start(made.request(prompt(9)))
        await soon(engine.reached.wait())
        try:
            await soon(made.worker.stop())
            assert "1 requests with 3 pages are abandoned" in caplog.text
            assert "an engine step that does not end is abandoned" in caplog.text
            assert made.worker.hung
            with pytest.raises(Unavailable):
                await made.outcome(call)
        finally:
            engine.open()
        assert made.worker._thread.close(5.0)
        [job] = made.worker.pipeline.jobs.values()  # its pages were not given back under the step
        assert made.worker.blocks.held_count == 3
        made.worker.pipeline.scheduler.release(job.prompt, State.ABORTED)
        made.worker.pipeline.quiet.set()


async def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    bundle = small_bundle()
    with pytest.raises(ConfigError) as failure:
        PrefillWorker(tiny_engine(spec(vocab_size=bundle.vocab_size - 1)), bundle, PrefillSettings())
    assert (failure.value.reason, failure.value.field) == ("SIZE_MISMATCH", "tokenizer")


async def test_drain_lets_running_prompts_finish_and_takes_no_new_one() -> None:
    engine = gated_engine()
    async with rig(prefill=engine, grace_s=5.0) as made:
        call = made.start(made.request(prompt(20)))
        await soon(engine.reached.wait())
        draining = asyncio.ensure_future(made.worker.drain())
        await made.until(lambda: made.worker.state == "draining")
        with pytest.raises(Unavailable) as failure:
            await made.send(made.request(prompt(9)))
        assert (failure.value.reason, failure.value.retryable) == ("DRAINING", True)
        engine.open()
        assert (await made.outcome(call)).sent_tokens == 20
        await soon(draining)


async def test_drain_ends_what_outlasts_the_grace_period() -> None:
    async with rig() as made:
        made.decode.may_grant.clear()
        calls = [made.start(made.request(prompt(30, seed=n))) for n in range(6)]
        await made.until_waiting(2)
        await soon(made.worker.drain(0.0))
        assert made.worker.blocks.held_count == 0
        for call in calls:
            with pytest.raises(Unavailable) as failure:
                await made.outcome(call)
            assert failure.value.reason == "DRAINING"


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with rig() as made:
        port = int(made.worker.address.rsplit(":", 1)[1])
        second = PrefillWorker(tiny_engine(), None, PrefillSettings(port=port))
        with pytest.raises(ConfigError) as failure:
            await second.start()
        assert failure.value.reason == "CANNOT_BIND"


async def test_no_task_outlives_a_worker() -> None:
    before = asyncio.all_tasks()
    async with rig() as made:
        await made.run(prompt(20))
        await made.worker.stop()
        await made.worker.stop()
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()
