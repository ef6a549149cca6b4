"""The manifest for KubeRay: what the operator's own schema says of it, and whether its parts fit each other.

`rayservice.schema.json.xz` is the schema of `RayService` (ray.io/v1) of KubeRay's repository (Apache 2.0, August 2026),
without its descriptions.
"""

from __future__ import annotations

import json
import lzma
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from localrun.cli.cluster import cluster_command
from localrun.config import env_name

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "packaging" / "kubernetes" / "cluster.yaml"


def strict(schema: Any) -> Any:
    """Kubernetes drops fields that it does not know; here they are mistakes."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and not is_open:
        made["additionalProperties"] = False
    return made


@pytest.fixture(scope="module")
def schema() -> Any:
    packed = Path(__file__).with_name("rayservice.schema.json.xz").read_bytes()
    found = strict(json.loads(lzma.decompress(packed)))
    found["properties"]["metadata"] = {"type": "object"}
    return found


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def pods(objects: dict[str, Any]) -> list[Any]:
    spec = objects["RayService"]["spec"]["rayClusterConfig"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_kuberay_takes_it(objects: dict[str, Any], schema: Any):
    jsonschema.validate(objects["RayService"], schema, cls=jsonschema.Draft4Validator)


@pytest.mark.parametrize("wrong", [{"rayVersion": 2.6}, {"headGroupSpec": {"rayStartParam": {}}}, {"workers": []}])
def test_the_schema_refuses_what_is_wrong(objects: dict[str, Any], schema: Any, wrong: dict[str, Any]):
    service = json.loads(json.dumps(objects["RayService"]))
    service["spec"]["rayClusterConfig"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, schema, cls=jsonschema.Draft4Validator)


def test_pods_run_commands_that_there_are(pods: list[Any]):
    for pod in pods:
        container = pod["spec"]["containers"][0]
        assert container["command"] == ["localrun"]
        group, name, *options = container["args"]
        assert group == "cluster"
        cluster_command.commands[name].make_context(name, options)  # raises UsageError for what it does not know


def test_pods_have_probes_volumes_and_an_address(pods: list[Any]):
    for pod in pods:
        container = pod["spec"]["containers"][0]
        assert {"readinessProbe", "livenessProbe", "resources"} <= set(container)
        assert {mount["name"] for mount in container["volumeMounts"]} <= {
            each["name"] for each in pod["spec"]["volumes"]
        }
        names = {each["name"] for each in container["env"]}
        assert {"POD_IP", "POD_NAME", env_name("models_dir")} == names
        assert pod["metadata"]["labels"]["app"] == "localrun"


def test_the_service_and_the_policy_choose_these_pods(objects: dict[str, Any], pods: list[Any]):
    head, *workers = (pod["metadata"]["labels"] for pod in pods)
    wanted = objects["Service"]["spec"]["selector"]
    assert wanted.items() <= head.items()
    assert not any(wanted.items() <= labels.items() for labels in workers)
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= workers[0].items()


def test_it_names_the_ray_that_is_installed(objects: dict[str, Any]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (ray,) = project["optional-dependencies"]["cluster"]
    version = objects["RayService"]["spec"]["rayClusterConfig"]["rayVersion"]
    assert f">={version.rpartition('.')[0]}," in ray
