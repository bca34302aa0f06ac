"""What the manifests name is what the program has: flags, ports, paths, variables, labels."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pdserve import __version__
from pdserve.config import Config
from pdserve.ray_app import build
from pdserve.registry.redis_url import parse
from pdserve.rpc.settings import TlsSettings
from pdserve.rpc.tls import CLIENT, OPERATOR, ROUTER, WORKER
from tests.infra import program
from tests.infra.manifests import CERT_MANAGER, INFRA, OVERLAYS, ROOT, Document, Pod, matches, of_kind, pods, render
from tests.infra.schemas import serve_config

HEALTH_OF_RAY = {("/api/local_raylet_healthz", 52365)}  # of each node's agent
HTTP_PATHS = {"/healthz", "/readyz"}  # tests/infra/test_processes.py asks them
DURING_A_DRAIN_S = 20.0
ROLES = {WORKER, ROUTER, OPERATOR, CLIENT}


def check(documents: list[Document], tmp_path: Path) -> None:
    """Raises AssertionError for the first thing that does not fit."""
    found = pods(documents)
    components = {pod.component: pod for pod in found}
    configured = next(pod for pod in found if pod.component != "redis")
    config = program.settings(documents, tmp_path, configured)
    for pod in found:
        check_pod(documents, pod, components, config, tmp_path)
    for service in of_kind(documents, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        (target,) = [pod for pod in found if matches(selector, pod.labels)]
        for port in service["spec"]["ports"]:
            assert program.ports(target.component, config)[port["targetPort"]] == port["port"], port
    for document in of_kind(documents, "PodDisruptionBudget"):
        selected = [pod for pod in found if matches(document["spec"]["selector"], pod.labels)]
        assert len(selected) == 1, document["metadata"]["name"]
    for document in of_kind(documents, "HorizontalPodAutoscaler"):
        target = document["spec"]["scaleTargetRef"]
        (scaled,) = [d for d in of_kind(documents, target["kind"]) if d["metadata"]["name"] == target["name"]]
        assert target["apiVersion"] == scaled["apiVersion"]
        assert "replicas" not in scaled["spec"], "it would undo the autoscaler's number at each apply"
    for policy in of_kind(documents, "NetworkPolicy"):
        check_policy(policy, components, config)
    for job in of_kind(documents, "RayJob"):
        (data,) = [each["data"] for each in of_kind(documents, "ConfigMap")]
        program.check_batch(job["spec"]["entrypoint"], data)
    for service in of_kind(documents, "RayService"):
        check_serve(service, tmp_path, components)


def check_pod(documents: list[Document], pod: Pod, components: dict[str, Pod], config: Config, tmp_path: Path) -> None:
    container, ports = pod.container, program.ports(pod.component, config)
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == ports, f"{pod.owner}: {named}, and the program listens on {ports}"
    program.check_environment(container, config)
    check_certificate(pod, components, config)
    check_probes(pod, named, config)
    check_stop(pod, config)
    if pod.ray_start is not None:
        program.check_ray_start(pod.ray_start)
    elif pod.component != "redis":
        given = program.arguments(container, tmp_path)
        program.check_command(container["command"], given, program.environment(container))
        for flag, port in (("--port", "grpc"), ("--http-port", "http"), ("--transfer-port", "transfer")):
            told = [int(each.partition("=")[2]) for each in given if each.partition("=")[0] == flag]
            assert all(value == ports[port] for value in told), given
    if pod.component != "redis":
        program.settings(documents, tmp_path, pod)
    if pod.component in ("prefill", "decode"):
        assert container["resources"]["requests"]["cpu"] == str(config.decode.engine.threads)
    assert pod.spec["securityContext"]["runAsNonRoot"] is True


def check_certificate(pod: Pod, components: dict[str, Pod], config: Config) -> None:
    """Each pod mounts the certificate of its own role where its configuration looks for it, and no key that signs."""
    volumes = {volume["name"]: volume["secret"] for volume in pod.spec["volumes"] if "secret" in volume}
    mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"] if mount["name"] in volumes}
    ((folder, mount),) = mounts.items()
    secret = volumes[mount["name"]]
    assert secret["secretName"] == f"pdserve-{role_of(pod, components)}-tls", f"{pod.owner}: {secret}"
    assert secret["defaultMode"] == 0o440 and pod.spec["securityContext"]["fsGroup"] and mount["readOnly"]
    if pod.component == "redis":
        named = re.findall(r"--tls-(?:cert|key|ca-cert)-file (\S+)", pod.container["args"][0])
        assert named == [f"{folder}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
        return
    for rpc in (config.router.rpc, config.prefill.rpc, config.decode.rpc):
        assert rpc.tls == TlsSettings.of_folder(Path(folder)) and not rpc.allow_plaintext
    url = config.decode.registry.url
    assert url.startswith("memory:") or (
        url.startswith("rediss:") and config.decode.registry.ca_file == rpc.tls.ca_file
    )


def role_of(pod: Pod, components: dict[str, Pod]) -> str:
    """Ray's head is the router's where there is no other."""
    if pod.component == "ray-head":
        return "worker" if "router" in components else "router"
    return {"prefill": "worker", "decode": "worker"}.get(pod.component, pod.component)


def check_probes(pod: Pod, named: dict[str, int], config: Config) -> None:
    container = pod.container
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(name, {})
        if "httpGet" in probe:
            path, port = probe["httpGet"]["path"], probe["httpGet"]["port"]
            scheme = probe["httpGet"].get("scheme", "HTTP")
            ours = path in HTTP_PATHS and port == "http" and "http" in named and scheme == "HTTPS"
            assert ours or ((path, port) in HEALTH_OF_RAY and scheme == "HTTP"), probe
        elif "exec" in probe and pod.component != "redis":
            folder = str(Path(config.decode.rpc.tls.cert_file).parent)
            command = probe["exec"]["command"]
            program.check_health(command, program.expanded(container), role="worker", port=named["grpc"], tls=folder)
        elif "tcpSocket" in probe:
            assert probe["tcpSocket"]["port"] in named, probe
        assert "grpc" not in probe, "it does not speak mutual TLS"
    assert "livenessProbe" in container and "readinessProbe" in container


def check_stop(pod: Pod, config: Config) -> None:
    """The pod's time to end holds the hook, the drain, and what comes after it."""
    grace_s = {"router": config.router.grace_s, "prefill": config.prefill.grace_s, "decode": config.decode.grace_s}
    if pod.component not in grace_s:
        return
    command = pod.container["lifecycle"]["preStop"]["exec"]["command"] if "lifecycle" in pod.container else None
    own_s = pod.spec["terminationGracePeriodSeconds"] if command else 0
    if command and command[0] == "pdserve":
        program.check_pdserve(command)
        hook_s = float(command[command.index("--timeout-s") + 1])
        assert grace_s[pod.component] + DURING_A_DRAIN_S <= hook_s <= own_s - DURING_A_DRAIN_S
    else:
        assert command and command[0] == "sleep", f"{pod.owner}: no drain before the end"
        assert grace_s[pod.component] + float(command[1]) + DURING_A_DRAIN_S <= own_s


