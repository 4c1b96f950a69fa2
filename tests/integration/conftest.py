"""What the tests of real processes share: groups that end with their test, whatever happens in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from tests.integration import namespaces
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import Group, ProxiedGroup, WatchedGroup
from tests.integration.namespaces import NamespacedGroup

AnyGroup = TypeVar("AnyGroup", bound=WatchedGroup)
LOG_LINES_SHOWN = 40

HERE = Path(__file__).parent

_failed = pytest.StashKey[bool]()


FAULTS = frozenset(
    {
        "test_broker_group",
        "test_broker_kill",
        "test_broker_partition",
        "test_broker_plain",
        "test_broker_stop",
        "test_classic_ha",
        "test_disk",
        "test_drills",
        "test_kill",
        "test_nemesis",
        "test_partition",
        "test_stop",
    }
)
"""Where groups are hurt under load; elsewhere they mostly answer questions."""


def group_of(item: pytest.Item) -> str:
    """Tests of a group run one after the other, also with ``pytest -n``: they would take each other's time.

    Two workers have the time of the larger half only if the groups can be dealt out: two of tests like these, one of
    containers, and of whatever else makes networks (see ``tests/browser``).
    """
    if "namespaced" in getattr(item, "fixturenames", ()):
        return "containers"
    return "faults" if item.path.stem in FAULTS else "processes"


@pytest.hookimpl(tryfirst=True)  # before xdist, which is else first if this directory is named on the command line
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal out the tests of this directory."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures know that the test failed."""
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


class Adopt(Protocol):
    """Hands a group to the test's clean-up."""

    def __call__(self, group: AnyGroup) -> AnyGroup: ...


@pytest.fixture
def adopt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Adopt]:
    """Whatever is adopted is killed after the test; its nodes must not have failed unless they were allowed to.

    Before ``tmp_path`` is removed, where it mostly is.
    """
    groups: list[WatchedGroup] = []

    def take(group: AnyGroup) -> AnyGroup:
        groups.append(group)
        return group

    yield take
    failed = request.node.stash.get(_failed, False)
    complaints: list[str] = []
    for group in groups:
        group.hard_kill()
        complaints += group.complaints()
        if failed:
            for node in group.nodes:
                text = "\n".join(group.logs(node).splitlines()[-LOG_LINES_SHOWN:])
                print(f"--- {node} in {group.directory} ---\n{text}", file=sys.stderr)  # noqa: T201 - for the report
    assert failed or not complaints, "\n".join(complaints)


@pytest.fixture
def make_group(adopt: Adopt, tmp_path: Path) -> Callable[..., Group]:
    """Make a group, which is not started yet; the arguments are ``Group``'s."""
    return lambda **options: adopt(Group(tmp_path / f"group-{options.get('name', 'default')}", **options))


@pytest.fixture
def group(make_group: Callable[..., Group]) -> Group:
    """Three nodes that run and have a leader."""
    made = make_group()
    made.start_all()
    made.leader()
    return made


@pytest.fixture
def proxied(adopt: Adopt, tmp_path: Path) -> ProxiedGroup:
    """Three nodes that run behind a proxy network and have a leader."""
    made = adopt(ProxiedGroup(tmp_path / "group"))
    made.start_all()
    made.leader()
    return made


@pytest.fixture
def namespaced(adopt: Adopt, tmp_path: Path) -> NamespacedGroup:
    """Three nodes, each in a network namespace of its own, that run and have a leader."""
    if reason := namespaces.why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    made = adopt(namespaces.NamespacedGroup(tmp_path / "group"))
    made.start_all()
    made.leader()
    return made


@pytest.fixture
def make_brokers(adopt: Adopt, tmp_path: Path) -> Callable[..., BrokerGroup]:
    """Make a group of brokers, which is not started yet; the arguments are ``BrokerGroup``'s."""
    return lambda **options: adopt(BrokerGroup(tmp_path / "brokers", **options))


@pytest.fixture
def brokers(make_brokers: Callable[..., BrokerGroup]) -> BrokerGroup:
    """Three brokers that run, have a master, and know the topic of the load."""
    made = make_brokers()
    made.start_all()
    made.create_topic()
    return made
