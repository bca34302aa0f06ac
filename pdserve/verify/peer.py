"""The side `transformers`: the same checkpoint run by the peer library, watched with hooks.

Read from a Hugging Face directory, or from a GGUF file. K and V come from its cache, the rest
from its layers' inputs and outputs. Eager attention, on the CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_transfer.contract import CachePlane
from pdserve.engine.dtypes import torch_dtype, wide
from pdserve.engine.load import model_path
from pdserve.engine.observe import Observed, Rows
from pdserve.errors import ConfigError
from pdserve.verify.observing import Prompts, Run, Shape, described
from pdserve.verify.sides import Side

# What the module is called that projects attention's output, in the families that the engine loads.
_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense")


def run_peer(side: Side, prompts: Prompts, tokens: int) -> Run:
    """`tokens` greedy tokens for every prompt. Raises ConfigError without the library, or for another kind of file."""
    check_installed()
    watch = _Watch(_load(side))
    with torch.inference_mode():
        observed = tuple(_run(watch, side, prompt, tokens) for prompt in prompts)
    planes = tuple(
        tuple(CachePlane(name, *layer[name].shape) for name in ("k", "v")) if "k" in layer else None
        for layer in observed[0].layers
    )
    shape = Shape(planes, observed[0].logits[0].shape[0])
    import transformers

    record = {**described(side, None), "transformers": str(transformers.__version__), "attention": "eager"}
    return Run(side=side, shape=shape, observed=observed, record=record)


def check_installed() -> None:
    """Raises ConfigError without the library. Imports nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "the library transformers is not installed",
            field="side",
            remedy="pip install transformers accelerate, or compare with another side",
        )


class _Watch:
    """Keeps what each layer read and wrote in the calls since `begin`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        layers = _decoder_layers(model)
        self.layers = len(layers)
        self.seen: list[dict[str, list[Tensor]]] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._input("x", index), with_kwargs=True)
            layer.register_forward_hook(self._output(index))
            projection = _projection(layer)
            if projection is not None:
                projection.register_forward_pre_hook(self._input("attended", index), with_kwargs=True)

    def begin(self) -> None:
        self.seen = [{} for _ in range(self.layers)]

    def keep(self, ids: Sequence[int]) -> int:
        """Logits to ask for. The last, but all where upper layers would else leave out rows that nobody asks for."""
        return len(ids) if getattr(self.model.config, "num_kv_shared_layers", 0) else 1

    def rows(self, index: int, name: str) -> Tensor | None:
        """[n, width] of all calls; None if this model has no such place."""
        found = self.seen[index].get(name)
        return torch.cat([part[0] for part in found]) if found else None

    def _input(self, name: str, index: int) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            value = arguments[0] if arguments else named["hidden_states"]
            self.seen[index].setdefault(name, []).append(value.detach().clone())

        return hook

    def _output(self, index: int) -> Any:
        def hook(module: Any, arguments: Any, result: Any) -> None:
            value = result[0] if isinstance(result, tuple) else result
            self.seen[index].setdefault("y", []).append(value.detach().clone())

        return hook


def _run(watch: _Watch, side: Side, prompt: tuple[int, ...], tokens: int) -> Observed:
    import transformers

    watch.begin()
    types = getattr(watch.model.config, "layer_types", None) or ()
    # Told of windows, it would drop keys that are out of them; of a convolution it must be told.
    cache = transformers.DynamicCache(config=watch.model.config if "conv" in types else None)
    size = side.chunk_tokens or len(prompt)
    pieces = [prompt[start : start + size] for start in range(0, len(prompt), size)]
    positions: list[int] = []
    logits: list[Tensor] = []
    outputs: list[int] = []
    while len(outputs) < tokens:
        ids = pieces.pop(0) if pieces else (outputs[-1],)
        own = list(range(len(positions), len(positions) + len(ids)))
        result = watch.model(
            torch.tensor([ids]),
            position_ids=torch.tensor([own]),
            cache=cache,
            use_cache=True,
            logits_to_keep=watch.keep(ids),
        )
        positions += own
        if not pieces:
            logits.append(result.logits[0, -1].to(wide(result.logits.dtype)))
            outputs.append(int(logits[-1].argmax()))
    ids = (*prompt, *outputs[:-1])
    layers, cached = [], []
    heads = watch.model.config.num_attention_heads
    for index in range(watch.layers):
        stored = cache.layers[index] if index < len(cache.layers) else None
        keys, values = (getattr(stored, name, None) for name in ("keys", "values"))
        if keys is None or values is None:  # it reads an earlier layer's, or keeps what only a convolution reads
            cached.append(len(ids))
            layers.append(_layer(watch, index, {}, heads))
            continue
        kept = {name: t[0].transpose(0, 1) for name, t in (("k", keys), ("v", values))}
        cached.append(int(kept["k"].shape[0]))
        layers.append(_layer(watch, index, kept, heads))
    return Observed(ids, len(prompt), tuple(positions), tuple(layers), tuple(cached), tuple(logits), tuple(outputs))


def _layer(watch: _Watch, index: int, kept: Mapping[str, Tensor], heads: int) -> dict[str, Rows]:
    """kept: k and v [n, Hkv, d], where the layer keeps them."""
    found = {name: Rows.of(rows) for name, rows in kept.items()}
    for name in ("x", "attended", "y"):
        tensor = watch.rows(index, name)
        if tensor is not None:
            found[name] = Rows.of(tensor.view(len(tensor), heads, -1) if name == "attended" else tensor)
    return found


def _load(side: Side) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    path = model_path(side.model)
    options = {"dtype": torch_dtype(side.engine.dtype), "attn_implementation": "eager", "local_files_only": True}
    logging.disable_progress_bar()
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()
    raise ConfigError(
        f"transformers cannot read {path}",
        field="side",
        remedy="compare a Hugging Face directory or a .gguf file",
    )


def _decoder_layers(model: Any) -> Sequence[Any]:
    """The one list of modules that has an entry per layer."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ConfigError(f"no list of {count} layers in {type(model).__name__}", field="side", remedy="use another side")


def _projection(layer: Any) -> Any:
    """Attention's output projection, whose input is what attention made; None where it has another name."""
    for name, module in layer.named_modules():
        if "attn" in name and name.rsplit(".", 1)[-1] in _PROJECTIONS:
            return module
    return None