def check_policy(policy: Document, components: dict[str, Pod], config: Config) -> None:
    spec, name = policy["spec"], policy["metadata"]["name"]
    selected = [pod for pod in components.values() if matches(spec["podSelector"], pod.labels)]
    assert selected, f"{name} selects nothing"
    for rule in spec.get("ingress", []):
        for each in rule["ports"]:
            opened = range(each["port"], each.get("endPort", each["port"]) + 1)
            reached = {
                port for pod in selected for port in program.ports(pod.component, config).values() if port in opened
            }
            of_ray = any(pod.ray_start for pod in selected)
            assert reached or of_ray, f"{name} opens {each}, where nobody listens"
            if config.decode.transfer_port in opened and any(pod.component == "decode" for pod in selected):
                check_only_prefill(rule, components)
        for peer in rule.get("from", []):
            if "namespaceSelector" not in peer:
                assert any(matches(peer["podSelector"], pod.labels) for pod in components.values()), name


def check_only_prefill(rule: Document, components: dict[str, Pod]) -> None:
    peers = rule["from"]
    allowed = {
        pod.component
        for pod in components.values()
        if any("namespaceSelector" in peer or matches(peer["podSelector"], pod.labels) for peer in peers)
    }
    assert allowed == {"prefill"}, f"the transfer port is open to {allowed}"


