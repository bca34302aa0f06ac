"""The prefill contract: five preconditions, padded batches, cache invariants, first-step logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.engine import checks
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, EngineConfig
from pdserve.engine.prefill import PrefillInputs, prefill
from pdserve.errors import InvalidRequest, PdserveError
from tests.engine import oracle
from tests.engine.tiny import prompt, run, spec, tiny_engine, tiny_model

ROWS = (prompt(9, 1), prompt(4, 2), prompt(1, 3))
TABLES = ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def padded(rows: Sequence[Sequence[int]], side: str, held: Sequence[int] | None = None) -> PrefillInputs:
    """Rows as one rectangle. Padding carries an id outside the vocabulary: nobody may look at it."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), 999), torch.zeros(len(rows), width, dtype=torch.int64)
    positions = torch.full((len(rows), width), -1)
    for b, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        start = held[b] if held else 0
        ids[b, columns], mask[b, columns] = torch.tensor(row), 1
        positions[b, columns] = torch.arange(start, start + len(row))
    return PrefillInputs(ids, mask, positions)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_padded_batch_equals_each_prompt_alone(side: str, chunk: int, deterministic: bool) -> None:
    engine = tiny_engine(dtype="float64", deterministic=deterministic)
    result = prefill(engine, padded(ROWS, side), TABLES, chunk_tokens=chunk, checks=checks.ALL)
    model = tiny_model(dtype="float64")
    assert result.next_logits.shape == (3, 97) and result.valid_lengths.tolist() == [9, 4, 1]
    assert result.counters.positions == 3 * (9 + 4 + 1)
    for b, row in enumerate(ROWS):
        torch.testing.assert_close(result.next_logits[b], oracle.logits(model, row)[-1], rtol=0, atol=1e-10)
    metadata = result.cache.metadata
    assert metadata.valid_lengths == (9, 4, 1) and metadata.positions[1] == range(4)
    assert (metadata.axis_order, metadata.page_size, metadata.keys_rotated) == ("hnd", 4, True)
    assert metadata.contract_digest == engine.contract().digest()
    for layer in range(3):
        for b, row in enumerate(ROWS):
            k, v = result.cache.sequence(layer, b)
            assert k.shape == v.shape == (2, len(row), 8)


def test_bits_do_not_depend_on_batch_mates_in_deterministic_mode() -> None:
    engine = tiny_engine(deterministic=True)
    together = prefill(engine, padded(ROWS, "left"), TABLES).next_logits
    for b, row in enumerate(ROWS):
        assert torch.equal(prefill(engine, padded([row], "right"), TABLES[:1]).next_logits[0], together[b])


def test_shape_ledger_of_the_small_example() -> None:
    of = spec(
        vocab_size=20, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, positions=replace(spec().positions, dims=4)
    )
    engine = Engine(tiny_model(of), EngineConfig(dtype="fp32", pages=3, page_size=4))
    result = prefill(engine, padded([prompt(12, vocab=20)], "left"), ((0, 1, 2),))
    assert result.next_logits.shape == (1, 20)
    assert sum(t.numel() for layer in range(2) for t in result.cache.sequence(layer, 0)) == 192


def test_reused_prefix_continues_its_positions() -> None:
    engine = tiny_engine(dtype="float64")
    run(engine, Chunk("warm", ROWS[0][:4], 0, TABLES[0], "none"))
    inputs = padded([ROWS[0][4:], ROWS[1]], "left", held=(4, 0))
    result = prefill(engine, inputs, TABLES[:2], held=(4, 0), checks=checks.ALL)
    expected = oracle.logits(tiny_model(dtype="float64"), ROWS[0])[-1]
    torch.testing.assert_close(result.next_logits[0], expected, rtol=0, atol=1e-10)
    assert result.valid_lengths.tolist() == [9, 4]


def set_at(inputs: PrefillInputs, field: str, row: int, column: int, value: int) -> PrefillInputs:
    changed = getattr(inputs, field).clone()
    changed[row, column] = value
    return replace(inputs, **{field: changed})


GOOD = padded(ROWS, "left")
VIOLATIONS: list[tuple[str, str, PrefillInputs, dict[str, Any]]] = [
    ("TOKEN_OUT_OF_RANGE", "input_ids", set_at(GOOD, "input_ids", 0, 8, 97), {}),
    ("TOKEN_OUT_OF_RANGE", "input_ids", set_at(GOOD, "input_ids", 1, 5, -1), {}),
    ("MASK_VALUES", "attention_mask", set_at(GOOD, "attention_mask", 0, 0, 2), {}),
    ("MASK_DISAGREES", "attention_mask", set_at(GOOD, "attention_mask", 0, 0, 0), {}),
    ("MASK_DISAGREES", "attention_mask", set_at(GOOD, "positions", 2, 0, 0), {}),
    ("POSITION_UNDEFINED", "positions", set_at(GOOD, "positions", 0, 4, -1), {}),
    ("POSITION_UNDEFINED", "positions", set_at(GOOD, "attention_mask", 1, 0, 1), {}),
    ("POSITION_GAP", "positions", set_at(GOOD, "positions", 0, 8, 9), {}),
    ("POSITION_GAP", "positions", GOOD, {"held": (4, 0, 0)}),
    ("EMPTY_PROMPT", "attention_mask", padded([*ROWS[:2], ()], "left"), {}),
    ("SIZE_MISMATCH", "tokenizer", GOOD, {"tokenizer_size": 98}),
    ("NOT_INFERENCE", "dropout", replace(GOOD, dropout=0.1), {}),
    ("SHAPE", "input_ids", replace(GOOD, positions=GOOD.positions[:2]), {}),
]


@pytest.mark.parametrize("reason, field, inputs, options", VIOLATIONS)
def test_preconditions(
    reason: str, field: str, inputs: PrefillInputs, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    monkeypatch.setattr(engine.decoder, "embed", unreachable)
    with pytest.raises(PdserveError) as error:
        prefill(engine, inputs, TABLES, **options)
    assert (error.value.reason, error.value.field) == (reason, field)


@pytest.mark.parametrize("part", ["embedding", "output vocabulary"])
def test_sizes_of_embedding_and_head_must_fit_the_model(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, decoder = tiny_engine(), tiny_engine(spec(vocab_size=96)).decoder
    if part == "embedding":
        engine.decoder.embedding = decoder.embedding
    else:
        engine.decoder.head = decoder.head
    monkeypatch.setattr(engine.decoder, "embed", unreachable)
    with pytest.raises(InvalidRequest) as error:
        prefill(engine, GOOD, TABLES)
    assert (error.value.reason, error.value.field) == ("SIZE_MISMATCH", part)


def test_weights_in_training_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.tensors["layers.1.o.weight"].requires_grad_(True)
    engine = Engine(model, EngineConfig(dtype="fp32", pages=9, page_size=4))
    monkeypatch.setattr(engine.decoder, "embed", unreachable)
    with pytest.raises(InvalidRequest) as error:
        prefill(engine, GOOD, TABLES)
    assert (error.value.reason, error.value.field) == ("NOT_INFERENCE", "weights")


def unreachable(*_: object) -> None:
    pytest.fail("a layer ran although a precondition was violated")
