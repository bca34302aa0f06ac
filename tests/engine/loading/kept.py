"""Loading a checkpoint whose digests may be kept beside it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pdserve.engine.checkpoint_files import CheckpointFiles
from pdserve.engine.load import load_model


def load(path: Path, settled_s: float = 0.0) -> tuple[bytes, int]:
    """The model's digest, and how many tensors were hashed for it."""
    files = CheckpointFiles(settled_s=settled_s)
    return load_model(path, "fp32", files=files).digest, len(files.hashed)


def fresh(path: Path) -> bytes:
    """The digest without anything kept."""
    files = CheckpointFiles(keep=False)
    digest = load_model(path, "fp32", files=files).digest
    assert files.hashed
    return digest


def next_tick(folder: Path) -> None:
    """Returns once the file system's clock has moved on: it is read by making files."""

    def now() -> int:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime_ns

    began = now()
    while now() == began:
        pass


def names(folder: Path) -> set[str]:
    return {item.name for item in folder.iterdir()}


def flip(path: Path, at: int = -1) -> None:
    """Changes one bit in place and puts size and modification time back as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
