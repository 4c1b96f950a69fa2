"""``compose.groups.yaml``: brokers of three groups in each of three containers, which share the writing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from docker import DockerClient

from tests.compose import project as projects
from tests.compose.project import UP_TIMEOUT_S, Project
from tests.support.waiting import wait_until

SERVICES = ("g0", "g1", "g2")


@pytest.fixture(scope="module")
def project(image: str) -> Iterator[Project]:
    """Its brokers, all of which have registered."""
    with projects.project(image, "compose.groups.yaml") as made:
        wait_until(lambda: len(_roles(made)) == 9, "nine brokers have registered", UP_TIMEOUT_S)
        yield made


def _inside(project: Project, *words: str) -> str:
    """A command in a container, which knows the others' names."""
    return project.compose("exec", "-T", "g0", "dledger", *words)


def _roles(project: Project) -> dict[str, str]:
    """The roles of those that answer, by address; none while there is a group without a master."""
    try:
        listed = json.loads(_inside(project, "cluster", "list", "--json"))["brokers"]
    except AssertionError:
        return {}
    return {one["address"]: one["role"] for one in listed}


def test_each_container_leads_its_share(project: Project) -> None:
    """After ``rebalance``; a topic created once is at all three masters, and takes messages at each."""
    balanced = json.loads(_inside(project, "cluster", "rebalance", "--json"))
    assert balanced["balanced"]

    masters = [address for address, role in _roles(project).items() if role.endswith("MASTER")]
    assert sorted(address.partition(":")[0] for address in masters) == [*SERVICES]
    assert sorted(address.partition(":")[2] for address in masters) == ["10911", "10921", "10931"]
    _inside(project, "topic", "create", "orders", "--queues", "1")
    for group in "abc":
        _inside(project, "message", "send", "-t", "orders", "--broker-name", group, f"to {group}")
    ranges = json.loads(_inside(project, "topic", "status", "orders", "--json"))
    assert {one["broker"]: one["max_offset"] for one in ranges} == {"a": 1, "b": 1, "c": 1}


def test_the_engine_finds_every_broker_of_a_container_healthy(project: Project, docker_engine: DockerClient) -> None:
    """The image's health check asks all three."""
    assert _inside(project, "health").splitlines() == [f"127.0.0.1:{port}: serving" for port in (10911, 10921, 10931)]
    found = [docker_engine.containers.get(project.container(one)) for one in SERVICES]

    def all_healthy() -> bool:
        for one in found:
            one.reload()
        return all(one.attrs["State"]["Health"]["Status"] == "healthy" for one in found)

    wait_until(all_healthy, "the containers are healthy", 90.0)


def test_one_group_is_reached_from_the_host(project: Project) -> None:
    """By its published ports, although its brokers say names that only containers know."""
    ports = [project.ports[f"{one.upper()}B"] for one in SERVICES]
    given = {"DLEDGER_BROKER": ",".join(f"127.0.0.1:{port}" for port in ports)}

    project.dledger("topic", "create", "of-b", environment=given)
    project.dledger("message", "send", "-t", "of-b", "from the host", environment=given)

    words = ("message", "consume", "-t", "of-b", "--group", "readers", "--from", "first", "--max", "1")
    assert project.dledger(*words, environment=given) == "from the host\n"
