"""The files of a checkpoint while it is loaded: were they left alone, and what do their tensors hash to.

Hashing reads the whole file, so content digests are kept beside it, in `.NAME.pdserve-digests`:

    {"format": 1, "file": [device, inode, size, mtime_ns, ctime_ns], "tensors": {name: hex}, "check": hex}

The stamp decides whether they still hold. Modification times can be set, change times cannot,
so a file that was overwritten and given its old time back has another stamp, and so has a copy.
Nothing else is trusted: the model's configuration is read and digested anew at every load, and
whatever is odd about the kept file (damaged, another format, other tensors, someone else's) means
hashing again. No digests are kept

- of a file changed less than SETTLED_S before it was hashed: a second change could fall into the
  same tick of the file system's clock;
- of a file that changed while it was hashed;
- where the directory cannot be written.

A file must not be written through a shared mapping while workers load it: such writes may leave no trace in its stamp.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

from blake3 import blake3

from cache_transfer.encoding import encode
from pdserve.engine.digest import content_digest
from pdserve.engine.stored import StoredTensor
from pdserve.errors import CheckpointError

FORMAT = 1
SETTLED_S = 2.0
_MAX_BYTES = 64 << 20  # of a kept file; a tensor takes about 130


@dataclass(frozen=True)
class Stamp:
    """What the file system says of one state of a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Raises OSError."""
        seen = path.stat()
        return cls(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


class CheckpointFiles:
    """Use one for one load: stamp() before a file is opened, digests() of what it holds, check_unchanged() at the end.

    Args:
        keep: whether content digests are read from and kept beside the files.
        settled_s: how long a file must have been left alone for its digests to be kept.
    """

    def __init__(self, keep: bool = True, settled_s: float = SETTLED_S) -> None:
        self.hashed: list[str] = []
        """Names of the tensors that were really hashed."""
        self._keep = keep
        self._settled_ns = int(settled_s * 1e9)
        self._stamps: dict[Path, Stamp] = {}

    def stamp(self, path: Path) -> None:
        """Notes the state of a file that is about to be opened. Raises CheckpointError when it cannot be read."""
        try:
            self._stamps[path] = Stamp.of(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}",
                field=path.name,
                reason="BAD_FILE",
                remedy="check the path and its permissions",
            ) from error

    def digests(self, path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, bytes]:
        """Content digests of all tensors of a stamped file."""
        if not self._keep:
            return self._hash(tensors)
        kept = kept_path(path)
        found = _read(kept, self._stamps[path], frozenset(tensors))
        if found is not None:
            return found
        with _draft(kept) as draft:
            # Made before hashing, its time tells when that began, by the file system's own clock.
            began_ns = os.fstat(draft.fileno()).st_mtime_ns if draft is not None else 0
            made = self._hash(tensors)
            stamp = self._stamps[path]
            settled = began_ns - stamp.ctime_ns >= self._settled_ns
            if draft is not None and settled and self._unchanged(path):
                _publish(draft, path, stamp, made)
        return made

    def check_unchanged(self) -> None:
        """Raises CheckpointError when a file is no longer what it was before it was opened.

        Then digests and weights may be of different states, so neither may be used.
        """
        for path in self._stamps:
            if not self._unchanged(path):
                raise CheckpointError(
                    f"{path} changed while it was loaded",
                    field=path.name,
                    reason="CHANGED",
                    remedy="load it again once it is written completely",
                )

    def _hash(self, tensors: Mapping[str, StoredTensor]) -> dict[str, bytes]:
        self.hashed += tensors
        return {name: content_digest(tensor) for name, tensor in tensors.items()}

    def _unchanged(self, path: Path) -> bool:
        try:
            return Stamp.of(path) == self._stamps[path]
        except OSError:
            return False


def kept_path(path: Path) -> Path:
    """Where digests of a checkpoint file are kept: beside the file itself, not beside links to it."""
    real = path.resolve()
    return real.with_name(f".{real.name}.pdserve-digests")


def _read(kept: Path, stamp: Stamp, names: frozenset[str]) -> dict[str, bytes] | None:
    """The kept digests of these tensors in this state of their file; None if there are none to be trusted."""
    try:
        with _open_kept(kept) as file:
            value = json.loads(file.read(_MAX_BYTES))
        tensors = value["tensors"]
        if value["format"] != FORMAT or value["file"] != list(astuple(stamp)) or set(tensors) != names:
            return None
        digests = {name: bytes.fromhex(text) for name, text in tensors.items()}
        if bytes.fromhex(value["check"]) != _check(stamp, digests):
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return digests


def _open_kept(kept: Path) -> IO[bytes]:
    """Raises OSError for what is no plain file, or could have been written by someone who may not write the model."""
    file = os.open(kept, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    seen = os.fstat(file)
    others = seen.st_uid not in (0, os.geteuid()) or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISREG(seen.st_mode) or others:
        os.close(file)
        raise PermissionError(f"{kept} is not trusted")
    return os.fdopen(file, "rb")


@contextlib.contextmanager
def _draft(kept: Path) -> Iterator[IO[bytes] | None]:
    """A new file beside `kept`, gone at the end unless it was renamed; None where none can be made.

    It is locked while its process lives, which tells it from one of a process that was killed.
    """
    _remove_abandoned(kept)
    try:
        draft = tempfile.NamedTemporaryFile(  # noqa: SIM115
            buffering=0,  # or closing it could fail, on a full disk
            prefix=f"{kept.name}-",
            dir=kept.parent,
            delete=False,
        )
    except OSError:
        yield None
        return
    try:
        with draft:
            with contextlib.suppress(OSError):  # some file systems lock nothing, and keep what is left
                fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield draft
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft.name)


def _remove_abandoned(kept: Path) -> None:
    for left in kept.parent.glob(f"{glob.escape(kept.name)}-*"):
        with contextlib.suppress(OSError), _open_kept(left) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _publish(draft: IO[bytes], path: Path, stamp: Stamp, digests: Mapping[str, bytes]) -> None:
    """Whoever looks finds what was kept before or the whole new file. A disk that refuses means: not kept."""
    value = {
        "format": FORMAT,
        "file": astuple(stamp),
        "tensors": {name: digest.hex() for name, digest in digests.items()},
        "check": _check(stamp, digests).hex(),
    }
    data = json.dumps(value).encode()
    with contextlib.suppress(OSError):
        if draft.write(data) == len(data):
            os.fchmod(draft.fileno(), path.stat().st_mode & 0o644)
            os.replace(draft.name, kept_path(path))


def _check(stamp: Stamp, digests: Mapping[str, bytes]) -> bytes:
    return blake3(encode((FORMAT, astuple(stamp), dict(digests)))).digest()
