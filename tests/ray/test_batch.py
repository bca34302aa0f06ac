"""examples/batch.py: every prompt has its answer, in one go or in two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.deployment import Deployment
from pdserve.local import LocalRunner
from tests.ray.asking import expected, long_requests

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

SCRIPT = Path(__file__).parents[2] / "examples" / "batch.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_that_was_broken_off_goes_on(deployment: Deployment, baseline: LocalRunner, tmp_path: Path) -> None:
    asked = long_requests(12, seed=700)
    answers = dict(enumerate(expected(baseline, asked)))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"id": n, "token_ids": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for n, (ids, _) in enumerate(asked)
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    # As an earlier run left it: one answer, one failure, and a line that was cut short.
    kept = {"id": 0, "text": "kept", "token_ids": []}
    target.write_text(f'{json.dumps(kept)}\n{json.dumps({"id": 1, "error": "no worker"})}\n{{"id": 2, "te')

    done = run(str(source), str(target), "--gateway", deployment.gateway, "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    assert "12 prompts, 1 answered before" in done.stderr and "answered 11 of 11" in done.stderr
    written = rows(target)
    assert written[0] == kept
    assert {row["id"]: tuple(row["token_ids"]) for row in written[2:]} == {n: answers[n] for n in range(1, 12)}

    again = run(str(source), str(target), "--gateway", deployment.gateway)
    assert again.returncode == 0 and rows(target) == written


def test_a_line_that_is_no_prompt_is_named_before_anything_starts(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "prompt": "a"}\n{"id": 2}\n')
    done = run(str(source), str(tmp_path / "out.jsonl"))
    assert done.returncode == 2 and "in.jsonl:2" in done.stderr
