"""The Kubernetes example, as far as it can be judged without a cluster: it fits itself, and the broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.image import DEPLOY, PROJECT
from dledger_cli.cli import COMMANDS
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import load_broker_settings
from tests.unit.cluster.deploy.shell import as_started

FILE = PROJECT / DEPLOY / "kubernetes" / "dledger.yaml"
Manifest = dict[str, Any]  # Any: YAML


@pytest.fixture(scope="module")
def manifests() -> dict[str, Manifest]:
    """The documents of the file, by kind; of the second service by its name."""
    documents = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    found = {document["kind"]: document for document in reversed(documents)}
    assert set(found) == {"Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet"}
    (second,) = documents[1:2]
    return {**found, second["metadata"]["name"]: second}


@pytest.fixture(scope="module")
def pod(manifests: dict[str, Manifest]) -> Manifest:
    """What every pod is made from."""
    found: Manifest = manifests["StatefulSet"]["spec"]["template"]["spec"]
    return found


@pytest.fixture(scope="module")
def container(pod: Manifest) -> Manifest:
    """Its one container."""
    (found,) = pod["containers"]
    assert isinstance(found, dict)
    return found


def environment(container: Manifest, index: int) -> dict[str, str]:
    """What the broker of one pod finds, ``$(NAME)`` replaced by what was defined before (Kubernetes' rule)."""
    fields = {
        "metadata.name": f"dledger-{index}",
        "metadata.namespace": "orders",
        "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
    }
    found: dict[str, str] = {}
    for one in container["env"]:
        if "valueFrom" in one:
            found[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], one["value"])
    return found


def test_every_pod_has_settings_that_a_broker_takes(manifests: dict[str, Manifest], container: Manifest) -> None:
    """No unknown name, nothing contradicts, every pod is one of the members, and they agree on who these are."""
    replicas = manifests["StatefulSet"]["spec"]["replicas"]
    configs: list[BrokerConfig] = []
    for index in range(replicas):
        image_sets = {"DLEDGER_STORE_PATH_ROOT_DIR": "/data", "DLEDGER_BIND_HOST": "0.0.0.0"}
        config, warnings = load_broker_settings(None, environment(container, index) | image_sets, {})
        assert warnings == ()
        configs.append(config)

    assert [config.node_id for config in configs] == ["n0", "n1", "n2"]
    nodes = [config.dledger for config in configs if config.dledger is not None]
    assert len({node.members for node in nodes}) == 1
    for index, (config, node) in enumerate(zip(configs, nodes, strict=True)):
        host = f"dledger-{index}.dledger.orders.svc"
        assert node.self_member.host == host, "pods are found by the headless service's name"
        assert config.address(config.listen_port) == f"{host}:10911"
        assert node.security.has_tls
        assert len(node.members) == replicas


def test_a_pod_beyond_the_founders_waits_until_it_is_added(container: Manifest) -> None:
    """The shell that starts it says so, and it knows the founders and itself."""
    configs = [
        load_broker_settings(None, as_started(container, environment(container, index)), {})[0] for index in range(5)
    ]
    nodes = [config.dledger for config in configs if config.dledger is not None]

    assert container["command"][-1].endswith("; exec dledger broker start")
    assert [node.join for node in nodes] == [False] * 3 + [True] * 2
    assert [one.node_id for one in nodes[4].members] == ["n0", "n1", "n2", "n4"]


def test_ports_are_the_brokers(manifests: dict[str, Manifest], container: Manifest) -> None:
    """The service leads where the containers listen, and they listen where their settings say."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    config, _ = load_broker_settings(None, environment(container, 0), {})
    assert config.dledger is not None
    dockerfile = (PROJECT / DEPLOY / "Dockerfile").read_text(encoding="utf-8")

    assert ports["clients"] == config.listen_port
    assert ports["grpc"] == config.grpc_bind_port
    assert ports["peers"] == config.dledger.self_member.port
    assert f"DLEDGER_METRICS_PORT={ports['metrics']}" in dockerfile
    service = manifests["Service"]["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True, "members look for each other before they are ready"
    assert manifests["StatefulSet"]["spec"]["serviceName"] == manifests["Service"]["metadata"]["name"]
    allowed = [one["port"] for rule in manifests["NetworkPolicy"]["spec"]["ingress"] for one in rule.get("ports", [])]
    assert set(allowed) <= set(ports)
    for_clients = manifests["dledger-rocketmq5"]["spec"]
    assert for_clients["ports"] == [{"name": "grpc", "port": 8081, "targetPort": "grpc"}]
    assert "grpc" in allowed


def test_probes_ask_what_there_is(container: Manifest) -> None:
    """A command of this project, paths of the metrics server, ports that have these names."""
    command = container["startupProbe"]["exec"]["command"]
    assert command[0] == "dledger"
    assert command[1] in COMMANDS
    ports = {port["name"] for port in container["ports"]}
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        asked = container[probe]["httpGet"]
        assert asked["path"] == path
        assert asked["port"] in ports


def test_a_majority_survives_machines_and_maintenance(manifests: dict[str, Manifest], pod: Manifest) -> None:
    """No two members on one machine, one at a time taken away, and everything selects the pods of the set."""
    labels = manifests["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    budget = manifests["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    for selector in (
        rule["labelSelector"]["matchLabels"],
        pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        manifests["StatefulSet"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["dledger-rocketmq5"]["spec"]["selector"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert pod["terminationGracePeriodSeconds"] >= 30


def test_pods_have_no_rights(pod: Manifest, container: Manifest) -> None:
    """The same as the compose file and the image: not root, no capabilities, nothing to write but the volumes."""
    dockerfile = (PROJECT / DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    user = pod["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile
    assert user["runAsNonRoot"] is True
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_volumes_are_there(manifests: dict[str, Manifest], pod: Manifest, container: Manifest) -> None:
    """Every mount has its volume; data is on a claim that outlives the set; certificates are where the settings say."""
    claims = {one["metadata"]["name"] for one in manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    volumes = {one["name"] for one in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == claims | volumes
    assert mounts["/data"] in claims
    kept = manifests["StatefulSet"]["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert kept == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    config, _ = load_broker_settings(None, environment(container, 1), {})
    assert config.dledger is not None
    security = config.dledger.security
    for path in (security.tls_cert_path, security.tls_key_path, security.tls_trust_cert_path):
        assert path is not None
        assert path.parent == Path("/certs")
    assert mounts["/certs"] in volumes
