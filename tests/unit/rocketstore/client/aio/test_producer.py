"""``Producer`` against scripted brokers: where messages go, what is repeated, what an error says, what is bounded."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import FLAG_ONEWAY, Frame
from rocketstore.client.aio import errors, queue_sends, routes
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.errors import SendStatus
from rocketstore.client.aio.outgoing import PipelineLimits
from rocketstore.client.aio.producer import Producer, ProducerOptions
from rocketstore.message.message import Message
from rocketstore.message.properties import java_hash
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import (
    MessageStore,
    ScriptedServer,
    Topics,
    refuses,
    scripted_server,
    silence,
    stores_silently,
)

SEND, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE


class World:
    """Two brokers, each alone, and what they keep; both tell routes."""

    def __init__(self, servers: list[ScriptedServer]) -> None:
        self.servers = servers
        self.a, self.b = servers
        self.stores = [MessageStore(), MessageStore()]
        brokers = {name: {0: server.address} for name, server in zip("ab", servers, strict=True)}
        self.topics = Topics(brokers, {"T": {"a": 2, "b": 2}, "A": {"a": 4}})
        for server, store in zip(servers, self.stores, strict=True):
            self.topics.serve(server)
            store.serve(server)

    def bodies(self) -> list[bytes]:
        return sorted(body for one in self.stores for body in one.bodies())

    def producer(
        self, timeout_s: float = 20.0, *, limits: PipelineLimits | None = None, allow_duplicates: bool = False
    ) -> Producer:
        options = ProducerOptions(
            allow_duplicates=allow_duplicates, close_timeout_s=5, limits=limits or PipelineLimits()
        )
        return Producer([one.address for one in self.servers], timeout_s=timeout_s, options=options)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with scripted_server() as first, scripted_server() as second:
        yield World([first, second])


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.02)


def message(body: bytes = b"x", topic: str = "T", delay_level: int = 0) -> Message:
    return Message(topic, body, delay_level=delay_level)


# -- where messages go -------------------------------------------------------------------------------------------------


@on_loop
async def test_a_result_says_where_the_message_is_and_how_safely() -> None:
    async with world() as here, here.producer() as producer:
        here.stores[0].status = AnswerCode.FLUSH_SLAVE_TIMEOUT
        first = await producer.send(message(b"0", "A"), queue=3)
        second = await producer.send(message(b"1", "A"), queue=3)
        assert (first.topic, first.broker, first.queue, first.offset) == ("A", "a", 3, 0)
        assert second.offset == 1
        assert first.status is SendStatus.FLUSH_SLAVE_TIMEOUT
        assert first.offset_id == f"{7:032X}"
        assert first.message_id != second.message_id
        assert here.stores[0].messages[0].properties == f"UNIQ_KEY\x01{first.message_id}"


@on_loop
async def test_messages_are_spread_over_all_queues_of_all_brokers() -> None:
    async with world() as here, here.producer() as producer:
        found = [await producer.send(message()) for _ in range(8)]
        assert sorted((one.broker, one.queue) for one in found) == sorted([("a", 0), ("a", 1), ("b", 0), ("b", 1)] * 2)


@on_loop
async def test_a_key_always_chooses_the_queue_that_rocketmqs_hash_chooses() -> None:
    """``SelectMessageQueueByHash``; queues are counted by broker, then by number."""
    async with world() as here, here.producer() as producer:
        places = {(one.broker, one.queue) for one in [await producer.send(message(), key="order-1") for _ in range(5)]}
        assert len(places) == 1
        spread = {(await producer.send(message(), key=str(one))).broker for one in range(10)}
        assert spread == {"a", "b"}
        number = abs(java_hash("order-1")) % 4
        assert places == {("ab"[number // 2], number % 2)}


@on_loop
async def test_a_number_is_enough_for_a_queue_if_only_one_broker_has_the_topic() -> None:
    async with world() as here, here.producer() as producer:
        assert (await producer.send(message(topic="A"), queue=2)).queue == 2
        with pytest.raises(errors.NoQueueError, match="has a queue 1 at each of a, b: give a MessageQueue"):
            await producer.send(message(), queue=1)
        found = await producer.send(message(), queue=MessageQueue("T", "b", 1))
        assert (found.broker, found.queue) == ("b", 1)
        with pytest.raises(errors.NoQueueError, match="no writable queue 9"):
            await producer.send(message(topic="A"), queue=9)
        with pytest.raises(ConfigError, match="give either key or queue"):
            await producer.send(message(), queue=1, key="k")
        with pytest.raises(TypeError, match="key must be a str, not int"):
            await producer.send(message(), key=7)  # type: ignore[arg-type]  # which is the point
        with pytest.raises(TypeError, match="queue must be a number or a MessageQueue, not '1'"):
            await producer.send(message(), queue="1")  # type: ignore[arg-type]
        with pytest.raises(errors.MessageRefusedError, match="the topic 'a b' has characters other than"):
            await producer.send(message(topic="a b"))


@on_loop
async def test_a_topic_that_may_not_be_written_is_refused() -> None:
    async with world() as here, here.producer() as producer:
        here.topics.permission = 4
        with pytest.raises(errors.ForbiddenError, match="topic T does not allow writes"):
            await producer.send(message())
        with pytest.raises(errors.ForbiddenError, match="topic T does not allow writes"):
            await producer.send(message(), key="k")


@on_loop
async def test_a_topic_that_does_not_exist_is_created_where_brokers_do_that() -> None:
    """As RocketMQ's producers do: by the queues of TBW102, four at most. A key needs a topic that exists."""
    async with world() as here, here.producer() as producer:
        with pytest.raises(errors.NotFoundError, match="topic N does not exist"):
            await producer.send(message(topic="N"))
        here.topics.topics["TBW102"] = {"b": 8}
        await asyncio.sleep(0.05)  # for the topic is looked up twice a second at most
        with pytest.raises(errors.NotFoundError, match="neither a key nor a number"):
            await producer.send(message(topic="N"), key="k")
        found = await producer.send(message(topic="N"))
        assert found.broker == "b"
        (request,) = here.b.of(SEND)
        assert (request.fields["b"], request.fields["c"], request.fields["d"]) == ("N", "TBW102", "4")
        here.topics.topics["N"] = {"b": 4}
        assert (await producer.send(message(topic="N"), key="k")).broker == "b"  # found at once


