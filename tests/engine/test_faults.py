"""Each failure that the prefill contract lists, planted in the real engine.

Every case shows three things: the named check reports the fault; with only that check off
nothing reports it; and the fault does harm (logits differ from the healthy engine's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine import attention, batch, blocks, checks, deterministic, engine, prefix
from pdserve.engine.blocks import BlockManager
from pdserve.engine.cache import PagedCache
from pdserve.engine.engine import Engine
from pdserve.engine.plain import Reads
from pdserve.engine.plan import Chunk, EngineConfig, StepOutput, StepPlan
from pdserve.engine.prefix import Prefix
from pdserve.engine.trace import StepTrace
from pdserve.errors import Internal
from tests.engine.divergence import baseline, first_divergence
from tests.engine.tiny import TINY, prompt, run, tiny_engine, tiny_model

Plant = Callable[[pytest.MonkeyPatch], None]
A, B = prompt(9, 1), prompt(4, 2)
TABLE_A, TABLE_B = (0, 1, 2), (3, 4)


def prefill_two(model: Engine, names: frozenset[str]) -> dict[str, Tensor]:
    """Two prompts of unequal length in one step."""
    return checked(model, names, Chunk("a", A, 0, TABLE_A), Chunk("b", B, 0, TABLE_B))


def reuse(model: Engine, names: frozenset[str]) -> dict[str, Tensor]:
    """The second part of a prompt on a prefix already cached."""
    checked(model, names, Chunk("a", A[:4], 0, TABLE_A, "none"))
    return checked(model, names, Chunk("a", A[4:], 4, TABLE_A))


def decode_two(model: Engine, names: frozenset[str]) -> dict[str, Tensor]:
    """One token each of two sequences of unequal length."""
    prefill_two(model, names)
    return checked(model, names, Chunk("a", (5,), 9, TABLE_A), Chunk("b", (6,), 4, TABLE_B))


def checked(model: Engine, names: frozenset[str], *chunks: Chunk) -> dict[str, Tensor]:
    trace = StepTrace()
    out = model.step(StepPlan(chunks), trace=trace)
    checks.check_step(model, trace, out, names)
    return dict(out.logits)


# -- the plants: each changes one function of the engine ---------------------------------------


def reads_the_last_column(patch: pytest.MonkeyPatch) -> None:
    """Takes every sample's logits at the rectangle's last column, as if all were as long as the longest."""
    patch.setattr(batch, "_wanted_rows", lambda chunk, row: range(max(row, 8), max(row, 8) + 1))


def one_layer_misses_a_token(patch: pytest.MonkeyPatch) -> None:
    write = PagedCache.write

    def lossy(self: PagedCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keep = len(slots) - (layer == 1)
        write(self, layer, slots[:keep], k[:keep], v[:keep])

    patch.setattr(PagedCache, "write", lossy)


def positions_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch, "_positions", lambda chunk: range(len(chunk.ids)))


def heads_mapped_round_robin(patch: pytest.MonkeyPatch) -> None:
    """Query head h reads KV head h % Hkv instead of h // group."""
    real = attention.prefill

    def mixed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        order = torch.arange(q.shape[1]).view(-1, k.shape[0]).T.flatten()
        return real(q[:, order], k, v, *rest)[:, order.argsort()]

    patch.setattr(attention, "prefill", mixed)
    fixed = deterministic.attend

    def mixed_fixed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        order = torch.arange(q.shape[1]).view(-1, k.shape[0]).T.flatten()
        return fixed(q[:, order], k, v, *rest)[:, order.argsort()]

    patch.setattr(deterministic, "attend", mixed_fixed)


def padding_keys_visible(patch: pytest.MonkeyPatch) -> None:
    bias = Reads.bias
    patch.setattr(Reads, "bias", lambda *args: torch.zeros_like(bias(*args)))
    fixed = deterministic.attend

    def padded(q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, *rest: Any) -> Tensor:
        return fixed(q, k, v, first, torch.full_like(end, k.shape[1]), *rest)

    patch.setattr(deterministic, "attend", padded)


