"""PEFT LoRA checkpoints: a directory with adapter_config.json and adapter_model.safetensors.

An adapter names modules of its base model as transformers does: `base_model.model.<module>.lora_A.weight` [rank,
inputs] and `lora_B.weight` [outputs, rank]. Where a module lies in our stacked products is told by the Source of its
weight: rows of B are the rows of a weight, so they are taken apart and reordered in the same way.

Its identity is its content: BLAKE3(encode(["adapter", version, [[module, scale, A, B], ...]])) with the modules sorted
by name, and [dtype, shape, BLAKE3(bytes)] for each factor as stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from cache_transfer.encoding import encode
from pdserve.engine import deterministic
from pdserve.engine.adapter_config import LoraConfig, read_lora_config
from pdserve.engine.adapters import Adapter, Delta, check_rows_of
from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.digest import content_digest
from pdserve.engine.dtypes import wide
from pdserve.engine.hf import read_json
from pdserve.engine.parts import Linear
from pdserve.engine.safetensors_file import MappedTensor, open_safetensors
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import Source, arrange
from pdserve.engine.weights import expected_tensors
from pdserve.errors import CheckpointError

_CONFIG, _WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_VERSION = 1
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_CANONICAL = re.compile(r"layers\.(?P<layer>\d+)\.(?P<name>q|k|v|o|gate|up|down|conv_in|conv_out)\.weight")
_PRODUCTS = {"qkv": ("q", "k", "v"), "o": ("o",), "up": ("gate", "up"), "down": ("down",), "conv_in": ("conv_in",),
             "conv_out": ("conv_out",)}  # fmt: skip
_PRODUCT_OF = {name: product for product, names in _PRODUCTS.items() for name in names}


@dataclass(frozen=True)
class Base:
    """What an adapter must fit."""

    spec: ModelSpec
    sources: Mapping[str, Source]  # canonical tensor -> where a Hugging Face directory has it
    dtype: torch.dtype
    device: torch.device
    tiled: bool  # deterministic mode


@dataclass(frozen=True)
class _Place:
    """A canonical weight that a module of the base model is made of, wholly or in part."""

    layer: int
    product: str
    start: int  # first column of the product's output
    outputs: int
    inputs: int
    source: Source


@dataclass(frozen=True)
class _Pair:
    a: MappedTensor
    b: MappedTensor


def load_adapter(path: str | Path, base: Base) -> Adapter:
    """Reads a checkpoint into memory, in the base model's layout.

    Raises:
        CheckpointError: naming the file, key, module or tensor at fault, or the file that changed meanwhile.
        Internal: in deterministic mode, if this build of torch does not keep rows apart.
    """
    path, files = Path(path), CheckpointFiles(keep=False)
    _check_files(path)
    for name in (_CONFIG, _WEIGHTS):
        files.stamp(path / name)
    config = read_lora_config(read_json(path / _CONFIG), str(path / _CONFIG))
    pairs = _pairs(open_safetensors(path / _WEIGHTS).tensors)
    places = _places(base)
    _check_modules(config, pairs, places)
    scales = {module: config.scale_of(module) for module in pairs}
    for module, pair in pairs.items():
        _check_shapes(module, pair, config.rank_of(module), places[module])
    deltas: dict[tuple[int, str], list[Delta]] = {}
    for module in sorted(pairs):
        for key, delta in _deltas(pairs[module], scales[module], places[module], base):
            deltas.setdefault(key, []).append(delta)
    size = sum(t.values.numel() for pair in pairs.values() for t in (pair.a, pair.b)) * wide(base.dtype).itemsize
    rank = max(pair.a.shape[0] for pair in pairs.values())
    adapter = Adapter(_digest(pairs, scales), {key: tuple(found) for key, found in deltas.items()}, rank, size)
    files.check_unchanged()
    if base.tiled:
        widths = {(p.layer, p.product): p.inputs for parts in places.values() for p in parts}
        check_rows_of(adapter, torch.Generator().manual_seed(1), widths, base.dtype)
    return adapter


def _check_files(path: Path) -> None:
    if not path.is_dir():
        raise _missing(f"{path} is no directory", "path", "give the directory that PEFT's save_pretrained wrote")
    if not (path / _CONFIG).is_file():
        raise _missing(f"{path} has no {_CONFIG}", _CONFIG, "give the directory that PEFT's save_pretrained wrote")
    if not (path / _WEIGHTS).is_file():
        pickled = f", only {_PICKLED}" if (path / _PICKLED).exists() else ""
        remedy = "save it as safetensors; pickled weights are not read"
        raise _missing(f"{path} has no {_WEIGHTS}{pickled}", _WEIGHTS, remedy)


def _pairs(tensors: Mapping[str, MappedTensor]) -> dict[str, _Pair]:
    """Module -> its two factors. Every tensor is one of them."""
    found: dict[str, dict[str, MappedTensor]] = {}
    for name in sorted(tensors):
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"tensor {name} {list(tensors[name].shape)} is no factor of a linear module",
                field=name,
                reason="UNKNOWN_TENSOR",
                remedy="only LoRA on linear modules is supported: no embeddings, biases, magnitudes or saved modules",
            )
        found.setdefault(match["module"], {})[match["which"]] = tensors[name]
    for module, factors in found.items():
        for which in sorted({"A", "B"} - set(factors)):
            name = f"{_PREFIX}{module}.lora_{which}.weight"
            raise CheckpointError(
                f"tensor {name} is missing", field=name, reason="MISSING_TENSOR", remedy="fetch the adapter again"
            )
    return {module: _Pair(factors["A"], factors["B"]) for module, factors in found.items()}


def _places(base: Base) -> dict[str, list[_Place]]:
    """Module of the base model -> the canonical weights it is made of, in the order of our products."""
    shapes = expected_tensors(base.spec)
    places: dict[str, list[_Place]] = {}
    for name in shapes:
        match = _CANONICAL.fullmatch(name)
        if match is None or name not in base.sources:
            continue
        product, prefix = _PRODUCT_OF[match["name"]], f"layers.{match['layer']}."
        before = _PRODUCTS[product][: _PRODUCTS[product].index(match["name"])]
        start = sum(shapes[f"{prefix}{other}.weight"][0] for other in before if f"{prefix}{other}.weight" in shapes)
        source = base.sources[name]
        outputs, inputs = shapes[name]
        place = _Place(int(match["layer"]), product, start, outputs, inputs, source)
        places.setdefault(source.name.removesuffix(".weight"), []).append(place)
    if not places:
        raise CheckpointError(
            "adapters are not supported for this base model: its format does not name modules as PEFT does",
            field="model",
            reason="NO_ADAPTERS",
            remedy="serve the base model from its Hugging Face directory",
        )
    return places


def _check_modules(config: LoraConfig, pairs: Mapping[str, _Pair], places: Mapping[str, Sequence[_Place]]) -> None:
    """What the configuration asks for, what the file has, and what this base model can take must be the same."""
    wanted = {module for module in places if config.matches(module)}
    for module in sorted(pairs):
        if module not in places:
            raise CheckpointError(
                f"the adapter changes {module}, which is no linear module in a layer of this base model",
                field=module,
                reason="UNSUPPORTED_MODULE",
                remedy="train it on attention and MLP projections of this base model only",
            )
        if module not in wanted:
            raise CheckpointError(
                f"the file has factors of {module}, which target_modules does not name",
                field="target_modules",
                reason="ADAPTER_MODULES",
                remedy="configuration and weights are of two adapters; fetch it again",
            )
    if not pairs:
        raise CheckpointError(
            "the adapter changes no module",
            field="target_modules",
            reason="EMPTY_ADAPTER",
            remedy="fetch it again, or name modules of this base model",
        )
    for module in sorted(wanted - set(pairs)):
        raise CheckpointError(
            f"target_modules names {module}, but the file has no factors of it",
            field="target_modules",
            reason="MISSING_TENSOR",
            remedy="configuration and weights are of two adapters, or of another base model; fetch it again",
        )


def _check_shapes(module: str, pair: _Pair, rank: int, parts: Sequence[_Place]) -> None:
    outputs = sum(part.outputs for part in parts)
    shapes = {"A": (pair.a, (rank, parts[0].inputs)), "B": (pair.b, (outputs, rank))}
    for which, (tensor, expected) in shapes.items():
        if tensor.shape != expected:
            raise CheckpointError(
                f"lora_{which} of {module} is {list(tensor.shape)}, expected {list(expected)}",
                field=tensor.name,
                reason="TENSOR_SHAPE",
                remedy="the adapter is of another base model, or its configuration of another adapter",
            )


def _deltas(pair: _Pair, scale: float, parts: Sequence[_Place], base: Base) -> list[tuple[tuple[int, str], Delta]]:
    """One delta for each run of neighbouring columns that the module makes."""
    a = _values(pair.a, base)
    b = _values(pair.b, base) * scale
    made: list[tuple[tuple[int, str], int, Tensor]] = []
    for part in parts:
        rows = arrange(b, replace(part.source, transposed=False))
        if made and made[-1][0] == (part.layer, part.product) and made[-1][1] + made[-1][2].shape[0] == part.start:
            key, start, before = made.pop()
            made.append((key, start, torch.cat([before, rows])))
        else:
            made.append(((part.layer, part.product), part.start, rows))
    product = deterministic.PaddedLinear if base.tiled else Linear
    down = product(a.contiguous(), None)
    return [
        (key, Delta(start, start + rows.shape[0], down, product(rows.contiguous(), None))) for key, start, rows in made
    ]


def _values(tensor: MappedTensor, base: Base) -> Tensor:
    """A copy of its own, in the precision of sums."""
    values = torch.empty(tensor.shape, dtype=wide(base.dtype), device=base.device)
    values.copy_(tensor.read(base.dtype))
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(
            f"tensor {tensor.name} has values that are no numbers",
            field=tensor.name,
            reason="OUT_OF_RANGE",
            remedy="fetch the adapter again",
        )
    return values


def _digest(pairs: Mapping[str, _Pair], scales: Mapping[str, float]) -> bytes:
    rows = tuple(
        (module, scales[module], _identity(pairs[module].a), _identity(pairs[module].b)) for module in sorted(pairs)
    )
    return blake3(encode(("adapter", _VERSION, rows))).digest()


def _identity(tensor: MappedTensor) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.dtype, tensor.shape, content_digest(tensor)


def _missing(message: str, field: str, remedy: str) -> CheckpointError:
    return CheckpointError(message, field=field, reason="MISSING_FILE", remedy=remedy)
