"""The prefill contract for a rectangular batch: inputs checked, one snapshot in, logits and cache out.

For whoever holds padded tensors, as a peer library gives them, and for the tests that hold the
engine against one; no pool calls it. Workers get ragged prompts, have the same preconditions
checked at admission (`check_token_ids` in pdserve/request.py) and when an engine is built, and
run the same `Engine.step`.

Takes [B, n] ids, a validity mask and positions, left or right padded; runs the valid tokens
and returns each sequence's logits at its last valid position together with the cache of
exactly that prefix. Padding never reaches the engine. What must hold before the first layer is
in `check_inputs`, what must hold after the last one in `checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.checks import INVARIANTS, check_step, check_tokenizer
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepCounters, StepPlan
from pdserve.engine.trace import StepTrace
from pdserve.errors import InvalidRequest


@dataclass(frozen=True)
class PrefillInputs:
    """input_ids, attention_mask (1 valid, 0 padding), positions (-1 at padding): int [B, n].

    A row's valid positions are consecutive and start at the number of tokens that its pages
    already hold (0 without prefix reuse).
    """

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    dropout: float = 0.0


@dataclass(frozen=True)
class CacheMetadata:
    """What a reader must know and compare before it uses the cache."""

    positions: tuple[range, ...]  # of each sequence's cached tokens
    valid_lengths: tuple[int, ...]
    page_size: int
    axis_order: str
    kv_dtype: str
    keys_rotated: bool
    contract_digest: bytes  # model, position scheme, attention, planes


@dataclass(frozen=True)
class CacheView:
    """The batch's cache: block tables into the engine's pages, and what they mean."""

    engine: Engine
    tables: tuple[tuple[int, ...], ...]
    metadata: CacheMetadata

    def sequence(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, valid_length, d] of one sequence; keys as used by attention."""
        return self.engine.cache.sequence(layer, self.tables[row], self.metadata.valid_lengths[row])


@dataclass(frozen=True)
class PrefillResult:
    """Raw scores and cache of the same prefix; no token has been chosen."""

    next_logits: Tensor  # [B, vocab_size] fp32, or float64 for a float64 model
    cache: CacheView
    valid_lengths: Tensor  # int64 [B]
    counters: StepCounters


def prefill(
    engine: Engine,
    inputs: PrefillInputs,
    tables: Sequence[Sequence[int]],
    *,
    held: Sequence[int] | None = None,
    tokenizer_size: int = 0,
    chunk_tokens: int = 0,
    checks: frozenset[str] = INVARIANTS,
) -> PrefillResult:
    """Runs a batch of prompts; K and V land in the pages of `tables`.

    tables: one block table per row. held: tokens that each row's pages hold already.
    tokenizer_size: ids that the tokenizer knows (0: there is none). Chunks of `chunk_tokens`
    (0: whole). checks: names from `checks.CHECKS` to run after each step.
    Raises InvalidRequest for a violated precondition, before the first layer (ConfigError for
    the tokenizer); Internal for a violated invariant.
    """
    starts = tuple(held) if held is not None else (0,) * inputs.input_ids.shape[0]
    check_inputs(engine, inputs, starts, tokenizer_size)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)]
    lengths = tuple(start + len(row) for start, row in zip(starts, rows, strict=True))
    size = chunk_tokens or max(len(row) for row in rows)
    logits: dict[str, Tensor] = {}
    counters = StepCounters()
    for first in range(0, max(len(row) for row in rows), size):
        chunks = tuple(
            Chunk(str(b), tuple(row[first : first + size]), starts[b] + first, tuple(tables[b]))
            for b, row in enumerate(rows)
            if row[first:]
        )
        trace = StepTrace() if checks else None
        out = engine.step(StepPlan(chunks), trace=trace)
        if trace is not None:
            check_step(engine, trace, out, checks)
        logits.update(out.logits)
        counters += out.counters
    view = CacheView(engine, tuple(tuple(table) for table in tables), _metadata(engine, lengths))
    next_logits = torch.stack([logits[str(b)][-1] for b in range(len(rows))])
    return PrefillResult(next_logits, view, torch.tensor(lengths), counters)


def check_inputs(engine: Engine, inputs: PrefillInputs, held: Sequence[int], tokenizer_size: int = 0) -> None:
    """The five preconditions, in the order of diagnosis. Raises InvalidRequest (ConfigError for the tokenizer)."""
    _check_inference(engine, inputs)
    _check_sizes(engine, tokenizer_size)
    ids, mask, positions = inputs.input_ids, inputs.attention_mask, inputs.positions
    if ids.dim() != 2 or not ids.shape == mask.shape == positions.shape or 0 in ids.shape or len(held) != len(ids):
        shapes = ", ".join(str(list(t.shape)) for t in (ids, mask, positions))
        raise _refused("SHAPE", "input_ids", f"ids, mask and positions are {shapes}", "send three [B, n] tensors")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise _refused("MASK_VALUES", "attention_mask", "the validity mask holds other values", "use 0 and 1 only")
    valid = mask.bool()
    for row, start in enumerate(held):
        _check_positions(row, valid[row], positions[row], start)
    wrong = torch.nonzero(valid & ((ids < 0) | (ids >= engine.spec.vocab_size)))
    if len(wrong):
        row, column = wrong[0].tolist()
        message = f"id {int(ids[row, column])} in row {row}, column {column} is outside the vocabulary"
        raise _refused("TOKEN_OUT_OF_RANGE", "input_ids", message, f"use ids from 0 to {engine.spec.vocab_size - 1}")


def _check_positions(row: int, valid: Tensor, positions: Tensor, start: int) -> None:
    defined = positions >= 0
    if bool((valid & ~defined).any()):
        raise _refused(
            "POSITION_UNDEFINED", "positions", f"row {row} has a valid token without a position", "number it"
        )
    if bool((~valid & defined).any()):
        message = f"row {row} gives a position to a column that the mask calls padding"
        raise _refused("MASK_DISAGREES", "attention_mask", message, "give padding the position -1")
    count = int(valid.sum())
    if not count:
        raise _refused("EMPTY_PROMPT", "attention_mask", f"row {row} has no valid token", "send at least one token")
    if not torch.equal(positions[valid], torch.arange(start, start + count, device=positions.device)):
        message = f"the positions of row {row} are not {start} to {start + count - 1}"
        raise _refused("POSITION_GAP", "positions", message, "number valid tokens on from the tokens held")


def _check_sizes(engine: Engine, tokenizer_size: int) -> None:
    vocab, decoder = engine.spec.vocab_size, engine.decoder
    sizes = {"embedding": decoder.embedding.shape[0], "output vocabulary": decoder.head.outputs}
    for name, size in sizes.items():
        if size != vocab:
            message = f"the {name} has {size} rows, the model {vocab} ids"
            raise _refused("SIZE_MISMATCH", name, message, "load one checkpoint's tensors")
    check_tokenizer(engine.spec, tokenizer_size)


def _check_inference(engine: Engine, inputs: PrefillInputs) -> None:
    if inputs.dropout:
        raise _refused("NOT_INFERENCE", "dropout", f"dropout is {inputs.dropout}", "turn dropout off")
    if engine.decoder.trainable:
        raise _refused("NOT_INFERENCE", "weights", "the weights require gradients", "freeze the model snapshot")


def _metadata(engine: Engine, lengths: tuple[int, ...]) -> CacheMetadata:
    return CacheMetadata(
        positions=tuple(range(length) for length in lengths),
        valid_lengths=lengths,
        page_size=engine.config.page_size,
        axis_order=engine.config.axis_order,
        kv_dtype=engine.cache.dtype_name,
        keys_rotated=engine.spec.positions.kind == "rope",
        contract_digest=engine.contract().digest(),
    )


def _refused(reason: str, field: str, message: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(message, reason=reason, field=field, remedy=remedy)
