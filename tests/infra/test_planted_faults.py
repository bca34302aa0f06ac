"""What a manifest names and the program does not have is found: one fault at a time, planted in good manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from tests.infra import program
from tests.infra.manifests import Document, of_kind, pods, render
from tests.infra.test_program import check


def container_of(component: str) -> Callable[[list[Document]], Any]:
    return lambda documents: next(
        d["spec"]["template"]["spec"]["containers"][0]
        for d in documents
        if d["kind"] == "Deployment" and d["metadata"]["name"] == f"pdserve-{component}"
    )


def replace(component: str, old: str, new: str) -> Callable[[list[Document]], None]:
    def plant(documents: list[Document]) -> None:
        container = container_of(component)(documents)
        before = list(container["args"])
        container["args"] = [each.replace(old, new) for each in before]
        assert container["args"] != before

    return plant


def set_in(component: str, *path: Any) -> Callable[[list[Document]], None]:
    def plant(documents: list[Document]) -> None:
        at = container_of(component)(documents)
        for step in path[:-2]:
            at = at[step]
        assert at[path[-2]] != path[-1]
        at[path[-2]] = path[-1]

    return plant


def in_config(old: str, new: str) -> Callable[[list[Document]], None]:
    def plant(documents: list[Document]) -> None:
        (data,) = [d["data"] for d in of_kind(documents, "ConfigMap")]
        assert old in data["pdserve.toml"]
        data["pdserve.toml"] = data["pdserve.toml"].replace(old, new)

    return plant


def open_transfer(documents: list[Document]) -> None:
    (policy,) = [d for d in of_kind(documents, "NetworkPolicy") if d["metadata"]["name"] == "pdserve-prefill-to-decode"]
    del policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]


def another_certificate(documents: list[Document]) -> None:
    (decode,) = [pod for pod in pods(documents) if pod.component == "decode"]
    (volume,) = [volume for volume in decode.spec["volumes"] if "secret" in volume]
    volume["secret"]["secretName"] = "pdserve-router-tls"


TYPOS: dict[str, Callable[[list[Document]], None]] = {
    "a flag": replace("decode", "--transfer-port", "--transfers-port"),
    "a port": replace("router", "8471", "8472"),
    "the path of the configuration": replace("prefill", "pdserve.toml", "pdserver.toml"),
    "a variable in an argument": replace("decode", "POD_IP", "POD_IPS"),
    "a variable": set_in("router", "env", 1, "name", "PDSERVE_APIKEYS"),
    "the path of a probe": set_in("router", "livenessProbe", "httpGet", "path", "/health"),
    "the port of a probe": set_in("decode", "env", 3, "value", "$(POD_IP):8490"),
    "the role of a probe": set_in("decode", "livenessProbe", "exec", "command", 4, "router"),
    "a probe in clear": set_in("router", "readinessProbe", "httpGet", "scheme", "HTTP"),
    "the folder of a certificate": in_config("/run/pdserve/tls/tls.crt", "/run/pdserver/tls/tls.crt"),
    "another role's certificate": another_certificate,
    "a container's port": set_in("decode", "ports", 1, "containerPort", 8482),
    "a module": set_in("prefill", "command", 2, "prefil_worker"),
    "a key of the configuration": in_config("transfer_port", "transfer_prot"),
    "a value of the configuration": in_config("threads = 2", "threads = 0"),
    "too little time to end": in_config("grace_s = 300", "grace_s = 400"),
    "a policy that opens the transfer port": open_transfer,
}


@pytest.mark.parametrize("what", TYPOS)
def test_what_the_program_does_not_have_is_found(what: str, tmp_path: Path) -> None:
    documents = render("plain")
    TYPOS[what](documents)
    with pytest.raises((AssertionError, KeyError, ConfigError)):
        check(documents, tmp_path)


def test_typos_around_ray_are_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ray start"):
        program.check_ray_start({"object-store-memry": "1"})
    with pytest.raises(AssertionError, match="does not take"):
        program.check_batch("python /opt/pdserve/examples/batch.py a b --confg c", {})
    with pytest.raises(AssertionError, match="timeout"):
        program.check_pdserve(["pdserve", "drain", "--timeouts", "3"])
