"""When weights are laid out for the kernels: at once before an engine serves, a part at a time after that."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_transfer.contract import PositionScheme
from pdserve.engine.adapters import Adapter, Delta
from pdserve.engine.checks import TOLERANCES, relative_error
from pdserve.engine.engine import Engine
from pdserve.engine.native import build, choice
from pdserve.engine.native.build import Recipe
from pdserve.engine.native.packed import PackedLinear
from pdserve.engine.parts import Linear
from pdserve.engine.plan import Chunk
from pdserve.engine.spec import ModelSpec
from pdserve.errors import ConfigError
from tests.engine.tiny import prompt, run, spec, tiny_engine

DECLINED = spec(positions=PositionScheme("alibi", dims=4))  # the kernels compute its products only


def packed_layers(engine: Engine) -> int:
    return sum(isinstance(layer.down, PackedLinear) for layer in engine.decoder.layers)


ADDS = Delta(0, 32, lambda x: x[:, :2], lambda x: x.repeat(1, 16))
ADAPTER = Adapter(b"a" * 32, {(1, "down"): (ADDS,)}, rank=2, size=0)


def answer(engine: Engine, adapter: Adapter | None = None) -> torch.Tensor:
    if adapter is not None:
        engine.adapters.add(adapter)
    return run(engine, Chunk("r", prompt(6), 0, (0, 1), adapter=adapter.digest if adapter else None)).logits["r"]


@pytest.mark.parametrize(("of", "adapter"), [(spec(), None), (DECLINED, None), (spec(), ADAPTER)])
def test_kernels_that_come_while_an_engine_serves_take_a_layer_before_each_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of: ModelSpec, adapter: Adapter | None
) -> None:
    real = build.build(build.find_recipe()).path  # kept for this user, or made now
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "_builds", {})
    monkeypatch.setattr(choice, "BYTES_A_STEP", 1)
    compile_now = threading.Event()

    def held(recipe: Recipe, target: Path) -> None:
        assert compile_now.wait(60)
        target.write_bytes(real.read_bytes())

    monkeypatch.setattr(build, "_compile", held)
    engine, late = tiny_engine(of, kernels="auto"), tiny_engine(of, kernels="auto")
    expected = answer(tiny_engine(of), adapter)
    assert relative_error(answer(engine, adapter), expected) < TOLERANCES["fp32"]
    compile_now.set()
    for wanted in choice._builds.values():
        wanted.result(60)
    for layers in range(1, of.layers + 1):
        assert relative_error(answer(engine, adapter), expected) < TOLERANCES["fp32"]
        assert packed_layers(engine) == layers
        assert engine.kernels.native_steps == 0
    for _ in range(2):
        assert relative_error(answer(engine, adapter), expected) < TOLERANCES["fp32"]
    assert isinstance(engine.decoder.head, PackedLinear)
    if of is not DECLINED:
        assert engine.kernels.state == "native" and engine.kernels.native_steps == (adapter is None)
    late.prepare()  # serves nobody yet
    assert packed_layers(late) == of.layers


@pytest.mark.parametrize("of", [spec(), DECLINED])
@pytest.mark.parametrize(("layer", "name"), [(0, "qkv"), (1, "o"), (2, "down"), (None, "head")])
def test_without_memory_for_a_weight_plain_torch_goes_on(of: ModelSpec, layer: int | None, name: str) -> None:
    engine = tiny_engine(of, kernels="auto")
    decoder = engine.decoder
    assert engine.kernels.state == ("plain" if of is DECLINED else "native")
    huge = Linear(torch.zeros(1, 32).expand(2**44, 32))  # 2 PiB once it is copied
    head, layers = decoder.head, list(decoder.layers)
    if layer is None:
        decoder.head = huge
    else:
        change: dict[str, Any] = {name: huge}
        decoder.layers[layer] = replace(layers[layer], **change)
    engine.prepare()
    assert "memory" in engine.kernels.why and engine.kernels.state == ("plain" if of is DECLINED else "failed")
    assert "memory" in engine.contract().info["kernels"]
    if layer is None:
        decoder.head = head
    else:
        assert packed_layers(engine) == layer
        assert not isinstance(decoder.layers[layer].qkv, PackedLinear)  # a layer is packed as a whole, or not at all
        decoder.layers[layer] = layers[layer]
    for _ in range(2):
        assert relative_error(answer(engine), answer(tiny_engine(of))) < TOLERANCES["fp32"]
    assert engine.kernels.plain_steps == 2


def test_what_else_keeps_weights_from_being_laid_out_is_not_called_a_want_of_memory() -> None:
    engine = tiny_engine(kernels="auto")
    whole = engine.decoder.layers[2]
    engine.decoder.layers[2] = replace(whole, down=Linear(torch.empty(32, 48, device="meta")))  # holds no numbers
    engine.prepare()
    why = engine.kernels.why
    assert engine.kernels.state == "failed" and "meta tensor" in why and "memory" not in why and "\n" not in why
    engine.decoder.layers[2] = whole
    assert relative_error(answer(engine), answer(tiny_engine())) < TOLERANCES["fp32"]


def test_under_native_an_engine_without_memory_for_a_weight_never_serves() -> None:
    engine = tiny_engine(kernels="native")
    last = engine.decoder.layers[2]
    engine.decoder.layers[2] = replace(last, down=Linear(torch.zeros(1, 48).expand(2**44, 48)))
    for attempt in (engine.prepare, engine.prepare, lambda: answer(engine)):
        with pytest.raises(ConfigError, match="memory") as caught:
            attempt()
        assert caught.value.field == "kernels" and caught.value.remedy
