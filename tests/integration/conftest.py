"""What the tests of real processes share: groups that end with their test, whatever happens in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from tests.integration import namespaces, tracing
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import STEADY, Group, ProxiedGroup, WatchedGroup
from tests.integration.namespaces import NamespacedGroup

AnyGroup = TypeVar("AnyGroup", bound=WatchedGroup)
LOG_LINES_SHOWN = 40

HERE = Path(__file__).parent

_failed = pytest.StashKey[bool]()


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
def steady(make_group: Callable[..., Group]) -> Group:
    """The same, whose leader stays the same although the machine is busy."""
    made = make_group(settings=STEADY)
    made.start_all()
    made.leader()
    return made


@pytest.fixture
def proxied(adopt: Adopt, tmp_path: Path) -> ProxiedGroup:
    """Three nodes that run behind a proxy network and have a leader."""
    made = adopt(ProxiedGroup(tmp_path / "group", settings=STEADY))
    made.start_all()
    made.leader()
    return made


@pytest.fixture(scope="session")
def strace() -> None:
    """A tracer that can inject failures."""
    tracing.need_strace()


@pytest.fixture
def namespaced(adopt: Adopt, tmp_path: Path) -> NamespacedGroup:
    """Three nodes, each in a network namespace of its own, that run and have a leader."""
    namespaces.need_namespaces()
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
