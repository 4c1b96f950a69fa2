"""``Admin`` against whole brokers, plain and in a group, and against scripted ones for what those do not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from rocketstore.broker_config import BrokerConfig
from rocketstore.client.aio import admin_requests, errors, routes
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import BrokerStatus, GroupInfo, TopicInfo, decoded
from rocketstore.client.aio.producer import Producer
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from rocketstore.state.attributes import FixedRetryDelays
from tests.support.on_loop import on_loop, until
from tests.support.remoting import RemotingSocket
from tests.support.scripted_server import ScriptedServer, Topics, refuses, scripted_server
from tests.unit.rocketstore.test_server import alone, plain, running


@pytest.fixture(params=[plain, alone], ids=["plain", "group"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerServer]:
    config: BrokerConfig = request.param(tmp_path)
    with running(config) as server:
        yield server


@asynccontextmanager
async def admin_of(broker: BrokerServer) -> AsyncIterator[Admin]:
    async with Admin(broker.address, timeout_s=30) as admin:
        yield admin


# -- brokers -----------------------------------------------------------------------------------------------------------


@on_loop
async def test_a_status_has_all_the_time_of_its_call(broker: BrokerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only that of an attempt, after which another broker would be asked: no other one can tell it."""
    monkeypatch.setattr(admin_requests, "ATTEMPT_S_MAX", 0.0)
    async with admin_of(broker) as admin:
        assert (await admin.status(broker.address)).address == broker.address
        assert isinstance((await admin.statuses())[broker.address], BrokerStatus)
        with pytest.raises(errors.ClientError):
            await admin.broker_config(broker.address)


