"""Brokers of several groups in each process, in ``compose.groups.yaml``, Kubernetes and systemd: they fit together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.image import DEPLOY, PROJECT
from dledger_cli.commands.broker import start
from dledger_cli.commands.health import own_servers
from rocketstore.broker_config import BrokerConfig
from rocketstore.nameserver.settings import load_name_server_settings
from rocketstore.server import check_brokers_together
from rocketstore.settings import load_broker_settings
from tests.unit.cluster.deploy.shell import as_started
from tests.unit.cluster.deploy.test_kubernetes import environment
from tests.unit.cluster.deploy.test_nameserver_manifests import IMAGE_SETS

Manifest = dict[str, Any]  # Any: YAML
KUBERNETES: Final = PROJECT / DEPLOY / "kubernetes"
GROUPS: Final = {"a": 10911, "b": 10921, "c": 10931}
_MERGED_BY: Final = ("containerPort", "port", "mountPath", "name")
"""What items of a list are told apart by in Kubernetes' strategic merge, of those of the lists that are patched."""


def _manifests(*names: str) -> dict[tuple[str, str], Manifest]:
    """The documents of some files, by kind and name."""
    documents = [one for name in names for one in yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8"))]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def _patched(base: Any, patch: Any) -> Any:  # noqa: ANN401  # YAML
    """Kubernetes' strategic merge, as ``kubectl kustomize`` does it: items of the patch come first."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: _patched(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list):
        key = next(one for one in _MERGED_BY if one in patch[0])
        ours = {one[key]: one for one in base}
        first = [_patched(ours.get(one[key]), one) for one in patch]
        return [*first, *(one for name, one in ours.items() if name not in {one[key] for one in patch})]
    return patch


def _kustomized() -> dict[tuple[str, str], Manifest]:
    """What ``kubectl apply -k`` applies, but for the patches of single values."""
    described = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))
    found = _manifests(*described["resources"])
    for name, patch in _manifests(*(one["path"] for one in described["patches"] if "path" in one)).items():
        found[name] = _patched(found[name], patch)
    return found


def _brokers(given: Mapping[str, str], mounted: str) -> list[BrokerConfig]:
    """The brokers of a process, whose settings fit together, and which the health check inside finds."""
    files = [Path(text) for text in given["DLEDGER_CONFIG"].split(":")]
    assert {str(one.parent) for one in files} == {mounted}
    here = [KUBERNETES / "groups" / one.name for one in files]
    variables = {**IMAGE_SETS, **given, "DLEDGER_CONFIG": ":".join(map(str, here))}
    loaded = [load_broker_settings(file, variables, {}) for file in here]
    assert [warnings for _, warnings in loaded] == [()] * len(GROUPS)
    configs = [config for config, _ in loaded]
    check_brokers_together([(one.name, config) for one, config in zip(files, configs, strict=True)])
    assert [one.address.rpartition(":")[2] for one in own_servers(variables)] == [*map(str, GROUPS.values())]
    return configs


def _check_members(processes: list[list[BrokerConfig]], hosts: list[str]) -> None:
    """Each process is a member of each group, at an address that its host's name leads to."""
    for configs, host in zip(processes, hosts, strict=True):
        assert {one.name: one.listen_port for one in configs} == GROUPS
        for config in configs:
            assert config.dledger is not None
            assert config.dledger.group == config.name
            assert config.dledger.self_member.host == host
            assert config.store.store_path_root_dir == Path("/data") / config.name
    members = {one.dledger.members for configs in processes for one in configs if one.dledger is not None}
    assert len(members) == 1


def test_composed_processes_are_members_of_every_group() -> None:
    """They agree on the members, register with the name server, and are published on this machine only."""
    composed = yaml.safe_load((PROJECT / "compose.groups.yaml").read_text(encoding="utf-8"))
    services = {name: one for name, one in composed["services"].items() if name not in ("namesrv", "console")}
    processes = []
    for name, service in services.items():
        given = {key: _default(value) for key, value in service["environment"].items() if value is not None}
        processes.append(configs := _brokers(given, "/groups"))
        assert service["hostname"] == name
        assert service["volumes"] == ["./cluster/deploy/kubernetes/groups:/groups:ro", f"{name}-data:/data"]
        assert f"{name}-data" in composed["volumes"]
        inside = [one.rpartition(":")[2] for one in service["ports"]]
        assert inside == [*(str(one.listen_port) for one in configs), IMAGE_SETS["DLEDGER_METRICS_PORT"]]
        assert all(one.startswith("${DLEDGER_PUBLISH:-127.0.0.1}:") for one in service["ports"])
        assert {one.namesrv_addr for one in configs} == {"namesrv:9876"}

    _check_members(processes, [*services])
    published = [one.split(":")[3] for service in composed["services"].values() for one in service.get("ports", ())]
    assert len({*published}) == len(published)
    assert composed["services"]["console"]["command"][:3] == ["console", "--namesrv", "namesrv:9876"]


def test_every_pod_is_a_member_of_every_group() -> None:
    """With TLS, and name servers whose certificates are of their pods; later pods wait until they are added."""
    found = _kustomized()
    (container,) = found["StatefulSet", "dledger"]["spec"]["template"]["spec"]["containers"]
    given = [as_started(container, environment(container, index)) for index in range(5)]
    processes = [_brokers(one, "/groups") for one in given]

    _check_members(processes[:3], [f"dledger-{index}.dledger.orders.svc" for index in range(3)])
    for index, configs in enumerate(processes):
        for config in configs:
            assert config.dledger is not None
            assert config.dledger.join == (index >= 3)
            assert config.dledger.security.has_tls
            assert config.namesrv_addr.split(";") == [
                f"dledger-nameserver-{one}.dledger-nameserver.orders.svc:9876" for one in range(2)
            ]
    (container,) = found["StatefulSet", "dledger-nameserver"]["spec"]["template"]["spec"]["containers"]
    name_server, unused = load_name_server_settings(None, IMAGE_SETS | environment(container, 1), {})
    assert unused == ()
    assert name_server.security.tls_cert_path == Path("/certs/ns1.crt")
    assert not name_server.security.insecure


def test_the_service_leads_to_the_ports_of_every_group() -> None:
    """The pods have these ports, and what is mounted is there."""
    found = _kustomized()
    for name in ("dledger", "dledger-nameserver"):
        pod = found["StatefulSet", name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert {one["name"]: one["port"] for one in found["Service", name]["spec"]["ports"]} == ports
        claims = [one["metadata"]["name"] for one in found["StatefulSet", name]["spec"]["volumeClaimTemplates"]]
        volumes = [*claims, *(one["name"] for one in pod["volumes"])]
        assert {one["name"] for one in container["volumeMounts"]} == {*volumes}
        assert len(volumes) == len({*volumes})
    ports = {one["name"]: one["containerPort"] for one in _container(found, "dledger")["ports"]}
    wanted = {f"clients-{group}": port for group, port in GROUPS.items() if group != "a"}
    assert wanted.items() <= ports.items()
    assert {name.replace("clients", "grpc"): port + 2 for name, port in wanted.items()}.items() <= ports.items()
    described = (KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8")
    opened = re.findall(r"path: /spec/ingress/1/ports/-, value: \{port: ([\w-]+)\}", described)
    assert {*opened} == {*ports} - {"clients", "grpc", "peers", "metrics"}
    rule = found["NetworkPolicy", "dledger"]["spec"]["ingress"][1]
    assert rule["ports"] == [{"port": "clients"}, {"port": "grpc"}]
    (generated,) = yaml.safe_load(described)["configMapGenerator"]
    assert generated["files"] == [f"groups/{group}.conf" for group in GROUPS]
    assert {"name": "groups", "configMap": {"name": generated["name"]}} in (
        found["StatefulSet", "dledger"]["spec"]["template"]["spec"]["volumes"]
    )


def test_the_unit_may_run_brokers_of_several_groups() -> None:
    """The drop-in replaces the unit's command by one that takes a conf file for each, and no directory of one."""
    lines = (PROJECT / DEPLOY / "systemd" / "dledger-broker-groups.conf").read_text(encoding="utf-8").splitlines()
    empty, started = (one.removeprefix("ExecStart=") for one in lines if one.startswith("ExecStart="))
    program, *words = shlex.split(started)

    assert empty == ""
    assert (Path(program).name, words[:2]) == ("dledger", ["broker", "start"])
    context = start.make_context("start", words[2:])
    assert context.params["config_files"] == tuple(Path(f"/etc/dledger/{group}.conf") for group in GROUPS)
    given = {name for name, one in context.params.items() if one}
    assert given == {"config_files", "log_level", "log_format"}


def _container(found: Mapping[tuple[str, str], Manifest], name: str) -> Manifest:
    (container,) = found["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _default(value: str) -> str:
    """What Compose makes of ``${NAME:-default}`` where the variable is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
