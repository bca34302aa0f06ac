"""`pdserve verify` as a user meets it: exit status, table, JSON, refusals."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.main import main
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.engine.engine import Engine
from pdserve.rpc.settings import RpcSettings
from pdserve.rpc.tls import CLIENT, OPERATOR, WORKER
from prefill_worker.settings import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.engine.tiny import spec, tiny_engine, tiny_model
from tests.rpc.certificates import make_certificates, rpc_of

IDS = ("--token-ids", "5,6,7,8,9,10,11", "--token-ids", "3 4", "--tokens", "2")
SMALL = "page:4"


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def pdserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["pdserve", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with another value projection in its second layer."""
    model = tiny_model()
    tensors = {**model.tensors, "layers.1.v.weight": model.tensors["layers.1.v.weight"] * 1.1}
    path = tmp_path_factory.mktemp("other") / "other.pdmodel"
    save_spec_checkpoint(path, model.spec, tensors)
    return path


def test_equal_sides_end_with_0_a_verdict_each_and_one_for_all(pdserve: Callable[..., Done], tiny: Path) -> None:
    done = pdserve(f"{tiny},{SMALL}", "chunked:3", "reused", *IDS)
    assert done.code == 0, done.err
    rows = [line.split()[0] for line in done.out.splitlines() if line.strip()]
    assert rows[0] == "prompts" and "prompts of 7, 2 tokens, then 2 greedy tokens each" in done.out
    assert rows[1] == "errors"
    assert "chunked:3 equals" in done.out and "reused equals" in done.out and "NO" not in done.out
    assert rows.count("layer") <= 2 and len(rows) <= 2 + 2 * (1 + 1 + 3) + 1  # at most three rows below a verdict
    assert done.out.splitlines()[-1] == "2 comparisons, all within tolerance"


def test_equal_bits_need_no_rows(pdserve: Callable[..., Done], tiny: Path) -> None:
    done = pdserve(f"{tiny},deterministic", "chunked:3", *IDS)
    lines = [line for line in done.out.splitlines()[2:] if line.strip()]
    assert lines[0].startswith("chunked:3 equals") and lines[0].endswith("bit for bit")
    assert lines[1:] == ["1 comparison, within tolerance"]


def test_a_divergence_ends_with_1_and_names_the_place(pdserve: Callable[..., Done], tiny: Path, other: Path) -> None:
    done = pdserve(tiny, "--against", other, *IDS)
    assert done.code == 1
    assert "it begins at: layer 1, v, prompt 1, token" in done.out.replace("\n", " ")
    assert "weights: the contracts differ in MODEL_DIGEST" in done.out
    assert "value projection" in done.out
    assert done.out.splitlines()[-1] == "1 comparison, 1 not within tolerance"
    rows = [line.split() for line in done.out.splitlines() if line.split()[1:2] == ["1"]]
    assert rows[0][:3] == ["1", "1", "v"] and 1 <= len(rows) <= 3  # the place where it begins is among the worst


