"""A model path, as given to a worker, to its tokenizer bundle."""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import CheckpointError
from pdserve.tokenizer.bundle import Bundle
from pdserve.tokenizer.directory import bundle_from_directory
from pdserve.tokenizer.gguf_file import gguf_bundle

_GGUF_MAGIC = b"GGUF"


def load_bundle(model_path: str | Path) -> Bundle | None:
    """The tokenizer beside or inside a model; None for a model that has none and takes ids only.

    Raises CheckpointError if the path does not exist, or a tokenizer is there but cannot be used.
    """
    path = Path(model_path)
    try:
        if path.is_dir():
            return bundle_from_directory(path)
        with path.open("rb") as file:
            is_gguf = file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}",
            reason="MODEL_UNREADABLE",
            field="model",
            remedy="give the path of a model directory or file",
        ) from error
    return gguf_bundle(path) if is_gguf else None