# -- batches and order -------------------------------------------------------------------------------------------------


@on_loop
async def test_what_is_submitted_together_is_sent_together() -> None:
    async with world() as here, here.producer() as producer:
        await producer.send(message(topic="A"))
        futures = [await producer.submit(message(b"%d" % one, "A")) for one in range(100)]
        found = await asyncio.gather(*futures)
        assert len(here.a.of(BATCH)) == 1
        assert [one.offset for one in found] == list(range(found[0].offset, found[0].offset + 100))
        assert here.stores[0].bodies(found[0].queue)[-100:] == [b"%d" % one for one in range(100)]
        assert len({one.message_id for one in found}) == 100


@on_loop
async def test_batches_are_bounded_by_count_and_bytes() -> None:
    limits = PipelineLimits(batch_messages_max=10, batch_bytes_max=4000)
    async with world() as here, here.producer(limits=limits) as producer:
        await producer.send_many([message(b"%d" % one, "A") for one in range(25)])
        await producer.send_many([message(b"z" * 1500, "A") for _ in range(4)])
        sizes = [len(one.body) for one in here.a.of(BATCH)]
        assert len(here.a.requests) >= 3 + 2
        assert all(size <= 4000 for size in sizes)
        assert len(here.stores[0].messages) == 29


@on_loop
async def test_delayed_messages_go_alone() -> None:
    """RocketMQ refuses batches with them."""
    async with world() as here, here.producer() as producer:
        await producer.send_many([message(b"1", "A"), message(b"2", "A", delay_level=3), message(b"3", "A")])
        assert here.a.of(BATCH) == []
        (delayed,) = [one for one in here.a.of(SEND) if one.body == b"2"]
        assert "DELAY\x013" in delayed.fields["i"]


@on_loop
async def test_messages_of_a_key_keep_their_order_across_retries() -> None:
    """One request per queue is in progress, and what was not stored goes before what comes behind it."""
    async with world() as here, here.producer() as producer:
        store = here.stores[0]
        codes = AnswerCode.SYSTEM_BUSY, AnswerCode.FLOW_CONTROL, AnswerCode.SERVICE_NOT_AVAILABLE
        store.answers.extend(map(refuses, codes))
        futures = []
        for one in range(200):
            futures.append(await producer.submit(message(b"%d" % one, "A"), key="k"))
            if one % 20 == 0:
                await asyncio.sleep(0)
        found = await asyncio.gather(*futures)
        queue = found[0].queue
        assert store.bodies(queue) == [b"%d" % one for one in range(200)]
        assert [one.offset for one in found] == list(range(200))


@on_loop
async def test_a_topic_that_is_made_smaller_fails_no_message_and_each_key_keeps_its_order() -> None:
    """At brokers that do not number messages; a queue that the caller has chosen stays chosen."""
    async with world() as here, here.producer() as producer:
        store = here.stores[0]
        here.topics.topics["A"]["a"] = 8
        await producer.send_many([message(b"before %d" % one, "A") for one in range(8)])
        here.topics.topics["A"]["a"] = store.queues = 1
        keyed, free = [], []
        for one in range(200):
            keyed.append(await producer.submit(message(b"%d" % one, "A"), key=str(one % 7)))
            free.append(await producer.submit(message(b"free %d" % one, "A")))
            if one % 10 == 0:
                await asyncio.sleep(0.001)
        results = await asyncio.gather(*keyed, *free)
        assert {one.queue for one in results} == {0}
        found = store.bodies()[8:]
        assert len(found) == 400
        for key in range(7):
            mine = [int(one) for one in found if one.isdigit() and int(one) % 7 == key]
            assert mine == list(range(key, 200, 7))
        with pytest.raises(errors.NotFoundError, match="queue 5"):
            await producer.send(message(b"chosen", "A"), queue=5)


@on_loop
async def test_a_queue_has_one_request_in_progress() -> None:
    """RocketMQ's brokers have several threads for messages."""
    async with world() as here, here.producer() as producer:
        here.stores[0].held = asyncio.Event()
        futures = [await producer.submit(message(b"0", "A"), key="k")]
        await until(lambda: here.a.of(SEND), "the first is on its way")
        futures += [await producer.submit(message(b"%d" % one, "A"), key="k") for one in range(1, 10)]
        await producer.submit(message(b"other", "A"))
        await until(lambda: len(here.a.of(SEND)) == 2, "that for any queue is, too")
        assert here.a.of(BATCH) == []
        here.stores[0].held.set()
        await asyncio.gather(*futures)
        assert len(here.a.of(BATCH)) == 1


@on_loop
async def test_each_queue_has_its_turn_though_few_requests_may_be_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    in_progress = most = 0
    call = BrokerConnections.call

    async def counted(self: BrokerConnections, address: str, request: Frame, timeout_s: float) -> Frame:
        nonlocal in_progress, most
        if request.code != SEND:
            return await call(self, address, request, timeout_s)
        in_progress += 1
        most = max(most, in_progress)
        try:
            return await call(self, address, request, timeout_s)
        finally:
            in_progress -= 1

    monkeypatch.setattr(BrokerConnections, "call", counted)
    async with world() as here, here.producer(limits=PipelineLimits(requests_max=3)) as producer:
        here.topics.topics["A"] = {"a": 20}
        futures = [await producer.submit(message(b"%d" % one, "A"), queue=one) for one in range(20)]
        async with asyncio.timeout(10):
            assert [(await one).queue for one in futures] == list(range(20))
    assert most == 3


