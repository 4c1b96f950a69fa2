"""``compose.yaml`` as a newcomer uses it: a group in containers, and the commands on their host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import docker
import pytest

from tests.compose import project as projects
from tests.compose.project import NODES, TOKEN, Project, wait_until_up
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def project(image: str) -> Iterator[Project]:
    """The group of compose.yaml."""
    with projects.project(image, "compose.yaml") as made:
        wait_until_up(made)
        yield made


def test_the_host_sees_the_group(project: Project) -> None:
    """Members say names that only containers can resolve; the published ports lead to them all the same."""
    nodes = {node["node_id"]: node for node in project.nodes()}

    assert set(nodes) == set(NODES)
    assert all("error" not in node for node in nodes.values()), nodes
    listed = json.loads(project.dledger("cluster", "list", "--json"))["brokers"]
    places = {one["node_id"]: one["address"] for one in listed}
    assert places == {node: f"127.0.0.1:{project.ports[node.upper()]}" for node in NODES}, listed


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
    for node in NODES:
        port = project.ports[f"{node.upper()}_METRICS"]
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert "\ndledger_" in text, node
        assert "\nrocketmq_" in text, node
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            assert answer.status == 200


def test_the_console_shows_the_group(project: Project) -> None:
    """To whoever has the token, and to nobody else."""
    address = f"http://127.0.0.1:{project.ports['CONSOLE']}"
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


def test_a_stopped_leader_hands_over(project: Project, docker_engine: docker.DockerClient) -> None:
    """``docker compose stop`` is SIGTERM: the master hands over, and its container ends by itself with 0.

    The message that the old leader acknowledged is there, and new ones are taken.
    """
    project.dledger("topic", "create", "handover")
    project.dledger("message", "send", "-t", "handover", "before")
    old = project.leader()
    assert old is not None
    before = next(node for node in project.nodes() if node["node_id"] == old)

    project.compose("stop", old)

    wait_until(lambda: project.leader() not in (None, old), "another member leads", 60)
    after = next(node for node in project.nodes() if node.get("role") == "LEADER")
    assert after["term"] > before["term"]
    stopped = docker_engine.containers.get(project.container(old))
    assert stopped.attrs["State"]["ExitCode"] == 0, stopped.logs().decode()
    assert b"handing over" in stopped.logs()
    project.dledger("message", "send", "-t", "handover", "after")
    arguments = ("-t", "handover", "--group", "billing", "--from", "first", "--max", "2")
    assert sorted(project.dledger("message", "consume", *arguments).splitlines()) == ["after", "before"]

    project.compose("start", old)
    wait_until_up(project)


def test_data_outlives_the_containers(project: Project) -> None:
    """``down`` removes them; what was acknowledged is in the volumes, which the next ``up`` takes."""
    project.dledger("topic", "create", "kept")
    project.dledger("message", "send", "-t", "kept", "still here")

    project.compose("down", "--timeout", "20")
    project.compose("up", "--detach", "--no-build")
    wait_until_up(project)

    arguments = ("-t", "kept", "--group", "readers", "--from", "first", "--max", "1")
    assert project.dledger("message", "consume", *arguments) == "still here\n"


def test_the_engine_finds_the_brokers_healthy(project: Project, docker_engine: docker.DockerClient) -> None:
    """By the image's health check, in containers that may do nothing else."""
    found = [docker_engine.containers.get(project.container(node)) for node in NODES]

    def all_healthy() -> bool:
        for one in found:
            one.reload()
        return all(one.attrs["State"]["Health"]["Status"] == "healthy" for one in found)

    wait_until(all_healthy, "the brokers are healthy", 90.0)
    for one in found:
        assert one.attrs["HostConfig"]["ReadonlyRootfs"]
        assert one.attrs["HostConfig"]["CapDrop"] == ["ALL"]
        assert all(
            bound[0]["HostIp"] == "127.0.0.1" for bound in one.attrs["NetworkSettings"]["Ports"].values() if bound
        )