def masked_keys_stay_in_the_denominator(patch: pytest.MonkeyPatch) -> None:
    def leaky(q: Tensor, k: Tensor, v: Tensor, blocks: object, scale: float, *rest: object) -> Tensor:
        n, m = q.shape[0], k.shape[1]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[0], 0) for t in (k, v))
        weights = torch.softmax(q.transpose(0, 1) @ k.transpose(1, 2) * scale, -1) * seen
        return (weights @ v).transpose(0, 1)

    patch.setattr(attention, "prefill", leaky)

    def leaky_fixed(q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, scale: float, *rest: object) -> Tensor:
        length = int(end.max())
        return leaky(q, k[:, :length], v[:, :length], None, scale)

    patch.setattr(deterministic, "attend", leaky_fixed)


def every_key_visible(patch: pytest.MonkeyPatch) -> None:
    def bounds(self: batch.Batch, window: int) -> tuple[Tensor, Tensor]:
        end = torch.cat([torch.full((len(c.ids),), c.start + len(c.ids)) for c in self.chunks])
        return torch.zeros_like(end), end

    patch.setattr(batch.Batch, "bounds", bounds)


def logits_of_another_request(patch: pytest.MonkeyPatch) -> None:
    lay_out = batch.lay_out

    def crossed(plan: StepPlan, cache: PagedCache) -> batch.Batch:
        made = lay_out(plan, cache)
        keys = [key for key, _, _ in made.wanted][::-1]
        made.wanted = [(key, first, end) for key, (_, first, end) in zip(keys, made.wanted, strict=True)]
        return made

    patch.setattr(engine, "lay_out", crossed)


CASES: list[tuple[Plant, str, Callable[[Engine, frozenset[str]], dict[str, Tensor]]]] = [
    (reads_the_last_column, "first_step_prefix", prefill_two),
    (one_layer_misses_a_token, "equal_lengths", decode_two),
    (positions_restart, "token_positions", reuse),
    (heads_mapped_round_robin, "attention_reference", prefill_two),
    (padding_keys_visible, "attention_reference", decode_two),
    (masked_keys_stay_in_the_denominator, "attention_reference", prefill_two),
    (every_key_visible, "causality", prefill_two),
    (logits_of_another_request, "first_step_prefix", prefill_two),
]


