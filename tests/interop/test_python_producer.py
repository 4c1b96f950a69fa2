"""Our ``Producer`` and ``Admin`` at Apache RocketMQ's own brokers, 4.9 and 5.5: ``make interop``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import pytest

from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import GroupInfo, TopicInfo
from rocketstore.client.aio.errors import (
    ClientError,
    NotFoundError,
    PreparedMessage,
    RequestNotKnownError,
    SendStatus,
    TransactionState,
)
from rocketstore.client.aio.producer import Producer
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from tests.interop import java, rocketmq, rocketmq5
from tests.interop.rocketmq import broker_port
from tests.support.on_loop import on_loop

pytestmark = pytest.mark.interop

START_S: Final = 120.0
DEADLINE_S: Final = 90.0
CALL_S: Final = 30.0
_T = TypeVar("_T")


class Apache(NamedTuple):
    """A name server and the directory and port of a broker named ``theirs``."""

    release: int
    name_server: str
    directory: Path
    port: int

    def broker(self) -> AbstractContextManager[object]:
        """The broker meanwhile."""
        settings = {
            "listenPort": self.port,
            "namesrvAddr": self.name_server,
            "brokerName": "theirs",
            "messageDelayLevel": "1s 1s 1s 1s",
            "transactionTimeOut": 500,
            "transactionCheckInterval": 1000,
        }
        start = rocketmq.broker if self.release == 4 else rocketmq5.broker
        return start(self.directory / "broker", settings)


@pytest.fixture(params=[4, 5])
def apache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Apache]:
    """A name server, without a broker yet."""
    java.build()
    start = rocketmq.name_server if request.param == 4 else rocketmq5.name_server
    with start(tmp_path / "namesrv") as address:
        yield Apache(request.param, address, tmp_path, broker_port())


@asynccontextmanager
async def administered(apache: Apache) -> AsyncIterator[Admin]:
    """An administrator of the broker, once that has registered."""
    async with Admin(name_servers=apache.name_server, timeout_s=CALL_S) as admin:
        await eventually(admin.brokers, START_S)
        yield admin


async def eventually(call: Callable[[], Awaitable[_T]], timeout_s: float = DEADLINE_S) -> _T:
    """The result once there is one."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await call()
            except (ClientError, AssertionError):
                await asyncio.sleep(0.25)


async def bodies(admin: Admin, topic: str) -> dict[int, list[bytes]]:
    """All messages of a topic, by queue."""
    found: dict[int, list[bytes]] = {}
    for one in await admin.queue_ranges(topic):
        offset = one.min_offset
        while offset < one.max_offset:
            messages, offset = await admin.messages(one.queue, offset)
            found.setdefault(one.queue.queue_id, []).extend(each.body for each in messages)
    return found


async def await_count(admin: Admin, topic: str, count: int) -> dict[int, list[bytes]]:
    """All messages of a topic, once there are so many."""

    async def all_there() -> dict[int, list[bytes]]:
        found = await bodies(admin, topic)
        assert sum(map(len, found.values())) == count
        return found

    return await eventually(all_there)


@on_loop
async def test_messages_of_all_kinds_are_stored(apache: Apache) -> None:
    """One, batches, in order by key, delayed, without an answer; and found by place, id, key and unique key."""
    with apache.broker():
        async with (
            administered(apache) as admin,
            Producer(name_servers=apache.name_server, timeout_s=CALL_S) as producer,
        ):
            await admin.put_topic(TopicInfo("orders", 4, 4))
            await eventually(lambda: admin.topic("orders"))
            first = await producer.send(Message("orders", b"first", tags="new", keys=["k1"]))
            assert (first.broker, first.status) == ("theirs", SendStatus.SEND_OK)
            many = await producer.send_many([Message("orders", b"m%d" % one, keys=["k2"]) for one in range(40)])
            ordered = [await producer.submit(Message("orders", b"o%d" % one), key="order-1") for one in range(100)]
            places = [await one for one in ordered]
            assert [one.offset - places[0].offset for one in places] == list(range(100))
            assert len({one.queue for one in places}) == 1
            await producer.send_oneway(Message("orders", b"oneway"))
            found = await await_count(admin, "orders", 142)
            assert found[first.queue][first.offset] == b"first"
            for number, one in enumerate(many):
                assert found[one.queue][one.offset] == b"m%d" % number
            assert (await admin.message_by_id(many[7].offset_id)).body == b"m7"

            async def by_key() -> None:
                assert len(await admin.messages_by_key("orders", "k2", max_messages=64)) == 40

            await eventually(by_key)
            (unique,) = await admin.messages_by_key("orders", many[3].message_id, unique=True)
            assert unique.body == b"m3"
            await producer.send(Message("orders", b"later", delay_level=1))
            found = await await_count(admin, "orders", 143)
            assert any(b"later" in one for one in found.values())


@on_loop
async def test_a_topic_is_created_by_its_first_message(apache: Apache) -> None:
    with apache.broker():
        async with (
            administered(apache) as admin,
            Producer(name_servers=apache.name_server, timeout_s=CALL_S) as producer,
        ):
            await eventually(lambda: producer.send(Message("fresh", b"1")))
            await eventually(lambda: producer.send(Message("fresh", b"2"), key="k"))
            await await_count(admin, "fresh", 2)


