"""`pdserve status` and `pdserve generate` as processes, in front of a live router with tenants and a mixed pool."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from pdserve.cli.main import app
from pdserve.cli.status import matrix, reasons
from pdserve.client import AsyncClient, Pair
from pdserve.engine.plan import EngineConfig
from pdserve.errors import ConfigError, FieldDifference, Unauthenticated, Unavailable
from router.tenants import Tenant
from tests.router.support import MODEL, House, house, model

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY, OTHER, WRONG = "sk-acme-0123456789abcdef", "sk-zeta-0123456789abcdef", "sk-nobody-0123456789abcd"
TENANTS = (Tenant.of("acme", KEY), Tenant.of("zeta", OTHER))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[House]:
    async with house(prefills=2, decodes=1, tenants=TENANTS, operators=("acme",)) as it:
        await it.add_decode("small", engine=EngineConfig(dtype="fp32", pages=128, page_size=2))
        await it.add_decode("stranger", of=model(seed=1))
        yield it


async def pdserve(made: House, *arguments: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    given = {} if key is None else {"PDSERVE_API_KEY": key}
    command = [sys.executable, "-m", "pdserve.cli", *arguments, "--gateway", made.router.address]
    return await asyncio.to_thread(
        subprocess.run, command, env={**os.environ, **given}, capture_output=True, text=True, input="", timeout=120
    )


async def test_several_answers_come_one_by_one_from_one_prefill(made: House) -> None:
    asked = ("generate", "the cat", "--n", "3", "--seed", "5", "--max-tokens", "6", "--ignore-eos")
    plain, as_json, none = await asyncio.gather(
        pdserve(made, *asked, "--record", key=KEY),
        pdserve(made, *asked, "--json", key=KEY),
        pdserve(made, "generate", "x", "--n", "0", key=KEY),
    )
    texts: dict[int, str] = {}
    for event in map(json.loads, as_json.stdout.splitlines()):
        if event["event"] == "tokens":
            texts[event["choice"]] = texts.get(event["choice"], "") + event["text"]
    assert plain.returncode == 0 and len(set(texts.values())) == 3, plain.stderr
    for number, text in texts.items():
        assert f"[{number}] {text}\n" in plain.stdout
    assert "3, from 1 prefill and 1 handoff" in plain.stderr
    assert none.returncode == 1 and none.stderr.startswith("error: n: 0 is not allowed"), none.stderr


async def test_without_a_good_key_there_is_one_clear_line(made: House) -> None:
    refused = {
        "there is no API key": await pdserve(made, "status"),
        "not known": await pdserve(made, "generate", "the", key=WRONG),
        "blanks": await pdserve(made, "status", "--api-key", f"{KEY}\n"),
    }
    for told, done in refused.items():
        assert (done.returncode, done.stdout) == (2 if told == "blanks" else 1, ""), done.stderr
        assert re.match(r"error: api_key: .*key", done.stderr) and told in done.stderr
        assert told == "blanks" or done.stderr.endswith("(set PDSERVE_API_KEY, or give --api-key)\n")
        assert len(done.stderr.splitlines()) == 1 and KEY not in done.stderr and WRONG not in done.stderr


async def test_the_key_may_come_from_the_environment(made: House) -> None:
    done = await pdserve(made, "generate", "the", "--max-tokens", "2", "--ignore-eos", key=KEY)
    assert done.returncode == 0 and "2 output tokens" in done.stderr, done.stderr
    assert KEY not in done.stdout + done.stderr


async def test_status_shows_the_matrix_and_what_lies_behind_it(made: House) -> None:
    done = await pdserve(made, "status", "--api-key", KEY, key=WRONG)  # the flag wins over the environment
    assert KEY not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    top = next(n for n, line in enumerate(lines) if line == "pairs (row: prefill, column: decode)")
    assert [line.split() for line in lines[top + 1 : top + 4]] == [
        ["d0", "small", "stranger"],
        ["p0", "yes", "converts", "NO"],
        ["p1", "yes", "converts", "NO"],
    ]
    right, wrong = (worker.contract.model_digest.hex()[:16] for worker in (made.decodes[0], made.decodes[2]))
    assert lines[-2].startswith("disaggregate always: ")
    assert lines[top + 4 : -2] == [
        "p0, p1 -> small fits:",
        "    PAGE_SIZE: 4 != 2 (convertible)",
        "p0, p1 -> stranger refused:",
        f"    MODEL_DIGEST: {right} != {wrong} (must equal)",
    ]


async def test_who_is_no_operator_sees_which_workers_fit_and_no_more_of_them(made: House) -> None:
    told, watched, as_json = await asyncio.gather(
        pdserve(made, "status", key=OTHER),
        pdserve(made, "top", "--once", key=OTHER),
        pdserve(made, "status", "--json", key=OTHER),
    )
    lines = told.stdout.splitlines()
    assert ["p0", "prefill", "ready", MODEL] in [line.split() for line in lines]
    assert ["p0", "yes", "yes", "NO"] in [line.split() for line in lines], "not even what is converted"
    for done in (told, watched):
        assert done.returncode == 0 and "shown to operators" in done.stdout
    everything = told.stdout + watched.stdout + as_json.stdout
    assert json.loads(as_json.stdout)["reduced"] is True
    for worker in made.workers:
        record = worker.record()
        assert record.endpoints[0].address not in everything
        assert record.contract.digest().hex()[:8] not in everything and "MODEL_DIGEST" not in everything


async def test_status_in_a_pipe_cuts_no_id_and_shows_addresses_that_conformance_takes(made: House) -> None:
    done = await pdserve(made, "status", key=KEY)
    heads = next(line for line in done.stdout.splitlines() if line.startswith("worker ")).split("  ")
    assert [head.strip() for head in heads if head.strip()][:6] == [
        *("worker", "pool", "state", "address", "contract", "kv dtype/page/axes")
    ]
    for worker in made.workers:
        (row,) = [line.split() for line in done.stdout.splitlines() if f" {worker.address} " in line]
        assert row[0] == worker.worker_id and row[5].startswith("fp32/")


async def test_the_http_port_is_no_gateway(made: House) -> None:
    for command in (("status",), ("generate", "x")):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "pdserve.cli", *command, "--gateway", made.router.http_address],
            capture_output=True,
            text=True,
            timeout=60,
        )
        problem = f"{made.router.http_address}: this is not a gRPC port"
        assert done.stderr == f"error: {problem} (give a gRPC port; a gateway's is 8470 by default)\n"


async def test_the_record_tells_attempts_and_what_was_refused(made: House) -> None:
    # Not sampled: an answer that ends inside a character has its last bytes told with the finish, after the record.
    ask = ("generate", "the", "--max-tokens", "2", "--ignore-eos", "--temperature", "0", "--record")
    done = await pdserve(made, *ask, key=KEY)
    shown = [line.split(maxsplit=2) for line in done.stderr.splitlines()]
    assert ["attempts", "1"] in shown
    assert re.search(r"pairs refused +p0, p1 -> stranger: MODEL_DIGEST: ", done.stderr), done.stderr
    assert re.search(r"pairs that fit +p0, p1 -> d0", done.stderr), done.stderr
    events = [json.loads(line) for line in (await pdserve(made, *ask, "--json", key=KEY)).stdout.splitlines()]
    names = [event["event"] for event in events]
    assert names[0] == "accepted" and "tokens" in names and names[-2:] == ["handoff_record", "finish"]


async def test_a_deadline_in_mid_answer_ends_its_line_and_names_the_flag(
    made: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, steps = threading.Event(), itertools.count()

    def held(step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The answer begins, and then does not end."""
        if next(steps) >= 5:
            assert go_on.wait(60)
        return step(*arguments, **options)

    for worker in made.decodes:
        monkeypatch.setattr(worker.engine, "step", functools.partial(held, worker.engine.step))
    ask = ("generate", "the", "--max-tokens", "60", "--ignore-eos", "--timeout-s", "2")
    try:
        done = await pdserve(made, *ask, key=KEY)
    finally:
        go_on.set()
    assert done.returncode == 1
    told = "error: timeout_s: no complete answer within 2 s (raise --timeout-s, or lower --max-tokens)\n"
    assert done.stderr == told
    assert done.stdout.endswith("\n") and len(done.stdout) > 1


