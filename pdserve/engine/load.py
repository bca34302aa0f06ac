"""One door for every kind of checkpoint.

    a directory with config.json   Hugging Face        hf.py
    *.gguf                         GGUF                gguf_file.py
    *.safetensors, *.pdmodel       plain ModelSpec     checkpoint.py

All of them end in a LoadedModel; what is wrong with the files comes out as a CheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdserve.engine.checkpoint import load_spec_checkpoint, save_spec_checkpoint
from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.dtypes import torch_dtype
from pdserve.engine.gguf_file import load_gguf
from pdserve.engine.hf import load_directory
from pdserve.engine.loaded import LoadedModel
from pdserve.engine.packaged import find_smollm2, model_path
from pdserve.errors import CheckpointError

__all__ = ["find_smollm2", "load_model", "model_path", "save_spec_checkpoint"]


def load_model(path: str | Path, dtype: str, device: str = "cpu", files: CheckpointFiles | None = None) -> LoadedModel:
    """Reads a checkpoint into memory.

    Args:
        path: a Hugging Face directory, a .gguf file, or a ModelSpec checkpoint file.
        dtype: of the weights in memory: fp32 | bf16 | fp16 | float64; auto: the checkpoint's own (stored.own_dtype).
        device: where the tensors go.
        files: how content digests are kept; None: beside the files (checkpoint_files.py).

    The weights are copied once, tensor by tensor; the files are not held open.

    Raises:
        CheckpointError: naming the file, tensor or key at fault, or the file that changed meanwhile.
        ConfigError: for an unknown dtype.
    """
    path, files = Path(path), files or CheckpointFiles()
    if dtype != "auto":
        torch_dtype(dtype)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", field="path", reason="MISSING_FILE", remedy="check the path")
    model = _loader(path)(path, dtype, device, files)
    files.check_unchanged()
    return model


def _loader(path: Path) -> Callable[[Path, str, str, CheckpointFiles], LoadedModel]:
    if path.is_dir():
        return load_directory
    if path.suffix == ".gguf":
        return load_gguf
    if path.suffix in (".safetensors", ".pdmodel"):
        return load_spec_checkpoint
    raise CheckpointError(
        f"{path} is not a model",
        field="path",
        reason="NOT_A_MODEL",
        remedy="give a directory with config.json, a .gguf file or a .pdmodel file",
    )
