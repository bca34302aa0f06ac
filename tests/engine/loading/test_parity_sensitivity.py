"""The parity tests can fail: a plausible fault moves the logits by more than 100 times their tolerance.

Each fault is planted in the loaded model or in the running engine; the same prompt, run
through the same comparison, must then be far off the peer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.loaded import LoadedModel
from tests.engine.loading import peers

LENGTH = 23
CUT = 9

Fault = Callable[[LoadedModel], LoadedModel]


def change_spec(**changes: Any) -> Fault:
    return lambda model: dataclasses.replace(model, spec=dataclasses.replace(model.spec, **changes))


def change_tensors(match: str, change: Callable[[Tensor, LoadedModel], Tensor]) -> Fault:
    def plant(model: LoadedModel) -> LoadedModel:
        tensors = {name: change(t, model) if match in name else t for name, t in model.tensors.items()}
        return dataclasses.replace(model, tensors=tensors)

    return plant


def in_order(*faults: Fault) -> Fault:
    def plant(model: LoadedModel) -> LoadedModel:
        for fault in faults:
            model = fault(model)
        return model

    return plant


def next_kv_head(tensor: Tensor, model: LoadedModel) -> Tensor:
    """Rows of KV head g move to g + 1, so that every query head reads a wrong one."""
    return tensor.roll(model.spec.head_dim, 0)


def pairs_not_reordered(tensor: Tensor, model: LoadedModel) -> Tensor:
    heads = tensor.shape[0] // model.spec.head_dim
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def without_qk_norm(model: LoadedModel) -> LoadedModel:
    tensors = {name: t for name, t in model.tensors.items() if "q_norm" not in name and "k_norm" not in name}
    return change_spec(qk_norm=False, qk_norm_each=False)(dataclasses.replace(model, tensors=tensors))


def unscaled_rope(model: LoadedModel) -> LoadedModel:
    scheme = model.spec.positions
    return change_spec(positions=PositionScheme(kind="rope", theta=scheme.theta, dims=scheme.dims))(model)


def scaling_parameter(name: str, value: float) -> Fault:
    def plant(model: LoadedModel) -> LoadedModel:
        scheme = model.spec.positions
        parameters = tuple({**dict(scheme.scaling_parameters), name: value}.items())
        return change_spec(positions=dataclasses.replace(scheme, scaling_parameters=parameters))(model)

    return plant


def exchanged(a: str, b: str) -> Fault:
    def plant(model: LoadedModel) -> LoadedModel:
        other = {f".{a}.": f".{b}.", f".{b}.": f".{a}."}
        names = {n: next((n.replace(x, y) for x, y in other.items() if x in n), n) for n in model.tensors}
        return dataclasses.replace(model, tensors={name: model.tensors[names[name]] for name in model.tensors})

    return plant


def per_head_norm(model: LoadedModel) -> LoadedModel:
    cut = model.spec.head_dim
    tensors = {n: t[:cut] if "q_norm" in n or "k_norm" in n else t for n, t in model.tensors.items()}
    return change_spec(qk_norm_whole=False)(dataclasses.replace(model, tensors=tensors))


def next_query_head(tensor: Tensor, model: LoadedModel) -> Tensor:
    return tensor.roll(model.spec.head_dim, 0)


def without_embed_norm(model: LoadedModel) -> LoadedModel:
    tensors = {name: t for name, t in model.tensors.items() if not name.startswith("embed_norm")}
    return change_spec(embed_norm=False)(dataclasses.replace(model, tensors=tensors))


def without_sinks(model: LoadedModel) -> LoadedModel:
    tensors = {name: t for name, t in model.tensors.items() if not name.endswith(".sinks")}
    return change_spec(attention_sinks=False)(dataclasses.replace(model, tensors=tensors))


def every_pair_turns(model: LoadedModel) -> LoadedModel:
    def all_of(scheme: PositionScheme) -> PositionScheme:
        return PositionScheme(kind="rope", theta=scheme.theta, dims=scheme.dims)

    return change_spec(layer_positions=tuple(map(all_of, model.spec.layer_positions)))(model)


def values_of_their_own(model: LoadedModel) -> LoadedModel:
    """In layers whose values are their keys."""
    own = {f"layers.{i}.v.weight": model.tensors[f"layers.{i}.k.weight"].flip(0) for i in model.spec.key_is_value}
    return change_spec(key_is_value=())(dataclasses.replace(model, tensors={**model.tensors, **own}))


def zero(tensor: Tensor, model: LoadedModel) -> Tensor:
    return torch.zeros_like(tensor)


NO_POSITIONS = change_spec(positions=PositionScheme(kind="none"))
OTHER_HEAD = in_order(change_tensors(".k.", next_kv_head), change_tensors(".v.", next_kv_head))

FAULTS: Mapping[str, tuple[str, Fault]] = {
    "llama: rope left out": ("llama", NO_POSITIONS),
    "llama: wrong KV head": ("llama", OTHER_HEAD),
    "llama: pairs not reordered": (
        "llama",
        in_order(change_tensors(".q.", pairs_not_reordered), change_tensors(".k.", pairs_not_reordered)),
    ),
    "llama: q bias left out": ("llama-biases", change_tensors(".q.bias", zero)),
    "llama: mlp bias left out": ("llama-biases", change_tensors(".down.bias", zero)),
    "llama3: scaling left out": ("llama3-scaled", unscaled_rope),
    "mistral: rope left out": ("mistral", NO_POSITIONS),
    "mistral: wrong KV head": ("mistral", OTHER_HEAD),
    "mistral: window left out": ("mistral-short-window", change_spec(sliding_window=())),
    "mistral: window one too long": ("mistral-short-window", change_spec(sliding_window=(6, 6, 6))),
    "mistral: window one too short": ("mistral-short-window", change_spec(sliding_window=(4, 4, 4))),
    "qwen2: rope left out": ("qwen2", NO_POSITIONS),
    "qwen2: wrong KV head": ("qwen2", OTHER_HEAD),
    "qwen2: bias left out": ("qwen2", change_tensors(".v.bias", zero)),
    "qwen2: window on the wrong layers": ("qwen2-windows", change_spec(sliding_window=(5, 5, 0))),
    "qwen3: rope left out": ("qwen3", NO_POSITIONS),
    "qwen3: wrong KV head": ("qwen3", OTHER_HEAD),
    "qwen3: q/k norm left out": ("qwen3", without_qk_norm),
    "linear: scaling left out": ("llama-linear", unscaled_rope),
    "yarn: scaling left out": ("llama-yarn", unscaled_rope),
    "yarn: attention factor left out": ("llama-yarn", scaling_parameter("attention_factor", 1.0)),
    "yarn: ends of the ramp made whole": ("llama-yarn-mscale", scaling_parameter("truncate", 1.0)),
    "longrope: short factors for a long prompt": ("phi3-longrope", scaling_parameter("long", 0.0)),
    "longrope: attention factor left out": ("phi3-longrope", scaling_parameter("attention_factor", 1.0)),
    "phi3: the whole head rotated": ("phi3-longrope", change_spec(positions=PositionScheme("rope", 1e4, 16))),
    "phi3: gate and up exchanged": ("phi3", exchanged("gate", "up")),
    "smollm3: every layer rotated": ("smollm3", change_spec(layer_positions=())),
    "granite: residual factor left out": ("granite", change_spec(residual_scale=1.0)),
    "granite: embedding factor left out": ("granite", change_spec(embed_scale=1.0)),
    "granite: attention factor left out": ("granite", change_spec(attention_scale=0.0)),
    "granite: logit factor left out": ("granite", change_spec(logit_scale=1.0)),
    "olmo2: q/k norm per head": ("olmo2", per_head_norm),
    "gemma2: attention cap left out": ("gemma2", change_spec(soft_cap=0.0)),
    "gemma2: logit cap left out": ("gemma2", change_spec(logit_soft_cap=0.0)),
    "gemma2: norms without their offset": ("gemma2", change_spec(norm_offset=0.0)),
    "gemma2: windows on the other layers": ("gemma2", change_spec(sliding_window=(0, 5, 0))),
    "gemma2: embedding not scaled": ("gemma2", change_spec(embed_scale=1.0)),
    "gemma3: one base for all": ("gemma3", change_spec(layer_positions=())),
    "gemma4: upper layers read another's cache": ("gemma4", change_spec(kv_layers=(0, 1, 2, 3, 0, 1))),
    "gemma4: embeddings of the layers shifted": ("gemma4", change_tensors("layer_embed", lambda t, _: t.roll(8, 1))),
    "gemma4: layers not scaled": ("gemma4", change_tensors("layer_scale", lambda t, _: torch.ones_like(t))),
    "gemma4: values not normed": ("gemma4", change_spec(v_norm=False)),
    "gemma4: windows on the other layers": ("gemma4", change_spec(sliding_window=(0, 5, 0, 5, 0, 5))),
    "gemma4: every pair turns": ("gemma4-global-heads", every_pair_turns),
    "gemma4: scores divided": ("gemma4-global-heads", change_spec(attention_scale=0.0)),
    "gemma4: values that are not the keys": ("gemma4-global-heads", values_of_their_own),
    "gemma4: experts not weighted": ("gemma4-experts", change_tensors("expert_gains", lambda t, _: torch.ones_like(t))),
    "gemma4: router reads what is not scaled": (
        "gemma4-experts",
        change_tensors("router_norm", lambda t, _: torch.ones_like(t)),
    ),
    "gemma4: gate and up exchanged": ("gemma4-experts", exchanged("expert_gate", "expert_up")),
    "lfm2: the filter reversed": ("lfm2", change_tensors(".conv.weight", lambda t, _: t.flip(1))),
    "lfm2: gates and input exchanged": ("lfm2", change_tensors("conv_in.weight", lambda t, m: t.roll(m.spec.width, 0))),
    "lfm2: a token too few": (
        "lfm2",
        change_tensors(".conv.weight", lambda t, _: torch.cat([t[:, :1] * 0, t[:, 1:]], 1)),
    ),
    "lfm2: the filter's bias left out": ("lfm2-long-kernel", change_tensors(".conv.bias", zero)),
    "qwen3-moe: weights not normed": ("qwen3-moe", change_spec(norm_experts=False)),
    "qwen3-moe: another expert": ("qwen3-moe", change_tensors("expert_down", lambda t, _: t.roll(1, 0))),
    "mixtral: one expert instead of two": ("mixtral", change_spec(active_experts=1)),
    "gpt-neox: one after the other": ("gpt-neox", change_spec(parallel=False)),
    "gpt-neox: the whole head rotated": ("gpt-neox", change_spec(positions=PositionScheme("rope", 1e4, 16))),
    "stablelm: q/k norm left out": ("stablelm-parallel", without_qk_norm),
    "stablelm: another head's norm": ("stablelm-parallel", change_tensors("q_norm", lambda t, _: t.roll(1, 0))),
    "nemotron: norms without their offset": ("nemotron", change_spec(norm_offset=0.0)),
    "nemotron: not squared": ("nemotron", change_spec(activation="relu")),
    "falcon: wrong KV head": ("falcon-groups", OTHER_HEAD),
    "falcon: norms exchanged": ("falcon-groups", exchanged("attn_norm", "mlp_norm")),
    "minimax-m2: choice not corrected": ("minimax-m2", change_tensors("router_correction", zero)),
    "gpt-oss: sinks left out": ("gpt-oss", without_sinks),
    "gpt-oss: another head's sink": ("gpt-oss", change_tensors(".sinks", lambda t, _: t.roll(1, 0))),
    "gpt-oss: limit left out": ("gpt-oss", change_spec(swiglu_limit=1e9)),
    "gpt-oss: another alpha": ("gpt-oss", change_spec(swiglu_alpha=1.702)),
    "gpt-oss: gate and up exchanged": ("gpt-oss", exchanged("expert_gate", "expert_up")),
    "gpt-oss: weights of all experts": ("gpt-oss", change_spec(norm_experts=False)),
    "gpt-oss: router without its bias": ("gpt-oss", change_tensors("router.bias", zero)),
    "gpt-oss: experts without their bias": ("gpt-oss", change_tensors("expert_down.bias", zero)),
    "gpt-oss: windows on the other layers": ("gpt-oss", change_spec(sliding_window=(0, 5, 0))),
    "gpt-oss: ends of yarn's ramp made whole": ("gpt-oss", scaling_parameter("truncate", 1.0)),
    "qwen2-moe: shared expert not weighted": ("qwen2-moe", change_tensors("shared_router", zero)),
    "qwen2-moe: weights normed": ("qwen2-moe", change_spec(norm_experts=True)),
    "opt: position offset left out": ("opt", change_tensors("pos", lambda t, _: t.roll(2, 0))),
    "bloom: positions left out": ("bloom", NO_POSITIONS),
    "bloom: slopes of another number of heads": ("bloom-six-heads", change_tensors(".q.", next_query_head)),
    "bloom: embedding norm left out": ("bloom", without_embed_norm),
    "gpt2: position table shifted": ("gpt2", change_tensors("pos", lambda t, _: t.roll(1, 0))),
    "gpt2: wrong head": ("gpt2", OTHER_HEAD),
    "gpt2: matrix not transposed": ("gpt2", change_tensors(".o.weight", lambda t, _: t.T)),
    "gpt2: another activation": ("gpt2", change_spec(activation="relu")),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    made: dict[str, tuple[Any, Path]] = {}

    def make(name: str) -> tuple[Any, Path]:
        if name not in made:
            model = peers.make_peer(name)
            made[name] = (model, peers.save_peer(model, tmp_path_factory.mktemp(name)))
        return made[name]

    return make


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_moves_the_logits(fault: str, checkpoints: Callable[[str], tuple[Any, Path]]) -> None:
    name, plant = FAULTS[fault]
    peer, path = checkpoints(name)
    ids = peers.prompt(LENGTH)
    broken = peers.engine_logits(peers.new_engine(plant(load_model(path, "fp32"))), ids)
    assert peers.largest_difference(broken, peers.peer_logits(peer, ids)) > 100 * peers.TOLERANCE


def shift_rotations(engine: Engine) -> None:
    """Later tokens are placed one position too far; earlier keys stay where they are.

    (Shifting all of them alike changes nothing: rotary attention sees differences only.)
    """
    assert engine.rotary is not None
    engine.rotary.cos.copy_(engine.rotary.cos.roll(-1, 0))  # in place: the kernels hold its address
    engine.rotary.sin.copy_(engine.rotary.sin.roll(-1, 0))


@pytest.mark.parametrize("name", ["llama", "llama3-scaled", "mistral", "qwen2", "qwen3"])
def test_position_shifted_after_a_chunk_moves_the_logits(
    name: str, checkpoints: Callable[[str], tuple[Any, Path]]
) -> None:
    peer, path = checkpoints(name)
    ids = peers.prompt(LENGTH)
    engine = peers.new_engine(load_model(path, "fp32"))

    def shift(start: int) -> None:
        if start == CUT:
            shift_rotations(engine)

    got = peers.engine_logits(engine, ids, (CUT,), shift)
    expected = peers.peer_logits(peer, ids)
    assert peers.largest_difference(got[:CUT], expected[:CUT]) <= peers.TOLERANCE
    assert peers.largest_difference(got[CUT:], expected[CUT:]) > 100 * peers.TOLERANCE
