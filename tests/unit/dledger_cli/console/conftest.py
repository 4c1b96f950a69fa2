"""Consoles over fake nodes and whole brokers: real HTTP, no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dledger_cli.console.sampler import SamplePace
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, GroupTarget
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.group_pages import Broker, plain_broker

MakeConsole = Callable[..., ConsoleServer]
PACE = SamplePace(watched_s=0.05, unwatched_s=0.2, unsettled_s=0.05, unreachable_s=0.1, timeout_s=0.5)


@pytest.fixture
def log_group() -> Iterator[FakeGroup]:
    """Three log nodes; n0 leads."""
    with fake_group() as group:
        yield group


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """One plain broker with a topic of two queues."""
    with plain_broker(tmp_path) as one:
        one.add_topic("orders", 2)
        yield one


def _leader_of(server: ConsoleServer) -> str:
    group = server.history.snapshot(0)["group"]
    assert isinstance(group, dict)
    return str(group["leader"])


@contextmanager
def _consoles() -> Iterator[MakeConsole]:
    with ExitStack() as stack:

        def make(addresses: list[str], *, known: bool = True, **options: object) -> ConsoleServer:
            target = GroupTarget(tuple(addresses), "", 2.0)
            server = ConsoleServer(
                target,
                BrokerTarget(target.bootstrap, 2.0),
                place=ListenAddress(port=0),
                pace=PACE,
                **options,  # type: ignore[arg-type]  # whichever a test names
            )
            stack.enter_context(server)
            if known:
                wait_until(lambda: server.history.kind == "broker" or _leader_of(server) != "", "the leader answered")
            return server

        yield make


@pytest.fixture
def make_console() -> Iterator[MakeConsole]:
    """A running console over these addresses; ``known`` waits until it knows who leads."""
    with _consoles() as make:
        yield make


@pytest.fixture(scope="module")
def shared_console() -> Iterator[ConsoleServer]:
    """Over log nodes of its own, for tests that change nothing: starting and stopping one takes longer than they do."""
    with fake_group() as group, _consoles() as make:
        yield make(group.addresses)


@pytest.fixture(scope="module")
def shared_broker_console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """The same over a broker of its own."""
    with plain_broker(tmp_path_factory.mktemp("broker")) as one, _consoles() as make:
        one.add_topic("orders", 2)
        yield make(one.addresses)


@pytest.fixture
def console(make_console: MakeConsole, log_group: FakeGroup) -> ConsoleServer:
    """Over the log nodes."""
    return make_console(log_group.addresses)
