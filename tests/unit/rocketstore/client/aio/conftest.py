"""A running broker, and what sends to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketstore.server import BrokerServer
from tests.unit.rocketstore.client.aio.harness import Sender
from tests.unit.rocketstore.test_server import plain, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    with running(plain(tmp_path)) as server:
        yield server


@pytest.fixture
def sender(broker: BrokerServer) -> Iterator[Sender]:
    found = Sender(broker)
    with found.producer, found.admin:
        yield found
