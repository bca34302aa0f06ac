"""The script for a GPU: says why it measures nothing without one, and runs as a whole on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_without_a_device_every_goal_is_unjudged_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu", "--json", str(tmp_path / "gpu.json")])
    gpu.main()
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert len(figures) == 6 and all(figure["met"] is None and figure["goal"] for figure in figures)
    assert "no CUDA device" in capsys.readouterr().err


def test_the_whole_script_runs_on_a_cpu() -> None:
    figures = gpu.measure(gpu.QUICK, "cpu")
    assert len(figures) == 12 and len({figure.name for figure in figures}) == 12
    parity = [figure for figure in figures if figure.name.startswith("parity")]
    assert [figure.value for figure in parity[1::2]] == [1.0, 1.0] and all(f.value < 1e-4 for f in parity[::2])
    assert {figure.name for figure in gpu.without_a_device()} >= {figure.name for figure in parity[::2]}