@on_loop
async def test_queues_of_a_broker_without_a_master_hold_up_no_others() -> None:
    options = ProducerOptions(close_timeout_s=5, limits=PipelineLimits(requests_max=1))
    async with world() as here, Producer([here.a.address], enable_idempotence=False, options=options) as producer:
        here.topics.brokers["b"] = {1: here.b.address}
        queues = [MessageQueue("T", "b", 0), MessageQueue("T", "b", 1), MessageQueue("T", "a", 0)]
        *waiting, found = await asyncio.gather(*(producer.submit(message(), queue=one) for one in queues))
        async with asyncio.timeout(10):
            assert (await found).broker == "a"
        assert not any(one.done() for one in waiting)
        here.topics.brokers["b"] = {0: here.b.address}
        async with asyncio.timeout(10):
            assert [(await one).queue for one in waiting] == [0, 1]


@on_loop
async def test_one_bad_message_of_a_batch_fails_alone() -> None:
    """The broker's limits are its own: if it refuses a batch, each message is sent by itself, in order."""
    async with world() as here, here.producer() as producer:
        store = here.stores[0]
        store.answers.extend([refuses(AnswerCode.MESSAGE_ILLEGAL, "too large")] * 2)
        futures = [await producer.submit(message(b"%d" % one, "A"), key="k") for one in range(5)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes[0], errors.MessageRefusedError)
        assert [type(one).__name__ for one in outcomes[1:]] == ["SendResult"] * 4
        assert store.bodies() == [b"1", b"2", b"3", b"4"]


# -- failures ----------------------------------------------------------------------------------------------------------


@on_loop
async def test_a_message_that_one_broker_does_not_take_goes_to_another_which_is_preferred_then() -> None:
    async with world() as here, here.producer() as producer:
        await here.a.stop()
        found = [await producer.send(message(b"%d" % one)) for one in range(10)]
        assert {one.broker for one in found} == {"b"}
        assert len(here.bodies()) == 10


@on_loop
async def test_who_wants_to_know_is_told_of_requests_that_fail_although_the_message_is_stored() -> None:
    """A monitor, or a drill: the message itself says nothing of it."""
    told: list[tuple[str, str]] = []

    def note(broker: str, error: errors.ClientError) -> None:
        told.append((broker, type(error).__name__))

    async with world() as here:
        await here.a.stop()
        options = ProducerOptions(on_failure=note)
        async with Producer([here.b.address], options=options, enable_idempotence=False) as producer:
            for _ in range(2):
                assert (await producer.send(message())).broker == "b"
    assert told == [("a", "BrokerUnreachableError")]


@pytest.mark.parametrize("code", [AnswerCode.NO_PERMISSION, AnswerCode.TOPIC_NOT_EXIST, AnswerCode.SYSTEM_BUSY])
@on_loop
async def test_rocketmqs_retryable_codes_are_tried_elsewhere(code: AnswerCode) -> None:
    """A broker whose permission was wiped, that does not have the topic yet, or is overloaded."""
    async with world() as here, here.producer() as producer:
        here.stores[0].answers.extend([refuses(code)] * 10)
        assert {(await producer.send(message())).broker for _ in range(4)} == {"b"}


@on_loop
async def test_what_no_broker_permits_fails_at_once() -> None:
    async with world() as here, here.producer() as producer:
        for store in here.stores:
            store.answers.extend([refuses(AnswerCode.NO_PERMISSION, "wrong key")] * 10)
        with pytest.raises(errors.ForbiddenError, match="wrong key"):
            await producer.send(message())
        assert len(here.a.of(SEND)) + len(here.b.of(SEND)) == 2
        with pytest.raises(errors.ForbiddenError, match="wrong key"):
            await producer.send(message(), key="k")
        assert len(here.a.of(SEND)) + len(here.b.of(SEND)) == 3


@on_loop
async def test_a_message_that_may_be_stored_is_not_sent_again() -> None:
    """Its outcome is unknown, and the caller decides; with allow_duplicates it is sent again, as by RocketMQ."""
    async with world() as here:
        async with here.producer(timeout_s=0.2) as producer:
            here.stores[0].answers.append(stores_silently)
            with pytest.raises(errors.TimedOutError) as caught:
                await producer.send(message(b"1", "A"))
            assert caught.value.outcome == "unknown"
            assert here.bodies() == [b"1"]
        async with here.producer(allow_duplicates=True) as producer:
            here.stores[0].answers.append(lambda frame: frame.answer(AnswerCode.SYSTEM_ERROR, "late"))
            await producer.send(message(b"2", "A"))
            assert here.bodies() == [b"1", b"2"]


@on_loop
async def test_a_doubt_is_not_forgotten_when_a_later_attempt_certainly_fails() -> None:
    async with world() as here, here.producer(timeout_s=0.5, allow_duplicates=True) as producer:
        here.stores[0].answers.append(lambda frame: frame.answer(AnswerCode.SYSTEM_ERROR, "late"))
        here.stores[0].answers.extend([refuses(AnswerCode.SERVICE_NOT_AVAILABLE)] * 100)
        with pytest.raises(errors.BrokerFailedError, match="late") as caught:
            await producer.send(message(b"1", "A"))
        assert caught.value.outcome == "unknown"


@on_loop
async def test_a_lost_connection_leaves_the_outcome_open_and_the_next_message_goes_through() -> None:
    async with world() as here, here.producer() as producer:
        here.stores[0].answers.append(silence)
        sent = asyncio.create_task(producer.send(message(b"1", "A")))
        await until(lambda: here.a.of(SEND), "it is on its way")
        here.a.hang_up()
        with pytest.raises(errors.ConnectionEndedError) as caught:
            await sent
        assert caught.value.outcome == "unknown"
        await producer.send(message(b"2", "A"))


@on_loop
async def test_until_there_is_a_master_again_messages_wait() -> None:
    async with world() as here, here.producer() as producer:
        here.topics.brokers["a"] = {1: here.a.address}
        sent = asyncio.create_task(producer.send(message(b"1", "A"), key="k"))
        await until(lambda: len(here.a.requests) + len(here.b.requests) > 5, "it is looking for one")
        here.topics.brokers["a"] = {0: here.a.address}
        assert (await sent).broker == "a"


@on_loop
async def test_without_a_master_by_the_deadline_nothing_was_stored() -> None:
    async with world() as here, here.producer(timeout_s=0.3) as producer:
        here.topics.brokers["a"] = {1: here.a.address}
        with pytest.raises(errors.BrokerUnreachableError, match="brokers a have no master now") as caught:
            await producer.send(message(b"1", "A"))
        assert caught.value.outcome == "not_applied"


@on_loop
async def test_if_nobody_tells_routes_the_error_says_why_by_the_deadline() -> None:
    async with world() as here, here.producer(timeout_s=0.3) as producer:
        await here.a.stop()
        await here.b.stop()
        with pytest.raises(errors.BrokerUnreachableError, match="no broker answered") as caught:
            await producer.send(message())
        assert caught.value.outcome == "not_applied"


@on_loop
async def test_apaches_brokers_need_name_servers_which_is_said_at_once() -> None:
    async with scripted_server() as server:
        MessageStore().serve(server)
        async with Producer(server.address, timeout_s=60) as producer:
            with pytest.raises(errors.RequestNotKnownError, match="give the addresses of name servers"):
                await producer.send(message())


@on_loop
async def test_garbage_in_an_answer_leaves_the_outcome_open() -> None:
    async with world() as here, here.producer() as producer:
        here.stores[0].answers.append(lambda frame: frame.answer(fields={"msgId": "x", "queueId": "many"}))
        with pytest.raises(errors.BadAnswerError) as caught:
            await producer.send(message(topic="A"))
        assert caught.value.outcome == "unknown"


