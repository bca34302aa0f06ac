"""What the command finds wrong before it starts anything, and how fast it can say so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.console import check_writable, record_rows, write_file
from pdserve.cli.generate import show_events
from pdserve.cli.main import main
from pdserve.cli.preflight import check_before_start
from pdserve.cli.ray_errors import pool_failure
from pdserve.cli.state import hold
from pdserve.client import Event, Finish, Tokens
from pdserve.config import parse_config
from pdserve.engine.checkpoint import save_spec_checkpoint
from pdserve.errors import ConfigError, FieldDifference, Unavailable
from pdserve.rpc.events import GroupPair, HandoffRecord
from tests.engine.tiny import TINY, tiny_model


def test_the_command_line_loads_no_heavy_library() -> None:
    heavy = ("torch", "ray", "transformers", "numpy")
    program = f"import sys, pdserve.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tables", "field", "said"),
    [
        ({"model": {"path": "/nonexistent/m.gguf"}}, "model.path", "/nonexistent/m.gguf does not exist"),
        ({"model": {"path": __file__}}, "model.path", "is not a model"),
        ({"router": {"host": "0.0.0.0"}}, "router.host", "allow_plaintext = true"),
        ({"router": {"http_host": "::"}}, "router.http_host", "allow_plaintext = true"),
        ({"prefill": {"host": "10.0.0.1"}}, "prefill.host", "allow_plaintext = true"),
        ({"decode": {"host": "10.0.0.1"}}, "decode.host", "allow_plaintext = true"),
    ],
)
def test_what_up_refuses_before_it_starts(tables: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_before_start(parse_config(tables))
    assert caught.value.field == field and said in str(caught.value)


def test_what_up_does_not_refuse(tmp_path: Path) -> None:
    path = tmp_path / "tiny.pdmodel"
    save_spec_checkpoint(path, TINY, tiny_model(TINY).tensors)
    check_before_start(parse_config({"model": {"path": str(path)}}))
    # The network is trusted; and the model lies where the workers of a cluster run, not here.
    trusted = {"router": {"host": "0.0.0.0"}, "rpc": {"allow_plaintext": True}}
    check_before_start(parse_config({**trusted, "model": {"path": "/far/away"}, "pools": {"ray_address": "ray:6379"}}))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\xff" * 64])
@pytest.mark.parametrize("suffix", ["gguf", "pdmodel", "safetensors"])
def test_a_header_that_cannot_be_read_is_the_models_fault(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_before_start(parse_config({"model": {"path": str(path)}}))
    assert caught.value.field == "model.path" and path.name in caught.value.message and caught.value.remedy


def test_a_wrong_model_comes_before_another_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_STATE", str(tmp_path / "up.json"))
    monkeypatch.setattr(sys, "argv", ["pdserve", "up", "--model", "/nonexistent"])
    with hold(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: model.path: /nonexistent does not exist (") and len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            "pdserve.errors.CheckpointError: path: /m does not exist (check the path)",
            "decode: the pool did not start: path: /m does not exist (check the path)",
        ),
        (
            "RuntimeError: no driver",
            "decode: the pool did not start: no driver (correct the configuration and start again)",
        ),
    ],
)
def test_a_pool_failure_names_no_class_and_has_one_remedy(last: str, said: str) -> None:
    assert str(pool_failure("decode", f"Traceback:\n  File x\n{last}\n\n")) == said


def test_where_a_report_cannot_go_is_known_before_it_is_made(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "report.json"):
        with pytest.raises(ConfigError) as caught:
            check_writable(path, "--json")
        assert caught.value.field == "--json" and caught.value.remedy
    path = tmp_path / "report.json"
    check_writable(path, "--json")
    assert not path.exists()
    write_file(path, "{}", "--json")
    check_writable(path, "--json")
    assert path.read_text() == "{}"


def _until_an_error(texts: Iterable[str], error: BaseException) -> Iterable[Event]:
    for number, text in enumerate(texts):
        yield Tokens(number, (number,), text)
    raise error


@pytest.mark.parametrize("error", [Unavailable("gone"), KeyboardInterrupt()])
@pytest.mark.parametrize(("texts", "shown"), [(("Par", "is"), "Paris\n"), (("",), ""), ((), "")])
def test_an_answer_that_breaks_off_ends_its_line(
    capsys: pytest.CaptureFixture[str], texts: tuple[str, ...], shown: str, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        show_events(_until_an_error(texts, error))
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("text", "shown"), [("Paris", "Paris\n"), ("", "\n")])
def test_a_whole_answer_ends_with_one_line_break(capsys: pytest.CaptureFixture[str], text: str, shown: str) -> None:
    show_events([Tokens(0, (1,), text), HandoffRecord(), Finish("stop")])
    assert capsys.readouterr().out == shown


def test_the_record_names_groups_of_pairs() -> None:
    why = (FieldDifference("LAYERS", "2", "3"), FieldDifference("WIDTH", "4", "5"))
    record = HandoffRecord(
        attempts=1,
        candidates=(GroupPair(("p0", "p1"), ("d0",), 9, 1), GroupPair(("d0", "d1"), ("d0", "d1"), 3, 3)),
        rejected=(GroupPair(("p0",), ("d1",), 1, 1, why),),
    )
    rows = record_rows(record)
    assert ("attempts", "1") in rows
    assert ("pairs that fit", "p0, p1 and 7 more -> d0") in rows
    assert ("pairs that fit", "d0, d1 and 1 more, without a handoff") in rows
    assert ("pairs refused", "p0 -> d1: LAYERS: 2 != 3; WIDTH: 4 != 5") in rows
