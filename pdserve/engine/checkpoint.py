"""Plain ModelSpec checkpoints: one safetensors file with canonical tensors and the spec in its metadata.

Metadata: `pdserve.version` (an integer; it bumps when a field of ModelSpec changes its
meaning) and `pdserve.spec` (the spec's fields as JSON). Unknown fields are refused.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cache_transfer.contract import PositionScheme
from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.digest import model_digest
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.safetensors_file import open_safetensors
from pdserve.engine.spec import LayerShape, ModelSpec
from pdserve.engine.stored import Source, assemble, own_dtype
from pdserve.engine.validate import check_spec
from pdserve.engine.weights import check_tensors, expected_tensors
from pdserve.errors import CheckpointError

VERSION = 1
_AGAIN = "write the file again with save_spec_checkpoint of this version"
_VERSION_KEY, _SPEC_KEY = "pdserve.version", "pdserve.spec"


def save_spec_checkpoint(path: str | Path, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Writes `path`; raises CheckpointError if the tensors are not those of the spec or the disk refuses."""
    check_spec(spec)
    check_tensors(spec, tensors)
    metadata = {_VERSION_KEY: str(VERSION), _SPEC_KEY: json.dumps(dataclasses.asdict(spec), sort_keys=True)}
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}",
            field=str(path),
            reason="BAD_FILE",
            remedy="check the path, its permissions and the space left there",
        ) from error


def load_spec_checkpoint(path: Path, dtype: str, device: str, files: CheckpointFiles) -> LoadedModel:
    """Raises CheckpointError naming the file, field or tensor at fault."""
    files.stamp(path)
    file = open_safetensors(path)
    spec = _read_spec(file.metadata, path)
    check_spec(spec)
    digest = model_digest(spec, file.tensors, files.digests(path, file.tensors))
    dtype = own_dtype(file.tensors) if dtype == "auto" else dtype
    sources = {name: Source(name) for name in expected_tensors(spec)}
    return LoadedModel(path.stem, spec, assemble(spec, sources, file.tensors, dtype, device), dtype, digest, path)


def _read_spec(metadata: Mapping[str, str], path: Path) -> ModelSpec:
    version = metadata.get(_VERSION_KEY)
    if version is None or _SPEC_KEY not in metadata:
        raise CheckpointError(
            f"{path} holds tensors but no ModelSpec",
            field=_SPEC_KEY,
            reason="NOT_A_MODEL",
            remedy="give the directory that holds config.json, or write the file with save_spec_checkpoint",
        )
    if version != str(VERSION):
        raise CheckpointError(
            f"{path} is of checkpoint version {version}, this reads {VERSION}",
            field=_VERSION_KEY,
            reason="BAD_FILE",
            remedy=_AGAIN,
        )
    try:
        values = json.loads(metadata[_SPEC_KEY])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a damaged spec: {error}", field=_SPEC_KEY, reason="BAD_FILE", remedy=_AGAIN
        ) from error
    return spec_from_json(values)


def read_spec_checkpoint(path: Path) -> ModelSpec:
    """The spec alone. Raises CheckpointError as `load_spec_checkpoint` does."""
    return _read_spec(open_safetensors(path).metadata, path)


def spec_from_json(values: object) -> ModelSpec:
    """Raises CheckpointError naming the field that is missing, unknown or of another type."""
    spec: ModelSpec = _build(ModelSpec, values, "spec")
    return spec


def _build(cls: type, values: object, where: str) -> Any:
    """A dataclass from JSON; every field must be known and of its type."""
    known = {item.name: item for item in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise _bad(where, values, "expected an object")
    for name in values:
        if name not in known:
            raise _bad(f"{where}.{name}", values[name], "is unknown")
    required = {n for n, f in known.items() if f.default is f.default_factory is dataclasses.MISSING}
    for name in sorted(required - set(values)):
        raise CheckpointError(f"{where}.{name} is missing", field=name, reason="MISSING_KEY", remedy=_AGAIN)
    hints = typing.get_type_hints(cls)
    return cls(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    if hint in (PositionScheme, LayerShape):
        return _build(hint, value, where)
    if typing.get_origin(hint) is types.UnionType:  # int | None
        return None if value is None else _typed(typing.get_args(hint)[0], value, where)
    if typing.get_origin(hint) is tuple:
        return _tuple(typing.get_args(hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _bad(where, value, f"expected {hint.__name__}")
    return value


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _bad(where, value, "expected a list")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_typed(items[0], item, where) for item in value)
    if len(value) != len(items):
        raise _bad(where, value, f"expected {len(items)} items")
    return tuple(_typed(hint, item, where) for hint, item in zip(items, value, strict=True))


def _bad(field: str, value: object, what: str) -> CheckpointError:
    return CheckpointError(f"{field} = {str(value)[:60]}: {what}", field=field, reason="BAD_SPEC", remedy=_AGAIN)