async def test_status_as_json_has_every_pair_with_every_difference(made: House) -> None:
    shown = json.loads((await pdserve(made, "status", "--json", key=KEY)).stdout)
    found = {
        (pair["prefill_worker"], pair["decode_worker"]): (
            pair["fits"],
            [(d["code"], d["kind"]) for d in pair["differences"] if d["kind"] != "informational"],
        )
        for pair in shown["pairs"]
    }
    column = {
        "d0": (True, []),
        "small": (True, [("PAGE_SIZE", "convertible")]),
        "stranger": (False, [("MODEL_DIGEST", "must_equal")]),
    }
    assert found == {(prefill, decode): what for prefill in ("p0", "p1") for decode, what in column.items()}


def difference(code: str, kind: str) -> FieldDifference:
    return FieldDifference(code, "a", "b", kind)


async def test_a_matrix_with_holes_losses_and_no_workers() -> None:
    assert reasons([]) == [] and matrix([]).row_count == 0
    refused = (difference("LAYERS", "must_equal"), difference("PAGE_SIZE", "convertible"))
    lossy = (difference("KV_DTYPE", "lossy"),)
    pairs = [
        Pair("p0", "d0", True, ()),
        Pair("p0", "d1", False, refused),
        Pair("p1", "d1", False, refused),
        Pair("p1", "d0", False, refused),
        Pair("p2", "d0", True, lossy),
        Pair("p3", "d0", True, (difference("INFO.torch", "informational"),)),
    ]
    table = matrix(pairs)
    assert [list(column.cells) for column in table.columns] == [
        ["p0", "p1", "p2", "p3"],
        ["yes", "NO", "lossy", "yes"],
        ["NO", "NO", "-", "-"],
    ]
    assert reasons(pairs) == [
        "p0 -> d1 refused:",
        "p1 -> d0, d1 refused:",
        "    LAYERS: a != b (must equal)",
        "    PAGE_SIZE: a != b (convertible)",
        "p2 -> d0 fits:",
        "    KV_DTYPE: a != b (lossy)",
    ]