@on_loop
async def test_send_many_says_of_each_message_what_became_of_it() -> None:
    limits = PipelineLimits(batch_messages_max=2)
    async with world() as here, here.producer(limits=limits) as producer:
        messages = [message(b"%d" % one, "A") for one in range(6)]
        here.stores[0].answers.extend([here.stores[0].store, refuses(AnswerCode.SYSTEM_ERROR)])
        with pytest.raises(errors.PartlySentError, match="4 of 6 messages stored, 2 of unknown outcome") as caught:
            await producer.send_many(messages, key="k")
        kinds = [type(one).__name__ for one in caught.value.results]
        assert kinds == ["SendResult"] * 2 + ["BrokerFailedError"] * 2 + ["SendResult"] * 2
        here.stores[0].answers.extend([refuses(AnswerCode.NO_PERMISSION)] * 3)
        with pytest.raises(errors.ForbiddenError):
            await producer.send_many(messages, key="k")
        assert await producer.send_many([]) == []


# -- refused before sending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Message("", b""), "the topic is empty"),
        (Message("T" * 128, b""), "has 128 characters; at most 127"),
        (Message("T", b"x" * (4 * 1024 * 1024 + 1)), "more than 4194304"),
        (Message("T", b"", 3), r"send\(message, queue=3\)"),
        (Message("T", b"", properties={"DELAY": "3"}), "delay_level"),
        (Message("T", b"", properties={"UNIQ_KEY": "x"}), "the producer sets it"),
        (Message("T", b"", properties={"TRAN_MSG": "true"}), "use Producer.transaction"),
        (Message("T", b"", properties={"a": "b\x02c"}), "0x02"),
        (Message("T", b"", properties={"a": "\ud800"}), "cannot send the message"),
        (Message("T", b"", properties={"a": "x" * 32_767}), "the properties take"),
    ],
)
@on_loop
async def test_a_message_that_no_broker_takes_is_refused_here(bad: Message, why: str) -> None:
    async with world() as here, here.producer() as producer:
        with pytest.raises(errors.MessageRefusedError, match=why) as caught:
            await producer.submit(bad)
        assert caught.value.outcome == "not_applied"
        assert here.a.of(SEND) + here.b.of(SEND) == []
        assert producer.pending_messages == 0


@on_loop
async def test_something_else_than_a_message_is_an_error_in_the_program() -> None:
    async with world() as here, here.producer() as producer:
        with pytest.raises(TypeError, match=r"a producer sends Message\(topic, body\), not str"):
            await producer.send("hello")  # type: ignore[arg-type]  # which is the point


# -- bounds, and the end -----------------------------------------------------------------------------------------------


@on_loop
async def test_who_submits_faster_than_brokers_store_waits_and_then_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = PipelineLimits(pending_messages_max=10)
    async with world() as here, here.producer(limits=limits) as producer:
        here.stores[0].held = asyncio.Event()
        futures = [await producer.submit(message(b"%d" % one, "A")) for one in range(10)]
        monkeypatch.setattr(producer._cluster, "timeout_s", 0.05)
        with pytest.raises(errors.SendQueueFullError, match=r"10 messages with [0-9]+ bytes are not sent yet"):
            await producer.submit(message(b"10", "A"))
        assert producer.pending_messages == 10
        here.stores[0].held.set()
        await asyncio.gather(*futures)


@on_loop
async def test_who_waits_for_room_goes_on_as_soon_as_there_is_some() -> None:
    limits = PipelineLimits(pending_bytes_max=2000)
    async with world() as here, here.producer(limits=limits) as producer:
        here.stores[0].held = asyncio.Event()
        futures = [await producer.submit(message(b"x" * 1000, "A")) for _ in range(2)]
        waiting = [asyncio.create_task(producer.submit(message(b"y" * 1000, "A"))) for _ in range(3)]
        await until(lambda: here.a.of(SEND) or here.a.of(BATCH), "the first are on their way")
        assert not any(one.done() for one in waiting)
        here.stores[0].held.set()
        futures += await asyncio.gather(*waiting)
        await asyncio.gather(*futures)
        assert producer.pending_messages == 0


