"""The ledger against figures of others: worked examples by hand, and torch's own flop counter."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from cache_transfer.contract import PositionScheme
from pdserve.cli.main import app
from pdserve.engine.engine import Engine
from pdserve.engine.ledger import Machine, Step, ledger, linear_cost, scalars_per_token
from pdserve.engine.load import save_spec_checkpoint
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.engine.spec_file import read_spec
from pdserve.engine.weights import expected_tensors
from pdserve.errors import CheckpointError, InvalidRequest
from tests.engine.test_layer_shapes import CONVOLUTIONS, UNLIKE
from tests.engine.tiny import TINY, spec, tiny_model

# Width 8, two layers, two query heads on one KV head of 4, vocabulary 20; the feed-forward width is free.
SMALL = ModelSpec(
    vocab_size=20, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_width=16, context_limit=64,
    positions=PositionScheme(kind="none"),
)  # fmt: skip

# Vocabulary 6000, embedding 4096, hidden 5200, 8 heads of 650, feed-forward 20800, last hidden 3200.
WALK = ModelSpec(
    vocab_size=6000, embed_width=4096, width=5200, heads=8, kv_heads=8, head_dim=650, layers=1, ffn_width=20800,
    out_width=3200, context_limit=64, positions=PositionScheme(kind="none"), norm="layer", norm_shift=True,
    norm_order="post", final_norm=False, mlp="plain", activation="gelu",
)  # fmt: skip


def test_shapes_of_a_prompt_of_twelve() -> None:
    found = ledger(SMALL, Step(1, 12))
    shapes = {row.name: row.shape for row in found.rows}
    assert shapes["layer input"] == shapes["layer output"] == (1, 12, 8)
    assert shapes["query"] == shapes["weighted sum"] == (1, 2, 12, 4)
    assert shapes["key"] == shapes["value"] == (1, 1, 12, 4)
    assert shapes["scores"] == (1, 2, 12, 12)
    assert found.cached_scalars == 192
    assert shapes["last position"] == (1, 1, 8)
    assert shapes["logits"] == (1, 20)


def test_shapes_of_a_walk_through_prompt() -> None:
    shapes = {row.name: row.shape for row in ledger(WALK, Step(1, 7)).rows}
    assert shapes["embedding"] == (1, 7, 4096)
    assert shapes["input projection"] == shapes["layer input"] == shapes["layer output"] == (1, 7, 5200)
    assert shapes["query"] == shapes["key"] == shapes["value"] == shapes["weighted sum"] == (1, 8, 7, 650)
    assert shapes["scores"] == (1, 8, 7, 7)
    assert shapes["attention output"] == (1, 7, 5200)
    assert shapes["up"] == (1, 7, 20800) and shapes["down"] == (1, 7, 5200)
    assert shapes["output projection"] == (1, 1, 3200)
    assert shapes["logits"] == (1, 6000)


def test_shapes_of_the_decode_step_after_it() -> None:
    prefill, found = ledger(WALK, Step(1, 7)), ledger(WALK, Step(1, 1, 7))
    shapes = {row.name: row.shape for row in found.rows}
    assert shapes["embedding"] == (1, 1, 4096) and shapes["layer input"] == (1, 1, 5200)
    assert shapes["query"] == shapes["key"] == shapes["value"] == (1, 8, 1, 650)
    assert shapes["scores"] == (1, 8, 1, 8)
    assert shapes["up"] == (1, 1, 20800) and shapes["down"] == (1, 1, 5200)
    assert found.cached_scalars == 2 * 8 * 8 * 650
    for name in ("up", "down"):
        assert 7 * found.row(name).flops == prefill.row(name).flops
        assert found.row(name).weight_bytes == prefill.row(name).weight_bytes


@pytest.mark.parametrize("tokens", [1, 512])
def test_a_linear_layer_has_the_intensity_of_its_tokens(tokens: int) -> None:
    flops, moved = linear_cost(tokens, 4096, 4096, 2)
    assert flops == tokens * 33_554_432 and moved == 32 << 20
    assert flops / moved == tokens


def test_attention_products_of_prefill_and_decode() -> None:
    batch, heads, length, d = 3, SMALL.heads, 40, SMALL.head_dim
    prefill, decode = ledger(SMALL, Step(batch, length)), ledger(SMALL, Step(batch, 1, length - 1))
    for found, expected in ((prefill, 4 * batch * heads * length**2 * d), (decode, 4 * batch * heads * length * d)):
        assert found.row("scores").flops + found.row("weighted sum").flops == expected


def test_a_layer_with_a_window_scores_no_more_than_the_window() -> None:
    rows = {row.name: row for row in ledger(spec(sliding_window=(8, 0, 0)), Step(1, 1, 31)).rows}
    assert rows["scores (window 8)"].times == 1 and rows["scores (window 8)"].shape[-1] == 8
    assert rows["scores"].times == 2 and rows["scores"].shape[-1] == 32
    # The windows of four queries cover eleven keys together.
    assert ledger(spec(sliding_window=(8, 0, 0)), Step(1, 4, 31)).row("scores (window 11)").shape[-2:] == (4, 11)


def test_the_slower_of_compute_and_traffic_is_the_bound() -> None:
    machine = Machine(flops=1e9, bandwidth=1e9)
    bound = machine.bound(1e7, 2e7)
    assert (bound.compute_s, bound.memory_s, bound.seconds, bound.binds) == (0.01, 0.02, 0.02, "memory")
    assert machine.bound(3e7, 2e7).binds == "compute"


@pytest.mark.parametrize(
    "of",
    [
        TINY,
        spec(mlp="plain", activation="gelu", norm="layer", norm_shift=True, kv_heads=2),
        spec(embed_width=24, out_width=40, tied_head=False),
        spec(norm_order="sandwich", embed_norm=True, logit_soft_cap=3.0),
        spec(experts=5, active_experts=2, expert_width=40, dense_layers=(0,), shared_width=24),
        spec(**UNLIKE),
        spec(**CONVOLUTIONS),
        spec(experts=5, active_experts=2, expert_width=40, expert_bias=True, attention_sinks=True, qkv_bias=True),
        spec(layer_input_width=5, kv_layers=(0, 1, 1), key_is_value=(1,), layer_ffn=(48, 48, 96), layer_scale=True),
        spec(experts=5, active_experts=2, expert_width=40, experts_beside=True, norm_order="sandwich"),
    ],
)
def test_flops_are_those_that_torch_counts(of: ModelSpec) -> None:
    """The decode path: one query sees what the ledger says. (Prefill leaves out blocks that are masked.)"""
    cached, batch = 31, 2
    engine = Engine(tiny_model(of), EngineConfig(dtype="fp32", pages=32, page_size=4, kernels="plain"))
    tables = [tuple(range(index * 8, index * 8 + 8)) for index in range(batch)]
    chunks = [Chunk(f"s{i}", tuple(range(cached)), 0, tables[i]) for i in range(batch)]
    engine.step(StepPlan(tuple(chunks)))
    with FlopCounterMode(display=False) as counter:
        engine.step(StepPlan(tuple(Chunk(f"s{i}", (5,), cached, tables[i]) for i in range(batch))))
    assert ledger(of, Step(batch, 1, cached)).flops == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("of", [TINY, WALK, SMALL, spec(**UNLIKE), spec(**CONVOLUTIONS)])
def test_a_decode_step_reads_every_weight_once(of: ModelSpec) -> None:
    """By the tensors that a checkpoint of this spec must have, made on the meta device: nothing is allocated."""
    found = ledger(of, Step(1, 1, 5), "bf16")
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in expected_tensors(of).items()
    }
    matrices = {name: t for name, t in tensors.items() if t.dim() == 2 and name not in ("embed", "pos")}
    if of.tied_head:
        matrices["head"] = tensors["embed"]
    looked_up = found.row("embedding").weight_bytes
    assert found.weight_bytes - looked_up == sum(tensor.nbytes for tensor in matrices.values())


# Experts of the published sizes: (spec, parameters in all, parameters that a token uses), in billions.
MIXTURES = {
    "Mixtral-8x7B": (
        ModelSpec(
            vocab_size=32000, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn_width=14336,
            context_limit=32768, positions=PositionScheme(kind="none"), experts=8, active_experts=2,
            expert_width=14336, norm_experts=True,
        ), 46.7, 12.9,
    ),
    "Qwen3-30B-A3B": (
        ModelSpec(
            vocab_size=151936, width=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn_width=6144,
            context_limit=40960, positions=PositionScheme(kind="none"), qk_norm=True, experts=128, active_experts=8,
            expert_width=768, norm_experts=True,
        ), 30.5, 3.3,
    ),
    "gpt-oss-20b": (
        ModelSpec(
            vocab_size=201088, width=2880, layers=24, heads=64, kv_heads=8, head_dim=64, ffn_width=2880,
            context_limit=131072, positions=PositionScheme(kind="none"), sliding_window=(128, 0) * 12, experts=32,
            active_experts=4, expert_width=2880, norm_experts=True, expert_bias=True, attention_sinks=True,
            swiglu_alpha=1.702, swiglu_limit=7.0,
        ), 20.91, 3.61 + 0.58,  # of what a token uses its makers leave the embedding out
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_a_token_of_a_mixture_reads_what_its_makers_say_it_uses(name: str) -> None:
    of, whole, active = MIXTURES[name]
    embedding = of.vocab_size * of.width

    def read(step: Step) -> int:
        found = ledger(of, step, "bf16")
        return (found.weight_bytes - found.row("embedding").weight_bytes) // 2 + embedding

    assert read(Step(1, 1)) / 1e9 == pytest.approx(active, abs=0.06)
    assert read(Step(4, 512)) / 1e9 == pytest.approx(whole, abs=0.06)  # every expert
    assert ledger(of, Step(4, 512)).row("expert up").flops == 2048 * ledger(of, Step(1, 1)).row("expert up").flops


def gemma4(pattern: int, layers: int, wide: LayerShape, narrow: LayerShape, **options: Any) -> ModelSpec:
    """Every `pattern`-th layer has no window, and heads of its own."""
    shapes = tuple(wide if (i + 1) % pattern == 0 else narrow for i in range(layers))
    return ModelSpec(
        vocab_size=262144, layers=layers, context_limit=131072, positions=PositionScheme(kind="none"), tied_head=True,
        heads=narrow.heads, kv_heads=narrow.kv_heads, head_dim=narrow.head_dim, layer_shapes=shapes,
        norm_order="sandwich", qk_norm=True, v_norm=True, **options,
    )  # fmt: skip


# Of the published sizes; what the makers say that a token uses, and all that there is, in billions of parameters.
GEMMA4 = {
    "26B-A4B": (
        gemma4(
            6, 30, LayerShape(16, 2, 512), LayerShape(16, 8, 256), width=2816, ffn_width=2112, experts=128,
            active_experts=8, expert_width=704, experts_beside=True, norm_experts=True,
            key_is_value=tuple(range(5, 30, 6)),
        ), 3.8, 25.2,
    ),
    "E2B": (  # without embeddings of each layer, and without what sees and hears
        gemma4(
            5, 35, LayerShape(8, 1, 512), LayerShape(8, 1, 256), width=1536, ffn_width=6144, layer_input_width=256,
            layer_ffn=(6144,) * 15 + (12288,) * 20,
            kv_layers=tuple(i if i < 15 else 14 if (i + 1) % 5 == 0 else 13 for i in range(35)),
        ), 2.3, 2.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMMA4)
def test_a_token_of_gemma4_reads_what_its_makers_say_it_uses(name: str) -> None:
    of, active, whole = GEMMA4[name]

    def read(step: Step) -> float:
        found = ledger(of, step, "bf16")
        return (found.weight_bytes - sum(r.weight_bytes for r in found.rows if r.name.startswith("embedding"))) / 2e9

    assert read(Step(1, 1)) == pytest.approx(active, abs=0.06)
    assert read(Step(4, 512)) == pytest.approx(whole, abs=0.06)


def test_cache_traffic_follows_the_cache_precision() -> None:
    wide, narrow = ledger(TINY, Step(2, 1, 9), "fp32"), ledger(TINY, Step(2, 1, 9), "fp32", "bf16")
    assert wide.cache_bytes == 2 * narrow.cache_bytes and wide.weight_bytes == narrow.weight_bytes
    # Each layer reads ten tokens of K and V, and writes one.
    assert wide.cache_bytes == 2 * (10 + 1) * 4 * scalars_per_token(TINY)


@pytest.mark.parametrize(
    ("step", "field"),
    [(Step(0, 1), "batch"), (Step(1, 0), "tokens"), (Step(1, 1, -1), "cached"), (Step(1, 65), "prompt")],
)
def test_impossible_steps_are_refused_by_name(step: Step, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ledger(SMALL, step)
    assert refused.value.field == field


def test_a_spec_is_read_without_weights(tmp_path: Path) -> None:
    model = tiny_model(TINY)
    save_spec_checkpoint(tmp_path / "tiny.pdmodel", TINY, model.tensors)
    (tmp_path / "tiny.json").write_text(json.dumps(asdict(TINY)))
    assert read_spec(tmp_path / "tiny.pdmodel") == read_spec(tmp_path / "tiny.json") == TINY
    with pytest.raises(CheckpointError, match="does not exist"):
        read_spec(tmp_path / "none.json")
    (tmp_path / "wrong.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(CheckpointError):
        read_spec(tmp_path / "wrong.json")


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    save_spec_checkpoint(tmp_path / "tiny.pdmodel", TINY, tiny_model(TINY).tensors)
    given = ["ledger", str(tmp_path / "tiny.pdmodel"), "--prompt", "12", "--gflops", "1", "--gbytes", "1"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    assert "scores" in shown.output and "): bound by " in shown.output
    assert "tiny.pdmodel: fp32," in shown.output and "us each" in shown.output
    found = json.loads(CliRunner().invoke(app, [*given, "--dtype", "fp32", "--run", "--json"]).stdout)
    assert found["prefill"]["flops"] == ledger(TINY, Step(1, 12)).flops
    assert found["decode"]["measured_s"] > found["decode"]["bound_s"]["memory"] * 0.01


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "int3"), ("gflops", "-3"), ("gbytes", "-3"), ("gflops", "nan"), ("prompt", "0"), ("batch", "0")],
)
def test_the_command_refuses_by_the_name_of_the_flag(name: str, value: str) -> None:
    wrong = CliRunner().invoke(app, ["ledger", "/nonexistent", f"--{name}", value])
    assert isinstance(wrong.exception, InvalidRequest) and wrong.exception.field == name
