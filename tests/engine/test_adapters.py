"""LoRA adapters against the peer library: logits at every position, merged and not, alone and mixed in one step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.adapter_files import load_adapter
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import Chunk, EngineConfig, StepPlan
from pdserve.errors import NotFound
from tests.engine import lora
from tests.engine.loading import peers
from tests.engine.loading.gguf_writing import write_gguf

LENGTH = 21
CUTS = {"prefill": (), "chunked": (3, 4, 11, 18), "decode": tuple(range(9, LENGTH))}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
FUSED_HEADS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]

# Name -> base model, options of the adapter.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "everything": ("llama", {"target_modules": ATTENTION + MLP}),
    "rank-stabilised": ("llama", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "r": 6}),
    "all-linear": ("qwen2", {"target_modules": "all-linear"}),
    "an expression": ("qwen3", {"target_modules": r".*\.(1|2)\.self_attn\.(q|o)_proj|.*\.0\.mlp\.\w+_proj"}),
    "some layers": ("llama", {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [0, 2]}),
    "a pattern of layers": (
        "llama",
        {"target_modules": ["up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    ),
    "patterns of rank and alpha": (
        "mistral-short-window",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
            "alpha_pattern": {"v_proj": 3, r"layers\.[02]\.self_attn\.o_proj": 17},
        },
    ),
    "left out": ("llama-biases", {"target_modules": ATTENTION + MLP, "exclude_modules": ["k_proj", "down_proj"]}),
    "fused projections": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "a bias beside it": ("qwen2", {"target_modules": ["q_proj", "k_proj", "v_proj"], "lora_alpha": 5}),
    "fused one after the other": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "fused head by head": ("gpt-neox", {"target_modules": FUSED_HEADS}),
    "fused head by head, without rotation": ("bloom", {"target_modules": FUSED_HEADS}),
    "opt": ("opt", {"target_modules": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]}),
    "norms after the products": ("gemma2", {"target_modules": "all-linear"}),
    "norms over all heads": ("olmo2", {"target_modules": "all-linear"}),
    "layers without positions": ("smollm3", {"target_modules": "all-linear"}),
    "multipliers": ("granite", {"target_modules": "all-linear"}),
    "beside experts": ("mixtral", {"target_modules": ATTENTION}),
    "keys that are read again": ("gemma4", {"target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}),
    "convolutions": ("lfm2", {"target_modules": ["in_proj", "out_proj", "q_proj", "w1", "w2", "w3"]}),
    "keys that are values": ("gemma4-global-heads", {"target_modules": ATTENTION}),
}


def adapted_logits(engine: Engine, ids: tuple[int, ...], digest: bytes | None, cuts: tuple[int, ...] = ()) -> Tensor:
    """[len(ids), vocab]: our logits at every position, the ids run in chunks that end at `cuts`."""
    pages = tuple(reversed(range(-(-len(ids) // engine.config.page_size))))
    rows = []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        plan = StepPlan((Chunk("s", ids[start:end], start, pages, logits="all", adapter=digest),))
        rows.append(engine.step(plan).logits["s"])
    return torch.cat(rows)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_peers_merged_and_not(name: str, tmp_path: Path) -> None:
    base, options = CASES[name]
    model = lora.make_adapted(base, {"default": options})
    engine = peers.new_engine(load_model(peers.save_peer(peers.make_peer(base), tmp_path / "base"), "fp32"))
    adapter = load_adapter(lora.save_adapter(model, "default", tmp_path / "adapter"), engine.base)
    engine.adapters.add(adapter)
    ids = peers.prompt(LENGTH)
    plain, expected = (lora.logits(model, ids, which) for which in (None, "default"))
    assert peers.largest_difference(plain, expected) > 0.1, "an adapter that changes nothing would hide a fault"
    merged = peers.peer_logits(model.merge_and_unload(), ids)
    for cuts in CUTS.values():
        got = adapted_logits(engine, ids, adapter.digest, cuts)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)
        torch.testing.assert_close(got, merged, rtol=0, atol=peers.TOLERANCE)
    torch.testing.assert_close(adapted_logits(engine, ids, None), plain, rtol=0, atol=peers.TOLERANCE)


@pytest.mark.parametrize(("base", "targets"), [("llama", ATTENTION + MLP), ("bloom", FUSED_HEADS)])
def test_a_gguf_file_takes_the_adapter_of_the_directory(base: str, targets: list[str], tmp_path: Path) -> None:
    """The file's rows of q and k are in another order than the adapter's, whose names are those of the directory."""
    model = lora.make_adapted(base, {"default": {"target_modules": targets}})
    path = lora.save_adapter(model, "default", tmp_path / "adapter")
    ids = peers.prompt(LENGTH)
    expected = lora.logits(model, ids, "default")
    file = write_gguf(peers.make_peer(base), tmp_path / "base.gguf")
    for stored in (file, peers.save_peer(peers.make_peer(base), tmp_path / "base")):
        engine = peers.new_engine(load_model(stored, "fp32"))
        adapter = load_adapter(path, engine.base)
        engine.adapters.add(adapter)
        got = adapted_logits(engine, ids, adapter.digest)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)


def test_beside_int8_weights_an_adapter_keeps_its_precision(tmp_path: Path) -> None:
    """The peer computes with the base weights that int8 stands for; its adapter's factors are not rounded."""
    model = lora.make_adapted("llama", {"default": {"target_modules": ATTENTION + MLP}})
    path = lora.save_adapter(model, "default", tmp_path / "adapter")
    ids = peers.prompt(LENGTH)
    exact = lora.logits(model, ids, "default")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "lora_" not in name and "embed" not in name:
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_(torch.round(weight / scale) * scale)
    config = EngineConfig(dtype="fp32", pages=32, page_size=peers.PAGE, weights="int8")
    engine = Engine(load_model(peers.save_peer(peers.make_peer("llama"), tmp_path / "base"), "fp32"), config)
    adapter = load_adapter(path, engine.base)
    engine.adapters.add(adapter)
    expected = lora.logits(model, ids, "default")
    assert peers.largest_difference(exact, expected) > 0.01, "weights that int8 does not change would hide a fault"
    for cuts in CUTS.values():
        got = adapted_logits(engine, ids, adapter.digest, cuts)
        torch.testing.assert_close(got, expected, rtol=0, atol=peers.TOLERANCE)
    plain = lora.logits(model, ids, None)
    torch.testing.assert_close(adapted_logits(engine, ids, None), plain, rtol=0, atol=peers.TOLERANCE)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str | None, Path]]:
    """A peer model with two adapters, its base model's directory, and each adapter's."""
    path = tmp_path_factory.mktemp("mixed")
    options: dict[str, dict[str, Any]] = {
        "red": {"target_modules": ATTENTION + MLP},
        "blue": {"target_modules": ["q_proj", "down_proj"], "r": 2},
    }
    model = lora.make_adapted("llama", options)
    base = peers.save_peer(peers.make_peer("llama"), path / "base")
    return model, base, {name: lora.save_adapter(model, name, path / "adapters") for name in ("red", "blue")}