def check_serve(service: Document, tmp_path: Path, components: dict[str, Pod]) -> None:
    """The applications can be built, and their replicas fit the pods that are there for them."""
    for application in serve_config(service).applications:
        assert application.import_path == f"{build.__module__.rpartition('.')[0]}:{build.__name__}"
        assert application.args["config"] == program.FILE
        role = application.args["pool"]
        assert application.name == f"pdserve-{role}"
        built = build({**application.args, "config": str(tmp_path / "pdserve.toml")})
        options = built._bound_deployment.ray_actor_options
        start = components[role].ray_start
        assert start is not None
        assert float(start["num-cpus"]) >= options["num_cpus"]
        (offered,) = shlex.split(start["resources"])  # KubeRay puts it in a shell's line as it is
        assert json.loads(offered) == options["resources"]
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned("ray")


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_manifest_names_what_the_program_has(overlay: str, tmp_path: Path) -> None:
    documents = render(overlay)
    check(documents, tmp_path)
    for pod in pods(documents):
        if pod.component != "redis":
            assert pod.container["image"] == f"pdserve:{__version__}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_those_that_the_deployment_page_makes(overlay: str) -> None:
    made = set(re.findall(r"--from-literal=([a-z-]+)=", (ROOT / "docs" / "deploy.md").read_text()))
    references = re.findall(r"'secretKeyRef': (\{[^}]*\})", str(render(overlay)))
    assert references or overlay == "rayjob"
    for reference in references:
        assert "'name': 'pdserve'" in reference
        found = re.search(r"'key': '([a-z-]+)'", reference)
        assert found is not None and found[1] in made, reference


def test_nothing_is_in_clear() -> None:
    for path in INFRA.glob("**/*.toml"):
        text = path.read_text()
        assert "[rpc.tls]" in text and "allow_plaintext" not in text and "redis://" not in text, path


def test_cert_manager_makes_every_secret_that_is_mounted(tmp_path: Path) -> None:
    """With names that the program takes for the roles, and that those who connect look for."""
    documents = render(CERT_MANAGER)
    made = {each["spec"]["secretName"]: each["spec"] for each in of_kind(documents, "Certificate")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Issuer")}
    assert {spec["issuerRef"]["name"] for spec in made.values()} == set(issuers)
    authority = made.pop(issuers["pdserve"]["ca"]["secretName"])
    assert authority["isCA"] and issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}}
    plain = render("plain")
    mounted = {secret for overlay in OVERLAYS for pod in pods(render(overlay)) for secret in mounted_secrets(pod)}
    assert mounted == set(made) - {"pdserve-client-tls", "pdserve-operator-tls"}, "people's own are in no pod"
    (by_hand,) = re.findall(r"^for part in (.+); do$", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE)
    assert mounted == {f"pdserve-{part}-tls" for part in by_hand.split()}
    config = program.settings(plain, tmp_path, next(pod for pod in pods(plain) if pod.component == "router"))
    for secret, spec in made.items():
        role = secret.removeprefix("pdserve-").removesuffix("-tls")
        assert {"server auth", "client auth"} <= set(spec["usages"]) and not spec.get("isCA")
        roles = {
            known
            for known in ROLES
            for name in spec["dnsNames"]
            if name == f"{known}.{config.router.rpc.tls.deployment}"
        }
        assert roles == ({role} if role in ROLES else set())
    assert parse(config.router.registry.url).hosts[0][0] in made["pdserve-redis-tls"]["dnsNames"]
    names = {service["metadata"]["name"] for service in of_kind(plain, "Service")}
    assert names & set(made["pdserve-router-tls"]["dnsNames"]) == {"pdserve"}


def mounted_secrets(pod: Pod) -> set[str]:
    return {volume["secret"]["secretName"] for volume in pod.spec["volumes"] if "secret" in volume}