def test_a_missing_peer_library_is_told_before_any_model_is_read(
    pdserve: Callable[..., Done], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find(name, *a)
    )
    done = pdserve(tiny, "--against", "transformers", *IDS)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: side: the library transformers is not installed (pip install transformers")
    assert "reading the models" not in done.err


def test_every_tensor_is_shown_on_request(pdserve: Callable[..., Done], tiny: Path) -> None:
    done = pdserve(f"{tiny},{SMALL}", "reused", "--all", *IDS)
    cells = [line.split() for line in done.out.splitlines()]
    assert sum(row[:3] == ["2", "1", "attended"] for row in cells) == 1
    assert sum(row[:3] == ["2", "2", "length"] for row in cells) == 1


def test_the_whole_report_as_json(pdserve: Callable[..., Done], tiny: Path, other: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = pdserve(f"{tiny},{SMALL},plain", "reused", other, "--json", file, *IDS)
    assert done.code == 1
    report = json.loads(file.read_text())
    assert set(report) == {"schema", "equal", "environment", "inputs", "baseline", "comparisons"}
    assert report["schema"] == 1 and report["equal"] is False
    assert set(report["environment"]) == {"pdserve", "torch", "python", "machine", "threads"}
    first = report["inputs"]["prompts"][0]
    assert first == {"token_ids": [5, 6, 7, 8, 9, 10, 11], "attention_mask": [1] * 7, "positions": list(range(7))}
    baseline = report["baseline"]
    assert (baseline["dtype"], baseline["kernels"], baseline["page_size"], baseline["way"]) == (
        *("fp32", "plain (kernels = plain)", 4, "alone"),
    )
    assert len(baseline["model_digest"]) == 64 and len(baseline["outputs"][0]) == 2
    same, differs = report["comparisons"]
    assert same["equal"] is True and same["first_divergence"] is None and same["side"]["reused_tokens"] == [4, 0]
    assert differs["equal"] is False
    assert {d["code"] for d in differs["contract_differences"]} == {"MODEL_DIGEST"}
    place = differs["first_divergence"]
    assert (place["layer"], place["tensor"], place["ok"]) == (1, "v", False)
    assert place["error"] == pytest.approx(0.1, rel=1e-3)
    assert place["place"].startswith("layer 1, v, prompt 1")
    assert set(differs["findings"][0]) == {
        *("prompt", "layer", "tensor", "ok", "max_abs", "error", "mean", "tolerance", "bits_equal", "token", "detail"),
    }
    assert differs["tolerance"] == {"mean": 2e-5, "worst_row": pytest.approx(1e-4)}


def test_json_on_standard_output_is_all_there_is(pdserve: Callable[..., Done], tiny: Path) -> None:
    done = pdserve(f"{tiny},{SMALL}", "nhd", "--json", "-", *IDS)
    assert done.code == 0
    assert json.loads(done.out)["equal"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "is no word of a side"),
        (("transfomers",), "did you mean transformers?"),
        (("bf16", "--token-ids", "one"), "write them as 1,2,3"),
        (("bf16", "--prompt", "hello"), "use --token-ids"),
        (("bf16", "--token-ids", "1000"), "use ids from 0 to 96"),
        (("transformers", *IDS), "compare a Hugging Face directory or a .gguf file"),
        (("bf16", "--tokens", "0"), "use 1 or more"),
        (("bf16", "--json", "/nowhere/report.json", *IDS), "cannot write"),
        (("bf16", "--config", "/nowhere.toml"), "cannot read"),
        (("device:cuda:9", *IDS), "device"),
        (("worker:127.0.0.1:1", *IDS), ""),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_what_cannot_be_compared_ends_with_2(
    pdserve: Callable[..., Done], tiny: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = pdserve(tiny, *arguments)
    assert done.code == 2, done.out
    assert said in done.err and "error" in done.err.lower()


def test_models_of_other_sizes_end_with_2_and_the_diff(
    pdserve: Callable[..., Done], tiny: Path, tmp_path: Path
) -> None:
    model = tiny_model(spec(layers=2))
    path = tmp_path / "two.pdmodel"
    save_spec_checkpoint(path, model.spec, model.tensors)
    done = pdserve(tiny, path, *IDS)
    assert done.code == 2 and done.out == ""
    assert "LAYERS: 3 != 2" in done.err


def test_the_configuration_file_holds_for_the_baseline(
    pdserve: Callable[..., Done], tiny: Path, tmp_path: Path
) -> None:
    config = tmp_path / "pdserve.toml"
    config.write_text(f'[model]\npath = "{tiny}"\n[engine]\ndtype = "bf16"\npage_size = 4\ndeterministic = true\n')
    file = tmp_path / "report.json"
    done = pdserve("--config", config, "--json", file, *IDS)
    assert done.code == 0, done.out + done.err
    report = json.loads(file.read_text())
    assert [c["side"]["side"] for c in report["comparisons"]] == ["chunked", "batched", "reused", "handoff"]
    assert all(c["bits_equal"] for c in report["comparisons"])
    assert (report["baseline"]["dtype"], report["baseline"]["deterministic"]) == ("bf16", "true")


def serving(model: Engine, allow: bool, run: Callable[[str], Done], rpc: RpcSettings | None = None) -> Done:
    """Runs the command beside a prefill worker."""

    async def both() -> Done:
        settings = PrefillSettings(allow_trace=allow, grace_s=1.0, rpc=rpc or RpcSettings())
        worker = PrefillWorker(model, None, settings)
        await worker.start()
        try:
            return await asyncio.to_thread(run, f"worker:{worker.address}")
        finally:
            await worker.stop()
            assert worker.blocks.held_count == 0

    return asyncio.run(both())


@pytest.mark.parametrize(("allow", "code"), [(True, 0), (False, 2)])
def test_a_running_worker(pdserve: Callable[..., Done], allow: bool, code: int) -> None:
    done: Any = serving(tiny_engine(), allow, lambda side: pdserve(side, side, *IDS))
    assert done.code == code
    assert ("equals" in done.out) if allow else ("allow_trace = true" in done.err)


@pytest.mark.parametrize(("role", "code"), [(OPERATOR, 0), (CLIENT, 2)])
def test_a_worker_that_uses_tls_is_shown_to_operators(
    pdserve: Callable[..., Done], tmp_path: Path, role: str, code: int
) -> None:
    folder = make_certificates(tmp_path)
    done = serving(
        tiny_engine(), True, lambda side: pdserve(side, side, *IDS, "--tls", folder / role), rpc_of(folder, WORKER)
    )
    assert done.code == code, done.out + done.err
    assert code == 0 or "certificate" in done.err


def test_help_tells_a_newcomer_what_to_write(pdserve: Callable[..., Done]) -> None:
    done = pdserve("--help")
    assert done.code == 0
    for shown in ("--against transformers", "worker:HOST:PORT", "Exit status: 0 equal", "handoff"):
        assert shown in done.out
