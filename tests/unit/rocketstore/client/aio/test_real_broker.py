"""The clients against whole brokers of this project."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketstore.broker_config import BrokerConfig
from rocketstore.client.aio import errors
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.producer import Producer
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import KVTable
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop, until
from tests.unit.rocketstore.test_server import alone, plain, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    with running(plain(tmp_path)) as server:
        yield server


@on_loop
async def test_a_group_is_found_without_a_name_server(broker: BrokerServer) -> None:
    """By one address of it: its name, its master, its topics."""
    cluster = Cluster(broker.address, None, timeout_s=60)
    (found,) = await cluster.brokers(cluster.deadline())
    assert (found.cluster, found.name, found.master) == (
        broker.config.cluster_name,
        broker.config.name,
        broker.address,
    )
    route = await cluster.route("TBW102", cluster.deadline())
    assert [one.broker_name for one in route.writable] == [found.name] * broker.config.default_topic_queue_nums
    answer = await cluster.ask_master(found.name, RequestCode.GET_BROKER_RUNTIME_INFO, deadline=cluster.deadline())
    assert "brokerVersionDesc" in KVTable.decode(answer.body).table
    with pytest.raises(errors.NotFoundError):
        await cluster.route("nowhere", cluster.deadline())
    await cluster.close()


def stored(broker: BrokerServer, topic: str) -> dict[int, list[bytes]]:
    """The bodies of a topic's messages by queue, as consumers would get them."""
    found: dict[int, list[bytes]] = {}
    for queue in range(broker.config.default_topic_queue_nums):
        for offset in range(broker.store.max_offset(topic, queue)):
            position = broker.store.position_of(topic, queue, offset)
            record = None if position is None else broker.store.read_record(position)
            if record is not None:
                found.setdefault(queue, []).append(decode_record(record).body)
    return found


@pytest.mark.parametrize("make", [plain, alone], ids=["plain", "group"])
@on_loop
async def test_messages_of_all_kinds_are_stored(make: Callable[[Path], BrokerConfig], tmp_path: Path) -> None:
    """One, many at once, in order by key, delayed, and without an answer; each result says where."""
    with running(make(tmp_path)) as broker:
        async with Producer(broker.address, timeout_s=30) as producer:
            first = await producer.send(Message("T", b"first", tags="new", keys=["k1"]))
            assert first.message_id
            results = await producer.send_many([Message("T", b"%d" % one, keys=["k2"]) for one in range(20)])
            futures = [await producer.submit(Message("T", b"o%d" % one), key="order-1") for one in range(50)]
            ordered = [await one for one in futures]
            assert [one.offset - ordered[0].offset for one in ordered] == list(range(50))
            await producer.send_oneway(Message("T", b"oneway"))
            await until(lambda: sum(map(len, stored(broker, "T").values())) == 72, "all are stored")
            bodies = stored(broker, "T")
            for result, body in zip(results, range(20), strict=True):
                assert bodies[result.queue][result.offset] == b"%d" % body
            assert bodies[first.queue][first.offset] == b"first"
            position = broker.store.position_of("T", first.queue, first.offset)
            assert position == parse_offset_message_id(first.offset_id)[1]
            delayed = await producer.send(Message("T", b"later", delay_level=1))
            assert delayed.message_id
            await until(lambda: any(b"later" in one for one in stored(broker, "T").values()), "it is delivered")


@on_loop
async def test_a_broker_that_is_restarted_is_found_again_by_what_waits(tmp_path: Path) -> None:
    config = alone(tmp_path)
    with running(config) as broker:
        producer = Producer(broker.address, timeout_s=60)
        await producer.send(Message("T", b"before"))
    waiting = asyncio.create_task(producer.send(Message("T", b"during")))
    with running(config) as broker:
        assert (await waiting).offset >= 0
        await producer.close()
        await until(lambda: sum(map(len, stored(broker, "T").values())) == 2, "both are stored")
