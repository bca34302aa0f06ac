"""Hugging Face directories: config.json beside safetensors files, one or sharded with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.digest import model_digest
from pdserve.engine.family import Family
from pdserve.engine.hf_config import find_family, spec_from_config
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.mxfp4 import unpacked
from pdserve.engine.safetensors_file import open_safetensors
from pdserve.engine.spec import ModelSpec
from pdserve.engine.stored import StoredTensor, assemble, own_dtype
from pdserve.engine.validate import check_spec
from pdserve.errors import CheckpointError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "get the model's files again; all of them are of one version"


def load_directory(path: Path, dtype: str, device: str, files: CheckpointFiles) -> LoadedModel:
    """Raises CheckpointError naming the file, tensor or key at fault."""
    config = read_json(path / _CONFIG)
    generation = read_json(path / _GENERATION) if (path / _GENERATION).exists() else {}
    where = str(path / _CONFIG)
    family = find_family(config, where)
    spec = spec_from_config(family, config, generation, where)
    check_spec(spec)
    opened = _open_weights(path, files)
    stored = {name: tensor for tensors in opened.values() for name, tensor in tensors.items()}
    if dtype == "auto":
        dtype = own_dtype(stored, config.get("dtype", config.get("torch_dtype")))
    contents = [files.digests(file, tensors) for file, tensors in opened.items()]
    digest = model_digest(spec, stored, {name: value for part in contents for name, value in part.items()})
    weights = unpacked(stored) if family.packed else stored
    tensors = assemble(
        spec,
        family.naming.sources(spec, _missing_prefix(family, weights)),
        _untie(family, spec, weights),
        dtype,
        device,
        family.naming.ignored(spec),
    )
    return LoadedModel(path.resolve().name, spec, tensors, dtype, digest, path, sources=family.naming.sources(spec))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist",
            field=path.name,
            reason="MISSING_FILE",
            remedy="check the path, or get the file again",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {error}", field=path.name, reason="BAD_FILE", remedy="get the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds no JSON object", field=path.name, reason="BAD_FILE", remedy="get the file again"
        )
    return value


def _open_weights(path: Path, files: CheckpointFiles) -> dict[Path, Mapping[str, StoredTensor]]:
    """The tensors of each file; no name is in two of them."""
    if (path / _SINGLE).exists():
        return {path / _SINGLE: _open(path / _SINGLE, files)}
    if not (path / _INDEX).exists():
        present = sorted(item.name for item in path.iterdir() if item.suffix in (".safetensors", ".bin", ".pt"))
        raise CheckpointError(
            f"{path} has neither {_SINGLE} nor {_INDEX}" + (f", only {', '.join(present)}" if present else ""),
            field=_SINGLE,
            reason="MISSING_FILE",
            remedy="fetch the safetensors weights; pickled weights are not read",
        )
    return _open_shards(path, _shard_map(path / _INDEX), files)


def _shard_map(index: Path) -> Mapping[str, str]:
    """Tensor -> shard file, from the index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map", field="weight_map", reason="BAD_FILE", remedy=_AGAIN)
    for tensor, shard in names.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index} places {tensor} in {shard!r}, which is no file name",
                field=tensor,
                reason="BAD_FILE",
                remedy=_AGAIN,
            )
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                f"shard {shard}, which {index.name} names for {tensor}, does not exist",
                field=shard,
                reason="MISSING_SHARD",
                remedy=f"fetch it into {index.parent}",
            )
    return names


def _open_shards(
    path: Path, shard_of: Mapping[str, str], files: CheckpointFiles
) -> dict[Path, Mapping[str, StoredTensor]]:
    opened: dict[Path, Mapping[str, StoredTensor]] = {}
    for shard in sorted(set(shard_of.values())):
        opened[path / shard] = _open(path / shard, files)
        for name in opened[path / shard]:
            if shard_of.get(name) != shard:
                raise CheckpointError(
                    f"shard {shard} holds tensor {name}, which {_INDEX} places in {shard_of.get(name, 'no shard')}",
                    field=name,
                    reason="UNKNOWN_TENSOR",
                    remedy=_AGAIN,
                )
    for name, shard in shard_of.items():
        if name not in opened[path / shard]:
            raise CheckpointError(
                f"tensor {name} is not in shard {shard}, where {_INDEX} places it",
                field=name,
                reason="MISSING_TENSOR",
                remedy=_AGAIN,
            )
    return opened


def _open(file: Path, files: CheckpointFiles) -> Mapping[str, StoredTensor]:
    files.stamp(file)
    return open_safetensors(file).tensors


def _missing_prefix(family: Family, stored: Mapping[str, StoredTensor]) -> str:
    prefix = family.optional_prefix
    return prefix if prefix and not any(name.startswith(prefix) for name in stored) else ""


def _untie(family: Family, spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Drops the copy of a tied head that some files carry; refuses one that is not a copy."""
    head = f"{family.naming.modules['head']}.weight"
    if not spec.tied_head or head not in stored:
        return stored
    name = f"{family.naming.modules['embed']}.weight".removeprefix(_missing_prefix(family, stored))
    if name in stored and not _same(stored[head], stored[name]):
        raise CheckpointError(
            f"tie_word_embeddings is true, but {head} differs from {name}",
            field="tie_word_embeddings",
            reason="TIED_HEAD",
            remedy="set tie_word_embeddings to false if the model has a head of its own, or remove the tensor",
        )
    return {key: tensor for key, tensor in stored.items() if key != head}


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    return a.shape == b.shape and torch.equal(a.read(torch.float32), b.read(torch.float32))
