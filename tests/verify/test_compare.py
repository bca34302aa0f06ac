"""Every kind of side passes when it is right; what is measured is what the contract asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cache_transfer.contract import CachePlane
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.observe import Observed, Rows, columns
from pdserve.errors import ConfigError, Incompatible
from pdserve.verify.compare import Finding, compare, tensor_finding
from pdserve.verify.observing import Run, Shape
from pdserve.verify.run import Request, verify
from pdserve.verify.sides import Side
from tests.engine.loading.peers import make_peer, save_peer
from tests.engine.tiny import TINY, prompt, spec, tiny_model
from tests.verify.support import PROMPTS, compared, sides

PARIS = (504, 3575, 282, 4649, 314)  # "The capital of France is"
WAYS = ("chunked:3", "batched", "batched:2", "reused", "reused:4", "handoff", "handoff,chunked:8", "nhd,page:8")


@pytest.mark.parametrize("fixed", [False, True], ids=["fast", "deterministic"])
def test_one_model_in_every_way(tiny: Path, fixed: bool) -> None:
    """In deterministic mode all of them are equal bit for bit."""
    kernels = "deterministic" if fixed else "fast"
    for comparison in compared(f"{tiny},{kernels}", *WAYS):
        assert comparison.equal, (comparison.right.side.text, comparison.first, comparison.right.broken)
        assert [len(o.outputs) for o in comparison.right.observed] == [4] * len(PROMPTS)
        if fixed:
            assert all(finding.bits_equal for finding in comparison.findings)


@pytest.mark.parametrize("words", ["native", "bf16", "fp16", "float64", "kv:bf16", "deterministic"])
def test_precisions_of_one_checkpoint(tiny: Path, words: str) -> None:
    (comparison,) = compared(tiny, words)
    assert comparison.equal, comparison.first
    assert comparison.tolerance == {"bf16": 6e-2, "kv:bf16": 6e-2, "fp16": 1e-2}.get(words, 2e-5)
    assert not all(finding.bits_equal for finding in comparison.findings)


def test_every_tensor_of_every_layer_is_compared(tiny: Path) -> None:
    (comparison,) = compared(tiny, "reused")
    places = {(f.prompt, f.layer, f.tensor) for f in comparison.findings}
    layer = ("x", "length", "k", "v", "visible", "attended", "y")
    expected = {(p, layer_, t) for p in range(4) for layer_ in range(3) for t in layer}
    ends = {(p, -1, "positions") for p in range(4)} | {(p, 3, t) for p in range(4) for t in ("logits", "top", "tokens")}
    assert places == expected | ends
    assert comparison.right.reused == (8, 0, 20, 0)


@pytest.mark.parametrize(
    "name", ["llama", "llama3-scaled", "mistral-short-window", "qwen2", "qwen3", "gemma4", "lfm2", "gpt2"]
)
def test_the_peer_library_agrees_on_a_directory(name: str, tmp_path: Path) -> None:
    path = save_peer(make_peer(name), tmp_path / "model")
    for comparison in compared(path, "transformers", "transformers,chunked:4"):
        assert comparison.equal, (name, comparison.first)
        tensors = {finding.tensor for finding in comparison.findings}
        assert tensors == {"positions", "x", "length", "k", "v", "attended", "y", "logits", "top", "tokens"}


@pytest.mark.model
@pytest.mark.slow
def test_the_peer_library_agrees_on_the_packaged_model() -> None:
    baseline, peer = sides("smollm2", "transformers", page_size=16)
    ((comparison,), prompts) = verify([baseline, peer], Request(ids=[PARIS], tokens=2))
    assert comparison.equal, comparison.first
    assert prompts == (PARIS,) and len(comparison.left.observed[0].layers) == 30
    assert comparison.left.observed[0].outputs[0] == comparison.right.observed[0].outputs[0] == 7042  # " Paris"


def changed(tmp_path: Path, name: str, factor: float = 1.01) -> Path:
    """The tiny model with one tensor scaled."""
    model = tiny_model()
    tensors = {**model.tensors, name: model.tensors[name] * factor}
    path = tmp_path / "changed.pdmodel"
    save_spec_checkpoint(path, model.spec, tensors)
    return path


@pytest.mark.parametrize(
    ("tensor", "layer", "what"),
    [
        ("embed", 0, "x"),
        ("layers.0.k.weight", 0, "k"),
        ("layers.1.v.weight", 1, "v"),
        ("layers.1.q.weight", 1, "attended"),
        ("layers.2.o.weight", 2, "y"),
        ("layers.2.down.weight", 2, "y"),
        ("head.weight", 3, "logits"),
    ],
)
def test_two_checkpoints_differ_from_the_tensor_that_was_changed_on(
    tiny: Path, tmp_path: Path, tensor: str, layer: int, what: str
) -> None:
    (comparison,) = compared(tiny, changed(tmp_path, tensor))
    assert comparison.first is not None
    assert (comparison.first.layer, comparison.first.tensor) == (layer, what)


def test_a_change_below_the_tolerance_is_no_divergence(tiny: Path, tmp_path: Path) -> None:
    """A differing digest, and differing bits, are no error by themselves."""
    other = changed(tmp_path, "layers.1.v.weight", 1 + 1e-6)
    (comparison,) = compared(tiny, other)
    assert comparison.equal
    assert comparison.left.record["model_digest"] != comparison.right.record["model_digest"]
    (strict,) = compared(tiny, other, tolerance=1e-8)
    assert strict.first is not None and (strict.first.layer, strict.first.tensor) == (1, "v")


def test_equal_best_ids_are_not_enough(tiny: Path, tmp_path: Path) -> None:
    """All scores scaled alike: the same tokens in the same order, and yet other logits."""
    (comparison,) = compared(tiny, changed(tmp_path, "head.weight", 1.5))
    assert not comparison.equal
    assert [f.tensor for f in comparison.findings if not f.ok] == ["logits"] * len(PROMPTS)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"layers": 2}, "LAYERS"), ({"kv_heads": 4}, "PLANES[0].k.heads"), ({"vocab_size": 90}, "VOCAB_SIZE")],
)
def test_models_of_other_sizes_are_refused_by_name(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    other = tiny_model(spec(**changes))
    path = tmp_path / "other.pdmodel"
    save_spec_checkpoint(path, other.spec, other.tensors)
    with pytest.raises(Incompatible) as error:
        compared(tiny, path)
    assert error.value.field == code
    assert [d.code for d in error.value.differences] == [code]


def test_the_default_prompts_pass_a_page_and_a_chunk(tiny: Path) -> None:
    baseline, other = sides(str(tiny), "chunked:30")
    _, prompts = verify([baseline, other], Request(tokens=1))
    lengths = [len(ids) for ids in prompts]
    assert len(prompts) >= 4 and min(lengths) == 1 and max(lengths) > 30 and max(lengths) % 4
    assert all(0 <= token < TINY.vocab_size for ids in prompts for token in ids)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"texts": ["hello"]}, "prompt"),  # no tokenizer
        ({"ids": [prompt(513)]}, "prompt"),
        ({"ids": [(1,)], "tokens": 0}, "tokens"),
        ({"ids": [(1,)], "tolerance": 2.0}, "tolerance"),
        ({"ids": [(1, 2)]}, "reused"),  # shorter than a page
    ],
)
def test_what_cannot_be_compared_is_refused(tiny: Path, request_: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        verify(sides(str(tiny), "reused"), Request(**request_))
    assert error.value.field == field and error.value.remedy


# -- the measure itself, with values worked out by hand --------------------------------------------

AT = Finding(0, 0, "x", True)


def rows(*values: list[float]) -> Rows:
    return Rows.of(torch.tensor(values, dtype=torch.float64))


def test_the_error_of_a_row_is_relative_to_that_row() -> None:
    found = tensor_finding(AT, rows([3.0, 4.0], [300.0, 400.0]), rows([3.0, 4.05], [300.0, 400.0]), 1e-2)
    assert found.max_abs == pytest.approx(0.05)
    assert found.error == pytest.approx(0.01)  # 0.05 / 5
    assert found.mean == pytest.approx(0.005)
    assert found.ok and found.token == 0
    assert not tensor_finding(AT, rows([3.0, 4.0]), rows([3.0, 4.1]), 1e-2).ok


def test_one_bad_row_among_many_is_found() -> None:
    good, bad = [[1.0, 0.0]] * 99, [1.0, 0.0]
    found = tensor_finding(AT, rows(*good, bad), rows(*good, [1.0, 0.1]), 1e-2)
    assert found.mean == pytest.approx(0.001) and not found.ok and found.token == 99


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_must_be_so_on_both_sides(value: float) -> None:
    assert not tensor_finding(AT, rows([1.0, 2.0]), rows([1.0, value]), 0.5).ok
    assert tensor_finding(AT, rows([1.0, value]), rows([1.0, value]), 0.5).ok


def test_another_shape_is_a_divergence() -> None:
    found = tensor_finding(AT, rows([1.0, 2.0]), rows([1.0]), 0.5)
    assert not found.ok and found.detail == "shapes [1, 2] and [1, 1]"


def test_a_choice_of_columns_is_even_and_the_norm_shows_the_rest() -> None:
    chosen = columns(1000, 50)
    assert len(set(chosen.tolist())) == 50
    assert [int(c) // 20 for c in chosen] == list(range(50))  # one in each of 50 equal cells
    assert len({int(c) % 4 for c in columns(256, 64)}) > 1
    whole = torch.ones(3, 1000, dtype=torch.float64)
    other = whole.clone()
    hidden = next(c for c in range(1000) if c not in set(chosen.tolist()))
    other[1, hidden] = 9.0
    a, b = Rows.of(whole, 50), Rows.of(other, 50)
    assert torch.equal(a.data, b.data)
    found = tensor_finding(AT, a, b, 1e-3)
    assert not found.ok and found.token == 1


# -- scores and tokens -----------------------------------------------------------------------------

ONE = Shape(planes=((CachePlane("k", 1, 1), CachePlane("v", 1, 1)),), vocab_size=4)


def scored(*steps: list[float], outputs: tuple[int, ...]) -> Run:
    """A run of one prompt of two tokens, with these logits after it."""
    ids = (1, 2, *outputs[:-1])
    logits = tuple(torch.tensor(step) for step in steps)
    observed = Observed(ids, 2, tuple(range(len(ids))), ({},), (len(ids),), logits, outputs)
    return Run(Side("side", kind="transformers"), ONE, (observed,))


BASE = scored([0.0, 1.0, 4.0, 2.0], [0.0, 3.0, 2.999, 1.0], outputs=(2, 1))


def test_a_near_tie_may_go_either_way() -> None:
    """3.0 against 2.999: closer than twice the tolerance, so another token is no divergence."""
    other = scored([0.0, 1.0, 4.0, 2.0], [0.0, 2.9985, 2.999, 1.0], outputs=(2, 2))
    found = compare(BASE, other, tolerance=1e-3)
    assert found.equal
    assert [f.detail for f in found.findings if f.tensor == "tokens"] == [
        "1 equal, then 1 against 2, 0.001 apart: a near tie"
    ]


def test_another_token_beyond_the_margin_is_a_divergence() -> None:
    other = scored([0.0, 4.5, 4.0, 2.0], [0.0, 3.0, 2.999, 1.0], outputs=(1, 1))
    wrong = [f.tensor for f in compare(BASE, other, tolerance=1e-3).findings if not f.ok]
    assert wrong == ["logits", "top", "tokens"]


def test_a_token_that_its_own_scores_do_not_favour_is_a_divergence() -> None:
    other = scored([0.0, 1.0, 4.0, 2.0], [0.0, 3.0, 2.999, 1.0], outputs=(3, 1))
    found = compare(BASE, other, tolerance=1e-3)
    assert found.first is not None and found.first.tensor == "tokens"
    assert found.first.detail == "3 was chosen, 2 scores best"


def test_logits_are_compared_as_far_as_both_ran_the_same_prefix() -> None:
    other = scored([0.0, 1.0, 4.0, 2.0], [9.0, 9.0, 9.0, 9.5], outputs=(2, 3))
    found = compare(BASE, other, tolerance=1e-3)
    assert found.first is not None and (found.first.tensor, found.first.token) == ("logits", 2)
    shorter = scored([0.0, 1.0, 4.0, 2.0], outputs=(2,))
    assert compare(BASE, shorter, tolerance=1e-3).equal
