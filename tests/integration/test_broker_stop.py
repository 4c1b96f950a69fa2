"""SIGTERM of brokers: the master hands over, and producers hardly notice."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import DEAF, SILENCE_S, STEADY
from tests.support.history import Outcome, longest_gap_s

PATIENCE_S = 120.0
"""Of producers: a send that takes too long is a gap, and not an error."""


def test_stopped_master_hands_over(make_brokers: Callable[..., BrokerGroup]) -> None:
    """No send fails, none waits for an election, and nobody is left with an unknown outcome."""
    brokers = make_brokers(settings=DEAF)
    brokers.start_all()
    brokers.create_topic()
    with brokers.load(timeout_s=PATIENCE_S, numbered=True) as load:
        load.history.wait_for_acks(200)
        master = brokers.master()

        code = brokers.stop(master)
        load.history.wait_for_acks(200)

        failed = [one for one in load.history.sends if one.outcome is not Outcome.ACKED]
        gap_s = longest_gap_s(one.ended for one in load.history.sends if one.outcome is Outcome.ACKED)
        brokers.start(master)

    assert code == 0
    assert not failed, failed[:3]
    assert gap_s < SILENCE_S - 1, "less than it takes to miss a master that does not hand over"
    brokers.verify()


def test_stopped_slave_is_not_missed(make_brokers: Callable[..., BrokerGroup]) -> None:
    """It leaves and returns without an election, and has everything afterwards."""
    brokers = make_brokers(settings=STEADY)
    brokers.start_all()
    brokers.create_topic()
    with brokers.load(timeout_s=PATIENCE_S, numbered=True) as load:
        load.history.wait_for_acks(100)
        term, slave = brokers.term(), brokers.followers(brokers.master())[0]

        code = brokers.stop(slave)
        load.history.wait_for_acks(100)
        brokers.start(slave)
        load.history.wait_for_acks(100)
        failed = [one for one in load.history.sends if one.outcome is not Outcome.ACKED]

    assert code == 0
    assert not failed, failed[:3]
    assert brokers.term() == term
    brokers.verify()
