"""Every example does what it says, run as its first lines say, against a real installation."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.lora import peer_warnings
from tests.examples.conftest import Served, check_nothing_held
from tests.infra.manifests import missing

pytestmark = [pytest.mark.slow, pytest.mark.model]

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 60.0


def run(name: str, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        input=said,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def output(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0 and not done.stderr, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_chat_keeps_the_conversation(served: Served) -> None:
    said = "What is the capital of France?\n\nAnd of Italy?\n"
    told = output(run("chat.py", "--gateway", served.gateway, "--temperature", "0", said=said))
    first, second = (part for part in told.split("you: ") if part.strip())
    assert "Paris" in first and "Rome" in second
    (prompts, cached) = zip(*re.findall(r"(\d+) prompt tokens, (\d+) from the cache", told), strict=True)
    assert int(prompts[1]) > int(prompts[0]) and int(cached[1]) > 0, "the second turn has the first before it"


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(served: Served) -> None:
    command = [sys.executable, str(EXAMPLES / "chat.py"), "--gateway", served.gateway, "--temperature", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write(b"Write a very long story about a ship.\n")
        told = b""
        while len(told) <= len("you: "):  # until the answer has begun; a pipe may give less than was asked for
            told += chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        chat.stdin.write(b"What is 1 + 1?\n")
        chat.stdin.close()
        told += chat.stdout.read()
    assert chat.returncode == 0
    assert b"[stopped]" in told and told.count(b"you: ") == 3 and told.count(b"prompt tokens") == 1


async def test_cancelled_answers_hold_nothing(served: Served) -> None:
    told = output(run("race.py", "Name an animal that can fly.", "--gateway", served.gateway, "--runners", "3"))
    assert re.fullmatch(r"seed [0-2] was first: .+\n", told, re.DOTALL)
    await check_nothing_held(served)
    late = run("race.py", "Write a very long story.", "--gateway", served.gateway, "--timeout", "0.2")
    assert "no answer within 0.2 s" in output(late)
    await check_nothing_held(served)


def test_structured_output_fits_what_was_asked_for(served: Served) -> None:
    animal, lesson = output(run("structured.py", "--gateway", served.gateway)).splitlines()
    (schema,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((EXAMPLES / "structured.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "SCHEMA"
    )
    jsonschema.Draft202012Validator(schema).validate(ast.literal_eval(animal))
    number = "[1-9][0-9]{0,2}"
    assert re.fullmatch(rf"{number}( \+ {number}){{1,2}} = {number}", lesson)


def test_openais_client_gets_the_same_answer_in_one_piece_and_as_a_stream(served: Served) -> None:
    asked = ["What is the capital of France?", "--base-url", f"http://{served.http}/v1"]
    whole, streamed, usage, refused = output(run("openai_client.py", *asked)).splitlines()
    assert whole.partition(": ")[2] == streamed and "Paris" in streamed
    assert re.fullmatch(r"\[\d+ prompt tokens, \d+ output tokens\]", usage)
    assert refused == "refused: temperature: invalid_temperature"


def test_a_client_in_node_speaks_the_published_proto(served: Served, tmp_path: Path) -> None:
    program = node_example(tmp_path)
    done = node(program, "What is the capital of France?", served.gateway)
    assert "Paris" in output(done) and re.search(r"\[\d+ prompt tokens, \d+ output tokens\]\n$", done.stdout)
    refused = node(program, "x " * 20_000, served.gateway)
    assert refused.returncode == 1 and "error: " in refused.stderr and "context" in refused.stderr


def node(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["node", str(program), *arguments]
    proto = {"PDSERVE_PROTO": str(EXAMPLES.parent / "proto")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=os.environ | proto
    )


def node_example(folder: Path) -> Path:
    """The example with the packages of its lock file, in a folder of its own. Skips without Node, fails in CI."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            missing(tool, "install Node 18 or newer with npm")
    copy = shutil.copytree(EXAMPLES / "node", folder / "node", ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        missing("what the example in Node needs", done.stderr)
    return copy / "generate.mjs"


def test_an_adapter_is_asked_beside_its_base_model(served: Served) -> None:
    question = ["What is the capital of France?", "--gateway", served.gateway]
    write_adapter(served.adapters / "untrained", spread=0.0)
    write_adapter(served.adapters / "random", spread=0.1)
    base, untrained = output(run("lora.py", "untrained", *question)).splitlines()
    assert base.partition(": ")[2] == untrained.partition(": ")[2] and "Paris" in base
    again, _, different = output(run("lora.py", "random", *question)).partition("\nrandom: ")
    assert again == base and different.strip() and "Paris" not in different
    unknown = run("lora.py", "nobody", *question)
    assert unknown.returncode == 1 and "nobody" in unknown.stderr


def write_adapter(folder: Path, spread: float) -> None:
    """What PEFT writes for a model of SmolLM2's shape. Its second factors have this spread: at first, PEFT has 0."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    wanted = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with torch.device("meta"), peer_warnings():
        adapted = peft.get_peft_model(LlamaForCausalLM(config), wanted)
    generator = torch.Generator().manual_seed(5)
    factors = {
        name: torch.randn(factor.shape, generator=generator) * (spread if "lora_B" in name else 0.1)
        for name, factor in peft.get_peft_model_state_dict(adapted).items()
    }
    wanted.save_pretrained(str(folder))
    save_file(factors, folder / "adapter_model.safetensors")


def test_every_example_is_on_the_page_of_examples() -> None:
    page = (EXAMPLES / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w./]+?)/?\)", page))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= linked
    assert all((EXAMPLES / name).exists() for name in linked)


def test_the_lock_file_names_no_place() -> None:
    locked = json.loads((EXAMPLES / "node" / "package-lock.json").read_text())["packages"]
    assert all("resolved" not in package for package in locked.values())
    assert all("integrity" in package for name, package in locked.items() if name)
