"""Single things that no world plays: tags, and a commit that crosses a restart, over remoting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import ClientError
from rocketstore.client.aio.queue_reader import QueueReader
from tests.sim_consumer.broker import ModelBroker
from tests.sim_consumer.drivers import GROUP, TOPIC, fast
from tests.sim_consumer.remoting import ModelPort, ServerLoop
from tests.support.on_loop import on_loop, until

PLACE = (TOPIC, 0)
NOTICED_S = 10.0


@contextmanager
def served(*, rocketmq: bool = False) -> Iterator[tuple[ModelBroker, ModelPort]]:
    """A broker with one queue, of this project or of RocketMQ."""
    broker, servers = ModelBroker(), ServerLoop()
    broker.put_topic(TOPIC, 1)
    port = ModelPort(broker, servers, 100, rocketmq=rocketmq)
    with fast():
        try:
            yield broker, port
        finally:
            port.cut()
            servers.close()


def restart(broker: ModelBroker, lost: int, *sent: tuple[bytes, str]) -> None:
    """Without its last messages, and with others, of these tags, in their places."""
    broker.set_down(down=True)
    with broker.changed:
        broker.lose_end(PLACE, lost)
        for body, tags in sent:
            broker.send(TOPIC, 0, body, tags=tags)
    broker.set_down(down=False)


@pytest.mark.parametrize("rocketmq", [False, True])
@pytest.mark.parametrize("lost", [2, 3])
def test_what_takes_the_places_of_unwanted_messages_is_read(lost: int, rocketmq: bool) -> None:
    """They were passed over, and never seen: the last one that was shows nothing about them."""

    @on_loop
    async def read() -> None:
        with served(rocketmq=rocketmq) as (broker, port):
            for body, tags in ((b"1", "a"), (b"2", "b"), (b"3", "b")):
                broker.send(TOPIC, 0, body, tags=tags)
            topics = {TOPIC: "a"}
            async with Consumer(port.address, group=GROUP, topics=topics, start="first", commit_s=None) as consumer:
                got: list[bytes] = []

                async def poll_until(condition: Callable[[], bool]) -> None:
                    async with asyncio.timeout(NOTICED_S):
                        while not condition():
                            got.extend(one.body for one in await consumer.poll(timeout_s=0.05))

                def position() -> int:
                    return next(offset for queue, offset in consumer.positions().items() if queue.topic == TOPIC)

                await poll_until(lambda: position() == 3)
                restart(broker, lost, (b"4", "a"), (b"5", "a"), (b"6", "b"))
                await poll_until(lambda: {b"4", b"5"} <= set(got))
                await poll_until(lambda: position() == broker.queues[PLACE].end)
                await consumer.commit()
                assert broker.offsets[GROUP, *PLACE] == broker.queues[PLACE].end
                assert got.count(b"1") == 1

    read()


@pytest.mark.parametrize("rocketmq", [False, True])
def test_what_was_read_only_since_a_restart_is_committed(rocketmq: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's offset was asked for before it, and is there again after it: nothing needs to come twice."""
    pulls = asyncio.Event()
    pull = QueueReader._pull

    async def pull_later(reader: QueueReader) -> bool:
        await pulls.wait()
        return await pull(reader)

    monkeypatch.setattr(QueueReader, "_pull", pull_later)

    @on_loop
    async def read() -> None:
        with served(rocketmq=rocketmq) as (broker, port):
            for body in (b"0", b"1", b"2"):
                broker.send(TOPIC, 0, body)
            broker.reset(GROUP, PLACE, 1)
            async with Consumer(port.address, group=GROUP, topics=TOPIC, start="first", commit_s=None) as consumer:
                restart(broker, 0)
                pulls.set()
                assert [one.body for one in await consumer.poll(timeout_s=NOTICED_S)] == [b"1", b"2"]
                await consumer.commit()
                assert broker.offsets[GROUP, *PLACE] == 3
                broker.send(TOPIC, 0, b"3")
                assert [one.body for one in await consumer.poll(timeout_s=NOTICED_S)] == [b"3"]

    read()


@pytest.mark.parametrize("rocketmq", [False, True])
def test_a_commit_reaches_the_process_that_was_read_or_none(rocketmq: bool) -> None:
    """The broker is exchanged while it is asked to commit, and its queue is as long as before."""

    @on_loop
    async def read() -> None:
        with served(rocketmq=rocketmq) as (broker, port):
            broker.send(TOPIC, 0, b"0")
            async with Consumer(port.address, group=GROUP, topics=TOPIC, start="first", commit_s=None) as consumer:
                assert [one.body for one in await consumer.poll(timeout_s=5)] == [b"0"]
                await consumer.commit()
                broker.send(TOPIC, 0, b"1")
                assert [one.body for one in await consumer.poll(timeout_s=5)] == [b"1"]
                broker.at_commits.append(lambda: restart(broker, 1, (b"2", "")))
                with suppress(ClientError):  # it may be told that it was not stored
                    await consumer.commit()
                assert broker.offsets[GROUP, *PLACE] == 1
                got: list[bytes] = []

                async def polled() -> bool:
                    got.extend(one.body for one in await consumer.poll(timeout_s=0.05))
                    return b"2" in got

                async with asyncio.timeout(
                    NOTICED_S
                ):  # a pull may wait longer, but none that follows a broken connection
                    while not await polled():
                        pass
                await consumer.commit()
            await until(lambda: broker.offsets[GROUP, *PLACE] == 2, "all is committed")

    read()
