"""`pdserve up` whose processes are killed one by one: Serve's controller, a replica, at last `up` itself.

The parts are found among its children; nothing is asked of Ray. Replicas that die with others
to take over are in tests/ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pdserve.cli.state import read_running
from pdserve.client import Client, Finish, Tokens
from pdserve.client.events import Event
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.engine import Engine
from pdserve.engine.load import load_model
from pdserve.engine.plan import EngineConfig
from pdserve.errors import PdserveError, Unavailable
from pdserve.local import LocalRunner
from pdserve.request import SamplingParams
from tests.engine.tiny import prompt, spec, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.ray]

WAIT_S = 60.0  # for Ray to notice and act
BOUND_S = 20.0  # for a request to fail, and for processes to follow `up`
CONTEXT = 4096
CONFIG = """
[model]
path = "{path}"
[engine]
pages = 2048
page_size = 4
deterministic = true
[registry]
lease_s = 2.0
heartbeat_s = 0.2
[router]
port = 0
http_port = 0
"""
IDS = prompt(20)
SHORT = SamplingParams(temperature=0, seed=0, max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, seed=0, max_tokens=4000, ignore_eos=True)
CONTROLLER, DECODE = "ray::ServeController", "ray::ServeReplica:pdserve-decode"
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own; they first try for a minute to tell the cluster that is gone."""


@dataclass
class Up:
    process: subprocess.Popen[str]
    gateway: str

    def find(self, name: str) -> psutil.Process | None:
        """The child whose command line begins so."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if " ".join(child.cmdline()).startswith(name):
                    return child
            except psutil.Error:  # it has just ended
                continue
        return None

    def kill(self, name: str) -> psutil.Process:
        child = self.find(name)
        assert child is not None, f"no {name}"
        child.send_signal(signal.SIGKILL)
        return child


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = tiny_model(spec(context_limit=CONTEXT))
    path = tmp_path / "tiny.pdmodel"
    save_spec_checkpoint(path, model.spec, model.tensors)
    return path


@pytest.fixture
def up(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    config = tmp_path / "pdserve.toml"
    config.write_text(CONFIG.format(path=checkpoint))
    monkeypatch.setenv("PDSERVE_STATE", str(tmp_path / "up.json"))
    command = [sys.executable, "-m", "pdserve.cli", "up", "--config", str(config)]
    process = subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("ready:"):
                break
        assert seen[-1].startswith("ready:"), "".join(seen)
        yield Up(process, json.loads((tmp_path / "up.json").read_text())["gateway"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)
        process.stderr.close()


def until(holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Ray is watched from outside: there is nothing to wait for but time."""
    pause = threading.Event()
    for _ in range(int(within_s / 0.1)):
        if holds():
            return
        pause.wait(0.1)
    raise AssertionError(f"not within {within_s:g} s")


def begin(client: Client, params: SamplingParams) -> tuple[Iterator[Event], list[int]]:
    """A stream of which the first tokens have come."""
    events = client.generate(token_ids=IDS, sampling=params, timeout_s=WAIT_S)
    for event in events:
        if isinstance(event, Tokens):
            return events, list(event.ids)
    raise AssertionError("no token came")


def ready(client: Client) -> bool:
    return sorted(w.role for w in client.status().workers if w.state == "ready") == ["decode", "prefill"]


def test_everything_that_can_be_killed(up: Up, checkpoint: Path) -> None:
    config = EngineConfig(dtype="fp32", pages=2048, page_size=4, deterministic=True)
    runner = LocalRunner(Engine(load_model(checkpoint, "fp32"), config))
    (expected,) = (output.ids for output in runner.generate_batch([IDS], [SHORT]))
    with Client(up.gateway) as client:
        # The controller: requests never pass through it. Ray starts another.
        events, ids = begin(client, SHORT)
        old = up.kill(CONTROLLER)
        for event in events:
            ids += event.ids if isinstance(event, Tokens) else ()
        assert isinstance(event, Finish) and tuple(ids) == expected
        # Its start can take both cores for longer than a lease: workers may be out for a moment.
        until(lambda: (found := up.find(CONTROLLER)) is not None and found.pid != old.pid and ready(client))

        # The only decode worker: its stream ends in bounded time, and the new controller replaces it.
        events, _ = begin(client, ENDLESS)
        dead = up.kill(DECODE)
        with pytest.raises(PdserveError) as caught:
            for event in events:
                assert not isinstance(event, Finish)
        assert isinstance(caught.value, Unavailable)
        until(lambda: (found := up.find(DECODE)) is not None and found.pid != dead.pid and ready(client))
        assert client.complete(token_ids=IDS, sampling=SHORT, timeout_s=WAIT_S).ids == expected

        # `up` itself, with a stream on: nobody outlives it, and another may be started.
        events, _ = begin(client, ENDLESS)
        children = psutil.Process(up.process.pid).children(recursive=True)
        ours = [child for child in children if not " ".join(child.cmdline()).startswith(AGENTS)]
        assert len(children) - len(ours) <= len(AGENTS) < len(ours)
        up.process.kill()
        up.process.wait(WAIT_S)
        with pytest.raises(Unavailable):
            for event in events:
                assert not isinstance(event, Finish)
        _, alive = psutil.wait_procs(ours, timeout=BOUND_S)
        assert not alive
        with pytest.raises(Unavailable):
            client.status(timeout_s=1.0)
    assert read_running() is None
