"""`python -m tests.ray.slow_relay LISTEN TARGET`: passes TCP on with a delay, and cuts connections when told.

Reads lines: "delay SECONDS", or "cut", which ends every connection there is; answers "done".
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

_CHUNK = 1 << 16
_AHEAD = 64  # chunks on their way per direction


class SlowRelay:
    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            self._writers.add(sink)
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Each chunk leaves `delay_s` after it came, however many are on their way."""
        clock = asyncio.get_running_loop().time
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_AHEAD)

        async def read() -> None:
            data = b"-"
            while data:
                data = await source.read(_CHUNK)
                await waiting.put((clock() + self.delay_s, data))

        try:
            with suppress(OSError):
                async with asyncio.TaskGroup() as group:
                    group.create_task(read())
                    while (item := await waiting.get())[1]:
                        await asyncio.sleep(max(0.0, item[0] - clock()))
                        sink.write(item[1])
                        await sink.drain()
        except* OSError:
            pass
        finally:
            self._writers.discard(sink)
            sink.close()


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def main(listen: str, target: str) -> None:
    relay = SlowRelay(target)
    host, port = listen.rsplit(":", 1)
    server = await asyncio.start_server(relay.serve, host, int(port))
    async with server:
        _say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            match line.split():
                case ["delay", seconds]:
                    relay.delay_s = float(seconds)
                case ["cut"]:
                    relay.cut()
            _say("done")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
