"""SIGKILL and SIGSTOP of brokers under producers and consumers: nothing acknowledged is lost, stored twice or moved."""

from __future__ import annotations

import pytest

from tests.integration.broker_harness import BrokerGroup

KILLS = 2


@pytest.mark.slow
def test_master_is_killed_again_and_again(brokers: BrokerGroup) -> None:
    """Every queue offset is given out once, in order, whoever is the master; consumers miss nothing."""
    with brokers.load() as load:
        for _ in range(KILLS):
            load.history.wait_for_acks(200)
            master = brokers.master()
            brokers.kill(master)
            brokers.master(other_than=master)
            load.history.wait_for_acks(200)
            brokers.start(master)

    brokers.verify()


@pytest.mark.slow
def test_successor_is_killed_while_it_is_promoted(brokers: BrokerGroup) -> None:
    """It was elected and perhaps took puts already: whatever it gave out is given out by nobody else again."""
    with brokers.load() as load:
        for _ in range(KILLS):
            load.history.wait_for_acks(100)
            master = brokers.master()
            brokers.kill(master)
            successor = brokers.leader(other_than=master)
            brokers.kill(successor)
            brokers.start_all()
            load.history.wait_for_acks(100)

    brokers.verify()


def test_whole_group_is_killed_at_once(brokers: BrokerGroup) -> None:
    """What was acknowledged is flushed on a majority: everybody dies under load, and all of it is there."""
    with brokers.load() as load:
        load.history.wait_for_acks(300)
        for node in brokers.nodes:
            brokers.kill(node)
        brokers.start_all()
        load.history.wait_for_acks(100)

    brokers.verify()


def test_paused_master_acknowledges_nothing_afterwards(brokers: BrokerGroup) -> None:
    """It slept through an election with requests in hand: each was stored once, by whoever acknowledged it."""
    with brokers.load() as load:
        load.history.wait_for_acks(200)
        master = brokers.master()
        brokers.pause(master)
        brokers.master(other_than=master)
        load.history.wait_for_acks(100)
        brokers.resume(master)
        load.history.wait_for_acks(100)

    brokers.verify()
