"""The native kernels against the plain path and against a decoder written apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cache_transfer.contract import PositionScheme
from pdserve.engine.checks import ALL, TOLERANCES, check_step, check_written, relative_error
from pdserve.engine.engine import Engine
from pdserve.engine.plan import Chunk, StepPlan
from pdserve.engine.spec import ModelSpec
from pdserve.engine.trace import StepTrace
from pdserve.errors import Cancelled, ConfigError
from tests.engine import oracle
from tests.engine.tiny import TINY, prompt, run, spec, tiny_engine, tiny_model


def rope(dims: int) -> PositionScheme:
    return PositionScheme(kind="rope", theta=10000.0, dims=dims)


LEARNED = PositionScheme(kind="learned", dims=512)
FAMILIES: dict[str, ModelSpec] = {
    "plain llama": TINY,
    "every bias": spec(qkv_bias=True, attn_out_bias=True, mlp_bias=True, head_bias=True),
    "q and k norms, partial rotation": spec(qk_norm=True, positions=rope(4)),
    "learned positions, layer norm, plain mlp": spec(
        positions=LEARNED, norm="layer", norm_shift=True, mlp="plain", activation="gelu_tanh"
    ),
    "windows and a soft cap": spec(sliding_window=(0, 5, 70), soft_cap=2.0),
    "post-norm, exact gelu, tied head": spec(norm_order="post", activation="gelu", tied_head=True),
    "head of 80, odd widths": spec(head_dim=80, positions=rope(80), width=41, ffn_width=51),
    "head of 128, groups of 3": spec(head_dim=128, positions=rope(128), heads=6, width=72, ffn_width=130),
    "head of 10, one KV head": spec(
        head_dim=10, positions=rope(6), width=33, ffn_width=35, heads=5, kv_heads=1, activation="relu"
    ),
}
LENGTHS = {"long": 141, "middle": 66, "short": 7, "one": 1}


def logits(engine: Engine, stale: float = float("nan")) -> dict[str, torch.Tensor]:
    """Every sequence's scores at every position: chunked prefill, a mixed step, then a decode step of all."""
    size = engine.cache.page_size
    engine.cache.storage.fill_(stale)  # what earlier owners left
    engine.cache.storage.narrow(engine.cache._slot_axis, engine.cache.pad * size, size).zero_()
    each = engine.cache.pages // len(LENGTHS)
    pages = {key: tuple(range(i * each, i * each + each))[::-1] for i, key in enumerate(LENGTHS)}
    rows: dict[str, list[torch.Tensor]] = {key: [] for key in LENGTHS}
    at = dict.fromkeys(LENGTHS, 0)
    for step in range(4):
        chunks = []
        for number, (key, length) in enumerate(LENGTHS.items()):
            left = length - 2 - at[key]  # two tokens are kept for steps 2 and 3
            take = (
                (1 if step >= 2 else max(0, -(-left // 2) if step == 0 else left))
                if length > 2
                else int(step == number)
            )
            if take:
                chunks.append(
                    Chunk(key, prompt(length, seed=length)[at[key] : at[key] + take], at[key], pages[key], "all")
                )
        plan = StepPlan(tuple(chunks))
        output = engine.step(plan)
        check_written(plan, output)
        for chunk in chunks:
            rows[chunk.key].append(output.logits[chunk.key])
            at[chunk.key] += len(chunk.ids)
    assert at == LENGTHS
    return {key: torch.cat(parts) for key, parts in rows.items()}


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield int(request.param)
    torch.set_num_threads(1)


@pytest.mark.parametrize("order, page_size, threads", [("hnd", 16, 1), ("nhd", 3, 2)], indirect=["threads"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_equals_a_decoder_written_apart_and_the_plain_path(
    name: str, order: str, page_size: int, threads: int
) -> None:
    of = FAMILIES[name]
    config: dict[str, Any] = {"page_size": page_size, "pages": 4 * -(-142 // page_size), "axis_order": order}
    native = tiny_engine(of, kernels="native", **config)
    plain = logits(tiny_engine(of, kernels="plain", **config))
    for key, found in logits(native).items():
        assert relative_error(found, plain[key]) < TOLERANCES["fp32"], key
    assert native.kernels.native_steps == 4 and native.kernels.plain_steps == 0
    if threads == 1:
        expected = oracle.logits(tiny_model(of), prompt(7, seed=7))
        assert relative_error(logits(native)["short"], expected) < TOLERANCES["fp32"]


def rms_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Root mean square difference of all scores, over that of the scores themselves."""
    a, b = (torch.cat([scores[key].double() for key in LENGTHS]) for scores in (got, expected))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_as_near_to_the_exact_answer_as_the_plain_path(name: str, kv_dtype: str) -> None:
    of = FAMILIES[name]
    config: dict[str, Any] = {"page_size": 16, "pages": 40}
    exact = logits(tiny_engine(of, "float64", **config))
    plain, native = (
        logits(tiny_engine(of, "bf16", kernels=kernels, kv_dtype=kv_dtype, **config)) for kernels in ("plain", "native")
    )
    assert rms_error(native, exact) < 1.05 * rms_error(plain, exact)


def test_int8_weights_equal_their_plain_arithmetic() -> None:
    of = FAMILIES["every bias"]
    config: dict[str, Any] = {"page_size": 16, "pages": 40, "weights": "int8"}
    (exact, plain), (fp32, bf16) = (
        [logits(tiny_engine(of, dtype, kernels=kernels, **config)) for dtype in ("fp32", "bf16")]
        for kernels in ("plain", "native")
    )
    for key, found in fp32.items():
        assert relative_error(found, exact[key]) < TOLERANCES["fp32"]
    assert rms_error(bf16, exact) < 1.05 * rms_error(plain, exact)
    native = tiny_engine(of, kernels="native", **config)
    assert native.contract().weight_dtype == "int8" and native.contract().activation_dtype == "fp32"
    assert native.contract().model_digest == tiny_engine(of).contract().model_digest


# Where the kernels change from one kind of product to another, in every type, with odd numbers of outputs.
ROWS = (*range(1, 67), 95, 96, 97, 127, 128, 131, 200, 258, 259, 400)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("weights", ["", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_number_of_rows_gives_the_plain_answer(dtype: str, weights: str, threads: int) -> None:
    # 2100 inputs of `down` are more than one stretch for 64 rows.
    of = spec(layers=1, width=33, ffn_width=2100)
    config: dict[str, Any] = {"pages": 110, "weights": weights}
    plain = tiny_engine(of, "fp32", kernels="plain", **config)
    native = tiny_engine(of, dtype, kernels="native", **config)
    rough = tiny_engine(of, dtype, kernels="plain", **config)
    for rows in ROWS:
        chunk = Chunk("a", prompt(rows, seed=rows), 0, tuple(range(100)), "all")
        wanted, found = (run(engine, chunk).logits["a"].double() for engine in (plain, native))
        error = float((found - wanted).norm() / wanted.norm())
        limit = TOLERANCES["fp32"]
        if dtype == "bf16":
            coarse = run(rough, chunk).logits["a"].double()
            limit = 0.002 + 1.2 * float((coarse - wanted).norm() / wanted.norm())
        assert error < limit, (rows, error)


def test_int8_is_refused_in_deterministic_mode_and_other_weights_always() -> None:
    with pytest.raises(ConfigError, match="int8"):
        tiny_engine(weights="int8", deterministic=True)
    with pytest.raises(ConfigError, match="int3"):
        tiny_engine(weights="int3")


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_every_check_of_a_traced_step_holds(order: str) -> None:
    engine = tiny_engine(FAMILIES["windows and a soft cap"], kernels="native", pages=64, axis_order=order)
    run(engine, Chunk("b", prompt(20), 0, tuple(range(40, 60)), "none"))
    trace = StepTrace()
    plan = StepPlan((Chunk("a", prompt(70), 0, tuple(range(20))), Chunk("b", (5,), 20, tuple(range(40, 60)))))
    output = engine.step(plan, trace=trace)
    check_step(engine, trace, output, ALL)
    assert engine.kernels.state == "native"


def test_long_sequences_are_cut_for_several_threads_and_put_together() -> None:
    of = replace(TINY, context_limit=4096)
    torch.set_num_threads(2)
    engines = [tiny_engine(of, kernels=kernels, page_size=16, pages=80) for kernels in ("plain", "native")]
    results = []
    for engine in engines:
        run(engine, Chunk("a", prompt(1200), 0, tuple(range(80)), "none"))
        results.append(run(engine, Chunk("a", (3,), 1200, tuple(range(80)))).logits["a"])
    torch.set_num_threads(1)
    assert relative_error(results[1], results[0]) < TOLERANCES["fp32"]


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_steps_of_every_size_around_the_kernels_cuts_are_right(threads: int) -> None:
    """Rows are cut differently for dots, lanes and panels, and once more where threads would be idle."""
    native, plain = (tiny_engine(kernels=kernels, pages=20, page_size=16) for kernels in ("native", "plain"))
    for rows in (48, 64, 65, 96, 100, 108, 128, 129, 130, 193, 258, 259):
        plan = StepPlan((Chunk("a", prompt(rows, seed=rows), 0, tuple(range(-(-rows // 16))), "all"),))
        found, expected = (engine.step(plan).logits["a"] for engine in (native, plain))
        assert relative_error(found, expected) < TOLERANCES["fp32"], rows


def test_layers_are_announced_and_cancelled_as_on_the_plain_path() -> None:
    engine, layers = tiny_engine(kernels="native"), list[int]()
    with pytest.raises(Cancelled):
        engine.step(
            StepPlan((Chunk("r", prompt(6), 0, (0, 1)),)), on_layer=layers.append, cancelled=lambda: len(layers) == 2
        )
    assert layers == [0, 1]
    out = run(engine, Chunk("r", prompt(6), 0, (0, 1)))
    out.logits["r"][0, 3] -= 1.0  # a sampler may


@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_in_one_call_are_the_same_to_the_bit_as_one_after_the_other(name: str) -> None:
    one, apart = (tiny_engine(FAMILIES[name], kernels="native", page_size=4, pages=64) for _ in range(2))
    pages = {"a": tuple(range(20)), "b": tuple(range(20, 40))}
    steps = [{"a": (0, 70), "b": (0, 9)}, {"a": (70, 71), "b": (9, 10)}, {"b": (10, 30), "a": (71, 72)}]
    told: list[int] = []
    for ranges in steps:
        ids = {key: prompt(80, seed=len(key)) for key in ranges}
        plan = StepPlan(tuple(Chunk(k, ids[k][i:j], i, pages[k], "all") for k, (i, j) in ranges.items()))
        expected, output = apart.step(plan, on_layer=told.append), one.step(plan)
        assert output.counters == expected.counters and output.written == expected.written
        for key in ranges:
            assert torch.equal(output.logits[key], expected.logits[key])
    assert told == list(range(apart.spec.layers)) * len(steps)
    assert torch.equal(one.cache.storage, apart.cache.storage)


@pytest.mark.parametrize(
    "config, word",
    [({"dtype": "float64"}, "float64"), ({"deterministic": True}, "deterministic"), ({"kv_dtype": "fp16"}, "fp16")],
)
def test_what_the_kernels_do_not_run_is_plain_under_auto_and_refused_under_native(
    config: dict[str, Any], word: str
) -> None:
    engine = tiny_engine(kernels="auto", **config)
    assert engine.kernels.state == "plain" and word in engine.kernels.why
    assert word in engine.contract().info["kernels"]
    with pytest.raises(ConfigError, match=word):
        tiny_engine(kernels="native", **config)
    with pytest.raises(ConfigError, match="fastest"):
        tiny_engine(kernels="fastest")


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("weights", ["", "int8"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 8e-3)])
def test_a_packed_product_by_itself_is_the_plain_one(dtype: str, tolerance: float, weights: str, threads: int) -> None:
    """As steps with adapters use it: heads wider than a panel's tile, odd widths, one row to many."""
    of = spec(head_dim=256, positions=rope(256), heads=2, kv_heads=1, width=41, ffn_width=2051, layers=1, qkv_bias=True)
    plain = tiny_engine(of, dtype, kernels="plain", weights=weights).decoder
    packed = tiny_engine(of, dtype, kernels="native", weights=weights)
    packed.prepare()
    for name in ("qkv", "o", "up", "down"):
        product = getattr(plain.layers[0], name)
        for rows in (0, 1, 5, 17, 131, 200, 258, 600):
            x = torch.randn(rows, product.weight.shape[1], dtype=plain.embedding.dtype)
            got = getattr(packed.decoder.layers[0], name)(x).float()
            expected = product(x).float()
            assert got.shape == expected.shape
            scale = expected.abs().max() if rows else torch.tensor(1.0)
            torch.testing.assert_close(
                got / scale, expected / scale, rtol=0, atol=tolerance, msg=f"{name}, {rows} rows"
            )


PORTABLE = """
import sys
from tests.engine.test_native import FAMILIES, logits, relative_error
from tests.engine.tiny import tiny_engine
from pdserve.engine.native import build, library
import pdserve.engine.native.choice as choice
recipe = build.find_recipe((*build.FLAGS, *sys.argv[1:]))
choice.find_recipe = lambda: recipe
for name in ("q and k norms, partial rotation", "windows and a soft cap"):
    for dtype, tolerance in (("fp32", 2e-5), ("bf16", 1.2e-1)):
        for weights in ("", "int8"):
            config = dict(page_size=16, pages=40, weights=weights)
            native = tiny_engine(FAMILIES[name], dtype, kernels="native", **config)
            want = logits(tiny_engine(FAMILIES[name], dtype, kernels="plain", **config))
            for key, found in logits(native).items():
                assert relative_error(found, want[key]) < tolerance, (name, dtype, weights, key)
print(library.level(native._kernels.current().library))
"""


@pytest.mark.slow
def test_processors_without_these_instructions_get_the_same_answers() -> None:
    """Built for a plain x86-64 processor: every intrinsic is left out, and the portable code takes its place."""
    flags = ("-march=x86-64", "-mno-avx", "-O1")
    done = subprocess.run(
        [sys.executable, "-c", PORTABLE, *flags], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "portable"
