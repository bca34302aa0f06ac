"""What must hold after a step, each statement under a name, and how far two correct runs may differ.

While serving, both workers run `check_written` after every step: a count per layer, and the one
check that costs nothing. `check_step` needs a trace of all tensors; it runs in `prefill()` and
in tests, never while serving. `check_tokenizer` runs once, when a worker or a local runner is
built.

Every check of `check_step` looks at one mechanism and takes the others' results as given, so
that a report names the part at fault. In the order of diagnosis:

    token_positions      each row's position is its token's place in the block table
    causality            a row sees its own sequence up to itself, within the window, no more
    equal_lengths        every layer's cache holds every token, as it was computed
    attention_reference  attention equals the plain reference over the cached keys (costly)
    first_step_prefix    logits belong to the last token of their own sequence

Two runs are compared layer by layer by pdserve/verify.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.attention import attend
from pdserve.engine.batch import Batch
from pdserve.engine.convolution import reference
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepOutput, StepPlan
from pdserve.engine.positions import alibi_slopes
from pdserve.engine.spec import ModelSpec
from pdserve.engine.trace import LayerTrace, StepTrace
from pdserve.errors import ConfigError, Internal

# Largest difference per dtype between two correct ways to compute the same number, relative
# to the largest absolute value of the tensor compared.
TOLERANCES = {"float64": 1e-11, "fp32": 2e-5, "fp16": 1e-2, "bf16": 6e-2}


@dataclass(frozen=True)
class Step:
    """What the checks look at."""

    engine: Engine
    batch: Batch
    layers: list[LayerTrace]
    output: StepOutput
    tolerance: float

    def rows(self) -> list[tuple[Chunk, slice]]:
        """Each chunk and its rows."""
        found, row = [], 0
        for chunk in self.batch.chunks:
            found.append((chunk, slice(row, row + len(chunk.ids))))
            row += len(chunk.ids)
        return found


def check_tokenizer(spec: ModelSpec, tokens: int) -> None:
    """Raises ConfigError for a tokenizer with more ids than the model has; 0: there is none.

    Embedding and output vocabulary are compared with the spec when an engine is built. A model
    may have more ids than its tokenizer: padding rows, which no text gives.
    """
    if tokens > spec.vocab_size:
        raise ConfigError(
            f"it knows {tokens} ids, the model {spec.vocab_size}",
            reason="SIZE_MISMATCH",
            field="tokenizer",
            remedy="use the model's own tokenizer",
        )


def check_written(plan: StepPlan, output: StepOutput) -> None:
    """Raises Internal unless every layer stored K and V of exactly the step's tokens."""
    tokens = sum(len(chunk.ids) for chunk in plan.chunks)
    for layer, rows in enumerate(output.written):
        if rows != tokens:
            raise _broken("equal_lengths", f"layer {layer} stored {rows} of {tokens} tokens")


def check_step(engine: Engine, trace: StepTrace, output: StepOutput, names: frozenset[str]) -> None:
    """Raises Internal, with the check's name as reason, for the first statement that does not hold."""
    if trace.batch is None:
        raise Internal("the trace is of no step", field="trace")
    step = Step(engine, trace.batch, trace.layers, output, TOLERANCES[engine.config.dtype])
    with torch.inference_mode():
        for name, check in CHECKS.items():
            if name in names:
                check(step)


