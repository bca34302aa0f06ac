"""The `pdserve` command as a user meets it: a real process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

KEY = "sk-0123456789abcdef"
COMMANDS = ("up", "generate", "status", "down", "demo", "config", "verify", "conformance", "ledger")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PDSERVE_STATE": str(tmp_path / "up.json")}


def pdserve(environment: dict[str, str], *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", *arguments],
        env=environment,
        input=text if text is not None else "",
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_names_every_command_and_shows_how_to_begin(environment: dict[str, str]) -> None:
    shown = pdserve(environment, "--help").stdout
    assert all(command in shown for command in COMMANDS)
    assert "pdserve generate --local" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(environment: dict[str, str], command: str) -> None:
    done = pdserve(environment, command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("status",), 1, "no deployment is running here"),
        (("down",), 1, "there is nothing to stop"),
        (("generate", "x"), 1, "start one with `pdserve up`"),
        (("generate", "x", "--gateway", "127.0.0.1:1"), 1, "error: 127.0.0.1:1: connection refused ("),
        (("generate", "x", "--gateway", "nonsense"), 2, "use host:port"),
        (("generate", "x", "--temperature", "nan"), 1, "temperature"),
        (("generate", "x", "--temperature", "-1"), 1, "temperature"),
        (("generate", "x", "--token-ids", "1,2"), 1, "give one of them"),
        (("generate", "--token-ids", "1,b"), 1, "--token-ids"),
        (("generate", "x", "--logit-bias", "1=2", "--logit-bias", "1:2"), 1, "--logit-bias: '1:2' is not"),
        (("generate", "x", "--gateway", "127.0.0.1:1", "--timeout-s", "-3"), 1, "error: timeout_s: -3 is not allowed"),
        (("conformance", "127.0.0.1:1"), 2, "error: endpoint: 127.0.0.1:1: connection refused ("),
        (("conformance", "127.0.0.1:1", "--json", "/nodir/x"), 2, "error: --json: cannot write /nodir/x"),
        (("generate", "--messages", "/nonexistent.json"), 1, "cannot read"),
        (("generate", "--local", "--model", "/nonexistent", "x"), 1, "/nonexistent cannot be read"),
        (("generate", "--local", "--record", "x"), 1, "leave out --local"),
        (("up", "--config", "/nonexistent.toml"), 2, "cannot read"),
        (("up", "--prefill", "0"), 2, "pools.prefill"),
        (("generate", "--nonsense"), 2, "--nonsense"),
    ],
)
def test_an_error_is_one_clear_line(
    environment: dict[str, str], arguments: tuple[str, ...], code: int, expected: str
) -> None:
    done = pdserve(environment, *arguments)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.model
def test_local_generation_answers_with_paris(environment: dict[str, str]) -> None:
    question = "What is the capital of France?"
    done = pdserve(environment, "generate", "--local", "--chat", question, "--temperature", "0", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], subprocess.Popen[str], Path]]:
    """`pdserve up` with the packaged model in deterministic mode, for one tenant, in a process of its own."""
    folder = tmp_path_factory.mktemp("up")
    config = folder / "pdserve.toml"
    config.write_text(
        "[engine]\ndeterministic = true\npages = 128\n"
        '[router]\nport = 0\nhttp_port = 0\ntenants = [{name = "us", keys_env = "OUR_KEYS"}]\n'
    )
    keys = {"OUR_KEYS": f"sk-another-0123456789 {KEY}", "PDSERVE_API_KEY": KEY}
    environment = {**os.environ, "PDSERVE_STATE": str(folder / "up.json"), **keys}
    up = subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli", "up", "--config", str(config)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stderr is not None
    seen = []
    for line in up.stderr:
        seen.append(line)
        if line.startswith("ready:"):
            break
    assert seen[-1].startswith("ready:"), "".join(seen)
    assert seen[-1].endswith(", model SmolLM2-135M-Instruct.Q4_1\n"), "".join(seen)
    yield environment, up, config
    if up.poll() is None:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
    up.stderr.close()


EVERY_OPTION = (
    *("--temperature", "0.7", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7"),
    *("--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.1"),
    *("--logit-bias", "504=1.5", "--stop", "never said", "--stop-token-id", "17", "--max-tokens", "8"),
    *("--min-tokens", "2", "--ignore-eos", "--logprobs", "2"),
)


def tokens_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["event"] == "finish"
    return [token for event in events if event["event"] == "tokens" for token in event["ids"]]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.model
class TestUp:
    Running = tuple[dict[str, str], subprocess.Popen[str], Path]

    def test_a_question_from_standard_input_is_answered(self, running: Running) -> None:
        question = ("generate", "--chat", "-", "--temperature", "0", "--max-tokens", "24", "--record")
        done = pdserve(running[0], *question, text="What is the capital of France?")
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
        for shown in ("37 tokens, 37 computed, 37 sent", "queued", "transfer", "tokens/s", "[stop: 37 prompt"):
            assert shown in done.stderr

    def test_every_option_reaches_the_sampler_as_in_one_process(self, running: Running, tmp_path: Path) -> None:
        environment, _, config = running
        chat = tmp_path / "chat.json"
        chat.write_text(json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]))
        asked = ("generate", "--messages", str(chat), *EVERY_OPTION, "--json")
        served, here = pdserve(environment, *asked), pdserve(environment, *asked, "--local", "--config", str(config))
        assert tokens_of(served) == tokens_of(here)
        first = next(json.loads(line) for line in served.stdout.splitlines() if '"tokens"' in line)
        assert len(first["logprobs"][0]["top"]) == 2

    def test_logprobs_are_shown_without_json_too(self, running: Running) -> None:
        ask = ("generate", "--token-ids", "1,2,3", "--max-tokens", "3", "--ignore-eos", "--logprobs", "2", "--record")
        done = pdserve(running[0], *ask)
        assert done.returncode == 0, done.stderr
        assert len([line for line in done.stderr.splitlines() if line.count(":-") == 2]) == 3

    def test_everything_listens_on_loopback_only(self, running: Running) -> None:
        up = psutil.Process(running[1].pid)
        open_to = {
            connection.laddr.ip.removeprefix("::ffff:")
            for process in (up, *up.children(recursive=True))
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert open_to <= {"127.0.0.1", "::1"} and open_to

    def test_status_shows_pools_and_pairs(self, running: Running) -> None:
        done = pdserve(running[0], "status", "--json")
        shown = json.loads(done.stdout)
        assert sorted(worker["role"] for worker in shown["workers"]) == ["decode", "prefill"]
        assert [pair["fits"] for pair in shown["pairs"]] == [True]
        assert "yes" in pdserve(running[0], "status").stdout

    def test_only_its_tenant_is_served(self, running: Running) -> None:
        environment = {key: value for key, value in running[0].items() if key != "PDSERVE_API_KEY"}
        done = pdserve(environment, "status")
        assert done.returncode == 1 and "set PDSERVE_API_KEY, or give --api-key" in done.stderr
        assert pdserve(environment, "status", "--api-key", KEY).returncode == 0

    def test_a_second_up_is_refused(self, running: Running) -> None:
        done = pdserve(running[0], "up")
        assert done.returncode == 2
        assert "pdserve down" in done.stderr

    def test_down_leaves_no_process_and_no_state(self, running: Running) -> None:
        environment, up, _ = running
        children = psutil.Process(up.pid).children(recursive=True)
        assert children
        done = pdserve(environment, "down")
        assert done.returncode == 0, done.stderr
        assert up.wait(60) == 0
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        assert not Path(environment["PDSERVE_STATE"]).exists()


@pytest.mark.slow
@pytest.mark.ray
def test_a_pool_that_cannot_start_is_one_clear_error(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pdserve.toml").write_text('[decode.engine]\ndevice = "nonsense"\n')
    began = time.monotonic()
    given = ("--config", str(tmp_path / "pdserve.toml"), "--port", "0", "--http-port", "0")
    done = pdserve(environment, "up", *given)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: decode: the pool did not start: ") and "nonsense" in last, done.stderr
    assert "Traceback" not in done.stderr and "Error: " not in last
    assert time.monotonic() - began < 100


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.model
def test_the_demo_names_paris_and_leaves_nothing(environment: dict[str, str]) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli", "demo"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    first = demo.stdout.read(1)  # the answer has begun, so everything is running
    children = psutil.Process(demo.pid).children(recursive=True)
    answer, told = demo.communicate(timeout=120)
    assert demo.returncode == 0, told
    assert "Paris" in first + answer
    for stage in ("queued", "prefill", "transfer", "first token", "tokens/s", "bytes in"):
        assert stage in told
    _, alive = psutil.wait_procs(children, timeout=20)
    assert children and not alive
