"""The ModelSpec of a checkpoint, without its weights: what the ledger needs."""

from __future__ import annotations

from pathlib import Path

from pdserve.engine.checkpoint import read_spec_checkpoint, spec_from_json
from pdserve.engine.gguf_file import read_gguf
from pdserve.engine.gguf_spec import spec_from_metadata
from pdserve.engine.hf import read_json
from pdserve.engine.hf_config import find_family, spec_from_config
from pdserve.engine.spec import ModelSpec
from pdserve.engine.validate import check_spec
from pdserve.errors import CheckpointError


def read_spec(path: str | Path) -> ModelSpec:
    """Reads headers and configuration only: a directory, a .gguf, .pdmodel or .safetensors file, or a spec as .json.

    A directory needs no more than its config.json. Raises CheckpointError naming the file or key at fault.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", field="path", reason="MISSING_FILE", remedy="check the path")
    spec = _read(path)
    check_spec(spec)
    return spec


def _read(path: Path) -> ModelSpec:
    if path.is_dir():
        config, where = read_json(path / "config.json"), str(path / "config.json")
        return spec_from_config(find_family(config, where), config, {}, where)
    if path.suffix == ".gguf":
        metadata, stored = read_gguf(path)
        return spec_from_metadata(metadata, stored, str(path))[1]
    if path.suffix == ".json":
        return spec_from_json(read_json(path))
    return read_spec_checkpoint(path)