@on_loop
async def test_a_cancelled_send_that_waits_is_not_sent() -> None:
    async with world() as here, here.producer() as producer:
        here.stores[0].held = asyncio.Event()
        first = await producer.submit(message(b"0", "A"), key="k")
        await until(lambda: here.a.of(SEND), "it is on its way")
        second = await producer.submit(message(b"1", "A"), key="k")
        third = await producer.submit(message(b"2", "A"), key="k")
        second.cancel()
        here.stores[0].held.set()
        await asyncio.gather(first, third)
        assert here.bodies() == [b"0", b"2"]
        assert producer.pending_messages == 0


@on_loop
async def test_flush_waits_for_everything_submitted_before() -> None:
    async with world() as here, here.producer() as producer:
        futures = [await producer.submit(message(b"%d" % one)) for one in range(50)]
        await producer.flush()
        assert all(one.done() for one in futures)
        assert len(here.bodies()) == 50


@on_loop
async def test_closing_sends_what_is_pending_and_then_refuses() -> None:
    async with world() as here:
        producer = here.producer()
        futures = [await producer.submit(message(b"%d" % one)) for one in range(50)]
        await asyncio.gather(producer.close(), producer.close())
        assert all(one.done() and one.exception() is None for one in futures)
        with pytest.raises(errors.ClientClosedError):
            await producer.send(message())
        await producer.close()


@on_loop
async def test_closing_does_not_wait_for_ever() -> None:
    """What is left has an outcome: not sent, or perhaps stored."""
    async with world() as here:
        here.stores[0].held = asyncio.Event()
        options = ProducerOptions(close_timeout_s=0.1)
        producer = Producer(here.a.address, timeout_s=60, options=options)
        sent = await producer.submit(message(b"0", "A"), key="k")
        await until(lambda: here.a.of(SEND), "it is on its way")
        waiting = await producer.submit(message(b"1", "A"), key="k")
        await producer.close()
        outcomes = [one.exception() for one in (sent, waiting)]
        assert [getattr(one, "outcome", None) for one in outcomes] == ["unknown", "not_applied"]
        assert producer.pending_messages == 0


@on_loop
async def test_what_closing_says_is_not_sent_is_not_sent_afterwards_either() -> None:
    """The end of one request makes room for the next one of its queue, which nothing may use any more."""
    async with world() as here:
        here.stores[0].held = asyncio.Event()
        producer = Producer(here.a.address, timeout_s=60, options=ProducerOptions(close_timeout_s=0.1))
        futures = [await producer.submit(message(b"0", "A"), key="k")]
        await until(lambda: here.a.of(SEND), "it is on its way")
        futures += [await producer.submit(message(b"%d" % one, "A"), key="k") for one in range(1, 5)]
        pipeline = producer._pipeline
        assert pipeline is not None
        await producer.close()
        assert [getattr(one.exception(), "outcome", "") for one in futures] == ["unknown"] + 4 * ["not_applied"]
        sends = pipeline._queue_sends
        assert (len(sends._tasks), len(sends._ready), len(sends._waiting)) == (0, 0, 0)
        here.stores[0].held.set()
        assert [request.body for request in here.a.of(SEND)] == [b"0"]
        assert here.a.of(BATCH) == []


@on_loop
async def test_nothing_is_kept_of_topics_and_queues_that_are_done() -> None:
    async with world() as here, here.producer() as producer:
        for one in range(20):
            await producer.send(message(b"x", "A"), key=str(one))
        pipeline = producer._pipeline
        assert pipeline is not None
        sends = pipeline._queue_sends
        await until(lambda: not (sends._waiting or sends._ready or sends._tasks or pipeline._unplaced), "empty")
        assert pipeline.pending.bytes == 0