def token_positions(step: Step) -> None:
    """The slot that a row is written to, found in the block table, gives its position."""
    size = step.engine.cache.page_size
    for chunk, rows in step.rows():
        place = {page: index for index, page in enumerate(chunk.pages)}
        for position, slot in zip(step.batch.positions[rows].tolist(), step.batch.slots[rows].tolist(), strict=True):
            expected = place[slot // size] * size + slot % size
            if position != expected:
                raise _broken("token_positions", f"{chunk.key}: the token at {expected} was given position {position}")


def causality(step: Step) -> None:
    """Every row saw exactly the keys up to itself, or its window of them."""
    for index, layer in enumerate(step.layers):
        window = step.engine.spec.window(index)
        for chunk, rows in step.rows():
            for offset, (first, end) in enumerate(
                zip(layer.first[rows].tolist(), layer.end[rows].tolist(), strict=True)
            ):
                own = chunk.start + offset
                if end != own + 1 or first != (max(0, own + 1 - window) if window else 0):
                    message = f"layer {index}, {chunk.key}: position {own} sees keys {first} to {end - 1}"
                    raise _broken("causality", message)


def equal_lengths(step: Step) -> None:
    """Every layer holds K and V of every token of the step, bit for bit."""
    cache = step.engine.cache
    for index, layer in enumerate(step.layers):
        for chunk, rows in step.rows():
            k, v = cache.sequence(index, chunk.pages, chunk.start + len(chunk.ids))
            for name, stored, computed in zip(cache.planes[index], (k, v), (layer.k, layer.v), strict=False):
                wanted = computed[rows].to(cache.dtype).transpose(0, 1)  # [Hkv, n, d]
                wrong = torch.nonzero((stored[:, chunk.start :] != wanted).any(-1).any(0))
                if wrong.numel():
                    token = chunk.start + int(wrong[0])
                    raise _broken("equal_lengths", f"layer {index}, {chunk.key}: {name} of token {token} is not cached")


def attention_reference(step: Step) -> None:
    """Attention equals the reference over the sequence's own cached keys."""
    spec, cache = step.engine.spec, step.engine.cache
    slopes = alibi_slopes(spec, str(cache.storage.device))
    for index, layer in enumerate(step.layers):
        for chunk, rows in step.rows():
            k, v = cache.sequence(spec.kv_layer(index), chunk.pages, chunk.start + len(chunk.ids))
            numbers = torch.arange(k.shape[1], device=k.device)
            visible = (numbers >= layer.first[rows, None]) & (numbers < layer.end[rows, None])
            heads = slopes, step.engine.decoder.layers[index].sinks
            expected = layer.q[rows]
            convolution = step.engine.decoder.layers[index].conv
            if convolution is not None:
                expected = reference(convolution, expected, k, visible)
            elif spec.shape_of(index).kv_heads:
                expected = attend(expected, k, v, visible, spec.scale_of(index), spec.soft_cap, *heads)
            elif not expected.numel():
                continue
            error = relative_error(layer.attended[rows], expected)
            if not error <= step.tolerance:
                raise _broken("attention_reference", f"layer {index}, {chunk.key}: attention is off by {error:.2g}")


def first_step_prefix(step: Step) -> None:
    """Logits are the head's scores of the last token of the sequence they are given to."""
    final = step.layers[-1].y
    for chunk, rows in step.rows():
        if chunk.logits == "none":
            continue
        own = final[rows] if chunk.logits == "all" else final[rows][-1:]
        expected = step.engine.decoder_logits(own)
        error = relative_error(step.output.logits[chunk.key], expected)
        if not error <= step.tolerance:
            raise _broken("first_step_prefix", f"{chunk.key}: the logits are of another prefix (off by {error:.2g})")


CHECKS: dict[str, Callable[[Step], None]] = {
    check.__name__: check
    for check in (token_positions, causality, equal_lengths, attention_reference, first_step_prefix)
}
ALL = frozenset(CHECKS)
INVARIANTS = ALL - {"attention_reference"}


def relative_error(got: Tensor, expected: Tensor, whole: Tensor | None = None) -> float:
    """Largest absolute difference over the largest absolute value of `whole` (default: expected).

    nan if got or expected has one; infinite for different shapes.
    """
    if got.shape != expected.shape:
        return float("inf")
    difference = (got.double() - expected.double()).abs().max()
    scale = (expected if whole is None else whole).double().abs().max()
    return float(difference / scale.clamp(min=1e-30))


def _broken(name: str, message: str) -> Internal:
    return Internal(message, reason=name, field="checks", remedy="the result was not released; report this")
