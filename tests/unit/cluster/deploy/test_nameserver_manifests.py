"""The name server in Kubernetes and in compose.yaml: both fit themselves, the image and the settings."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.image import DEPLOY, PROJECT
from rocketstore.nameserver.settings import NameServerConfig, load_name_server_settings

Manifest = dict[str, Any]  # Any: YAML
IMAGE_SETS = {
    "DLEDGER_STORE_PATH_ROOT_DIR": "/data",
    "DLEDGER_BIND_HOST": "0.0.0.0",
    "DLEDGER_LOG_FORMAT": "json",
    "DLEDGER_METRICS_HOST": "0.0.0.0",
    "DLEDGER_METRICS_PORT": "5557",
}


@pytest.fixture(scope="module")
def manifests() -> dict[str, Manifest]:
    """The documents of the file, by kind."""
    file = PROJECT / DEPLOY / "kubernetes" / "nameserver.yaml"
    return {document["kind"]: document for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))}


def _config(environment: dict[str, str]) -> NameServerConfig:
    dockerfile = (PROJECT / DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert [one for one, value in IMAGE_SETS.items() if f"{one}={value}" not in dockerfile] == []
    config, unused = load_name_server_settings(None, IMAGE_SETS | environment, {})
    assert unused == ()
    assert config.listen_host == "0.0.0.0"
    assert str(config.kv_config_path).startswith("/data/")
    return config


def test_every_pod_has_settings_that_a_name_server_takes(manifests: dict[str, Manifest]) -> None:
    """It listens where the service leads, and keeps its values on the claim."""
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = _config({one["name"]: one["value"] for one in container["env"]})

    assert container["args"] == ["nameserver"]
    ports = {"remoting": config.listen_port, "metrics": config.metrics_port}
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == ports
    service = manifests["Service"]
    assert {one["name"]: one["port"] for one in service["spec"]["ports"]} == ports
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    assert manifests["StatefulSet"]["spec"]["serviceName"] == service["metadata"]["name"]
    claims = {one["metadata"]["name"] for one in manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts["/data"] in claims
    assert set(mounts.values()) == claims | {one["name"] for one in pod["volumes"]}


def test_everything_selects_its_pods(manifests: dict[str, Manifest]) -> None:
    """And they have no rights."""
    spec = manifests["StatefulSet"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for selector in (
        rule["labelSelector"]["matchLabels"],
        spec["selector"]["matchLabels"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_composed_one_has_settings_that_a_name_server_takes() -> None:
    """In a profile of its own: the brokers of this file are found without one."""
    composed = yaml.safe_load((PROJECT / "compose.yaml").read_text(encoding="utf-8"))
    service = composed["services"]["namesrv"]
    given = {name: value for name, value in service["environment"].items() if value and not value.startswith("${")}
    config = _config(given)

    assert service["command"] == ["nameserver"]
    assert service["profiles"] == ["nameserver"]
    inside = [one.rpartition(":")[2] for one in service["ports"]]
    assert inside == [str(config.listen_port), str(config.metrics_port)]
    assert all(one.startswith("${DLEDGER_PUBLISH:-127.0.0.1}:") for one in service["ports"])
    assert service["healthcheck"]["test"] == ["CMD", "dledger", "health", "--nameserver"]
    assert service["volumes"][0].partition(":")[0] in composed["volumes"]
