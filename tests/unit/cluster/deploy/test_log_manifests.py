"""The bare log in Kubernetes and in ``compose.log.yaml``: both fit themselves, the image and the settings of a node."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from cluster.image import DEPLOY, PROJECT
from dledger import settings
from dledger.config import ServerConfig
from dledger_cli.commands.health import own_servers
from tests.unit.cluster.deploy.shell import as_started
from tests.unit.cluster.deploy.test_nameserver_manifests import IMAGE_SETS

Manifest = dict[str, Any]  # Any: YAML


@pytest.fixture(scope="module")
def manifests() -> dict[str, Manifest]:
    """The documents of the file, by kind."""
    file = PROJECT / DEPLOY / "kubernetes" / "log.yaml"
    return {document["kind"]: document for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))}


def _config(environment: dict[str, str]) -> ServerConfig:
    """The node's settings; health checks inside the container must ask the same server."""
    loaded = settings.load(None, IMAGE_SETS | environment, {})
    assert loaded.warnings == ()
    config = loaded.config
    assert own_servers(IMAGE_SETS | environment)[0].address.endswith(f":{_client_port(config)}")
    assert config.store.base_dir.is_relative_to("/data")
    return config


def _client_port(config: ServerConfig) -> int:
    return config.client_port or config.self_member.port + 10_000


def _pod_environment(container: Manifest, index: int) -> dict[str, str]:
    """One pod's variables, ``$(NAME)`` replaced as Kubernetes does."""
    fields = {
        "metadata.name": f"dledger-log-{index}",
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


def test_every_pod_is_a_member_that_clients_reach_by_the_services_name(manifests: dict[str, Manifest]) -> None:
    """The pods agree on the members, each is one of them, with TLS and at the ports that the service leads to."""
    spec = manifests["StatefulSet"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    configs = [_config(_pod_environment(container, index)) for index in range(spec["replicas"])]

    assert container["command"][-1].endswith("; exec dledger serve")
    assert [config.node_id for config in configs] == ["n0", "n1", "n2"]
    assert len({(config.members, config.cluster_id) for config in configs}) == 1
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for index, config in enumerate(configs):
        host = f"dledger-log-{index}.dledger-log.orders.svc"
        assert config.self_member.host == host
        assert config.advertised_client_address == f"{host}:{ports['clients']}"
        assert config.security.has_tls
        assert ports == {
            "clients": _client_port(config),
            "grpc": config.grpc_bind_port,
            "peers": config.self_member.port,
            "metrics": config.metrics_port,
        }
    assert {port["name"]: port["port"] for port in manifests["Service"]["spec"]["ports"]} == ports
    assert spec["serviceName"] == manifests["Service"]["metadata"]["name"] == "dledger-log"


def test_a_pod_beyond_the_founders_waits_until_it_is_added(manifests: dict[str, Manifest]) -> None:
    """The shell that starts it says so, and it knows the founders and itself."""
    (container,) = manifests["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    joins = [_config(as_started(container, _pod_environment(container, index))).join for index in range(5)]
    config = _config(_pod_environment(container, 4))

    assert joins == [False] * 3 + [True] * 2
    assert [one.node_id for one in config.members] == ["n0", "n1", "n2", "n4"]


def test_everything_selects_its_pods_and_volumes_are_there(manifests: dict[str, Manifest]) -> None:
    """One node per machine, one taken away at a time, no rights, and data on a claim."""
    spec = manifests["StatefulSet"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for selector in (
        rule["labelSelector"]["matchLabels"],
        pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
        spec["selector"]["matchLabels"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    claims = {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/data"] in claims
    assert set(mounts.values()) == claims | {one["name"] for one in pod["volumes"]}


def test_the_composed_nodes_are_one_group_and_the_console_knows_them() -> None:
    """Published on this machine only, each with a volume of its own."""
    composed = yaml.safe_load((PROJECT / "compose.log.yaml").read_text(encoding="utf-8"))
    services = composed["services"]
    everyone = {name: one for name, one in services.items() if name != "console"}
    nodes = {name: one for name, one in everyone.items() if "profiles" not in one}
    configs = {name: _config(_given(one)) for name, one in nodes.items()}

    assert [config.node_id for config in configs.values()] == ["n0", "n1", "n2"]
    assert len({(config.members, config.cluster_id) for config in configs.values()}) == 1
    said = [config.advertised_client_address for config in configs.values()]
    assert services["console"]["environment"]["DLEDGER_CONSOLE_NODES"].split(",") == said
    for name in everyone.keys() - nodes.keys():
        configs[name] = config = _config(_given(everyone[name]))
        assert everyone[name]["profiles"] == ["grow"]
        assert config.join
        assert [*configs["log0"].members, config.self_member] == [*config.members]
    for name, config in configs.items():
        service = everyone[name]
        assert service["command"] == ["serve"]
        assert service["hostname"] == name == config.self_member.host
        assert config.advertised_client_address == f"{name}:{_client_port(config)}"
        assert [one.rpartition(":")[2] for one in service["ports"]] == [
            str(_client_port(config)),
            str(config.grpc_bind_port),
            "5557",
        ]
        assert all(one.startswith("${DLEDGER_PUBLISH:-127.0.0.1}:") for one in service["ports"])
        assert service["volumes"] == [f"{name}-data:/data"]
        assert f"{name}-data" in composed["volumes"]


def _given(service: Manifest) -> dict[str, str]:
    """A service's variables as the file sets them by default."""
    return {key: _default(value) for key, value in service["environment"].items() if value and _default(value)}


def _default(value: str) -> str:
    """What Compose makes of ``${NAME:-default}`` where the variable is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
