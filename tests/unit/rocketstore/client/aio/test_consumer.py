"""``Consumer`` against whole brokers of this project."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.client.shared import ClientSecurity
from dledger.config import AccessConfig
from dledger.errors import ConfigError
from rocketstore.client.aio import errors
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import ClientClosedError, NotFoundError, OffsetOutOfRangeError
from rocketstore.client.aio.producer import Producer
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.client.aio.harness import DEADLINE_S, TOPIC, Sender, bodies, gather, until
from tests.unit.rocketstore.test_server import plain, running


@on_loop
async def test_a_group_goes_on_where_it_stopped(broker: BrokerServer, sender: Sender) -> None:
    """Messages returned by ``poll`` before ``close`` are done; nothing is skipped, nothing comes twice."""
    await sender.topic()
    await sender.send(b"1", b"2", queue=0)
    await sender.send(b"3", queue=1)
    async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
        first = await gather(consumer, 3)
    assert bodies(first) == [b"1", b"2", b"3"]
    assert {(one.topic, one.queue.queue_id, one.queue_offset) for one in first} == {
        (TOPIC, 0, 0),
        (TOPIC, 0, 1),
        (TOPIC, 1, 0),
    }
    await sender.send(b"4", queue=1)
    async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
        assert bodies(await gather(consumer, 1)) == [b"4"]
        assert await consumer.poll(timeout_s=0.1) == []
        assert set(consumer.lag().values()) == {0}


@on_loop
async def test_a_new_group_begins_at_the_end_and_that_is_stored_at_once(broker: BrokerServer, sender: Sender) -> None:
    """A message sent after the start is not missed, although the consumer that started was killed without a commit."""
    await sender.topic()
    await sender.send(b"old")
    killed = Consumer(broker.address, group="g", topics=TOPIC)
    await killed.start()
    running = killed._running
    assert running is not None
    for one in running.deliveries.assignments.values():
        one.reader.stop()
    await running.cluster.close()  # without the group's knowing
    await sender.send(b"new")
    async with Consumer(broker.address, group="g", topics=TOPIC) as consumer:
        assert bodies(await gather(consumer, 1)) == [b"new"]
    with pytest.raises(ClientClosedError):  # its last commit had nobody to go to
        await killed.close()


@on_loop
async def test_members_share_the_queues_and_divide_them_anew(broker: BrokerServer, sender: Sender) -> None:
    """Each queue has one member; when one leaves, the other has all; each message is handled."""
    await sender.topic(queues=4)
    one = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    other = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    got: Counter[bytes] = Counter()

    async def handle(message: ConsumedMessage) -> None:
        got[message.body] += 1

    runs = [asyncio.ensure_future(each.run(handle)) for each in (one, other)]
    await until(lambda: len(_own(one)) == len(_own(other)) == 2 and not set(_own(one)) & set(_own(other)))
    for queue in range(4):
        await sender.send(b"a%d" % queue, queue=queue)
    await until(lambda: len(got) == 4)
    await other.close()
    await until(lambda: len(_own(one)) == 4)
    for queue in range(4):
        await sender.send(b"b%d" % queue, queue=queue)
    await until(lambda: len(got) == 8)
    await one.close()
    await asyncio.gather(*runs)
    assert set(got.values()) == {1}


def _own(consumer: Consumer) -> list[MessageQueue]:
    return [one for one in consumer.queues if one.topic == TOPIC]


@on_loop
async def test_a_failed_message_comes_again_with_its_topic_and_attempts(broker: BrokerServer, sender: Sender) -> None:
    """Whatever the handler raises, ``SystemExit`` included; the worker goes on; at last it is done."""
    await sender.topic()
    await sender.send(b"bad", b"good")
    seen: list[tuple[bytes, str, int]] = []

    async def handle(message: ConsumedMessage) -> None:
        seen.append((message.body, message.topic, message.attempts))
        if message.body == b"bad" and message.attempts == 0:
            raise SystemExit("as if the program ended")

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    run = asyncio.ensure_future(consumer.run(handle, workers=1))
    await until(lambda: len(seen) == 3)
    await consumer.close()
    await run
    assert sorted(seen) == [(b"bad", TOPIC, 0), (b"bad", TOPIC, 1), (b"good", TOPIC, 0)]


@on_loop
async def test_only_wanted_tags_arrive_and_the_position_passes_the_others(broker: BrokerServer, sender: Sender) -> None:
    """What is filtered leaves no lag behind."""
    await sender.topic(queues=1)
    await sender.send(b"1", tags="new")
    await sender.send(b"2", tags="old")
    await sender.send(b"3", tags="paid")
    await sender.send(b"4", tags="old")
    async with Consumer(broker.address, group="g", topics={TOPIC: "new || paid"}, start="first") as consumer:
        assert bodies(await gather(consumer, 2)) == [b"1", b"3"]
        assert await consumer.poll(timeout_s=0.5) == []
        await until(lambda: [lag for queue, lag in consumer.lag().items() if queue.topic == TOPIC] == [0])


@on_loop
async def test_assigned_queues_are_read_without_a_group(broker: BrokerServer, sender: Sender) -> None:
    """By number, and nothing is committed; ``seek`` and pause work."""
    await sender.topic()
    await sender.send(b"0", queue=0)
    await sender.send(b"1", b"2", b"3", queue=1)
    async with Consumer(broker.address, topics=TOPIC, assign=[1], start="first") as consumer:
        assert [one.body for one in await gather(consumer, 3)] == [b"1", b"2", b"3"]
        (queue,) = consumer.queues
        await consumer.seek(queue, 1)
        assert [one.body for one in await gather(consumer, 2)] == [b"2", b"3"]
        await consumer.seek(queue, "first")
        consumer.pause(queue)
        assert await consumer.poll(timeout_s=0.2) == []
        consumer.resume()
        assert bodies(await gather(consumer, 3)) == [b"1", b"2", b"3"]
        await consumer.seek_to_time(0, queue)
        assert bodies(await gather(consumer, 3)) == [b"1", b"2", b"3"]
        await consumer.seek_to_time(0)
        assert bodies(await gather(consumer, 3)) == [b"1", b"2", b"3"]
        with pytest.raises(TypeError, match=r"a queue is a MessageQueue, such as those of .*, not 1"):
            await consumer.seek(1, 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the time, in ms since 1970, comes first"):
            await consumer.seek_to_time(queue, 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a handler must be callable, not None"):
            await consumer.run_batches(None)  # type: ignore[arg-type]
    async with Consumer(broker.address, topics=TOPIC, assign=[1], start="first") as consumer:
        assert len(await gather(consumer, 3)) == 3
    with pytest.raises(NotFoundError, match=r"no queues \[7\]"):
        await Consumer(broker.address, topics=TOPIC, assign=[7]).start()


@on_loop
async def test_in_order_a_queue_waits_for_its_failing_message(broker: BrokerServer, sender: Sender) -> None:
    """It is tried again in place, before any later one."""
    await sender.topic(queues=1)
    await sender.send(b"1", b"2", b"3")
    seen: list[bytes] = []

    async def handle(message: ConsumedMessage) -> None:
        seen.append(message.body)
        if len(seen) < 3:
            raise ValueError("not yet")

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first", ordered=True)
    run = asyncio.ensure_future(consumer.run(handle))
    await until(lambda: len(seen) == 5)
    await consumer.close()
    await run
    assert seen == [b"1", b"1", b"1", b"2", b"3"]


@on_loop
async def test_a_reset_by_an_administrator_is_followed(broker: BrokerServer, sender: Sender) -> None:
    """Within ``commit_s``, by a running member, and not undone by it."""
    await sender.topic(queues=1)
    await sender.send(b"1", b"2", b"3")
    async with Consumer(broker.address, group="g", topics=TOPIC, start="first", commit_s=0.1) as consumer:
        await gather(consumer, 3)
        await consumer.commit()
        await asyncio.to_thread(sender.admin.reset_offsets, "g", TOPIC, "first")
        assert bodies(await gather(consumer, 3)) == [b"1", b"2", b"3"]


@on_loop
async def test_one_that_must_not_skip_says_what_is_gone(broker: BrokerServer, sender: Sender) -> None:
    """At every poll, until it goes elsewhere."""
    await sender.topic(queues=1)
    await sender.send(b"1")
    async with Consumer(
        broker.address, topics=TOPIC, assign="all", start="first", when_out_of_range="error"
    ) as consumer:
        await gather(consumer, 1)
        (queue,) = consumer.queues
        await consumer.seek(queue, 1000)
        with pytest.raises(OffsetOutOfRangeError, match="ends at 1, before 1000"):
            await gather(consumer, 1)
        with pytest.raises(OffsetOutOfRangeError):
            await consumer.poll()
        await consumer.seek(queue, 0)
        assert bodies(await gather(consumer, 1)) == [b"1"]


@on_loop
async def test_what_was_polled_last_comes_again_if_its_block_raises(broker: BrokerServer, sender: Sender) -> None:
    """Only what came before it is done."""
    await sender.topic(queues=1)
    await sender.send(b"1", b"2")

    async def fail() -> None:
        async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
            for _ in range(2):
                assert await consumer.poll(1, timeout_s=DEADLINE_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert broker.state.offset("g", TOPIC, 0) == 1


@on_loop
async def test_a_closed_consumer_says_so(broker: BrokerServer, sender: Sender) -> None:
    """Closing is idempotent, ends iteration, and wakes a poll that waits."""
    await sender.topic()
    consumer = Consumer(broker.address, group="g", topics=TOPIC)
    await consumer.start()
    waiting = asyncio.ensure_future(consumer.poll(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    await consumer.close()
    await consumer.close()
    with pytest.raises(ClientClosedError):
        await waiting
    assert [one async for one in consumer] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"topics": "t"}, "needs a group"),
        ({"topics": [], "group": "g"}, "names no topic"),
        ({"topics": {"t": "||"}, "group": "g"}, "names no tag"),
        ({"topics": "t", "group": "g", "assign": "all", "ordered": True}, "does not go together"),
        ({"topics": "t", "group": "g", "start": "middle"}, "start must be"),
        ({"topics": "t", "group": "g", "offsets_file": Path("x")}, "for broadcast"),
        ({"topics": "t", "group": "g", "commit_s": -1}, "commit_s=-1 must be above 0"),
        ({"topics": "t", "group": "g", "retries_max": -1}, "retries_max=-1 must be at least 0"),
        ({"topics": "t", "group": "a b"}, "group 'a b': 1 to 120 of the characters"),
        ({"topics": "a b", "group": "g"}, "the topic 'a b' has characters other than"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(arguments: dict[str, object], problem: str) -> None:
    """Before anything is connected, with what to do."""
    with pytest.raises(ConfigError, match=problem):
        Consumer("127.0.0.1:1", **arguments)  # type: ignore[arg-type]


_RULES = """accounts:
- accessKey: alice
  secretKey: alice-secret
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: SUB
"""


@on_loop
async def test_whose_key_is_revoked_is_told_at_each_poll_until_it_may_read_again(tmp_path: Path) -> None:
    """As with Kafka; the consumer goes on where it was."""
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(_RULES)
    rules.chmod(0o600)
    alice = ClientSecurity(access_key="alice", secret_key="alice-secret")
    with running(replace(plain(tmp_path), access=AccessConfig(acl_enable=True, acl_file=rules))) as server:
        async with Producer(server.address, security=alice, timeout_s=30) as producer:
            await producer.send(Message(TOPIC, b"before"))
            async with Consumer(server.address, group="g", topics=TOPIC, start="first", security=alice) as consumer:
                assert bodies(await gather(consumer, 1)) == [b"before"]
                rules.write_text(_RULES.replace("alice", "bob"))
                for _ in range(2):
                    with pytest.raises(errors.ForbiddenError, match="access key"):
                        await gather(consumer, 1)
                rules.write_text(_RULES)
                found: list[bytes] = []
                async with asyncio.timeout(DEADLINE_S):
                    while not found:
                        with suppress(errors.ForbiddenError):
                            await producer.send(Message(TOPIC, b"after"))
                            found += bodies(await gather(consumer, 1))
                assert found == [b"after"]
