"""A broker with a gateway, and a client of it, for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness


@pytest.fixture
def broker() -> Iterator[GatewayHarness]:
    with GatewayHarness() as harness:
        yield harness


@pytest.fixture
def client(broker: GatewayHarness) -> Iterator[GatewayClient]:
    with broker.dial() as dialled:
        yield dialled
