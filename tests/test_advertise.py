"""A worker that nobody could connect to does not start."""

from __future__ import annotations

import pytest

from decode_worker.__main__ import main as decode_main
from decode_worker.settings import DecodeSettings
from pdserve.errors import ConfigError
from pdserve.rpc.settings import RpcSettings
from prefill_worker.__main__ import main as prefill_main
from prefill_worker.settings import PrefillSettings

FIELDS = [
    (PrefillSettings, "prefill", "advertise"),
    (DecodeSettings, "decode", "advertise"),
    (DecodeSettings, "decode", "advertise_transfer"),
]


@pytest.mark.parametrize(("settings", "section", "name"), FIELDS)
@pytest.mark.parametrize(
    ("address", "reason"),
    [("myhost", "BAD_ADDRESS"), ("myhost:0", "BAD_ADDRESS"), ("myhost:5000", "PLAINTEXT_REFUSED")],
)
def test_an_address_that_leads_nowhere_is_named(
    settings: type[PrefillSettings | DecodeSettings], section: str, name: str, address: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**{name: address}).check()  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.reason) == (f"{section}.{name}", reason)
    assert caught.value.remedy


@pytest.mark.parametrize(("settings", "section", "name"), FIELDS)
def test_an_address_that_may_be_used_is_taken(
    settings: type[PrefillSettings | DecodeSettings], section: str, name: str
) -> None:
    for address, allowed in (("", False), ("127.0.0.1:5000", False), ("[::1]:5000", False), ("myhost:5000", True)):
        settings(**{name: address}, rpc=RpcSettings(allow_plaintext=allowed)).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_the_process_says_so_in_one_line_before_it_loads_a_model(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = {"prefill": prefill_main, "decode": decode_main}[section]
    assert main(["--model", "/does/not/exist", "--advertise", "myhost"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{section}.advertise" in line and "host:port" in line