def loaded(mixed: tuple[Any, Path, dict[str | None, Path]], **config: Any) -> tuple[Engine, dict[str | None, bytes]]:
    """An engine with both adapters, and their digests by name."""
    _, base, paths = mixed
    given = {"dtype": "fp32", "pages": 64, "page_size": 4, **config}
    engine = Engine(load_model(base, given["dtype"]), EngineConfig(**given))
    digests: dict[str | None, bytes] = {}
    for name, path in paths.items():
        adapter = load_adapter(path, engine.base)
        engine.adapters.add(adapter)
        digests[name] = adapter.digest
    return engine, digests


# Who is in the steps: prompts of different lengths, some already decoding, in an order that mixes the adapters.
CROWD: tuple[tuple[str, str | None, int], ...] = (
    ("r0", "red", 9),
    ("r1", None, 14),
    ("r2", "blue", 3),
    ("r3", "red", 17),
    ("r4", None, 6),
    ("r5", "blue", 12),
)


def run_crowd(
    engine: Engine, digests: dict[str | None, bytes], only: str | None = None, chunk: int = 5
) -> dict[str, Tensor]:
    """Logits of every position of everyone, run together in chunks: long prompts still prefill while others decode."""
    rows: dict[str, list[Tensor]] = {key: [] for key, _, _ in CROWD}
    starts = dict.fromkeys(rows, 0)
    while True:
        chunks = []
        for number, (key, adapter, prefilled) in enumerate(CROWD):
            start = starts[key]
            if start == LENGTH or only not in (None, key):
                continue
            take = min(chunk, prefilled - start) if start < prefilled else 1
            ids = peers.prompt(LENGTH, seed=number)[start : start + take]
            pages = tuple(range(number * 6, number * 6 + 6))
            chunks.append(Chunk(key, ids, start, pages, logits="all", adapter=digests.get(adapter)))
            starts[key] += take
        if not chunks:
            return {key: torch.cat(parts) for key, parts in rows.items() if parts}
        for key, logits in engine.step(StepPlan(tuple(chunks))).logits.items():
            rows[key].append(logits)


