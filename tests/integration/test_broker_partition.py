"""Partitions between brokers: the master without a majority acknowledges nothing, and its guesses are taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.remoting.codes import AnswerCode
from tests.integration.broker_harness import ProxiedBrokers
from tests.integration.conftest import Adopt
from tests.support.broker_load import TOPIC
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until


@pytest.fixture
def proxied_brokers(adopt: Adopt, tmp_path: Path) -> ProxiedBrokers:
    """Three brokers that run behind a proxy network, have a master, and know the topic of the load."""
    made = adopt(ProxiedBrokers(tmp_path / "brokers"))
    made.start_all()
    made.create_topic()
    return made


def test_parted_master_acknowledges_nothing(proxied_brokers: ProxiedBrokers) -> None:
    """Its queue offsets are given out again by the next master, and what it had taken is gone or nowhere doubled."""
    brokers = proxied_brokers
    with brokers.load() as load:
        load.history.wait_for_acks(100)
        old = brokers.master()
        brokers.network.partition([old])
        with RemotingSocket(brokers.nodes[old].client_port) as lonely:
            sent = [lonely.begin_send(TOPIC, b"lonely/%d" % number, number) for number in range(3)]
            brokers.master(other_than=old)
            load.history.wait_for_acks(100)
            answers = [lonely.answer_to(opaque).code for opaque in sent]
        wait_until(lambda: not brokers.broker_status(old).runtime.is_master, "the old master gives up")
        brokers.network.heal_all()
        load.history.wait_for_acks(100)

    assert AnswerCode.SUCCESS not in answers
    bodies = brokers.verify()
    assert not [body for queue in bodies.values() for body in queue if body.startswith(b"lonely/")]
