"""One browser for all; groups of real processes, each under a console with every button."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger_cli.console.server import ConsoleServer, appending, open_console, trading
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from tests.browser.chromium import Page, browser, need_chromium

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The browser."""
    need_chromium()
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser, whose console must stay free of complaints."""
    chromium.complaints()
    yield chromium
    chromium.leave()
    found, chromium.found = chromium.found, []
    assert found == []


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBrokers]:
    """Three brokers, a producer and two groups of consumers."""
    with LocalBrokers(tmp_path_factory.mktemp("brokers"), settings={"mappedFileSizeCommitLog": "16m"}) as group:
        group.master()
        with trading(group):
            yield group


@pytest.fixture
def broker_console(page: Page, brokers: LocalBrokers) -> Iterator[ConsoleServer]:
    """Their console; all of them run."""
    brokers.start_all()
    brokers.master()
    with open_console(brokers, port=0) as server:
        yield server
        page.leave()  # else it complains of the console's end
    for node in brokers.nodes:
        if brokers.is_running(node):
            brokers.resume(node)


@pytest.fixture(scope="module")
def shared_log_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroup]:
    """Three log nodes that take a line now and then."""
    small = {"segment_bytes": "16m", "index_segment_bytes": "1m"}  # whole files are made, and pytest keeps them all
    with LocalGroup(tmp_path_factory.mktemp("log") / "group", settings=small) as group:
        group.leader()
        with appending(group):
            yield group


@pytest.fixture
def log_group(shared_log_group: LocalGroup) -> Iterator[LocalGroup]:
    """They, all of them running."""
    shared_log_group.start_all()
    shared_log_group.leader()
    yield shared_log_group
    for node in shared_log_group.nodes:
        if shared_log_group.is_running(node):
            shared_log_group.resume(node)


@pytest.fixture
def log_console(page: Page, log_group: LocalGroup) -> Iterator[ConsoleServer]:
    """Their console."""
    with open_console(log_group, port=0) as server:
        yield server
        page.leave()
