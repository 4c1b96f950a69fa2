"""``compose.log.yaml``: the bare log in containers, used from their host at published ports of other numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose import project as projects
from tests.compose.project import Project, wait_until_up
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def project(image: str) -> Iterator[Project]:
    """Its group."""
    with projects.project(image, "compose.log.yaml") as made:
        wait_until_up(made)
        yield made


def test_entries_go_to_whichever_node_leads(project: Project) -> None:
    """Nodes name addresses that only containers know; the published ports lead to them, also to the next leader."""
    project.dledger("append", "before")
    old = project.leader()
    assert old is not None
    project.compose("stop", f"log{old[1:]}")
    wait_until(lambda: project.leader() not in (None, old), "another node leads", 60.0)

    project.dledger("append", "after")

    shown = project.dledger("get", "0", "--count", "2")
    assert shown.splitlines() == ["before", "after"]
    project.compose("start", f"log{old[1:]}")
    wait_until_up(project)
