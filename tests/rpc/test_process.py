"""A service as a process: a thread that never ends does not keep it alive."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys, threading
    from pdserve.rpc import process

    class Stuck:
        def __init__(self):
            self.broken = asyncio.Event()

        async def start(self):
            threading.Thread(target=threading.Event().wait, name="stuck step").start()

        async def drain(self): pass
        async def stop(self): pass

    process.EXIT_S = 0.2

    async def main(stopping):
        await process.serve(Stuck(), lambda: "ready", stopping)

    sys.exit(process.run("test", process.parser("test", "").parse_args([]), main))
    """
)


def test_a_thread_that_never_ends_does_not_keep_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "the process does not end by itself" in errors and "stuck step" in errors
