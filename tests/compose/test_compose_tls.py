"""``compose.tls.yaml``: the same group, where everybody has to show a certificate."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from docker import DockerClient

from tests.compose import project as projects
from tests.compose.project import NODES, Project, output_of, wait_until_up


@pytest.fixture(scope="module")
def project(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The group; the host has the client's files, fetched as the compose file says."""
    with projects.project(image, "compose.yaml", "compose.tls.yaml") as made:
        files = tmp_path_factory.mktemp("certs") / "client"
        projects.run(["docker", "cp", f"{made.container('certs')}:/certs/client", str(files)], made.environment)
        made.environment.update(
            DLEDGER_TLS_CA=f"{files}/ca.crt",
            DLEDGER_TLS_CERT=f"{files}/client.crt",
            DLEDGER_TLS_KEY=f"{files}/client.key",
        )
        wait_until_up(made)
        yield made


def test_a_client_with_a_certificate_is_let_in(project: Project) -> None:
    """From the host, at the published ports, whose certificates are good for localhost."""
    project.dledger("topic", "create", "orders")
    project.dledger("message", "send", "-t", "orders", "hello")

    consumed = project.dledger("message", "consume", "-t", "orders", "--group", "g", "--from", "first", "--max", "1")

    assert consumed == "hello\n"


def test_a_client_without_one_is_not(project: Project) -> None:
    """Neither in plaintext nor with TLS that shows nothing."""
    nothing = {"DLEDGER_TLS_CA": "", "DLEDGER_TLS_CERT": "", "DLEDGER_TLS_KEY": ""}
    with pytest.raises(AssertionError, match="ended with 1"):
        project.dledger("status", "--timeout", "2", environment=nothing)
    with pytest.raises(AssertionError, match="ended with 1"):
        project.dledger("status", "--timeout", "2", environment=nothing | {"DLEDGER_TLS_CA": ca_of(project)})


def ca_of(project: Project) -> str:
    """The CA's certificate on the host."""
    return project.environment["DLEDGER_TLS_CA"]


def test_a_broker_has_its_own_key_only(project: Project, docker_engine: DockerClient) -> None:
    """Whoever breaks into one cannot be taken for another; the engine's health check has what it needs."""
    for node in NODES:
        container = docker_engine.containers.get(project.container(node))
        files = output_of(container, "find", "/certs", "-type", "f", "-printf", "%f %m\n")
        assert sorted(files.splitlines()) == ["ca.crt 600", "node.crt 600", "node.key 600"]
        facts = json.loads(output_of(container, "dledger", "certs", "show", "/certs/node.crt", "--json"))
        assert f"DNS:{node}" in facts["names"]
        assert "serving" in output_of(container, "dledger", "health")


def test_the_console_has_the_clients_certificate(project: Project, docker_engine: DockerClient) -> None:
    """And sees the group with it."""
    console = docker_engine.containers.get(project.container("console"))
    nodes = json.loads(output_of(console, "dledger", "status", "--json", "-b", "n0:10911,n1:10921,n2:10931"))["nodes"]

    assert sorted(node["node_id"] for node in nodes if "error" not in node) == list(NODES)
