"""What the program says to what a manifest names: its own parsers and settings are asked, nothing is started."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

import decode_worker.__main__
import prefill_worker.__main__
import router.__main__
from pdserve.cli.main import app
from pdserve.config import Config, load_config
from pdserve.rpc import health
from tests.infra.manifests import ROOT, Document, Pod

Main = Callable[[Sequence[str]], int]
MAINS: dict[str, tuple[Main, tuple[str, ...]]] = {
    # Module -> its entry point, and arguments with which it ends after everything was read.
    "router": (router.__main__.main, ("--port", "70000")),
    "prefill_worker": (prefill_worker.__main__.main, ("--model", "/does/not/exist")),
    "decode_worker": (decode_worker.__main__.main, ("--model", "/does/not/exist")),
}
ENV_OF_RAY = {"RAY_USAGE_STATS_ENABLED", "RAY_REDIS_CA_CERT"}
VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")
MOUNT, FILE = "/etc/pdserve", "/etc/pdserve/pdserve.toml"


def settings(documents: list[Document], tmp_path: Path, pod: Pod) -> Config:
    """The configuration that this pod mounts, read by the program.

    tmp_path/pdserve.toml is the same with an authority's file that is there.
    """
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in pod.container["volumeMounts"]}
    name = mounted[MOUNT]["configMap"]["name"]
    (data,) = [d["data"] for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"] == name]
    for file, text in data.items():
        (tmp_path / file).write_text(text)
    path = tmp_path / Path(FILE).name
    config = load_config(path)
    # Who reads it next looks for the authority's file.
    here = tmp_path / "tls"
    here.mkdir(exist_ok=True)
    (here / "ca.crt").touch()
    path.write_text(path.read_text().replace(str(Path(config.decode.rpc.tls.ca_file).parent), str(here)))
    return config


def environment(container: Document) -> dict[str, str]:
    """The variables of a container, with values that can stand for those of a cluster."""
    values = {"POD_IP": "127.0.0.1", "POD_NAME": "pod-0"}
    return {each["name"]: each.get("value", values.get(each["name"], "a-secret-of-sufficient-length"))
            for each in container.get("env", [])}  # fmt: skip


def expanded(container: Document) -> dict[str, str]:
    """The same, with the variables that its values name in them."""
    known = environment(container)
    return {name: VARIABLE.sub(lambda match: known[match[1]], value) for name, value in known.items()}


def arguments(container: Document, tmp_path: Path) -> list[str]:
    """A container's arguments as the program sees them, with paths under `tmp_path`.

    Raises AssertionError for a variable that the container does not have.
    """
    known = environment(container)

    def value(match: re.Match[str]) -> str:
        assert match[1] in known, f"$({match[1]}) is not set"
        return known[match[1]]

    return [VARIABLE.sub(value, each).replace(MOUNT, str(tmp_path)) for each in container.get("args", [])]


def check_command(command: Sequence[str], given: Sequence[str], environment: Mapping[str, str]) -> str:
    """`python -m MODULE ARGUMENTS`: every argument is one that the module takes. Returns the module."""
    assert tuple(command[:2]) == ("python", "-m") and len(command) == 3, command
    main, ending = MAINS[command[2]]
    told = io.StringIO()
    with contextlib.redirect_stderr(told), patch.dict(os.environ, environment):
        try:
            status = main([*given, *ending])
        except SystemExit as error:
            raise AssertionError(f"{command[2]} does not take {given}: {told.getvalue()}") from error
    wrong = told.getvalue()
    assert status == 2 and ("70000" in wrong or "/does/not/exist" in wrong), f"{command[2]} {given}: {wrong}"
    return command[2]


def check_pdserve(words: Sequence[str]) -> None:
    """`pdserve COMMAND ...`, parsed by the command line's own parser and not run."""
    assert words[0] == "pdserve"
    commands: Mapping[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009  # a group has them
    assert words[1] in commands, f"no command {words[1]}"
    try:
        commands[words[1]].make_context(words[1], list(words[2:]))
    except Exception as error:
        raise AssertionError(f"{words}: {error}") from error


def check_health(command: Sequence[str], environment: Mapping[str, str], *, role: str, port: int, tls: str) -> None:
    """`python -m pdserve.rpc.health ...`: it asks that port as that role's, with the certificate at `tls`."""
    assert tuple(command[:3]) == ("python", "-m", health.__name__), command
    with patch.dict(os.environ, environment):
        try:
            read = health.parser().parse_args(command[3:])
        except SystemExit as error:
            raise AssertionError(f"the probe does not take {command[3:]}") from error
    assert int(read.address.rpartition(":")[2]) == port, read.address
    assert read.role == role and str(read.tls) == tls, read


def check_ray_start(parameters: Mapping[str, str]) -> None:
    start = importlib.import_module("ray.scripts.scripts").start
    known = {option for parameter in start.params for option in parameter.opts}
    unknown = [name for name in parameters if f"--{name}" not in known]
    assert not unknown, f"`ray start` has no {unknown}"


def check_batch(entrypoint: str, files: Mapping[str, str]) -> None:
    """`python /opt/pdserve/examples/batch.py ...`, read by the script's own parser."""
    words = shlex.split(entrypoint)
    assert words[0] == "python" and words[1].startswith("/opt/pdserve/"), words
    script = ROOT / words[1].removeprefix("/opt/pdserve/")
    assert script.is_file(), script
    parse = runpy.run_path(str(script), run_name="batch")["arguments"]
    before, sys.argv = sys.argv, [str(script), *words[2:]]
    try:
        read = parse()
    except SystemExit as error:
        raise AssertionError(f"batch.py does not take {words[2:]}") from error
    finally:
        sys.argv = before
    for path in (read.input, read.config):
        assert path.parent == Path(MOUNT) and path.name in files, path


def check_environment(container: Document, config: Config) -> None:
    """Every variable is read by someone: the configuration, the container's own arguments, Ray."""
    wanted = {each.keys_env for each in config.router.tenants} | {config.router.registry.password_env}
    texts = [*container.get("command", ()), *container.get("args", ())]
    text = " ".join([*texts, *(each.get("value", "") for each in container.get("env", []))])
    if "pdserve.rpc.health" in str(container):
        wanted |= {"PDSERVE_HEALTH", "PDSERVE_TLS"}
    for name in (each["name"] for each in container.get("env", [])):
        used = name in wanted or f"$({name})" in text or f"${name}" in text or name in ENV_OF_RAY
        assert used, f"nobody reads {name}"


def ports(component: str, config: Config) -> dict[str, int]:
    """What a part listens on, by the names that the manifests use."""
    if component == "router":
        return {"grpc": config.router.port, "http": config.router.http_port}
    if component == "prefill":
        return {"grpc": config.prefill.port}
    if component == "decode":
        return {"grpc": config.decode.port, "transfer": config.decode.transfer_port}
    if component == "redis":
        return {"redis": 6379}
    return {"gcs-server": 6379, "dashboard": 8265, "client": 10001}  # Ray's own defaults
