"""A peer as a child process that works on command and sleeps in between."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0  # of one command; loading compiles
STOP_S = 10.0

VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_PROC_BIND": "false",  # where this process is told to bind its threads, vLLM's two processes would share a core
}


class PeerError(Exception):
    """The peer could not start, or could not do what it was told."""


def folder() -> Path:
    """Where `make peers` puts them."""
    return Path(os.environ.get("PDSERVE_PEERS") or ROOT / ".peers").absolute()


def find_python(peer: str) -> Path | None:
    """The interpreter of a peer's environment; None when `make peers` has not built it."""
    path = folder() / peer / "bin" / "python"
    return path if path.exists() else None


def find_model() -> Path | None:
    """The packaged model as a Hugging Face directory in bf16, for peers that read no GGUF."""
    path = folder() / "smollm2-bf16"
    return path if (path / "model.safetensors").exists() else None


class PeerProcess:
    """A `*_side` module in a child. Blocking; the child ends when it is told to, or when this process does."""

    def __init__(
        self, python: Path, module: str, arguments: Sequence[object], environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts loading; `ready` waits for it."""
        self.name = module.rsplit(".", 1)[-1].removesuffix("_side")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        # A process whose threads are bound (OMP_PROC_BIND) has one core, and so would whom it starts.
        os.sched_setaffinity(self._process.pid, range(os.cpu_count() or 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def ready(self) -> None:
        """Raises PeerError."""
        self._answer()

    def ask(self, do: str, **arguments: object) -> Any:
        """What the command returned; mostly seconds. Raises PeerError."""
        pipe = _open(self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it has ended: so says its answer
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """Processor time of the process so far, all its threads together."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            _open(self._process.stdin).close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _open(self._process.stdout).close()
        self._log.close()

    def _answer(self) -> Any:
        pipe = _open(self._process.stdout)
        # One command has one line of answer, so nothing is ever left in the reader's buffer.
        if not select.select([pipe], [], [], TIMEOUT_S)[0]:
            self._process.kill()  # what it would answer later is not what is asked then
            raise PeerError(f"{self.name} did not answer within {TIMEOUT_S:g} s")
        line = pipe.readline()
        if not line:
            raise PeerError(f"{self.name} ended:\n{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}\n{self._last_words()}")
        return answer["value"]

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def _open(pipe: Any) -> Any:
    if pipe is None:
        raise PeerError("the process was started without pipes")
    return pipe
