"""Judges of a manifest: Kubernetes' own schemas, KubeRay's, a short one of ours, and Ray's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from tests.infra.manifests import CLUSTER, ROOT, Document

KUBERNETES = ("1.28.0", "1.37.0")  # the oldest and the newest that the manifests are for
CRDS = ROOT.parent / "shared" / "data" / "kuberay-crds"  # not part of the project: where it is, it is used
OURS = Path(__file__).with_name("kuberay.schema.yaml")
CERT_MANAGER = Path(__file__).with_name("cert-manager.schema.yaml")


def check(document: Document) -> None:
    """Raises what the judge of its kind raises for a document that is wrong."""
    if document["apiVersion"].startswith("ray.io/"):
        check_by_ours(document)
        if CRDS.is_dir():
            check_by_crd(document)
    elif document["apiVersion"].startswith("cert-manager.io/"):
        _cert_manager(document["kind"]).validate(document)
    else:
        check_by_kubernetes(document)


def check_by_kubernetes(document: Document) -> None:
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def check_by_crd(document: Document) -> None:
    """Raises jsonschema.ValidationError, also for fields that the CRD does not list."""
    kind = document["kind"]
    served = _crd(kind)
    group, _, version = document["apiVersion"].partition("/")
    assert group == served["group"] and version in served["versions"], f"{document['apiVersion']} is not served"
    served["versions"][version].validate(document)


def check_by_ours(document: Document) -> None:
    """The fields that we use; pod templates by Kubernetes' schema of a pod."""
    _ours(document["kind"]).validate(document)
    cluster = document["spec"][CLUSTER[document["kind"]]]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **template["metadata"]}}
        assert set(template) == {"metadata", "spec"}
        check_by_kubernetes({**pod, "spec": template["spec"]})
    if "serveConfigV2" in document["spec"]:
        serve_config(document)


def serve_config(document: Document) -> ServeDeploySchema:
    """Raises pydantic.ValidationError, and AssertionError for a field that Ray would pass over in silence."""
    given = yaml.safe_load(document["spec"]["serveConfigV2"])
    read = ServeDeploySchema.model_validate(given)
    unknown = set(given) - set(ServeDeploySchema.model_fields)
    for application in given["applications"]:
        unknown |= set(application) - set(ServeApplicationSchema.model_fields)
        for deployment in application.get("deployments", []):
            unknown |= set(deployment) - set(DeploymentSchema.model_fields)
    assert not unknown, f"Ray knows no {unknown}"
    return read


@cache
def _ours(kind: str) -> jsonschema.Draft202012Validator:
    return _judge(yaml.safe_load(OURS.read_text())[kind])


@cache
def _cert_manager(kind: str) -> jsonschema.Draft202012Validator:
    return _judge(yaml.safe_load(CERT_MANAGER.read_text())[kind])


def _judge(schema: Any) -> jsonschema.Draft202012Validator:
    """Without a look at the schema itself, which for KubeRay's takes seconds."""
    return jsonschema.Draft202012Validator(schema)


@cache
def _crd(kind: str) -> dict[str, Any]:
    for path in sorted(CRDS.glob("*.yaml")):
        if f"_{kind.lower()}s." in path.name:
            spec = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
            served = [version for version in spec["versions"] if version["served"] and version["storage"]]
            schemas = {v["name"]: _judge(_closed(v["schema"]["openAPIV3Schema"])) for v in served}
            return {"group": spec["group"], "versions": schemas}
    raise AssertionError(f"no CRD for {kind} in {CRDS}")


def _closed(schema: Any, name: str = "") -> Any:
    """The schema with unknown fields refused wherever fields are listed, metadata aside."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        closed["properties"] = {key: _closed(value, key) for key, value in schema["properties"].items()}
        if name != "metadata" and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed
