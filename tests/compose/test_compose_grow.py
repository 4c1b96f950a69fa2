"""The profile ``grow`` of ``compose.yaml``: a group of three becomes one of five, and of three again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.compose import project as projects
from tests.compose.project import Project
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def project(image: str) -> Iterator[Project]:
    """All five containers."""
    with projects.project(image, "compose.yaml", profile="grow") as made:
        wait_until(lambda: voters(made) == {"n0", "n1", "n2"}, "three found a group", projects.UP_TIMEOUT_S)
        yield made


def voters(project: Project) -> set[str]:
    """By the word of the leader; none if nobody leads."""
    try:
        listed = json.loads(project.dledger("member", "list", "--json"))
    except AssertionError:
        return set()
    return {one["id"] for one in listed["members"] if one["role"] == "voter"}


def test_a_group_grows_and_shrinks_as_the_file_says(project: Project) -> None:
    """The two wait until they are added, get what was sent before, and serve it when those before them are gone."""
    all_five = ",".join(f"127.0.0.1:{project.ports[node]}" for node in ("N0", "N1", "N2", "N3", "N4"))
    told = {"DLEDGER_BROKER": all_five, "DLEDGER_BOOTSTRAP": all_five}
    project.dledger("topic", "create", "orders")
    project.dledger("message", "send", "-t", "orders", "before")

    for node in ("n3", "n4"):
        project.dledger("member", "add", f"{node}={node}:20911")
    assert voters(project) == {"n0", "n1", "n2", "n3", "n4"}
    project.dledger("transfer-leader", "n4", environment=told)
    project.dledger("message", "send", "-t", "orders", "between", environment=told)

    project.compose("stop", "n0", "n1")  # of five, two may fail
    project.dledger("message", "send", "-t", "orders", "after", environment=told)
    for node in ("n0", "n1"):
        project.dledger("member", "remove", node, environment=told)
    listed = json.loads(project.dledger("member", "list", "--json", environment=told))
    assert {(one["id"], one["role"]) for one in listed["members"]} == {(one, "voter") for one in ("n2", "n3", "n4")}
    arguments = ("-t", "orders", "--group", "billing", "--from", "first", "--max", "3")
    consumed = project.dledger("message", "consume", *arguments, environment=told)
    assert sorted(consumed.splitlines()) == ["after", "before", "between"]
