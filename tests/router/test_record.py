"""What is told about a request: which workers it could have had, which it had and why, and where its time went."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from decode_worker.sequence import State
from pdserve.errors import DataLoss, PdserveError, Unavailable
from pdserve.registry.records import DECODE, PREFILL
from pdserve.request import SamplingParams
from pdserve.rpc.events import GroupPair, HandoffRecord, TokenBatch
from router.backlog import Event
from router.record import group_pair
from router.request import Ask, TokenPrompt
from router.wire import WORKER_LOST
from tests.engine.tiny import prompt
from tests.router.peers import BadPrefill, serving
from tests.router.support import MODEL, VOCAB, House, contract, finish_of, house, ids_of, record_of

IDS = prompt(50, seed=3, vocab=VOCAB)
BODY: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip


async def ask(made: House, want_record: bool = True, **sampling: Any) -> tuple[list[Event], PdserveError | None]:
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | sampling
    request = await made.router.intake.take(Ask(TokenPrompt(IDS), SamplingParams(**given), want_record=want_record))
    events: list[Event] = []
    try:
        async for event in made.router.orchestrator.generate(request):
            events.append(event)
    except PdserveError as error:
        return events, error
    return events, None


async def test_a_record_tells_the_candidates_the_choice_and_the_stages() -> None:
    async with house(prefills=2) as made:
        stranger = contract(model_digest=b"x" * 32, tokenizer_digest=b"", vocab_size=VOCAB)
        await made.add_ghost("stranger", DECODE, contract=stranger)
        events, _ = await ask(made)
        record = record_of(events)
        assert record.outcome == finish_of(events).reason == "length"
        assert record.output_tokens == len(ids_of(events)) == 8
        assert record.candidates == (GroupPair(("p0", "p1"), ("d0",), 2, 1),)
        (rejected,) = record.rejected
        assert (rejected.prefill_workers, rejected.decode_workers) == (("p0", "p1"), ("stranger",))
        assert "MODEL_DIGEST" in {difference.code for difference in rejected.differences}
        (attempt,) = record.history
        assert (attempt.prefill_worker, attempt.decode_worker) == (record.prefill_worker, "d0")
        assert (attempt.prefill_candidates, attempt.decode_candidates) == (2, 1)
        assert attempt.prefill_cost == 50.0  # an idle worker that has none of the prompt
        assert (attempt.outcome, attempt.failed_worker, attempt.first_index, attempt.output_tokens) == (
            "length", "", 0, 8,
        )  # fmt: skip
        stages = [record.intake_ms, record.admitted_ms, record.first_token_ms, record.total_ms]
        assert stages == sorted(stages) and stages[0] > 0
        assert record.total_ms >= record.first_token_ms + record.decode_ms > record.first_token_ms
        assert all(0 < some_ms < record.total_ms for some_ms in (record.transfer_ms, record.push_ms, record.prefill_ms))
        for name in ("bytes_sent", "frames_sent", "sent_tokens", "queued_ms", "prefill_ms", "push_ms", "transfer_ms"):
            assert getattr(attempt, name) == getattr(record, name)
        assert attempt.begun_ms + attempt.total_ms == pytest.approx(record.total_ms, abs=50)


async def test_every_attempt_is_told_with_its_outcome() -> None:
    peer = BadPrefill(DataLoss("a byte"))
    async with house() as made, serving(peer) as address:
        await made.add_ghost("gone", DECODE)
        await made.add_ghost("bad", PREFILL, address)
        for worker in made.workers:
            made.make_look_busy(worker.worker_id)
        events, _ = await ask(made)
        told = [(a.prefill_worker, a.decode_worker, a.outcome, a.failed_worker) for a in record_of(events).history]
        assert told[0] == ("bad", "gone", WORKER_LOST, "gone")
        assert told[1] == ("bad", "d0", "DATA_LOSS", "bad")
        assert told[2:] == [("p0", "d0", "length", "")]
        assert record_of(events).attempts == 3


async def test_a_failed_request_has_its_record_before_the_error_and_one_that_did_not_ask_has_none() -> None:
    async with house(prefills=0) as made:
        await made.add_ghost("gone", PREFILL)
        events, error = await ask(made)
        assert error is not None
        record = events[-1]
        assert isinstance(record, HandoffRecord)
        assert (record.outcome, record.output_tokens, record.attempts) == (error.reason, 0, 1) != ("", 0, 1)
        assert record.first_token_ms == record.decode_ms == 0.0 < record.total_ms
        assert record.history[0].failed_worker == "gone"
    async with house(prefills=0) as made:
        await made.add_ghost("gone", PREFILL)
        events, error = await ask(made, want_record=False)
        assert error is not None and not any(isinstance(event, HandoffRecord) for event in events)


async def test_the_log_has_the_same_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with house() as made:
        with caplog.at_level(logging.INFO, "router.record"):
            events, _ = await ask(made)
        (line,) = [r.getMessage() for r in caplog.records if r.name == "router.record"]
        assert "\n" not in line
        told = json.loads(line.removeprefix("request "))
        assert told.pop("label") == ""
        assert told == json.loads(json.dumps(asdict(record_of(events))))


async def test_over_http_it_comes_in_an_extension_field_when_asked_for() -> None:
    async with house() as made:
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=20) as http:
            plain = (await http.post("/v1/chat/completions", json=BODY)).json()
            assert "pdserve_record" not in plain
            whole = (await http.post("/v1/chat/completions", json={**BODY, "pdserve_record": True})).json()
            record = whole["pdserve_record"]
            assert whole["choices"] == plain["choices"]
            assert (record["outcome"], record["output_tokens"], record["history"][0]["decode_worker"]) == (
                "length", 4, "d0",
            )  # fmt: skip
            assert record["prompt_tokens"] == whole["usage"]["prompt_tokens"]
            refused = await http.post("/v1/chat/completions", json={**BODY, "pdserve_record": "yes"})
            assert refused.status_code == 400
        await made.prefills.pop().stop()
        await made.add_ghost("gone", PREFILL)
        async with httpx.AsyncClient(base_url=f"http://{made.router.http_address}", timeout=20) as http:
            for stream in (False, True):
                await made.router.registry.heartbeat(
                    "gone", made.member("gone").record.incarnation, "ready", made.member("gone").record.load
                )
                await made.router.pool.refresh()
                answer = await http.post(
                    "/v1/chat/completions", json={**BODY, "stream": stream, "pdserve_record": True}
                )
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "worker_lost"
                assert answer.json()["pdserve_record"]["history"][0]["failed_worker"] == "gone"


def test_a_group_is_told_by_its_first_workers_and_its_size() -> None:
    many = tuple(f"p{n}" for n in range(100))
    group = group_pair(many, ("d",), ())
    assert (group.prefill_workers, group.prefill_count, group.decode_count) == (many[:8], 100, 1)


async def test_the_cached_part_of_a_prompt_is_that_of_the_first_attempt() -> None:
    """A resumed answer finds its own prompt at prefill; the client did not."""
    async with house(decodes=2) as made:
        request = await made.router.intake.take(
            Ask(TokenPrompt(IDS), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True), want_record=True)
        )
        events: list[Event] = []
        async for event in made.router.orchestrator.generate(request):
            events.append(event)
            if isinstance(event, TokenBatch) and event.first_index == 0:
                for worker in made.decodes:
                    for sequence in worker.pipeline.sequences:
                        worker.pipeline.end(sequence, State.ABORTED, Unavailable("by the test", reason="ENDED"))
        record = record_of(events)
        assert record.attempts == 2 and record.history[0].outcome == "ENDED"
        assert record.history[1].computed_tokens < len(IDS)
        assert finish_of(events).usage.cached_prompt_tokens == 0
        assert len(ids_of(events)) == finish_of(events).usage.output_tokens == 120


async def test_a_request_that_the_gate_refuses_has_a_line_with_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    async with house(decodes=0) as made:
        stranger = contract(model_digest=b"x" * 32, tokenizer_digest=b"", vocab_size=VOCAB)
        await made.add_ghost("stranger", DECODE, contract=stranger)
        with caplog.at_level(logging.INFO, "router.record"), pytest.raises(PdserveError) as caught:
            await made.router.intake.take(Ask(TokenPrompt(IDS), label="a\nb"))
        (line,) = [r.getMessage() for r in caplog.records if r.name == "router.record"]
        assert "\n" not in line
        told = json.loads(line.removeprefix("request "))
        assert (told["label"], told["outcome"]) == ("a\nb", caught.value.reason)
        assert "MODEL_DIGEST" in {difference["code"] for difference in told["rejected"]}
