"""A ``Consumer`` and an ``Admin`` with SQL conditions, against whole brokers of this project."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import ConfigError
from rocketstore.client import Sql
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.broker_session import Subscriptions, difference
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.consumer_options import ConsumerOptions
from rocketstore.client.aio.errors import RefusedError
from rocketstore.remoting.groups import SubscriptionData
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.client.aio.harness import TOPIC, Sender, bodies, gather, until
from tests.unit.rocketstore.test_server import plain, running


async def _send(sender: Sender) -> None:
    await sender.topic(queues=1)
    for number in range(1, 6):
        await sender.send(b"%d" % number, tags="paid", amount=str(number))


@on_loop
async def test_only_messages_that_fulfil_the_condition_arrive(broker: BrokerServer, sender: Sender) -> None:
    """What is filtered leaves no lag behind; a message that is sent back comes again."""
    await _send(sender)
    condition = Sql("amount > 2 AND TAGS = 'paid' AND amount <> 4")
    async with Consumer(broker.address, group="g", topics={TOPIC: condition}, start="first") as consumer:
        found = await gather(consumer, 2)
        assert bodies(found) == [b"3", b"5"]
        assert await consumer.poll(timeout_s=0.5) == []
        await until(lambda: [lag for queue, lag in consumer.lag().items() if queue.topic == TOPIC] == [0])
        members = await _members(broker)
        assert members == {TOPIC: condition.expression}


async def _members(broker: BrokerServer) -> dict[str, str]:
    async with Admin(broker.address) as admin:
        topics = (await admin.members("g")).topics
    return {topic: text for topic, text in topics.items() if not topic.startswith("%RETRY%")}


@on_loop
async def test_reading_alone_and_administrators_have_conditions_too(broker: BrokerServer, sender: Sender) -> None:
    await _send(sender)
    wanted = Sql("amount BETWEEN 2 AND 3")
    async with Consumer(broker.address, topics={TOPIC: wanted}, assign="all", start="first") as consumer:
        assert bodies(await gather(consumer, 2)) == [b"2", b"3"]
    async with Admin(broker.address) as admin:
        queue = MessageQueue(TOPIC, broker.config.name, 0)
        messages, following = await admin.messages(queue, 0, expression=wanted)
        assert ([one.body for one in messages], following) == ([b"2", b"3"], 5)
        with pytest.raises(ConfigError, match="at character 9"):
            await admin.messages(queue, 0, expression=Sql("amount >"))


@pytest.mark.parametrize("group", ["g", ""])
@on_loop
async def test_a_broker_without_conditions_is_found_out_at_the_start(tmp_path: Path, group: str) -> None:
    """Else its queues would be refused for ever, and nobody would be told but the log."""
    with running(plain(tmp_path, enablePropertyFilter="false")) as broker:
        sender = Sender(broker)
        with sender.producer, sender.admin:
            await _send(sender)
        consumer = Consumer(
            broker.address, group=group, topics={TOPIC: Sql("amount > 1")}, assign=None if group else "all"
        )
        with pytest.raises(RefusedError, match="does not support consumer to filter message by SQL92"):
            await consumer.start()
        await consumer.close()


@on_loop
async def test_members_with_other_conditions_are_told_apart(
    broker: BrokerServer, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """And tags that read like a condition are no condition."""
    await sender.topic()
    for later in (Sql("a"), "a", Sql("a > 1")):
        caplog.clear()
        async with (
            Consumer(broker.address, group="g", topics={TOPIC: Sql("a")}),
            Consumer(broker.address, group="g", topics={TOPIC: later}),
        ):
            pass
        told = [one.message for one in caplog.records if "each misses the messages" in one.message]
        assert bool(told) == (later != Sql("a")), later


def test_a_condition_and_tags_are_compared_by_kind() -> None:
    mine = Subscriptions("g", "c1", {"A": Sql("a > 1")}, ConsumerOptions())
    assert difference(mine, {"A": SubscriptionData("A", "a > 1", expression_type="SQL92")}) == ""
    for other in (SubscriptionData("A", "a > 2", expression_type="SQL92"), SubscriptionData("A", "a > 1")):
        assert "and this one with SQL92 'a > 1'" in difference(mine, {"A": other})
