"""What is read back from every node when a drill is over."""

from __future__ import annotations

from contextlib import closing

from cluster.drill.readback import pull_all
from rocketstore.client.connection import BrokerConnection
from tests.unit.rocketstore.broker.harness import Harness


def test_a_broker_that_has_just_started_is_given_time() -> None:
    """It refuses reads until it knows what is committed: that is no finding."""
    told = iter((False, False))
    with (
        Harness(has_caught_up=lambda: next(told, True)) as broker,
        closing(BrokerConnection([broker.address], timeout_s=10)) as connection,
    ):
        assert pull_all(connection, broker.address, "T", 0) == ()
    assert next(told, None) is None
