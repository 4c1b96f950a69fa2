"""Real brokers that lose their disks while retention takes the log's begin."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

import pytest

from rocketstore.client import DLedgerError, Message
from rocketstore.message.ids import parse_offset_message_id
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
    with brokers.producer(timeout_s=30) as producer:
        last = [producer.send(Message("rare", b"old")) for _ in range(5)][-1]
        assert last.offset == 4
        _, at = parse_offset_message_id(last.offset_id)
        while min(brokers.broker_status(node).runtime.begin or 0 for node in brokers.nodes) <= at:
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

    wait_until(leads, "the one with the new disk is master")
    with brokers.producer(timeout_s=30) as producer:
        assert producer.send(Message("rare", b"new")).offset == 5
    brokers.wait_dispatched()
    for node in brokers.nodes:
        with brokers.admin() as admin:
            part = admin.read_at(brokers.nodes[node].client_address, "rare", 0, 5)
        assert [one.queue_offset for one in part.messages] == [5]
        assert "misnumbered" not in brokers.broker_status(node).runtime.conditions