@on_loop
async def test_transactions_are_committed_rolled_back_and_checked(apache: Apache) -> None:
    left = {b"left, succeeded": TransactionState.COMMIT, b"left, failed": TransactionState.ROLLBACK}
    asked: list[bytes] = []

    async def check(prepared: PreparedMessage) -> TransactionState:
        asked.append(prepared.message.body)
        return left[prepared.message.body]

    with apache.broker():
        async with administered(apache) as admin:
            await admin.put_topic(TopicInfo("orders", 1, 1))
            await eventually(lambda: admin.topic("orders"))
            async with Producer(name_servers=apache.name_server, group="py", check=check, timeout_s=CALL_S) as producer:
                for body in (b"committed", b"rolled back", *left):
                    async with producer.transaction(Message("orders", body)) as transaction:
                        if body == b"rolled back":
                            transaction.rollback()
                        elif body in left:
                            transaction.leave_open()
                    assert transaction.result.problem is None
                found = await await_count(admin, "orders", 2)
                assert sorted(found[0]) == [b"committed", b"left, succeeded"]
                assert set(asked) == set(left)


@on_loop
async def test_a_broker_that_is_killed_and_comes_back_is_found_again(apache: Apache) -> None:
    """What was not stored is sent once it is back; the producer is the same."""
    async with Producer(name_servers=apache.name_server, timeout_s=120) as producer:
        with apache.broker():
            async with administered(apache) as admin:
                await admin.put_topic(TopicInfo("orders", 1, 1))
                await eventually(lambda: admin.topic("orders"))
            await producer.send(Message("orders", b"before"))
        waiting = asyncio.create_task(producer.send(Message("orders", b"during")))
        with apache.broker():
            await waiting
            async with administered(apache) as admin:
                found = await await_count(admin, "orders", 2)
                assert found[0][-1] == b"during"


@on_loop
async def test_topics_groups_offsets_and_brokers_are_administered(apache: Apache) -> None:
    with apache.broker():
        async with (
            administered(apache) as admin,
            Producer(name_servers=apache.name_server, timeout_s=CALL_S) as producer,
        ):
            address = f"127.0.0.1:{apache.port}"
            (broker,) = await admin.brokers()
            assert (broker.name, broker.master) == ("theirs", address)
            status = await eventually(lambda: admin.status(address))
            assert status.runtime.version.startswith(f"V{apache.release}_")
            assert (await admin.broker_config(address))["brokerName"] == "theirs"
            await admin.set_broker_config(address, {"defaultTopicQueueNums": "5"})
            assert (await admin.broker_config(address))["defaultTopicQueueNums"] == "5"

            await admin.put_topic(TopicInfo("orders", 2, 2))
            await eventually(lambda: admin.topic("orders"))
            assert TopicInfo("orders", 2, 2, 6, "theirs") in await admin.topics()
            assert "TBW102" not in {one.name for one in await admin.topics()}
            first, second = (MessageQueue("orders", "theirs", one) for one in range(2))
            for number in range(10):
                await producer.send(Message("orders", b"%d" % number), queue=number % 2)

            async def in_queues() -> None:
                ranges = await admin.queue_ranges("orders")
                assert [(one.queue, one.min_offset, one.max_offset) for one in ranges] == [
                    (first, 0, 5),
                    (second, 0, 5),
                ]

            await eventually(in_queues)
            assert [await admin.offset_at(first, one) for one in ("first", "last")] == [0, 5]
            (message, *_), _ = await admin.messages(first, 2)
            assert await admin.offset_at(first, message.store_timestamp) in (0, 1, 2)

            await admin.put_group(GroupInfo("billing", 3))
            assert [one for one in await admin.groups() if one.name == "billing"] == [
                GroupInfo("billing", 3, True, True, "theirs", is_ordered=False, retry_delays="levels")
            ]
            with pytest.raises(NotFoundError):
                await admin.members("billing")
            await admin.set_offsets("billing", {first: 2, second: 5})

            async def known() -> None:
                assert await admin.offsets("billing", "orders") == {first: 2, second: 5}

            await eventually(known)
            assert await admin.lag("billing", "orders") == 3
            assert await admin.reset_offsets("billing", "orders", "first") == {first: 0, second: 0}
            assert await admin.lag("billing", "orders") == 10
            await admin.delete_group("billing")

            async def gone() -> None:
                """RocketMQ 5 makes it anew by itself, with the default settings and without offsets."""
                left = [one for one in await admin.groups() if one.name == "billing"]
                assert not left or (apache.release == 5 and left[0].retries_max == 16)

            await eventually(gone, 30)

            await admin.set_write_permission("theirs", allowed=False)
            await admin.set_write_permission("theirs", allowed=True)
            await admin.delete_topic("orders")
            assert "orders" not in {one.name for one in await admin.topics()}


@on_loop
async def test_the_address_of_their_broker_alone_is_not_enough(apache: Apache) -> None:
    """It does not tell where its topics are: the error says what to give instead."""
    with apache.broker():
        async with administered(apache), Producer(f"127.0.0.1:{apache.port}", timeout_s=CALL_S) as producer:
            with pytest.raises(RequestNotKnownError, match="give the addresses of name servers"):
                await producer.send(Message("orders", b"x"))
