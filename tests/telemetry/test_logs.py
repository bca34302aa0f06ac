"""Log lines: their fields, and that nothing in them can look like another line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pdserve.telemetry.context import Scope, TraceContext, enter
from pdserve.telemetry.logs import Told, about, configure
from pdserve.telemetry.settings import TelemetrySettings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SCOPE = Scope("", "", "req-1", "ab12", 2, TraceContext(TRACE, "00f067aa0ba902b7", True))
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+")
FORGED = "harmless\n2026-01-01 00:00:00,000 ERROR router: forged\r\x1b[31m\u2028\x85{}"

log = logging.getLogger("tests.telemetry.lines")


class Written:
    """What went to standard error, once."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()  # also at separators that only Unicode knows
        self._whole = text

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._whole.split("\n") if line]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], Written]]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    enter(Scope())
    yield lambda: Written(capsys.readouterr().err)
    enter(Scope())
    root.handlers[:] = before
    root.setLevel(level)


def json_lines(level: str = "info") -> None:
    configure(TelemetrySettings(log_format="json", log_level=level), "prefill", "p0")


def test_a_json_line_has_its_fields(written: Callable[[], Written]) -> None:
    json_lines()
    log.info("no request")
    enter(SCOPE)
    log.warning("%d of %s", 3, "five")
    first, second = written().objects
    assert list(first) == ["time", "level", "logger", "message", "part", "worker"]
    assert {key: value for key, value in second.items() if key != "time"} == {
        "level": "warning",
        "logger": log.name,
        "message": "3 of five",
        "part": "prefill",
        "worker": "p0",
        "request_id": "req-1",
        "handoff_id": "ab12",
        "attempt": 2,
        "trace_id": TRACE,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", second["time"])
    assert abs(datetime.fromisoformat(second["time"]) - datetime.now(UTC)) < timedelta(minutes=1)


def test_the_part_of_a_request_goes_before_that_of_the_process(written: Callable[[], Written]) -> None:
    json_lines()
    log.info("x", extra=about(Scope(part="decode", worker="d0", request_id="req-2")))
    (line,) = written().objects
    assert (line["part"], line["worker"], line["request_id"]) == ("decode", "d0", "req-2")


def test_a_record_is_an_object_in_json_and_json_in_text(written: Callable[[], Written]) -> None:
    record = {"label": FORGED, "attempts": 1}
    json_lines()
    log.info("request %s", Told(record))
    configure(TelemetrySettings(log_level="info"), "router")
    log.info("request %s", Told(record))
    first, second = written().lines
    assert json.loads(first)["message"] == "request" and json.loads(first)["record"] == record
    assert json.loads(second.partition(": request ")[2]) == record


def test_text_lines_end_with_the_ids(written: Callable[[], Written]) -> None:
    configure(TelemetrySettings(log_level="info"), "prefill", "p0")
    log.info("no request")
    enter(SCOPE)
    log.info("a request")
    first, second = written().lines
    assert first.endswith("INFO tests.telemetry.lines: no request")
    assert second.endswith(
        f"INFO tests.telemetry.lines: a request [request_id=req-1 handoff_id=ab12 attempt=2 trace_id={TRACE}]"
    )


@pytest.mark.parametrize("style", ["text", "json"])
def test_no_value_forges_a_line(written: Callable[[], Written], style: str) -> None:
    configure(TelemetrySettings(log_format=style, log_level="info"), "router")
    enter(Scope(request_id=FORGED, handoff_id=FORGED))
    log.info(FORGED)
    log.info("%s", FORGED)
    logging.getLogger(FORGED).info("named")
    lines = written().lines
    assert len(lines) == 3
    for line in lines:
        assert line.isprintable()
        assert LINE.match(line) if style == "text" else json.loads(line)["request_id"] == FORGED


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_traceback_forges_no_line(written: Callable[[], Written], style: str) -> None:
    configure(TelemetrySettings(log_format=style, log_level="info"), "router")
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("failed")
    told = written()
    if style == "json":
        (line,) = told.objects
        assert line["message"] == "failed" and FORGED.partition("\n")[0] in line["error"]
        assert len(told.lines) == 1
    else:
        assert LINE.match(told.lines[0]) and all(line.isprintable() for line in told.lines)
        assert len(told.lines) > 3 and all(line.startswith("    ") for line in told.lines[1:])


def test_setting_up_again_takes_the_place_of_the_first(written: Callable[[], Written]) -> None:
    json_lines("error")
    log.info("unheard")
    configure(TelemetrySettings(log_level="error"), "router", level="info", style="json")
    log.info("heard once")
    assert [line["message"] for line in written().objects] == ["heard once"]
