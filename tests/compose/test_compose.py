"""``compose.yaml`` as a newcomer uses it: a group in containers, and the commands on their host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import pytest

from cluster.containers.compose import compose_command
from cluster.containers.engine import EngineClient
from cluster.containers.image import PROJECT
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

UP_TIMEOUT_S = 120.0
TOKEN = "a token of the tests"
NODES = ("n0", "n1", "n2")


@dataclass(frozen=True, slots=True)
class Project:
    """A project that is up, and its published ports."""

    command: list[str]
    environment: dict[str, str]
    ports: dict[str, int]
    metrics_ports: dict[str, int]
    console_port: int

    def compose(self, *arguments: str) -> str:
        """``docker compose …``"""
        return run([*self.command, *arguments], self.environment)

    def dledger(self, *arguments: str) -> str:
        """A command on the host, which knows nothing but the published ports."""
        return run([sys.executable, "-m", "cluster.entry", *arguments], self.environment)

    def nodes(self) -> list[dict[str, Any]]:  # Any: JSON
        """What ``dledger status`` says."""
        found: list[dict[str, Any]] = json.loads(self.dledger("status", "--json"))["nodes"]
        return found

    def leader(self) -> str | None:
        """Who leads, by its own word."""
        return next((node["node_id"] for node in self.nodes() if node.get("role") == "LEADER"), None)


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run to the end; fails with what it said."""
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=UP_TIMEOUT_S)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def project(docker_engine: EngineClient, image: str) -> Iterator[Project]:
    """The group of compose.yaml, on ports that are free."""
    command = compose_command()
    if command is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed (Debian: apt-get install docker-compose)")
    ports = free_ports(7)
    published = dict(zip(NODES, ports[:3], strict=True))
    metrics = dict(zip(NODES, ports[3:6], strict=True))
    brokers = ",".join(f"127.0.0.1:{port}" for port in published.values())
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("DLEDGER_")},
        "DOCKER_HOST": docker_engine.url,
        "COMPOSE_PROJECT_NAME": f"dledger-test-{os.getpid()}",
        "DLEDGER_IMAGE": image,
        **{f"DLEDGER_{node.upper()}_PORT": str(port) for node, port in published.items()},
        **{f"DLEDGER_{node.upper()}_METRICS_PORT": str(port) for node, port in metrics.items()},
        "DLEDGER_CONSOLE_PORT": str(ports[6]),
        "DLEDGER_CONSOLE_TOKEN": TOKEN,
        "DLEDGER_MAPPED_FILE_SIZE_COMMIT_LOG": "16m",
        "DLEDGER_BROKER": brokers,
        "DLEDGER_BOOTSTRAP": brokers,
    }
    made = Project(command, environment, published, metrics, ports[6])
    try:
        made.compose("up", "--detach", "--no-build")
        wait_until(lambda: is_up(made), "the group has a leader", UP_TIMEOUT_S)
        yield made
    except AssertionError as error:
        error.add_note(made.compose("logs", "--tail", "20"))
        raise
    finally:
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")


