"""A service as a process: a thread that never ends does not keep it alive."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys, threading
    HUNG = sys.argv[1] == "hung"
    from pdserve.rpc import process

    class Stuck:
        def __init__(self):
            self.broken = asyncio.Event()
            self.hung = HUNG

        async def start(self):
            threading.Thread(target=threading.Event().wait, name="stuck step").start()

        async def drain(self): pass
        async def stop(self): pass

    process.EXIT_S, process.HUNG_S = (60.0, 0.2) if HUNG else (0.2, 60.0)

    async def main(stopping):
        await process.serve(Stuck(), lambda: "ready", stopping)

    sys.exit(process.run("test", process.parser("test", "").parse_args([]), main))
    """
)


@pytest.mark.parametrize("known", ["hung", "unknown"])
def test_a_thread_that_never_ends_does_not_keep_the_process(known: str) -> None:
    """One that the service has told of, and one that it does not know."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, known], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "the process does not end by itself" in errors and "stuck step" in errors
