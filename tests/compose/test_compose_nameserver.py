"""The name server of ``compose.yaml``, in its profile: the brokers beside it register, and it says how it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import docker
import pytest

from tests.compose import project as projects
from tests.compose.project import NODES, TOKEN, Project, output_of, wait_until_up
from tests.support.waiting import wait_until

REGISTERED_S = 60.0


@pytest.fixture(scope="module")
def project(image: str) -> Iterator[Project]:
    """The group, and its name server."""
    settings = {"DLEDGER_NAMESRV_ADDR": "namesrv:9876"}
    with projects.project(image, "compose.yaml", profile="nameserver", settings=settings) as made:
        wait_until_up(made)
        yield made


def _metrics(project: Project) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{project.ports['NAMESRV_METRICS']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "#" not in name}


def test_the_brokers_register_also_after_it_was_restarted(project: Project, docker_engine: docker.DockerClient) -> None:
    """It has forgotten them; they come back long before their next registration is due."""
    prefix = "rocketmq_namesrv_"

    def all_are_there() -> bool:
        try:
            found = _metrics(project)
        except OSError:
            return False
        return (found.get(f"{prefix}broker_addresses"), found.get(f"{prefix}brokers_without_master")) == (3, 0)

    wait_until(all_are_there, "three brokers have registered", REGISTERED_S)
    docker_engine.containers.get(project.container("namesrv")).restart(timeout=20)
    wait_until(all_are_there, "they have registered again", REGISTERED_S / 2)
    broker = docker_engine.containers.get(project.container("n0"))
    listed = output_of(broker, "dledger", "cluster", "list", "--namesrv", "namesrv:9876", "--insecure")
    for node in NODES:
        assert f"{node}:109" in listed


def test_the_console_shows_the_whole_cluster(project: Project) -> None:
    """By the name server, not only the nodes it is given."""
    address = f"http://127.0.0.1:{project.ports['CONSOLE']}"
    browser = build_opener(HTTPCookieProcessor())

    def members() -> list[int]:
        try:
            with (
                browser.open(f"{address}/?{urlencode({'token': TOKEN})}", timeout=10),
                browser.open(f"{address}/api/state", timeout=10) as answer,
            ):
                state = json.load(answer)
        except OSError:
            return []
        assert [one["address"] for one in state["name_servers"]] == ["namesrv:9876"]
        return [len(one["members"]) for one in state["groups"]]

    wait_until(lambda: members() == [3], "one group of three is shown", REGISTERED_S)


def test_it_is_healthy_and_has_no_rights(project: Project, docker_engine: docker.DockerClient) -> None:
    """By the engine's own check, which asks it by its protocol; from the host, by the published port."""
    container = docker_engine.containers.get(project.container("namesrv"))

    assert output_of(container, "dledger", "health", "--nameserver") == "127.0.0.1:9876: serving\n"
    assert output_of(container, "id", "-u") == "10001\n"
    address = f"127.0.0.1:{project.ports['NAMESRV']}"
    assert project.dledger("health", "--nameserver", address) == f"{address}: serving\n"
    facts = container.attrs
    assert facts["Config"]["Healthcheck"]["Test"] == ["CMD", "dledger", "health", "--nameserver"]
    assert facts["HostConfig"]["ReadonlyRootfs"] is True
