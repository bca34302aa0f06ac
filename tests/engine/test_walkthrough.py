"""The walk-through model (spec C) at a fortieth of its widths: shapes, then numbers."""

from __future__ import annotations

import torch

from cache_transfer.contract import PositionScheme
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.engine.trace import StepTrace
from tests.engine import oracle
from tests.engine.tiny import prompt, tiny_model

# vocabulary 6000, embedding 4096, hidden 5200, 8 heads of 650, feed-forward 20800, last 3200
WALK = ModelSpec(
    vocab_size=150, embed_width=102, width=128, heads=8, kv_heads=8, head_dim=16, layers=2, ffn_width=512, out_width=80,
    context_limit=64, positions=PositionScheme(kind="none"), norm="layer", norm_shift=True, norm_order="post",
    final_norm=False, mlp="plain", activation="gelu",
)  # fmt: skip


def test_shapes_and_numbers_of_prefill_and_decode() -> None:
    model = tiny_model(WALK, "float64", seed=8, spread=0.2)
    engine = Engine(model, EngineConfig(dtype="float64", pages=4, page_size=4))
    ids, pages = prompt(8, vocab=150), (3, 1)
    trace = StepTrace()
    out = engine.step(StepPlan((Chunk("r", ids[:7], 0, pages),)), trace=trace)
    layer = trace.layers[0]
    assert layer.x.shape == (7, 128)
    assert layer.q.shape == layer.k.shape == layer.v.shape == layer.attended.shape == (7, 8, 16)
    assert layer.attended.flatten(1).shape == layer.y.shape == (7, 128)
    assert [tuple(t.shape) for t in engine.cache.sequence(0, pages, 7)] == [(8, 7, 16)] * 2
    decoder = engine.decoder
    assert decoder.embedding[list(ids[:7])].shape == (7, 102)
    up = decoder.layers[0].up
    assert up is not None and up(layer.y).shape == (7, 512)
    assert decoder.out_proj is not None and decoder.out_proj(layer.y).shape == (7, 80)
    assert out.logits["r"].shape == (1, 150)
    want = oracle.logits(model, ids)
    torch.testing.assert_close(out.logits["r"][0], want[6], rtol=0, atol=1e-11)

    trace = StepTrace()
    out = engine.step(StepPlan((Chunk("r", ids[7:], 7, pages),)), trace=trace)
    assert trace.layers[0].x.shape == (1, 128) and trace.layers[0].q.shape == (1, 8, 16)
    assert [tuple(t.shape) for t in engine.cache.sequence(1, pages, 8)] == [(8, 8, 16)] * 2
    assert out.counters.score_pairs == 2 * 8 * 8  # layers, heads, visible keys
    torch.testing.assert_close(out.logits["r"][0], want[7], rtol=0, atol=1e-11)


def test_a_sample_by_hand() -> None:
    """LN(X + attention), then LN(X1 + FFN): each row leaves a layer with the last norm's mean and spread."""
    model = tiny_model(WALK, "float64", seed=8, spread=0.2)
    assert isinstance(model.tensors, dict)
    for name in ("attn_norm", "mlp_norm"):
        for layer in range(2):
            model.tensors[f"layers.{layer}.{name}.scale"].fill_(1.0)
            model.tensors[f"layers.{layer}.{name}.shift"].zero_()
    engine, trace = Engine(model, EngineConfig(dtype="float64", pages=4, page_size=4)), StepTrace()
    engine.step(StepPlan((Chunk("r", prompt(7, vocab=150), 0, (0, 1)),)), trace=trace)
    for traced in trace.layers:
        assert float(traced.y.mean(-1).abs().max()) < 1e-12
        assert float((traced.y.var(-1, unbiased=False) - 1).abs().max()) < 1e-4