@pytest.mark.parametrize("fixed", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("plant, name, scenario", CASES, ids=[case[0].__name__ for case in CASES])
def test_planted_fault(
    plant: Plant,
    name: str,
    scenario: Callable[[Engine, frozenset[str]], dict[str, Tensor]],
    fixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Made before the plant: a deterministic engine proves its kernels when it is built.
    sound, checked_engine, unchecked = (tiny_engine(deterministic=fixed) for _ in range(3))
    healthy = scenario(sound, checks.ALL)
    plant(monkeypatch)
    with pytest.raises(Internal) as error:
        scenario(checked_engine, checks.ALL)
    assert error.value.reason == name
    unreported = scenario(unchecked, checks.ALL - {name})
    assert any(float((unreported[key] - healthy[key]).abs().max()) > 0.01 for key in healthy)


def test_fully_masked_row_is_refused_when_the_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported by `attention.check_visible`; without it, NaN reaches the logits."""

    def bounds(self: batch.Batch, window: int) -> tuple[Tensor, Tensor]:
        end = (self.places + 1) * (self.places != 7)
        return torch.zeros_like(end), end

    monkeypatch.setattr(batch.Batch, "bounds", bounds)
    model = tiny_engine()
    run(model, Chunk("a", A[:7], 0, TABLE_A))
    with pytest.raises(Internal) as error:
        run(model, Chunk("a", A[7:8], 7, TABLE_A))
    assert error.value.reason == "EMPTY_QUERY_ROW"
    monkeypatch.setattr(attention, "check_visible", lambda first, end: None)
    assert bool(run(model, Chunk("a", A[7:8], 7, TABLE_A)).logits["a"].isnan().any())


def test_cache_of_another_adapter_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported by the comparison after a hit (`prefix.same`), even if the digest forgets the identity."""
    ids = prompt(9, 4)
    monkeypatch.setattr(prefix, "_root", lambda identity: b"forgot the identity")
    plain, adapted = tiny_model(), tiny_model()
    assert isinstance(adapted.tensors, dict)
    adapted.tensors["layers.0.v.weight"] = adapted.tensors["layers.0.v.weight"] * 1.5
    first = Engine(plain, EngineConfig(dtype="fp32", pages=8, page_size=4, kernels="plain"))
    second = Engine(adapted, EngineConfig(dtype="fp32", pages=8, page_size=4, kernels="plain"))
    second.cache = second._kernels.current().cache = first.cache  # one pool serves both adapters
    manager = BlockManager(8, 4)
    pages = manager.allocate("under a", 3)
    run(first, Chunk("r", ids, 0, pages))
    manager.publish(Prefix(b"adapter a", ids, 4), pages)
    want = run(second, Chunk("r", ids, 0, manager.allocate("fresh", 3))).logits["r"]
    assert manager.match(Prefix(b"adapter b", ids, 4), 8) == ((), 0)

    monkeypatch.setattr(blocks, "same", lambda *_: True)
    found, tokens = manager.match(Prefix(b"adapter b", ids, 4), 8)
    assert tokens == 8
    manager.retain("polluted", found)
    table = found + manager.allocate("polluted", 1)
    got = run(second, Chunk("r", ids[8:], 8, table)).logits["r"]
    assert float((got - want).abs().max()) > 0.01


# -- comparison with a baseline, layer by layer ------------------------------------------------


def traced(model: Engine, *plans: StepPlan) -> list[tuple[StepTrace, StepOutput]]:
    found = []
    for plan in plans:
        trace = StepTrace()
        found.append((trace, model.step(plan, trace=trace)))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "float64"])
def test_batching_and_chunking_do_not_diverge_from_the_baseline(dtype: str) -> None:
    model = tiny_engine(dtype=dtype)
    base = baseline(model, A, (8, 9, 10))
    together = traced(model, StepPlan((Chunk("b", B, 0, TABLE_B), Chunk("a", A, 0, TABLE_A))))
    assert first_divergence(model, base, together, "a") is None
    plans = [StepPlan((Chunk("a", A[i:j], i, TABLE_A),)) for i, j in ((0, 4), (4, 8), (8, 9))]
    assert first_divergence(model, base, traced(model, *plans), "a") is None
    assert first_divergence(model, base, traced(model, plans[2]), "a") is None  # prefix reused


def test_first_divergence_names_layer_and_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_engine(), StepPlan((Chunk("a", A, 0, TABLE_A),))
    base = baseline(model, A, TABLE_A)
    other = tiny_model()
    assert isinstance(other.tensors, dict)
    other.tensors["layers.1.o.weight"] = other.tensors["layers.1.o.weight"] * 1.01
    found = first_divergence(
        model, base, traced(Engine(other, EngineConfig(dtype="fp32", pages=8, page_size=4)), plan), "a"
    )
    assert found is not None and (found.layer, found.what) == (1, "y")
    heads_mapped_round_robin(monkeypatch)
    found = first_divergence(model, base, traced(model, plan), "a")
    assert found is not None and (found.layer, found.what) == (0, "attended")
    monkeypatch.undo()
    positions_restart(monkeypatch)
    found = first_divergence(model, base, traced(model, StepPlan((Chunk("a", A[4:], 4, TABLE_A),))), "a")
    assert found is not None and found.what == "positions"
    monkeypatch.undo()
    logits_of_another_request(monkeypatch)
    crossed = traced(model, StepPlan((Chunk("b", B, 0, TABLE_B), Chunk("a", A, 0, TABLE_A))))
    found = first_divergence(model, base, crossed, "a")
    assert found is not None and (found.layer, found.what) == (TINY.layers, "logits")
