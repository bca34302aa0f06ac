"""The configuration file: what it accepts, what it refuses, and that its template is the truth."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.template import SECTIONS, SHARED, field_docs, template
from pdserve.config import DTYPES, Config, load_config, parse_config
from pdserve.engine.ledger import ITEM_BYTES
from pdserve.errors import ConfigError
from pdserve.rpc.settings import TlsSettings


def test_no_file_means_the_defaults() -> None:
    config = load_config()
    assert (config.model.path, config.pools.prefill, config.pools.decode) == ("smollm2", 1, 1)
    assert config.prefill.model == config.decode.model == "smollm2"
    assert config.prefill.engine == config.decode.engine
    assert config.router.host == config.prefill.host == config.decode.host == "127.0.0.1"


def test_the_template_means_the_same_as_no_file() -> None:
    assert parse_config(tomllib.loads(template())) == Config(
        **{name: getattr(load_config(), name) for name in ("model", "prefill", "decode", "router", "pools")}
    )


@pytest.mark.parametrize(("name", "cls"), [(name, cls) for name, cls, _ in SECTIONS])
def test_every_key_says_what_it_means(name: str, cls: type) -> None:
    docs = field_docs(cls)
    silent = [f for f in cls.__dataclass_fields__ if not docs.get(f) and f not in SHARED]  # type: ignore[attr-defined]
    assert not silent, f"[{name}] does not document {silent}"


def test_sections_reach_their_owners_and_overrides_win(tmp_path: Path) -> None:
    path = tmp_path / "pdserve.toml"
    path.write_text(
        '[model]\npath = "m.gguf"\nname = "m"\n[engine]\ndtype = "fp32"\npages = 7\n'
        "[decode.engine]\npages = 9\n[prefill]\nchunk_tokens = 64\n[rpc]\nkeepalive_s = 3.5\n[pools]\nprefill = 2\n"
    )
    config = load_config(path, {"pools": {"prefill": 3}})
    assert (config.prefill.engine.pages, config.decode.engine.pages) == (7, 9)
    assert config.prefill.engine.dtype == config.decode.engine.dtype == "fp32"
    assert config.prefill.chunk_tokens == 64
    assert (config.prefill.name, config.decode.model) == ("m", "m.gguf")
    assert config.router.rpc.keepalive_s == config.prefill.rpc.keepalive_s == 3.5
    assert config.pools.prefill == 3


def test_one_file_gives_each_part_the_certificate_of_its_role() -> None:
    names = {"cert_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
    config = parse_config({"rpc": {"tls": {key: f"/etc/pdserve/{{role}}/{name}" for key, name in names.items()}}})
    assert config.router.rpc.tls == config.router.http_tls == TlsSettings.of_folder(Path("/etc/pdserve/router"))
    for pool in (config.prefill, config.decode):
        assert pool.rpc.tls == TlsSettings.of_folder(Path("/etc/pdserve/worker"))


@pytest.mark.parametrize(
    ("tables", "field", "remedy"),
    [
        ({"prefil": {}}, "prefil", "did you mean prefill?"),
        ({"prefill": {"chunk_token": 3}}, "prefill.chunk_token", "did you mean chunk_tokens?"),
        ({"decode": {"engine": {"page": 3}}}, "decode.engine.page", "did you mean pages?"),
        ({"engine": {"dtyp": "bf16"}}, "engine.dtyp", "did you mean dtype?"),
        ({"engine": {"dtype": "bf32"}}, "engine.dtype", "use one of fp32, bf16, fp16, float64"),
        ({"engine": {"axis_order": "nhn"}}, "engine.axis_order", "use one of hnd, nhd"),
        ({"engine": {"page_size": 0}}, "engine.page_size", "1 or more"),
        ({"prefill": {"engine": {"kv_dtype": "int8"}}}, "prefill.engine.kv_dtype", "use one of fp32"),
        ({"decode": {"model": "x"}}, "decode.model", "known keys"),
        ({"pools": {"prefill": "two"}}, "pools.prefill", "correct it"),
        ({"pools": {"decode": 0}}, "pools.decode", "use 1 or more"),
        ({"pools": {"decode_gpus": -1}}, "pools.decode_gpus", "use 0 or more"),
        ({"router": {"port": 70000}}, "router.port", "65535"),
        ({"registry": {"lease_s": -1}}, "registry.lease_s", "above 0"),
        ({"rpc": {"keepalive_s": 0}}, "rpc.keepalive_s", "above 0"),
        ({"model": "smollm2"}, "model", "write [model]"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tables: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tables)
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_the_dtypes_of_the_file_are_the_engines() -> None:
    assert set(DTYPES) == set(ITEM_BYTES)
    for dtype in DTYPES:
        assert parse_config({"engine": {"dtype": dtype}}).decode.engine.dtype == dtype


@pytest.mark.parametrize("content", [None, b"[model\n", b"\xff\xfe"])
def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "pdserve.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"pdserve\.toml"):
        load_config(path)