@on_loop
async def test_an_unused_producer_costs_nothing_and_needs_no_loop() -> None:
    producer = await asyncio.to_thread(Producer, "127.0.0.1:1")
    await producer.close()
    await producer.close()
    del producer
    gc.collect()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "give either the addresses of brokers, or name_servers"),
        ({"addresses": "localhost"}, "invalid address 'localhost'"),
        ({"addresses": "192.0.2.1:10911"}, "plaintext is for loopback addresses only"),
        ({"addresses": "127.0.0.1:1", "check": print}, "give group=… beside check=…"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Producer(**arguments)


def test_a_producer_serves_one_loop() -> None:
    """A second asyncio.run needs another one: its connections ended with the first."""
    producer = Producer("127.0.0.1:1", timeout_s=0.05)

    async def use() -> None:
        with pytest.raises(errors.BrokerUnreachableError):
            await producer.send(message())

    asyncio.run(use())

    async def use_again() -> None:
        with pytest.raises(errors.ClientClosedError, match="make one for each loop"):
            await producer.send(message())

    asyncio.run(use_again())


@pytest.mark.parametrize("kind", [Producer, Admin])
def test_closed_on_a_second_loop_a_client_says_where_to_close_it(kind: type[Producer | Admin]) -> None:
    """Its connections belong to the first one, and a loop that has ended cannot close any."""
    first = asyncio.new_event_loop()
    here = world()
    servers = first.run_until_complete(here.__aenter__())
    client = kind(servers.a.address)
    if isinstance(client, Producer):
        first.run_until_complete(client.send(message()))
    else:
        first.run_until_complete(client.brokers())
    for _ in range(2):
        with pytest.raises(errors.ClientClosedError, match="make one for each loop, and close it there"):
            asyncio.run(client.close())
    first.run_until_complete(client.close())
    asyncio.run(client.close())  # nothing is left to close
    first.run_until_complete(here.__aexit__(None, None, None))
    first.close()


# -- oneway ------------------------------------------------------------------------------------------------------------


@on_loop
async def test_oneway_messages_are_sent_once_and_not_answered() -> None:
    async with world() as here, here.producer() as producer:
        await producer.send_oneway(message(b"1", "A"), key="k")
        await until(lambda: here.bodies() == [b"1"], "it has arrived")
        assert here.a.of(SEND)[0].flag & FLAG_ONEWAY
        with pytest.raises(errors.NotFoundError):
            await producer.send_oneway(message(topic="nowhere"))
        await here.a.stop()
        connections = producer._cluster.connections
        await until(lambda: not connections.is_open(here.a.address), "the end of the connection was heard of")
        with pytest.raises(errors.BrokerUnreachableError):
            await producer.send_oneway(message(topic="A"))


def test_brokers_that_failed_are_passed_over_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """And used again when there is no other, or once they have worked."""

    async def main() -> None:
        cache = routes.RouteCache(None)  # type: ignore[arg-type]  # nothing is looked up
        for name in "ab":
            cache._brokers[name] = routes.RoutedBroker("C", name, {0: f"{name}:1"})
        parts = (routes.TopicQueues("a", 2, 2, 6), routes.TopicQueues("b", 2, 2, 6))
        route, selector = routes.TopicRoute("T", parts), queue_sends.QueueSelector(cache)

        def chosen(*tried: str) -> set[str]:
            return {selector.next(route, tried).broker_name for _ in range(8)}

        assert chosen() == {"a", "b"}
        selector.avoid("a")
        assert chosen() == {"b"}
        assert chosen("b") == {"a"}
        selector.avoid("b")
        assert chosen() == {"a", "b"}
        selector.works_again("b")
        assert chosen() == {"b"}
        monkeypatch.setattr(queue_sends, "AVOIDED_S", -1.0)
        selector.avoid("a")
        assert chosen() == {"a", "b"}
        cache._brokers["b"] = routes.RoutedBroker("C", "b", {1: "b:1"})
        assert chosen() == {"a"}  # the other has no master

    asyncio.run(main())
