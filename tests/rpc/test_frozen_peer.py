"""A peer that hangs without closing its connection: probes find out, not the call's own deadline."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.errors import Unavailable
from pdserve.rpc.channel import channel
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.status import from_rpc_error

PROBES = RpcSettings(keepalive_s=1.0, keepalive_timeout_s=1.0)
DEADLINE_S = 40.0


async def test_a_stopped_process_ends_its_silent_streams_within_the_probes_time() -> None:
    command = [sys.executable, "-m", "router", "--port", "0", "--http-port", "0", "--stop-with-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None and peer.stdin is not None
        found = re.search(r"grpc (\S+)", peer.stdout.readline())
        assert found is not None
        async with channel(found[1], PROBES) as connection:
            request = health_pb2.HealthCheckRequest()
            watch = health_pb2_grpc.HealthStub(connection).Watch(request, timeout=DEADLINE_S)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            os.kill(peer.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
            finally:
                os.kill(peer.pid, signal.SIGCONT)
            assert isinstance(from_rpc_error(caught.value), Unavailable)
            assert time.monotonic() - stopped < DEADLINE_S / 2  # the deadline would be another error, and later
        peer.stdin.close()
        assert peer.wait(30) == 0
