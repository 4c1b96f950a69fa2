"""A group of three fake brokers with a topic of four queues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_broker import FakeBrokers, fake_brokers


@pytest.fixture
def brokers() -> Iterator[FakeBrokers]:
    with fake_brokers(3) as group:
        group.add_topic("orders")
        yield group
