"""Compiles the kernels, once per machine and source, and keeps the library.

    $XDG_CACHE_HOME or ~/.cache / pdserve / kernels / <recipe's digest> / kernels.so, kernels.sha256

The recipe is everything that decides the library's content: sources, flags, compiler and the processor's features. So
a kept library is never one of another machine or version. It is loaded only if it and its folders belong to this
user, nobody else can write there, and its digest is the one noted. One process builds at a time; the others find it.
One library serves every model, batch size and length: nothing is ever compiled for a shape.

Who finds a library dates its folder and holds a lock on its digest until the process ends. Who has built one removes
the folders of other recipes that nobody holds, and nobody has found for UNUSED_S: of older versions, mostly.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cache_transfer.encoding import sha256
from pdserve.errors import ConfigError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-Wno-psabi")
LIMIT_S = 300  # of one compilation
UNUSED_S = 30 * 24 * 3600  # after which another recipe's library goes
_SOURCES = (
    *("abi.h", "simd.h", "ahead.h", "dots.h", "tiles.h", "panels.h", "products.h", "tasks.h", "pages.h", "decode.h"),
    *("prefill.h", "attention.h", "kernels.cpp"),
)
_LIBRARY, _DIGEST = "kernels.so", "kernels.sha256"
_BUILDING = ".building-"  # begins the names of folders that are built in

log = logging.getLogger(__name__)
_held: dict[Path, int] = {}  # folders that this process has found a library in -> its shared lock there


@dataclass(frozen=True)
class Recipe:
    """How a library is made."""

    compiler: str
    digest: str  # hex, over everything that decides the library's content
    flags: tuple[str, ...] = FLAGS

    @property
    def folder(self) -> Path:
        return kernels_folder() / self.digest


@dataclass(frozen=True)
class Built:
    path: Path
    compiled: bool  # False: it was kept from before, or another process has just made it


def kernels_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "kernels"


@cache
def find_recipe(flags: tuple[str, ...] = FLAGS) -> Recipe:
    """Raises ConfigError where this machine has no compiler that can build the kernels."""
    if platform.system() != "Linux":
        raise _no_compiler(f"on {platform.system()}")
    for name in (os.environ.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        version = _version(path) if path else ""
        if path and "Free Software Foundation" in version:  # torch's OpenMP runtime is GCC's: never a second one
            parts = (*_source_texts(), *flags, path, version, platform.machine(), _processor())
            return Recipe(path, sha256("kernels", parts).hex(), flags)
    raise _no_compiler("without g++")


def kept(recipe: Recipe) -> Path | None:
    """The library of an earlier build, or None; never one that somebody else may have written."""
    path = recipe.folder / _LIBRARY
    try:
        if not all(_ours(place) for place in (kernels_folder(), recipe.folder, path, recipe.folder / _DIGEST)):
            return None
        _hold(recipe.folder)
        noted = (recipe.folder / _DIGEST).read_text().strip()
        if hashlib.sha256(path.read_bytes()).hexdigest() == noted:
            return path
    except (OSError, UnicodeDecodeError):
        return None
    log.warning("%s is damaged and will be built again", path)
    return None


def build(recipe: Recipe) -> Built:
    """The kept library, or a new one. Raises ConfigError with the compiler's words, or for a folder it cannot use."""
    with _one_builder(), _fresh_folder(recipe) as (folder, found):
        if found is not None:
            return Built(found, compiled=False)
        _compile(recipe, folder / _LIBRARY)
        (folder / _DIGEST).write_text(hashlib.sha256((folder / _LIBRARY).read_bytes()).hexdigest())
        if recipe.folder.exists():
            shutil.rmtree(recipe.folder)
        folder.rename(recipe.folder)
        _hold(recipe.folder)
        _remove_unused()
    return Built(recipe.folder / _LIBRARY, compiled=True)


def _hold(folder: Path) -> None:
    """Until this process ends nobody removes the folder for want of use. Raises OSError where there is no library."""
    lock = os.open(folder / _DIGEST, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)  # who removes the folder has it for a moment: then there is no library here
    before, _held[folder] = _held.pop(folder, None), lock
    if before is not None:
        os.close(before)
    with suppress(OSError):  # a disk that is only read
        os.utime(folder)


def _remove_unused() -> None:
    """Under the lock of `_one_builder`. What cannot be removed stays."""
    for digest in kernels_folder().glob(f"*/{_DIGEST}"):
        with suppress(OSError):
            lock = os.open(digest, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - digest.parent.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(digest.parent)
            finally:
                os.close(lock)


def _compile(recipe: Recipe, target: Path) -> None:
    source = Path(__file__).with_name("kernels.cpp")
    command = [recipe.compiler, *recipe.flags, str(source), "-o", str(target)]
    if nice := shutil.which("nice"):
        command = [nice, *command]  # the steps of a serving worker go first
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the kernels were not built: {error}", field="kernels", remedy="use plain") from error
    if done.returncode:
        raise ConfigError(f"the kernels were not built: {done.stderr[-500:]}", field="kernels", remedy="use plain")


@contextmanager
def _one_builder() -> Iterator[None]:
    """Raises ConfigError where the folder cannot be made, or is not ours alone."""
    folder = kernels_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _no_folder(str(error)) from error
    try:
        if not _ours(folder):
            raise _no_folder(f"{folder} can be written by others")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _fresh_folder(recipe: Recipe) -> Iterator[tuple[Path, Path | None]]:
    """A folder to build in, and the library that another process has made meanwhile. Under the lock of `_one_builder`:
    what others were building in is left of a process that was killed.
    """
    for left in kernels_folder().glob(f"{_BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=kernels_folder()))
    try:
        yield folder, kept(recipe)
    except OSError as error:
        raise _no_folder(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ours(path: Path) -> bool:
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022 and not path.is_symlink()


def _source_texts() -> Iterator[str]:
    for name in _SOURCES:
        yield Path(__file__).with_name(name).read_text()


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "cpu family", "model", "stepping")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in wanted}))


def _no_compiler(where: str) -> ConfigError:
    return ConfigError(
        f"the native kernels cannot be built {where}",
        reason="NO_COMPILER",
        field="kernels",
        remedy="install g++, or use kernels = plain",
    )


def _no_folder(message: str) -> ConfigError:
    return ConfigError(message, field="kernels", remedy="set XDG_CACHE_HOME to a folder of your own, or use plain")
