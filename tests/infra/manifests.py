"""The manifests as kubectl renders them, and what can be found in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
OVERLAYS = ("plain", "kuberay", "rayjob")
CERT_MANAGER = "../cert-manager"
LEAST = (1, 27)  # the first kubectl whose kustomize knows what ours use
CLUSTER = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}

Document = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One pod template, and what is around it."""

    owner: str  # kind/name
    labels: dict[str, str]
    spec: Document
    replicas: int
    ray_start: dict[str, str] | None = None  # parameters, where KubeRay makes the command

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Document:
        (only,) = self.spec["containers"]
        return dict(only)


def missing(what: str, remedy: str) -> None:
    """Ends a test that needs `what`: a failure in CI, a skip elsewhere."""
    text = f"{what} is not installed: {remedy}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


def kubectl() -> str:
    found = shutil.which("kubectl")
    if found is None:
        missing("kubectl", "install version 1.27 or newer")
    assert found is not None
    return found


@cache
def _rendered(overlay: str) -> str:
    told = json.loads(_output("version", "--client", "-o", "json"))["clientVersion"]
    version = (int(told["major"]), int(told["minor"].rstrip("+")))
    assert version >= LEAST, f"kubectl is {version}, the manifests need {LEAST}"
    return _output("kustomize", str(INFRA / "k8s" / "overlays" / overlay))


def render(overlay: str) -> list[Document]:
    """Documents of the caller's own. Raises AssertionError with kubectl's words when it refuses."""
    kubectl()
    return list(yaml.load_all(_rendered(overlay), yaml.CSafeLoader))


def _output(*arguments: str) -> str:
    done = subprocess.run([kubectl(), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pods(documents: list[Document]) -> list[Pod]:
    return [pod for document in documents for pod in _pods(document)]


def _pods(document: Document) -> Iterator[Pod]:
    kind, spec = document["kind"], document.get("spec", {})
    owner = f"{kind}/{document['metadata']['name']}"
    if kind in ("Deployment", "StatefulSet"):
        template = spec["template"]
        yield Pod(owner, template["metadata"]["labels"], template["spec"], spec.get("replicas", 1))
    elif kind in CLUSTER:
        cluster = spec[CLUSTER[kind]]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            template = group["template"]
            labels, replicas = template["metadata"]["labels"], group.get("replicas", 1)
            yield Pod(owner, labels, template["spec"], replicas, group["rayStartParams"])


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def matches(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return exact and all(labels.get(rule["key"]) in rule["values"] for rule in rules)
