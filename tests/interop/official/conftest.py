"""Brokers and drivers for the tests of this directory; each driver runs once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dledger_cli.local.brokers import LocalBrokers
from tests.interop import java
from tests.interop.official.clients import LANGUAGES, NOT_TRIED, InstallError, Language, OfficialClient, running
from tests.interop.official.world import Users, World
from tests.support import lacking

ALWAYS = ("python", "node")
SETTINGS = {
    "mappedFileSizeCommitLog": "64m",
    "autoCreateTopicEnable": "false",
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A group of three, for tests that kill nobody."""
    directory = tmp_path_factory.mktemp("official")
    with LocalBrokers(directory / "brokers", settings=SETTINGS) as brokers:
        brokers.master()
        found = World(brokers, directory)
        try:
            yield found
        finally:
            found.admin.close()


@pytest.fixture(scope="session", params=[*LANGUAGES, *NOT_TRIED])
def language(request: pytest.FixtureRequest) -> Language:
    """Each of them, installed; all but Python's and Node.js's where that is possible."""
    if request.param in NOT_TRIED:
        lacking.lacks(f"RocketMQ's client for {request.param}", NOT_TRIED[request.param])
    found = LANGUAGES[request.param]
    try:
        found.install()
    except (InstallError, java.JavaMissingError) as error:
        if found.name in ALWAYS:
            raise
        lacking.lacks(f"RocketMQ's client for {found.name}", str(error))
    return found


@pytest.fixture(scope="session")
def client(language: Language, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficialClient]:
    """Its driver."""
    with running(language, tmp_path_factory.mktemp(language.name)) as started:
        yield started


@pytest.fixture
def users(world: World, client: OfficialClient) -> Users:
    """Producers and consumers of the driver at the brokers."""
    return Users(world, client)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as stack:
        yield stack