@pytest.mark.parametrize("config", [{"kernels": "plain"}, {"kernels": "auto"}, {"deterministic": True}])
def test_each_row_of_a_mixed_batch_is_its_own_adapters(mixed: Any, config: dict[str, Any]) -> None:
    engine, digests = loaded(mixed, **config)
    got = run_crowd(engine, digests)
    for number, (key, adapter, _) in enumerate(CROWD):
        expected = lora.logits(mixed[0], peers.prompt(LENGTH, seed=number), adapter)
        torch.testing.assert_close(got[key], expected, rtol=0, atol=peers.TOLERANCE)


def test_in_deterministic_mode_no_bit_depends_on_whose_rows_are_beside_it(mixed: Any) -> None:
    engine, digests = loaded(mixed, deterministic=True)
    together = run_crowd(engine, digests)
    for key, _, _ in CROWD:
        alone = run_crowd(engine, digests, only=key, chunk=3)
        assert torch.equal(alone[key], together[key]), key
    without, _ = loaded(mixed, deterministic=True)
    for digest in digests.values():
        without.adapters.remove(digest)
    for key, adapter, _ in CROWD:
        if adapter is None:
            assert torch.equal(run_crowd(without, {}, only=key)[key], together[key]), key


def test_in_bf16_an_adapter_errs_no_more_than_the_peers(mixed: Any) -> None:
    """Both against the peer in fp32; the peer, too, computes adapters in fp32 beside a model in bf16."""
    engine, digests = loaded(mixed, dtype="bf16", kernels="plain")
    ids, model = peers.prompt(LENGTH), mixed[0]
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for adapter in ("red", "blue", None):
        expected = lora.logits(model, ids, adapter)
        peer_error = (lora.logits(rounded, ids, adapter).float() - expected).square().mean()
        error = (adapted_logits(engine, ids, digests.get(adapter)) - expected).square().mean()
        assert error < 2 * peer_error, adapter


def test_a_digest_that_is_not_here_is_refused_before_any_layer(mixed: Any) -> None:
    engine, digests = loaded(mixed)
    engine.adapters.remove(digests["blue"])
    chunks = (
        Chunk("x", (1, 2), 0, (0,), adapter=digests["red"]),
        Chunk("y", (1, 2), 0, (1,), adapter=digests["blue"]),
    )
    written = tuple(engine.cache.written)
    with pytest.raises(NotFound, match=digests["blue"].hex()[:16]):
        engine.step(StepPlan(chunks))
    assert tuple(engine.cache.written) == written
