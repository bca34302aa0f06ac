"""Engine.step: mixed plans, refusals, cancellation, announcements, counters, the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, EngineConfig, StepCounters, StepPlan
from pdserve.errors import Cancelled, ConfigError, Internal, InvalidRequest, PdserveError
from tests.engine import oracle
from tests.engine.tiny import prompt, run, spec, tiny_engine, tiny_model

WINDOWS = {"sliding_window": (0, 5, 0)}


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_mixed_plan_equals_every_sequence_alone(order: str, page_size: int) -> None:
    of = spec(**WINDOWS)
    engine = tiny_engine(of, "float64", page_size=page_size, pages=400, axis_order=order)
    engine.cache.storage.fill_(float("nan"))  # what earlier owners left
    engine.cache.storage.narrow(engine.cache._slot_axis, engine.cache.pad * page_size, page_size).zero_()
    lengths = {"long": 61, "short": 2, "chunk": 30, "fresh": 9, "one": 1, "middle": 17}
    ids = {key: prompt(length, seed=length) for key, length in lengths.items()}
    pages = {key: tuple(range(i * 64, i * 64 + 64))[::-1] for i, key in enumerate(lengths)}
    for key in ("long", "short", "middle"):  # all but the last token
        run(engine, Chunk(key, ids[key][:-1], 0, pages[key], "none"))
    run(engine, Chunk("chunk", ids["chunk"][:13], 0, pages["chunk"], "none"))
    begin = {"long": 60, "short": 1, "middle": 16, "chunk": 13}
    plan = [Chunk(key, ids[key][begin.get(key, 0) :], begin.get(key, 0), pages[key]) for key in lengths]
    out = run(engine, *plan)
    model = tiny_model(of, "float64")
    pairs = 0
    for chunk in plan:
        torch.testing.assert_close(
            out.logits[chunk.key][0], oracle.logits(model, ids[chunk.key])[-1], rtol=0, atol=1e-10
        )
        for position in range(chunk.start, len(ids[chunk.key])):
            pairs += 4 * (2 * (position + 1) + min(5, position + 1))
    assert out.counters == StepCounters(3 * sum(len(chunk.ids) for chunk in plan), pairs)


def test_logits_are_what_was_asked_for_and_can_be_changed() -> None:
    engine = tiny_engine()
    out = run(
        engine,
        Chunk("none", prompt(5), 0, (0, 1), "none"),
        Chunk("last", prompt(5), 0, (2, 3), "last"),
        Chunk("all", prompt(5), 0, (4, 5), "all"),
    )
    assert {key: tuple(t.shape) for key, t in out.logits.items()} == {"last": (1, 97), "all": (5, 97)}
    torch.testing.assert_close(out.logits["all"][-1:], out.logits["last"])
    out.logits["last"][0, 3] -= 1.0
    assert not run(engine, Chunk("none", prompt(5), 0, (0, 1), "none")).logits


BAD: list[tuple[str, type[PdserveError], dict[str, Any]]] = [
    ("EMPTY_PROMPT", InvalidRequest, {"ids": ()}),
    ("TOKEN_OUT_OF_RANGE", InvalidRequest, {"ids": (1, 97)}),
    ("TOKEN_OUT_OF_RANGE", InvalidRequest, {"ids": (-1,)}),
    ("NEGATIVE_START", InvalidRequest, {"start": -1}),
    ("PROMPT_TOO_LONG", InvalidRequest, {"start": 511, "ids": (1, 2)}),
    ("PAGES_TOO_FEW", InvalidRequest, {"pages": (3,), "ids": (1,) * 5}),
    ("PAGES_TOO_FEW", InvalidRequest, {"pages": ()}),
    ("PAGE_OUT_OF_RANGE", Internal, {"pages": (64, 1)}),
    ("SHARED_PAGE", Internal, {"pages": (9, 1)}),
    ("SHARED_PAGE", Internal, {"pages": (1, 1), "ids": (1,) * 5}),
    ("DUPLICATE_KEY", Internal, {"key": "other"}),
    ("INVALID_LOGITS", InvalidRequest, {"logits": "some"}),
]


@pytest.mark.parametrize("reason, kind, fields", BAD)
def test_bad_chunks_are_refused_before_anything_is_written(
    reason: str, kind: type[PdserveError], fields: dict[str, Any]
) -> None:
    engine, layers = tiny_engine(), list[int]()
    chunk = Chunk(**{"key": "r", "ids": (1, 2), "start": 0, "pages": (0, 1), **fields})
    with pytest.raises(kind) as error:
        engine.step(StepPlan((Chunk("other", (1, 2), 0, (9,)), chunk)), on_layer=layers.append)
    assert error.value.reason == reason
    assert not layers and not bool(engine.cache.storage.any())


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(InvalidRequest) as error:
        tiny_engine().step(StepPlan(()))
    assert error.value.reason == "EMPTY_STEP"


def test_on_layer_finds_final_keys_and_values() -> None:
    engine, seen = tiny_engine(), list[torch.Tensor]()
    engine.step(
        StepPlan((Chunk("r", prompt(6), 0, (0, 1)),)),
        on_layer=lambda layer: seen.append(engine.cache.storage[layer].clone()),
    )
    assert len(seen) == 3
    for layer, at_call in enumerate(seen):
        assert torch.equal(engine.cache.storage[layer], at_call)


def test_cancellation_is_noticed_between_layers() -> None:
    engine, layers = tiny_engine(), list[int]()
    with pytest.raises(Cancelled):
        engine.step(
            StepPlan((Chunk("r", prompt(6), 0, (0, 1)),)), on_layer=layers.append, cancelled=lambda: len(layers) == 2
        )
    assert layers == [0, 1]


def test_kv_dtype_may_differ_from_the_models() -> None:
    engine = tiny_engine(kv_dtype="bf16")
    plain = tiny_engine()
    a, b = (run(e, Chunk("r", prompt(20), 0, tuple(range(5)))).logits["r"] for e in (engine, plain))
    assert engine.cache.storage.dtype == torch.bfloat16
    assert 0 < float((a - b).abs().max()) < 0.5
    run(engine, Chunk("r", prompt(1), 20, tuple(range(6))))


def test_contract_tells_what_the_engine_promises() -> None:
    engine = tiny_engine(of=spec(**WINDOWS), dtype="bf16", kv_dtype="fp32", deterministic=True, axis_order="nhd")
    contract = engine.contract(b"t" * 32)
    assert contract.model_digest == tiny_model(spec(**WINDOWS)).digest
    assert (contract.kv_dtype, contract.weight_dtype, contract.activation_dtype) == ("fp32", "bf16", "bf16")
    assert (contract.page_size, contract.page_axis_order, contract.device) == (4, "nhd", "cpu")
    assert contract.attention.sliding_window == (0, 5, 0) and len(contract.planes) == 3
    assert contract.tokenizer_digest == b"t" * 32 and contract.context_limit == 64 * 4
    assert contract.info["torch"] == torch.__version__
    assert contract.info["deterministic"] == "true" and contract.info["kernels"].startswith("plain")
    assert tiny_engine().contract().info["kernels"] == "plain (kernels = plain)"


def test_engine_refuses_a_model_in_another_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        Engine(tiny_model(dtype="bf16"), EngineConfig(dtype="fp32"))
