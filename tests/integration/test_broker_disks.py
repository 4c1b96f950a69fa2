"""Real brokers that lose their disks while retention takes the log's begin."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

import pytest

from dledger.errors import DLedgerError
from rocketstore.client.aio.received import split_records
from rocketstore.client.methods import PULL
from rocketstore.client.producer import Producer
from rocketstore.message.message import Message
from rocketstore.pb import broker_pb2 as pb
from tests.integration.broker_harness import BrokerGroup
from tests.support.waiting import wait_until

KEEP_NOTHING = {
    "fileReservedTime": "0",
    "cleanResourceInterval": "500",
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
}


@pytest.mark.soak  # half a minute until the brokers' state lets go of the log's begin
def test_a_master_with_a_new_disk_goes_on_counting_in_queues_whose_messages_have_expired(
    make_brokers: Callable[..., BrokerGroup],
) -> None:
    """What it gives out is new to everybody, so all of them can show the message."""
    brokers = make_brokers(settings=KEEP_NOTHING)
    brokers.start_all()
    brokers.create_topic("rare", 1)
    brokers.create_topic("busy", 1)
    with Producer(brokers.addresses, timeout_s=30) as producer:
        last = [producer.send(Message("rare", b"old")) for _ in range(5)][-1]
        assert last.queue_offset == 4
        while min(one.min_offset for one in brokers.broker_statuses().values()) <= last.offset:
            for _ in range(8):
                producer.send(Message("busy", b"x" * 100_000))
    victim = brokers.followers(brokers.master())[0]
    brokers.kill(victim)
    shutil.rmtree(brokers.root_dir(victim))
    brokers.start(victim)

    def leads() -> bool:
        if brokers.master() != victim:
            with suppress(DLedgerError), brokers.client() as client:
                client.transfer_leadership(victim)
        return brokers.master() == victim

    wait_until(leads, "the one with the new disk is master", 60)
    with Producer(brokers.addresses, timeout_s=30) as producer:
        assert producer.send(Message("rare", b"new")).queue_offset == 5
    brokers.wait_dispatched()
    for node in brokers.nodes:
        with brokers.pinned(node) as connection:
            request = pb.PullRequest(topic="rare", queue_id=0, offset=5, max_messages=9)
            answer = connection.ask(PULL, request, brokers.nodes[node].client_address, connection.deadline())
        assert [one.queue_offset for one in split_records(answer.records)] == [5]
        assert "misnumbered" not in {one.kind for one in brokers.broker_statuses()[node].conditions}
