"""A broker and a client of it for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        yield harness


@pytest.fixture
def client(broker: RemotingHarness) -> Iterator[RemotingSocket]:
    with broker.dial() as dialled:
        yield dialled