async def test_a_router_process_takes_its_tenants_from_the_file_it_is_given(tmp_path: Path) -> None:
    """As `pdserve up` starts it: the file names a variable, which the router inherits."""
    config = tmp_path / "pdserve.toml"
    config.write_text('[router]\nport = 0\nhttp_port = 0\ntenants = [{name = "acme", keys_env = "ACME_KEYS"}]\n')
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--config", str(config)),
        env={**os.environ, "ACME_KEYS": KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert router.stdout is not None
        async with asyncio.timeout(30):
            words = (await router.stdout.readline()).decode().split()
        async with AsyncClient(words[3], api_key=KEY) as client, AsyncClient(words[3]) as nobody:
            assert (await client.status()).workers == ()
            with pytest.raises(Unauthenticated):
                await nobody.status()
    finally:
        router.terminate()
        async with asyncio.timeout(30):
            out, errors = await router.communicate()
    assert router.returncode == 0 and KEY.encode() not in out + errors


@pytest.mark.parametrize("command", [("generate", "hi"), ("status",), ("adapters", "list")], ids=" ".join)
async def test_another_machine_is_reached_in_clear_only_when_told(command: tuple[str, ...]) -> None:
    """0.0.0.0 counts as another machine, and is not: with leave the command gets as far as looking there."""
    given = [*command, "--gateway", "0.0.0.0:1"]
    refused = CliRunner().invoke(app, given)
    assert isinstance(refused.exception, ConfigError) and "--plaintext" in refused.exception.remedy
    assert isinstance(CliRunner().invoke(app, [*given, "--plaintext"]).exception, Unavailable)