def is_up(project: Project) -> bool:
    """Whether all three answer and one leads."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster.entry", "status", "--json"],
        cwd=PROJECT,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=UP_TIMEOUT_S,
    )
    if done.returncode != 0:
        return False
    roles = sorted(node.get("role", "") for node in json.loads(done.stdout)["nodes"])
    return roles == ["FOLLOWER", "FOLLOWER", "LEADER"]


def test_the_host_sees_the_group(project: Project) -> None:
    """Members say names that only containers can resolve; the published ports lead to them all the same."""
    nodes = {node["node_id"]: node for node in project.nodes()}

    assert set(nodes) == set(NODES)
    assert all("error" not in node for node in nodes.values()), nodes
    listed = project.dledger("cluster", "list")
    for node, port in project.ports.items():
        assert any({node, f"127.0.0.1:{port}"} <= set(line.split()) for line in listed.splitlines()), listed


def test_messages_go_in_and_come_out(project: Project) -> None:
    """From the host, by the commands of the README."""
    project.dledger("topic", "create", "orders")
    project.dledger("message", "send", "-t", "orders", "--keys", "order-17", "hello 17")

    consumed = project.dledger(
        "message", "consume", "-t", "orders", "--group", "billing", "--from", "first", "--max", "1"
    )

    assert consumed == "hello 17\n"


def test_every_broker_has_metrics(project: Project) -> None:
    """At its published port, as Prometheus reads them; and it says there that it is ready."""
    for node, port in project.metrics_ports.items():
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert "\ndledger_" in text, node
        assert "\nrocketmq_" in text, node
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            assert answer.status == 200


def test_the_console_shows_the_group(project: Project) -> None:
    """To whoever has the token, and to nobody else."""
    address = f"http://127.0.0.1:{project.console_port}"
    wait_until(lambda: opens(f"{address}/healthz"), "the console serves", 60.0)

    with pytest.raises(HTTPError) as refused:
        urlopen(f"{address}/api/overview", timeout=10)
    refused.value.close()
    assert refused.value.code in (401, 403)
    browser = build_opener(HTTPCookieProcessor())
    with browser.open(f"{address}/?{urlencode({'token': TOKEN})}", timeout=10) as page:
        assert "<title>" in page.read().decode()


def opens(url: str) -> bool:
    """Whether somebody answers there."""
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_a_stopped_leader_hands_over(project: Project, docker_engine: EngineClient) -> None:
    """``docker compose stop`` is SIGTERM: the master hands over, and its container ends by itself with 0.

    The message that the old leader acknowledged is there, and new ones are taken.
    """
    project.dledger("topic", "create", "handover")
    project.dledger("message", "send", "-t", "handover", "before")
    old = project.leader()
    assert old is not None
    before = next(node for node in project.nodes() if node["node_id"] == old)

    project.compose("stop", old)

    after = next(node for node in project.nodes() if node.get("role") == "LEADER")
    assert after["node_id"] != old
    assert after["term"] > before["term"]
    stopped = docker_engine.containers.get(project.compose("ps", "--all", "--quiet", old).strip())
    assert stopped.attrs["State"]["ExitCode"] == 0, stopped.logs().decode()
    assert b"handing over" in stopped.logs()
    project.dledger("message", "send", "-t", "handover", "after")
    arguments = ("-t", "handover", "--group", "billing", "--from", "first", "--max", "2")
    assert sorted(project.dledger("message", "consume", *arguments).splitlines()) == ["after", "before"]

    project.compose("start", old)
    wait_until(lambda: is_up(project), f"{old} is back", UP_TIMEOUT_S)


def test_data_outlives_the_containers(project: Project) -> None:
    """``down`` removes them; what was acknowledged is in the volumes, which the next ``up`` takes."""
    project.dledger("topic", "create", "kept")
    project.dledger("message", "send", "-t", "kept", "still here")

    project.compose("down", "--timeout", "20")
    project.compose("up", "--detach", "--no-build")
    wait_until(lambda: is_up(project), "the group is back", UP_TIMEOUT_S)

    arguments = ("-t", "kept", "--group", "readers", "--from", "first", "--max", "1")
    assert project.dledger("message", "consume", *arguments) == "still here\n"


def test_the_engine_finds_the_brokers_healthy(project: Project, docker_engine: EngineClient) -> None:
    """By the image's health check, in containers that may do nothing else."""
    found = [docker_engine.containers.get(project.compose("ps", "--quiet", node).strip()) for node in NODES]

    def all_healthy() -> bool:
        for one in found:
            one.reload()
        return all(one.attrs["State"]["Health"]["Status"] == "healthy" for one in found)

    wait_until(all_healthy, "the brokers are healthy", 40.0)
    for one in found:
        assert one.attrs["HostConfig"]["ReadonlyRootfs"]
        assert one.attrs["HostConfig"]["CapDrop"] == ["ALL"]
        assert all(
            bound[0]["HostIp"] == "127.0.0.1" for bound in one.attrs["NetworkSettings"]["Ports"].values() if bound
        )