@on_loop
async def test_a_broker_tells_what_it_is_and_what_it_is_set_to(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin:
        (found,) = await admin.brokers()
        assert (found.name, found.master) == (broker.config.name, broker.address)
        status = await admin.status(broker.address)
        assert status.runtime.node == broker.config.node_id
        assert status.table["brokerVersionDesc"] == status.runtime.version
        statuses = await admin.statuses()
        assert statuses.keys() == {broker.address}
        assert isinstance(statuses[broker.address], BrokerStatus)
        settings = await admin.broker_config(broker.address)
        assert settings["autoCreateTopicEnable"] == "true"
        await admin.set_broker_config(broker.address, {"autoCreateTopicEnable": "false"})
        assert (await admin.broker_config(broker.address))["autoCreateTopicEnable"] == "false"
        with pytest.raises(errors.ForbiddenError):
            await admin.set_broker_config(broker.address, {"brokerName": "other"})


# -- topics ------------------------------------------------------------------------------------------------------------


@on_loop
async def test_topics_are_created_changed_listed_and_deleted(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin:
        name = broker.config.name
        await admin.put_topic(TopicInfo("orders", 2, 3))
        assert await admin.topic("orders") == [TopicInfo("orders", 2, 3, 6, name)]
        assert await admin.topics() == [TopicInfo("orders", 2, 3, 6, name)]
        assert {one.name for one in await admin.topics(system=True)} >= {"orders", "TBW102"}
        await admin.put_topic(TopicInfo("orders", 4, 4, 4, name))
        assert await admin.topics() == [TopicInfo("orders", 4, 4, 4, name)]
        await admin.delete_topic("orders")
        assert await admin.topics() == []
        await asyncio.sleep(routes.UNKNOWN_REFRESH_S)  # a route that was looked up is used for so long at least
    async with admin_of(broker) as admin:
        with pytest.raises(errors.NotFoundError, match="topic orders does not exist"):
            await admin.delete_topic("orders")
        with pytest.raises(errors.ClientError, match="queue"):
            await admin.put_topic(TopicInfo("bad", 0, 0))


@on_loop
async def test_names_that_no_broker_takes_are_refused_at_once() -> None:
    """A broker's answer to them leaves open whether it has done anything."""
    async with Admin("127.0.0.1:1") as admin:
        with pytest.raises(ConfigError, match="the topic 'a b' has characters other than"):
            await admin.put_topic(TopicInfo("a b"))
        with pytest.raises(ConfigError, match="the topic SELF_TEST_TOPIC is reserved for the broker"):
            await admin.put_topic(TopicInfo("SELF_TEST_TOPIC"))
        with pytest.raises(ConfigError, match="group 'a b': 1 to 120 of the characters"):
            await admin.put_group(GroupInfo("a b"))


@on_loop
async def test_a_queues_offsets_are_its_first_its_end_and_by_time(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("orders", 2, 2))
        for number in range(3):
            await producer.send(Message("orders", b"%d" % number), queue=1)
        queue = MessageQueue("orders", broker.config.name, 1)
        await until(lambda: broker.store.max_offset("orders", 1) == 3, "all are in their queue")
        ranges = await admin.queue_ranges("orders")
        assert [(one.queue.queue_id, one.min_offset, one.max_offset) for one in ranges] == [(0, 0, 0), (1, 0, 3)]
        (first, *_), _ = await admin.messages(queue, 0)
        assert ranges[1].last_update_ms >= first.store_timestamp
        assert await admin.offset_at(queue, "first") == 0
        assert await admin.offset_at(queue, "last") == 3
        assert await admin.offset_at(queue, first.store_timestamp) == 0
        assert await admin.offset_at(queue, first.store_timestamp + 3_600_000) == 3
        await admin.put_topic(TopicInfo("orders", 2, 1))
        drained = await admin.queue_ranges("orders")
        assert [(one.queue.queue_id, one.min_offset, one.max_offset) for one in drained] == [(0, 0, 0), (1, 0, 3)]
        with pytest.raises(errors.NotFoundError):
            await admin.queue_ranges("nowhere")


# -- messages ----------------------------------------------------------------------------------------------------------


@on_loop
async def test_messages_are_found_by_id_by_key_and_by_place(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("orders", 1, 1))
        sent = [
            await producer.send(Message("orders", b"%d" % number, keys=["k1", f"n{number}"])) for number in range(5)
        ]
        queue = MessageQueue("orders", broker.config.name, 0)
        await until(lambda: broker.store.max_offset("orders", 0) == 5, "all are in their queue")
        assert (await admin.message_by_id(sent[2].offset_id)).body == b"2"
        last = broker.store.position_of("orders", 0, 4)
        await until(lambda: broker.store.index_end().offset == last, "all are in the index")
        assert [one.body for one in await admin.messages_by_key("orders", "k1")] == [b"%d" % one for one in range(5)]
        assert [one.body for one in await admin.messages_by_key("orders", "n3")] == [b"3"]
        assert len(await admin.messages_by_key("orders", "k1", max_messages=2)) == 2
        found = await admin.messages_by_key("orders", sent[4].message_id, unique=True)
        assert [one.body for one in found] == [b"4"]
        assert await admin.messages_by_key("orders", "none") == []
        messages, following = await admin.messages(queue, 1, max_messages=2)
        assert ([one.body for one in messages], following) == ([b"1", b"2"], 3)
        assert await admin.messages(queue, 5) == ([], 5)
        other = sent[0].offset_id[:-16] + f"{1 << 40:016X}"
        for nothing in (other, "junk", "7F000001" + "FFFFFFFF" + "0" * 16):
            with pytest.raises(errors.NotFoundError):
                await admin.message_by_id(nothing)


@on_loop
async def test_a_brokers_own_copy_is_read_at_it_whatever_others_have(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("orders", 1, 1))
        assert "orders" in await admin.topics_at(broker.address)
        for number in range(3):
            await producer.send(Message("orders", b"%d" % number))
        await until(lambda: broker.store.max_offset("orders", 0) == 3, "all are in their queue")
        part = await admin.read_at(broker.address, "orders", 0, 1, max_messages=1)
        assert [(one.body, one.queue_offset) for one in part.messages] == [(b"1", 1)]
        assert (part.next_offset, part.min_offset, part.max_offset) == (2, 0, 3)
        assert (await admin.read_at(broker.address, "orders", 0, 3)).messages == ()
        with pytest.raises(errors.NotFoundError):
            await admin.read_at(broker.address, "nowhere", 0, 0)


@on_loop
async def test_a_broker_that_has_just_started_is_given_time() -> None:
    """It refuses reads until it knows what is committed: that is no finding about its copy."""
    fields = {"nextBeginOffset": "0", "minOffset": "0", "maxOffset": "0", "suggestWhichBrokerId": "0"}
    answers = [refuses(AnswerCode.SERVICE_NOT_AVAILABLE)] * 2
    async with scripted_server() as server:
        Topics({"a": {0: server.address}}, {"T": {"a": 1}}).serve(server)
        nothing = AnswerCode.PULL_NOT_FOUND
        server.scripts[RequestCode.PULL_MESSAGE] = lambda frame: (
            answers.pop()(frame) if answers else frame.answer(nothing, fields=fields)
        )
        async with Admin(server.address) as admin:
            assert (await admin.read_at(server.address, "T", 0, 0)).max_offset == 0
        assert len(server.of(RequestCode.PULL_MESSAGE)) == 3


def test_garbage_instead_of_records_is_an_error() -> None:
    record = encode_record(Message("T", b"x"))
    assert [one.body for one in decoded(record + record)] == [b"x", b"x"]
    for bad in (record[:-1], record + b"\0\0\0\0", b"\0\0\0\x08junk", record[:4] + b"\0" * (len(record) - 4)):
        with pytest.raises(errors.BadAnswerError):
            decoded(bad)


# -- groups and offsets ------------------------------------------------------------------------------------------------


@on_loop
async def test_groups_are_created_changed_listed_and_deleted(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin:
        await admin.put_group(GroupInfo("billing", 3, may_broadcast=False))
        name = broker.config.name
        assert await admin.groups() == [GroupInfo("billing", 3, True, False, name, False, "levels")]
        delays = FixedRetryDelays((1000, 5000))
        await admin.put_group(GroupInfo("billing", 5, is_ordered=True, retry_delays=delays))
        assert await admin.groups() == [GroupInfo("billing", 5, True, False, name, True, delays)]
        await admin.put_group(GroupInfo("billing", may_broadcast=True))
        assert await admin.groups() == [GroupInfo("billing", 5, True, True, name, True, delays)]
        await admin.put_group(GroupInfo("billing", retry_delays="levels"))
        assert await admin.groups() == [GroupInfo("billing", 5, True, True, name, True, "levels")]
        await admin.delete_group("billing")
        assert await admin.groups() == []


@on_loop
async def test_offsets_of_a_group_are_set_reset_and_compared(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("orders", 2, 2))
        await admin.put_group(GroupInfo("billing"))
        for number in range(10):
            await producer.send(Message("orders", b"%d" % number), queue=number % 2)
        await until(lambda: broker.store.max_offset("orders", 1) == 5, "all are in their queues")
        first, second = (MessageQueue("orders", broker.config.name, one) for one in range(2))
        with pytest.raises(errors.NotFoundError, match="group billing has no offsets"):
            await admin.progress("billing")
        await admin.set_offsets("billing", {first: 2, second: 5})
        assert await admin.offsets("billing") == {first: 2, second: 5}
        assert [one.lag for one in await admin.progress("billing", "orders")] == [3, 0]
        assert await admin.lag("billing") == 3
        assert await admin.reset_offsets("billing", "orders", "first") == {first: 0, second: 0}
        assert await admin.lag("billing") == 10
        assert await admin.reset_offsets("billing", "orders", "last") == {first: 5, second: 5}
        assert await admin.lag("billing") == 0
        messages, _ = await admin.messages(first, 3)
        assert (await admin.reset_offsets("billing", "orders", messages[0].store_timestamp))[first] <= 3
        with pytest.raises(errors.ClientError):
            await admin.set_offsets("billing", {first: 1000})


@on_loop
async def test_who_is_online_is_listed_and_told_of_a_reset(broker: BrokerServer) -> None:
    async with admin_of(broker) as admin, Producer(broker.address, timeout_s=30) as producer:
        await admin.put_topic(TopicInfo("orders", 1, 1))
        await producer.send(Message("orders", b"x"), queue=0)
        await until(lambda: broker.store.max_offset("orders", 0) == 1, "it is in its queue")
        with pytest.raises(errors.NotFoundError):
            await admin.members("billing")
        with pytest.raises(errors.NotFoundError):
            await admin.producers("billing")
        with RemotingSocket(broker.port) as member:
            await asyncio.to_thread(member.subscribe, "billing", "orders", "new || paid", client_id="c1")
            found = await admin.members("billing")
            assert [one.client_id for one in found.clients] == ["c1"]
            assert found.topics["orders"] == "new || paid"
            assert [one.client_id for one in await admin.producers("billing")] == ["c1"]
            queue = MessageQueue("orders", broker.config.name, 0)
            await admin.set_offsets("billing", {queue: 1})
            assert await admin.groups_of_topic("orders") == ["billing"]
            await admin.reset_offsets("billing", "orders", "first")
            told = await asyncio.to_thread(member.request, RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
            assert told.fields["topic"] == "orders"
        assert await admin.offsets("billing") == {queue: 0}


# -- several brokers, name servers -------------------------------------------------------------------------------------


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Admin, Topics, list[ScriptedServer]]]:
    """Two brokers behind a name server; what they are asked to change, they do."""
    async with scripted_server() as first, scripted_server() as second, scripted_server() as name_server:
        topics = Topics({"a": {0: first.address}, "b": {0: second.address}}, {"T": {"a": 1, "b": 1}})
        topics.serve(name_server)
        async with Admin(name_servers=name_server.address, timeout_s=60) as admin:
            yield admin, topics, [first, second, name_server]


def agrees(server: ScriptedServer, *codes: int) -> None:
    for code in codes:
        server.scripts[code] = lambda frame: frame.answer()


@on_loop
async def test_changes_go_to_all_brokers_also_if_one_of_them_refuses() -> None:
    code = RequestCode.UPDATE_AND_CREATE_TOPIC
    async with pair() as (admin, _, (first, second, _name_server)):
        first.scripts[code] = refuses(AnswerCode.NO_PERMISSION, "not you")
        agrees(second, code)
        with pytest.raises(errors.ForbiddenError, match="not you"):
            await admin.put_topic(TopicInfo("U", 8, 8))
        assert second.of(code)[0].fields["readQueueNums"] == "8"
        agrees(first, code)
        await admin.put_topic(TopicInfo("U", 8, 8, broker="a"))
        assert (len(first.of(code)), len(second.of(code))) == (2, 1)
        with pytest.raises(errors.NotFoundError, match="no brokers are named c"):
            await admin.put_topic(TopicInfo("U", broker="c"))


@on_loop
async def test_a_deleted_topic_is_deleted_at_name_servers_too() -> None:
    async with pair() as (admin, _, (first, second, name_server)):
        agrees(first, RequestCode.DELETE_TOPIC_IN_BROKER)
        agrees(second, RequestCode.DELETE_TOPIC_IN_BROKER)
        agrees(name_server, RequestCode.DELETE_TOPIC_IN_NAMESRV)
        await admin.delete_topic("T")
        assert all(one.of(RequestCode.DELETE_TOPIC_IN_BROKER) for one in (first, second))
        assert name_server.of(RequestCode.DELETE_TOPIC_IN_NAMESRV)[0].fields["topic"] == "T"


@on_loop
async def test_the_write_permission_of_a_broker_is_a_matter_of_name_servers() -> None:
    wipe, add = RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER
    async with pair() as (admin, _, (_first, _second, name_server)):
        agrees(name_server, wipe, add)
        await admin.set_write_permission("a", allowed=False)
        await admin.set_write_permission("a", allowed=True)
        assert [one.fields["brokerName"] for one in name_server.of(wipe) + name_server.of(add)] == ["a", "a"]
    async with Admin("127.0.0.1:1") as admin:
        with pytest.raises(ConfigError, match="give name_servers"):
            await admin.set_write_permission("a", allowed=False)


@on_loop
async def test_a_broker_that_does_not_answer_does_not_hide_the_others() -> None:
    async with pair() as (admin, _, (first, second, _name_server)):
        first.scripts[RequestCode.GET_BROKER_RUNTIME_INFO] = lambda frame: frame.answer(
            body=b'{"table":{"brokerVersionDesc":"V5_1_0"}}'
        )
        await second.stop()
        found = await admin.statuses()
        status = found[first.address]
        assert isinstance(status, BrokerStatus)
        assert status.runtime.version == "V5_1_0"
        assert isinstance(found[second.address], errors.BrokerUnreachableError)


@on_loop
async def test_an_answer_that_cannot_be_read_names_the_broker() -> None:
    async with pair() as (admin, _, (first, second, _name_server)):
        agrees(second, RequestCode.GET_TOPIC_STATS_INFO)
        first.scripts[RequestCode.GET_TOPIC_STATS_INFO] = lambda frame: frame.answer(body=b"[]")
        with pytest.raises(errors.BadAnswerError, match="a answered with a TopicStatsTable that cannot be read"):
            await admin.queue_ranges("T")


@on_loop
async def test_an_id_of_a_broker_elsewhere_is_not_asked_here() -> None:
    """A wrong message would be shown."""
    async with pair() as (admin, _, _servers):
        with pytest.raises(errors.NotFoundError, match=r"the id names the broker 192.0.2.1:10911"):
            await admin.message_by_id("C0000201" + f"{10911:08X}" + "0" * 16)


@on_loop
async def test_tags_are_compared_here_too() -> None:
    """RocketMQ's brokers compare only hash codes: ``Aa`` and ``BB`` have the same."""
    records = b"".join(encode_record(Message("T", tag.encode(), properties={"TAGS": tag})) for tag in ("Aa", "BB"))
    fields = {"nextBeginOffset": "2", "minOffset": "0", "maxOffset": "2", "suggestWhichBrokerId": "0"}
    async with scripted_server() as server:
        Topics({"a": {0: server.address}}, {"T": {"a": 1}}).serve(server)
        server.scripts[RequestCode.PULL_MESSAGE] = lambda frame: frame.answer(fields=fields, body=records)
        async with Admin(server.address) as admin:
            found, following = await admin.messages(MessageQueue("T", "a", 0), 0, expression="BB")

        assert ([one.body for one in found], following) == ([b"BB"], 2)
        assert server.of(RequestCode.PULL_MESSAGE)[0].fields["subscription"] == "BB"
