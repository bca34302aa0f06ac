"""Tenants as they are configured: which keys count, what is refused by name, and that no key is ever shown."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import load_config, operator_key, parse_config
from pdserve.errors import ConfigError, Unauthenticated
from router.auth import Authenticator
from router.settings import RouterSettings
from router.tenants import Tenant, first_key, read_tenants

ACME, ACME_2, ZETA, ZETA_2 = (f"sk-{name}-0123456789abcdef" for name in ("acme", "acme2", "zeta", "zeta2"))
SECRET = "sk-0123-do-not-show-me"

FILE = """
[[router.tenants]]
name = "acme"
keys = ["{acme}", "{acme_2}"]

[[router.tenants]]
name = "zeta"
keys_env = "ZETA_KEYS"
keys_file = "{file}"
"""


def configured(tmp_path: Path) -> Path:
    keys, path = tmp_path / "zeta.keys", tmp_path / "pdserve.toml"
    keys.write_text(f"\n{ZETA_2}\n")
    path.write_text(FILE.format(acme=ACME, acme_2=ACME_2, file=keys))
    return path


def authenticator(*tenants: Tenant, **environment: str) -> Authenticator:
    settings = RouterSettings(tenants=tenants)
    settings.check()
    return Authenticator(settings, environment)


def test_keys_come_from_the_file_a_variable_and_another_file(tmp_path: Path) -> None:
    settings = load_config(configured(tmp_path)).router
    known = Authenticator(settings, {"ZETA_KEYS": f" {ZETA} "})
    asked = {key: known.tenant([f"Bearer {key}"]) for key in (ACME, ACME_2, ZETA, ZETA_2)}
    assert asked == {ACME: "acme", ACME_2: "acme", ZETA: "zeta", ZETA_2: "zeta"}


def test_only_digests_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = configured(tmp_path)
    settings = load_config(path).router
    assert settings.tenants[0].keys == tuple(hashlib.sha256(key.encode()).digest() for key in (ACME, ACME_2))
    for form in (repr(settings), str(settings.tenants), repr(load_config(path))):
        assert ACME not in form and "keys=" not in form.replace("keys_", "")
    assert ACME.encode() not in pickle.dumps(settings)
    monkeypatch.setenv("ZETA_KEYS", ZETA)
    held = repr(vars(Authenticator(settings)))
    assert not any(key in held for key in (ACME, ACME_2, ZETA, ZETA_2))


@pytest.mark.parametrize("credentials", [[f"Bearer {ACME}"], [f"bearer {ACME}"], [f"  BEARER   {ACME}  "]])
def test_a_known_key_is_a_tenant(credentials: list[str]) -> None:
    assert authenticator(Tenant.of("acme", ACME), Tenant.of("zeta", ZETA)).tenant(credentials) == "acme"


@pytest.mark.parametrize(
    ("credentials", "reason"),
    [
        ([], "MISSING_API_KEY"),
        ([""], "MISSING_API_KEY"),
        (["Bearer"], "MISSING_API_KEY"),
        (["Bearer "], "MISSING_API_KEY"),
        ([ACME], "MISSING_API_KEY"),
        ([f"Basic {ACME}"], "MISSING_API_KEY"),
        ([f"Bearer {ACME}", f"Bearer {ZETA}"], "MISSING_API_KEY"),
        ([f"Bearer {SECRET}"], "INVALID_API_KEY"),
        ([f"Bearer {ACME[:-1]}"], "INVALID_API_KEY"),
        ([f"Bearer {ACME}x"], "INVALID_API_KEY"),
        ([f"Bearer {ACME} {ZETA}"], "INVALID_API_KEY"),
        ([f"Bearer {ACME.upper()}"], "INVALID_API_KEY"),
        (["Bearer acme"], "INVALID_API_KEY"),
        (["Bearer é\udcff"], "INVALID_API_KEY"),
    ],
)
def test_anything_else_is_nobody(credentials: list[str], reason: str) -> None:
    known = authenticator(Tenant.of("acme", ACME), Tenant.of("zeta", ZETA))
    with pytest.raises(Unauthenticated) as caught:
        known.tenant(credentials)
    assert (caught.value.reason, caught.value.field) == (reason, "authorization")
    assert not any(part in str(caught.value) for part in (ACME, ZETA, SECRET, "acme", "zeta"))


def test_a_digest_is_no_key() -> None:
    """Who reads the digests of a running router cannot call it with them."""
    known = authenticator(Tenant.of("acme", ACME))
    with pytest.raises(Unauthenticated):
        known.tenant([f"Bearer {hashlib.sha256(ACME.encode()).hexdigest()}"])


def test_a_digest_stands_for_its_key_wherever_keys_are_kept(tmp_path: Path) -> None:
    """Written as `sha256sum` prints it; whoever reads it cannot call with it."""
    tool = (
        subprocess.run(["sha256sum"], input=ACME.encode(), capture_output=True, check=True).stdout.decode().split()[0]
    )
    written = f"sha256:{tool}"
    (tmp_path / "keys").write_text(f"{written}\n{ACME_2}\n")
    for known in (
        authenticator(Tenant.of("acme", written)),
        authenticator(Tenant("acme", keys_env="KEYS"), KEYS=f"{ZETA} {written.upper().replace('SHA256', 'sha256')}"),
        authenticator(Tenant("acme", keys_file=str(tmp_path / "keys"))),
        Authenticator(RouterSettings(tenants=read_tenants([{"name": "acme", "keys": [written]}])), {}),
    ):
        assert known.tenant([f"Bearer {ACME}"]) == "acme"
        for other in (written, tool):
            with pytest.raises(Unauthenticated):
                known.tenant([f"Bearer {other}"])
    both = [{"name": "acme", "keys": [written]}, {"name": "zeta", "keys": [ZETA]}]
    assert first_key(both, {}) == ZETA and first_key(both[:1], {}) == ""


@pytest.mark.parametrize("bad", ["", "ab", "g" * 64, "a" * 63, "a" * 65, "aa " * 21 + "a"])
def test_what_is_no_digest_is_refused_by_place(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tenants([{"name": "acme", "keys": [f"sha256:{bad}"]}])
    assert caught.value.field == "router.tenants[0].keys[0]" and (not bad or bad not in str(caught.value))


def test_every_digest_is_compared_and_each_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon one fits, and whether one does: the standard library's comparison is counted as it is called."""
    known = authenticator(Tenant.of("acme", ACME, ACME_2), Tenant.of("zeta", ZETA, ZETA_2))
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def counted(ours: bytes, given: bytes) -> bool:
        compared.append((ours, given))
        return real(ours, given)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in (ACME, ZETA_2, SECRET):
        compared.clear()
        try:
            known.tenant([f"Bearer {key}"])
        except Unauthenticated:
            assert key == SECRET
        digest = hashlib.sha256(key.encode()).digest()
        assert len({ours for ours, _ in compared}) == 4 and {given for _, given in compared} == {digest}


