"""A broker with a gateway, and a client of it, for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayHarness]:
    """Its receives that do not wait look at all queues, however slow this machine is."""
    monkeypatch.setattr("rocketstore.broker.popping.receiving.SCAN_S_MAX", 60.0)
    with GatewayHarness() as harness:
        yield harness


@pytest.fixture
def client(broker: GatewayHarness) -> Iterator[GatewayClient]:
    with broker.dial() as dialled:
        yield dialled
