"""Every manifest against the schemas of those who will read it; a typo in any of them is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pydantic
import pytest

from tests.infra import schemas
from tests.infra.manifests import CERT_MANAGER, OVERLAYS, Document, of_kind, render

REFUSALS = (
    jsonschema.ValidationError,
    pydantic.ValidationError,
    kubernetes_validate.ValidationError,
    AssertionError,
)


@pytest.mark.parametrize("overlay", [*OVERLAYS, CERT_MANAGER])
def test_every_document_is_what_its_readers_take(overlay: str) -> None:
    documents = render(overlay)
    for document in documents:
        schemas.check(document)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)


def rename(*path: Any) -> Callable[[Document], None]:
    """A typo: the last key of the path gets another letter."""

    def plant(document: Document) -> None:
        at: Any = document
        for step in path[:-1]:
            at = at[step]
        at[f"{path[-1]}s"] = at.pop(path[-1])

    return plant


TEMPLATE = ("spec", "template", "spec", "containers", 0)
KUBERNETES = {
    "Deployment": (*TEMPLATE, "readinessProbe", "httpGet", "port"),
    "StatefulSet": (*TEMPLATE, "resources", "limits"),
    "Service": ("spec", "ports", 0, "targetPort"),
    "HorizontalPodAutoscaler": ("spec", "metrics", 0, "resource", "target", "averageUtilization"),
    "PodDisruptionBudget": ("spec", "maxUnavailable"),
    "NetworkPolicy": ("spec", "podSelector"),
    "ConfigMap": ("data",),
}


@pytest.mark.parametrize("kind", KUBERNETES)
def test_a_typo_in_a_kubernetes_kind_is_refused(kind: str) -> None:
    document = of_kind(render("plain"), kind)[-1 if kind == "Deployment" else 0]
    schemas.check_by_kubernetes(document)
    rename(*KUBERNETES[kind])(document)
    with pytest.raises(REFUSALS):
        schemas.check_by_kubernetes(document)


@pytest.mark.parametrize(("kind", "path"), [("Certificate", ("spec", "dnsNames")), ("Issuer", ("spec", "selfSigned"))])
def test_a_typo_in_a_certificate_is_refused(kind: str, path: tuple[str, ...]) -> None:
    document = next(each for each in of_kind(render(CERT_MANAGER), kind) if path[1] in each["spec"])
    rename(*path)(document)
    with pytest.raises(REFUSALS):
        schemas.check(document)


SERVICE, JOB = ("kuberay", "RayService"), ("rayjob", "RayJob")
RAY = {
    "a field of the service": (SERVICE, rename("spec", "upgradeStrategy")),
    "a field of the cluster": (SERVICE, rename("spec", "rayClusterConfig", "enableInTreeAutoscaling")),
    "a field of the secret": (SERVICE, rename("spec", "rayClusterConfig", "gcsFaultToleranceOptions", "redisPassword")),
    "a field of a group": (SERVICE, rename("spec", "rayClusterConfig", "workerGroupSpecs", 0, "maxReplicas")),
    "a field of the job": (JOB, rename("spec", "shutdownAfterJobFinishes")),
    "a field of a pod": (
        JOB,
        rename("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "livenessProbe"),
    ),
    "a version": (SERVICE, lambda document: document.update(apiVersion="ray.io/v2")),
    "a value": (JOB, lambda document: document["spec"].update(backoffLimit="two")),
}
JUDGES = {"ours": schemas.check_by_ours, "KubeRay's": schemas.check_by_crd}


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("what", RAY)
def test_a_typo_in_a_kuberay_kind_is_refused(what: str, judge: str) -> None:
    if judge == "KubeRay's" and not schemas.CRDS.is_dir():
        pytest.skip("KubeRay's definitions are not here; ours are checked all the same")
    (overlay, kind), plant = RAY[what]
    (document,) = of_kind(render(overlay), kind)
    JUDGES[judge](document)
    plant(document)
    with pytest.raises(REFUSALS):
        JUDGES[judge](document)


@pytest.mark.parametrize(
    ("right", "typo"),
    [("import_path", "import_paths"), ("route_prefix", "route_prefixx"), ("proxy_location", "proxy_locations")],
)
def test_a_typo_in_the_serve_configuration_is_refused(right: str, typo: str) -> None:
    (document,) = of_kind(render("kuberay"), "RayService")
    assert right in document["spec"]["serveConfigV2"]
    document["spec"]["serveConfigV2"] = document["spec"]["serveConfigV2"].replace(right, typo, 1)
    with pytest.raises(REFUSALS):
        schemas.check_by_ours(document)