def test_without_tenants_everyone_is_the_one_there_is() -> None:
    known = Authenticator(RouterSettings(tenant="us"), {})
    for credentials in ([], ["Bearer anything"], ["nonsense"], ["a", "b"]):
        assert known.tenant(credentials) == "us"


def tables(*tenants: Any) -> dict[str, Any]:
    return {"router": {"tenants": list(tenants)}}


GOOD = {"name": "good", "keys": [ACME]}


@pytest.mark.parametrize(
    ("written", "field"),
    [
        (tables({"keys": [SECRET]}), "router.tenants[0].name"),
        (tables({"name": "", "keys": [SECRET]}), "router.tenants[0].name"),
        (tables({"name": "n" * 257, "keys": [SECRET]}), "router.tenants[0].name"),
        (tables(GOOD, {"name": "good", "keys": [SECRET]}), "router.tenants[1].name"),
        (tables({"name": "a"}), "router.tenants[0].keys"),
        (tables({"name": "a", "keys": []}), "router.tenants[0].keys"),
        (tables(GOOD, {"name": "a", "keys": [SECRET, ""]}), "router.tenants[1].keys[1]"),
        (tables({"name": "a", "keys": [SECRET[:15]]}), "router.tenants[0].keys[0]"),
        (tables({"name": "a", "keys": [SECRET * 100]}), "router.tenants[0].keys[0]"),
        (tables({"name": "a", "keys": [f"{SECRET} "]}), "router.tenants[0].keys[0]"),
        (tables({"name": "a", "keys": [f"{SECRET}é"]}), "router.tenants[0].keys[0]"),
        (tables({"name": "a", "keys": [f"{SECRET}\n"]}), "router.tenants[0].keys[0]"),
        (tables({"name": "a", "keys": SECRET}), "router.tenants[0].keys"),
        (tables({"name": "a", "keys": [SECRET, 1]}), "router.tenants[0].keys"),
        (tables({"name": 7, "keys": [SECRET]}), "router.tenants[0].name"),
        (tables({"name": "a", "keys_env": [SECRET]}), "router.tenants[0].keys_env"),
        (tables({"name": "a", "key": SECRET}), "router.tenants[0].key"),
        (tables(SECRET), "router.tenants"),
        ({"router": {"tenants": SECRET}}, "router.tenants"),
        ({"router": {"tenants": {"name": "a", "keys": [SECRET]}}}, "router.tenants"),
        ({"router": {"tenants": [{"name": "a", "keys": [SECRET]}], "port": -1}}, "router.port"),
        ({"tenants": [{"name": "a", "keys": [SECRET]}]}, "tenants"),
    ],
)
def test_what_cannot_be_is_refused_by_place_and_never_by_value(written: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(written)
    assert caught.value.field == field and caught.value.remedy
    told = [str(caught.value), repr(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    assert not any(SECRET[:15] in text for text in told)


@pytest.mark.parametrize(
    ("tenant", "field"),
    [
        (Tenant("a", keys_env="UNSET"), "keys_env"),
        (Tenant("a", keys_env="BLANK"), "keys_env"),
        (Tenant("a", keys_env="SHORT"), "keys_env[1]"),
        (Tenant("a", keys_file="/nonexistent"), "keys_file"),
        (Tenant("a", keys_file="/dev/null"), "keys_file"),
        (Tenant("a", keys_file="{binary}"), "keys_file"),
        (Tenant.of("a", ZETA, ZETA), "keys"),
        (Tenant.of("a", ACME), "keys"),
        (Tenant("a", keys_env="ACME"), "keys"),
    ],
)
def test_the_router_does_not_start_without_every_key(tenant: Tenant, field: str, tmp_path: Path) -> None:
    binary = tmp_path / "keys"
    binary.write_bytes(b"\xff" + SECRET.encode())
    tenant = Tenant(tenant.name, tenant.keys, tenant.keys_env, tenant.keys_file.format(binary=binary))
    environment = {"BLANK": " \n", "SHORT": f"{SECRET} {SECRET[:4]}", "ACME": ACME}
    with pytest.raises(ConfigError) as caught:
        authenticator(Tenant.of("acme", ACME), tenant, **environment)
    assert caught.value.field == f"router.tenants[1].{field}" and caught.value.remedy
    assert not any(part in f"{caught.value!r}{caught.value.__cause__!r}" for part in (SECRET[:4], ACME, ZETA))


def test_workers_can_read_a_configuration_whose_keys_they_may_not(tmp_path: Path) -> None:
    """Variables and files are the router's: reading the configuration does not need them."""
    path = tmp_path / "pdserve.toml"
    path.write_text('[[router.tenants]]\nname = "a"\nkeys_env = "UNSET"\nkeys_file = "/nonexistent"\n')
    assert load_config(path).router.tenants == (Tenant("a", keys_env="UNSET", keys_file="/nonexistent"),)


def test_the_operator_has_a_key_where_there_are_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operator_key(None) == ""
    assert operator_key(configured(tmp_path)) == ACME
    path = tmp_path / "other.toml"
    path.write_text('[router]\nport = 0\ntenants = [{name = "z", keys_env = "ZETA_KEYS"}]\n')
    monkeypatch.setenv("ZETA_KEYS", f"{ZETA} {ZETA_2}")
    assert operator_key(path) == ZETA
    assert Authenticator(load_config(path).router).tenant([f"Bearer {ZETA_2}"]) == "z"
