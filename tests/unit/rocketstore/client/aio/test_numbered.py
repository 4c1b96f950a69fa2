"""Idempotent sends: what is sent again is stored once, whatever became of the requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from dledger.sending import window
from rocketstore.client.aio import errors, numbered, routes
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.errors import NO_OFFSET, SendResult
from rocketstore.client.aio.outgoing import outgoing
from rocketstore.client.aio.producer import Producer, ProducerOptions
from rocketstore.client.aio.queue_sends import OnFailure
from rocketstore.message.message import Message
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import NumberedSend
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import (
    MessageStore,
    Reply,
    ScriptedServer,
    Topics,
    refuses,
    scripted_server,
    silence,
    stores_silently,
)
from tests.unit.rocketstore.client.aio.test_real_broker import stored
from tests.unit.rocketstore.test_server import alone, running

NUMBERED = OwnCode.SEND_NUMBERED


class World:
    """Brokers that number messages, and what they keep."""

    def __init__(self, servers: dict[str, ScriptedServer]) -> None:
        self.servers = servers
        self.stores = {name: MessageStore() for name in servers}
        self.topics = Topics(
            {name: {0: one.address} for name, one in servers.items()}, {"T": dict.fromkeys(servers, 2)}
        )
        for name, server in servers.items():
            self.topics.serve(server)
            self.stores[name].serve_numbered(server)
        self.a, self.store = servers["a"], self.stores["a"]

    def producer(
        self, timeout_s: float = 20.0, enable_idempotence: bool | str = "auto", on_failure: OnFailure | None = None
    ) -> Producer:
        return Producer(
            [one.address for one in self.servers.values()],
            timeout_s=timeout_s,
            enable_idempotence=enable_idempotence,  # type: ignore[arg-type]  # one of three
            options=ProducerOptions(close_timeout_s=20, on_failure=on_failure),
        )

    def numbered(self) -> list[NumberedSend]:
        return [NumberedSend.decode(one.body) for one in self.a.of(NUMBERED)]


@asynccontextmanager
async def world(*names: str) -> AsyncIterator[World]:
    async with scripted_server() as first, scripted_server() as second:
        servers = {"a": first, "b": second}
        yield World({name: servers[name] for name in names or ("a",)})


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.02)


def message(body: bytes) -> Message:
    return Message("T", body)


def bodies(count: int) -> list[bytes]:
    return [b"%d" % one for one in range(count)]


@on_loop
async def test_messages_are_numbered_where_the_broker_does_that() -> None:
    """By one sequence for all queues of a broker; each result says where the message is."""
    async with world() as here, here.producer() as producer:
        first = await producer.send(Message("T", b"0", tags="new", keys=["k"]), queue=1)
        assert (first.broker, first.queue, first.offset) == ("a", 1, 0)
        found = await producer.send_many([message(b"%d" % one) for one in range(1, 50)])
        assert sorted((one.queue, one.offset) for one in found if one.queue == 0) == [
            (0, one) for one in range(len([1 for each in found if each.queue == 0]))
        ]
        assert sorted(here.store.bodies()) == sorted(bodies(50))
        assert "TAGS\x01new" in here.store.messages[0].properties
        assert f"UNIQ_KEY\x01{first.message_id}" in here.store.messages[0].properties
        assert len({one.producer for one in here.numbered()}) == 1
        assert len(here.numbered()) <= 3
        assert here.a.of(RequestCode.SEND_MESSAGE_V2) == []


@on_loop
async def test_lost_answers_and_connections_store_nothing_twice_and_nothing_out_of_order() -> None:
    async with world() as here, here.producer() as producer:
        here.store.answers.extend([stores_silently, stores_silently])
        futures = [await producer.submit(message(one), key="k") for one in bodies(100)]
        for attempt in (1, 2):
            await until(lambda: len(here.a.of(NUMBERED)) >= attempt, "it is stored, and not answered")  # noqa: B023
            here.a.hang_up()
        found = await asyncio.gather(*futures)
        assert here.store.bodies() == bodies(100)
        assert any(one.offset == NO_OFFSET for one in found) or [one.offset for one in found] == list(range(100))


@on_loop
async def test_who_wants_to_know_is_told_of_a_connection_that_broke_although_nothing_is_lost() -> None:
    told: list[str] = []
    async with world() as here, here.producer(on_failure=lambda broker, _: told.append(broker)) as producer:
        here.store.answers.append(stores_silently)
        future = await producer.submit(message(b"0"))
        await until(lambda: len(here.a.of(NUMBERED)) == 1, "it is stored, and not answered")
        assert told == []
        here.a.hang_up()
        await future
        assert set(told) == {"a"}


@on_loop
async def test_a_broker_that_is_busy_or_not_the_master_gets_them_in_order_later() -> None:
    async with world() as here, here.producer() as producer:
        codes = AnswerCode.SYSTEM_BUSY, AnswerCode.SERVICE_NOT_AVAILABLE, AnswerCode.SYSTEM_BUSY
        here.store.answers.extend(map(refuses, codes))
        busy = {"status": "OS_PAGECACHE_BUSY", "outcome": "not_applied", "message": "0"}
        here.store.answers.append(lambda frame: frame.answer(AnswerCode.SYSTEM_ERROR, "too much is pending", busy))
        futures = [await producer.submit(message(one), key="k") for one in bodies(300)]
        await asyncio.gather(*futures)
        assert here.store.bodies() == bodies(300)


@on_loop
async def test_one_bad_message_fails_alone() -> None:
    """The broker says which; those around it are stored, in order."""
    async with world() as here, here.producer() as producer:
        blamed = {"status": "MESSAGE_ILLEGAL", "outcome": "not_applied", "message": "2"}
        here.store.answers.append(lambda frame: frame.answer(AnswerCode.MESSAGE_ILLEGAL, "too large", blamed))
        futures = [await producer.submit(message(one), key="k") for one in bodies(5)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes[2], errors.MessageRefusedError)
        assert here.store.bodies() == [b"0", b"1", b"3", b"4"]
        await producer.send(message(b"5"), key="k")
        assert here.store.bodies()[-1] == b"5"


@on_loop
async def test_a_number_that_fits_into_no_request_fails_that_message_alone() -> None:
    async with world() as here, here.producer() as producer:
        sent = [Message("T", b"0"), Message("T", b"1", flag=1 << 40), Message("T", b"2")]
        with pytest.raises(errors.PartlySentError) as caught:
            await producer.send_many(sent, key="k")
        assert [isinstance(one, errors.MessageRefusedError) for one in caught.value.results] == [False, True, False]
        assert here.store.bodies() == [b"0", b"2"]


@on_loop
async def test_a_block_is_spread_over_the_queues_with_several_messages_in_a_row_to_one() -> None:
    async with world() as here, here.producer() as producer:
        found = await producer.send_many([message(one) for one in bodies(100)])
        queues = [one.queue for one in found]
        assert sorted([queues.count(0), queues.count(1)]) == [36, 64]
        assert sum(one != other for one, other in itertools.pairwise(queues)) < 10
        assert {one.queue for one in await producer.send_many([message(b"x"), message(b"y")])} == {0, 1}


@on_loop
async def test_a_message_without_an_answer_by_its_deadline_may_be_stored() -> None:
    async with world() as here, here.producer(timeout_s=2.0) as producer:
        here.store.answers.extend([silence] * 100)
        with pytest.raises(errors.TimedOutError) as caught:
            await producer.send(message(b"0"))
        assert caught.value.outcome == "unknown"
        here.store.answers.clear()


@on_loop
async def test_messages_that_a_broker_refuses_until_their_deadline_fail_with_its_last_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those behind the refused one, too, though they were never sent."""
    monkeypatch.setattr(window, "RETRY_STEP_MS", 1000.0)  # no attempt has less than that to be refused in
    full = {"status": "TIMER_FLOW_CONTROL", "outcome": "not_applied"}
    async with world() as here, here.producer(timeout_s=2.0) as producer:
        here.store.answers.extend([lambda frame: frame.answer(AnswerCode.SYSTEM_BUSY, "a million wait", full)] * 1000)
        large = bytes(400_000)  # each is a request of its own
        futures = [await producer.submit(message(large), key="k") for _ in range(3)]
        failed = await asyncio.gather(*futures, return_exceptions=True)
        here.store.answers.clear()
        for one in failed:
            assert isinstance(one, errors.BrokerBusyError)
            assert "a million wait" in str(one)
            assert (one.outcome, one.answer_code) == ("not_applied", AnswerCode.SYSTEM_BUSY)


@on_loop
async def test_what_this_account_may_not_do_is_said_at_once() -> None:
    async with world() as here, here.producer() as producer:
        denied = {"status": "NO_PERMISSION", "outcome": "not_applied"}
        here.store.answers.append(lambda frame: frame.answer(AnswerCode.NO_PERMISSION, "not you", denied))
        with pytest.raises(errors.ForbiddenError, match="not you") as caught:
            await producer.send(message(b"0"))
        assert caught.value.outcome == "not_applied"


@on_loop
async def test_without_a_master_messages_for_any_queue_go_elsewhere() -> None:
    async with world("a", "b") as here, here.producer() as producer:
        await here.a.stop()
        found = [await producer.send(message(one)) for one in bodies(10)]
        assert {one.broker for one in found} == {"b"}
        assert here.stores["b"].bodies() == bodies(10)


@on_loop
async def test_a_new_master_knows_what_the_old_one_has_stored() -> None:
    """Both are members of one group: the numbers are in its log."""
    async with scripted_server() as first, scripted_server() as second:
        store = MessageStore()
        topics = Topics({"a": {0: first.address, 1: second.address}}, {"T": {"a": 2}})
        for server in (first, second):
            topics.serve(server)
            store.serve_numbered(server)
        async with Producer([first.address, second.address], timeout_s=60) as producer:
            await producer.send(message(b"0"), key="k")
            store.answers.append(stores_silently)
            futures = [await producer.submit(message(one), key="k") for one in bodies(20)[1:]]
            await until(lambda: len(first.of(NUMBERED)) >= 2, "they are stored, and not answered")
            topics.brokers["a"] = {0: second.address, 1: first.address}
            await first.stop()
            await asyncio.gather(*futures)
            assert store.bodies() == bodies(20)
            assert second.of(NUMBERED)


@pytest.mark.parametrize("numbers", ["auto", False])
@on_loop
async def test_a_master_whose_machine_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, numbers: bool | str
) -> None:
    """Nothing refuses a connection there; the other members know a new master as soon as there is one."""
    monkeypatch.setattr(numbered, "ATTEMPT_S_MAX", 60.0)
    is_gone = asyncio.Event()
    connect = BrokerConnections.connect

    async def connect_unless_gone(connections: BrokerConnections, address: str, timeout_s: float) -> int:
        if is_gone.is_set() and address == first.address:
            await asyncio.Event().wait()
        return await connect(connections, address, timeout_s)

    monkeypatch.setattr(BrokerConnections, "connect", connect_unless_gone)
    async with scripted_server() as first, scripted_server() as second:
        store = MessageStore()
        topics = Topics({"a": {0: first.address, 1: second.address}}, {"T": {"a": 2}})
        for server in (first, second):
            topics.serve(server)
            store.serve_numbered(server)
        options = ProducerOptions(close_timeout_s=20)
        given = [second.address, first.address]
        async with Producer(given, timeout_s=60, enable_idempotence=numbers, options=options) as producer:  # type: ignore[arg-type]  # one of three
            await producer.send(message(b"0"), key="k")
            for code in (*first.scripts, RequestCode.GET_ROUTEINFO_BY_TOPIC):
                first.scripts[code] = silence
            is_gone.set()
            looked = len(second.of(RequestCode.GET_BROKER_CLUSTER_INFO))
            first.connections[-1].close("its machine is gone")
            sent = asyncio.create_task(producer.send(message(b"1"), key="k"))
            await until(lambda: len(second.of(RequestCode.GET_BROKER_CLUSTER_INFO)) > looked + 1, "it looks around")
            topics.brokers["a"] = {0: second.address, 1: first.address}
            await sent
        assert store.bodies() == bodies(2)
        assert second.of(NUMBERED if numbers else RequestCode.SEND_MESSAGE_V2)


@on_loop
async def test_who_must_have_it_is_told_where_it_cannot_be_had() -> None:
    """Apache's brokers; "auto" sends there as RocketMQ's producers do, and False everywhere."""
    async with world() as here:
        async with here.producer(enable_idempotence=False) as producer:
            await producer.send(message(b"0"))
        here.a.announced = {}
        async with here.producer(enable_idempotence=True) as producer:
            with pytest.raises(errors.RequestNotKnownError, match="does not number messages") as caught:
                await producer.send(message(b"x"))
            assert caught.value.outcome == "not_applied"
        async with here.producer() as producer:
            await producer.send(message(b"1"))
            await producer.send(message(b"2"), key="k")
        assert here.store.bodies() == bodies(3)
        assert here.a.of(NUMBERED) == []


@on_loop
async def test_until_a_broker_can_be_asked_messages_wait_and_then_are_told_why() -> None:
    async with world() as here, here.producer(timeout_s=2.0) as producer:
        here.topics.brokers["a"] = {1: here.a.address}
        with pytest.raises(errors.BrokerUnreachableError, match="have no master now") as caught:
            await producer.send(message(b"x"))
        assert caught.value.outcome == "not_applied"
        here.topics.brokers["a"] = {0: here.a.address}
        await producer.send(message(b"0"), key="k")
        assert here.store.bodies() == bodies(1)


@on_loop
async def test_garbage_in_an_answer_leaves_the_outcome_open() -> None:
    async with world() as here, here.producer() as producer:
        here.store.answers.append(lambda frame: frame.answer(body=b"junk"))
        with pytest.raises(errors.BadAnswerError) as caught:
            await producer.send(message(b"0"))
        assert caught.value.outcome == "unknown"


@on_loop
async def test_more_than_may_be_on_its_way_waits_and_is_sent_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered, "NUMBERED_BYTES_MAX", 2000)
    monkeypatch.setattr(numbered, "BATCH_MESSAGES", 10)
    async with world() as here, here.producer() as producer:
        futures = [await producer.submit(message(one), key="k") for one in bodies(500)]
        await asyncio.gather(*futures)
        assert here.store.bodies() == bodies(500)


@on_loop
async def test_an_answer_without_an_outcome_says_nothing_of_the_message() -> None:
    """As when a broker takes too long: another broker must not get it, and this one recognizes it."""
    async with world("a", "b") as here, here.producer() as producer:
        await producer.send_many([message(one) for one in bodies(4)])
        before = {name: len(one.of(NUMBERED)) for name, one in here.servers.items()}
        for store in here.stores.values():
            store.answers.append(refuses(AnswerCode.SYSTEM_ERROR))
        await producer.send(message(b"late"))
        grown = sorted(len(one.of(NUMBERED)) - before[name] for name, one in here.servers.items())
        assert grown == [0, 2]


@on_loop
async def test_closing_at_once_gives_every_message_an_outcome() -> None:
    async with world() as here:
        here.store.answers.extend([silence] * 100)
        producer = Producer(here.a.address, timeout_s=60, options=ProducerOptions(close_timeout_s=0.1))
        sent = await producer.submit(message(b"0"), key="k")
        await until(lambda: here.a.of(NUMBERED), "it is on its way")
        await producer.close()
        error = sent.exception()
        assert isinstance(error, errors.ClientError)
        assert error.outcome == "unknown"
        assert producer.pending_messages == 0


@on_loop
async def test_closing_sends_nothing_to_another_broker() -> None:
    """What waits behind requests without an answer may go elsewhere, but not any more once the producer ends."""
    async with world("a", "b") as here:
        addresses = [one.address for one in here.servers.values()]
        producer = Producer(addresses, timeout_s=60, options=ProducerOptions(close_timeout_s=0.1))
        await producer.send_many([message(b"%d" % one) for one in range(4)])
        here.store.answers.extend([silence] * 100)
        futures: list[asyncio.Future[SendResult]] = []

        def other_has(requests: int) -> bool:
            return len(here.servers["b"].of(NUMBERED)) >= requests

        for at in range(2 * numbered.REQUESTS_MAX):
            futures += [await producer.submit(message(b"%d" % one)) for one in range(4)]
            await until(partial(other_has, at + 2), "the other broker has its share")
        await until(lambda: producer.pending_messages == sum(not one.done() for one in futures), "answered")
        before = len(here.servers["b"].of(NUMBERED))
        await producer.close()
        outcomes = {getattr(one.exception(), "outcome", "stored") for one in futures}
        assert outcomes == {"stored", "unknown", "not_applied"}
        assert len(here.servers["b"].of(NUMBERED)) == before


@on_loop
async def test_a_topic_that_is_made_smaller_fails_no_message_and_each_key_keeps_its_order() -> None:
    """The queue of a message is chosen anew, unless the caller has chosen it; nothing is stored twice."""
    async with world() as here, here.producer(timeout_s=30) as producer:
        here.topics.topics["T"]["a"] = 8
        await producer.send_many([message(b"before %d" % one) for one in range(8)])
        here.topics.topics["T"]["a"] = here.store.queues = 1
        keyed, free = [], []
        for one in range(400):
            keyed.append(await producer.submit(message(b"%d" % one), key=str(one % 7)))
            free.append(await producer.submit(message(b"free %d" % one)))
            if one % 10 == 0:
                await asyncio.sleep(0.001)
        chosen = await producer.submit(message(b"chosen"), queue=5)
        results = await asyncio.gather(*keyed, *free)
        assert {one.queue for one in results} == {0}
        found = here.store.bodies()[8:]
        assert sorted(found) == sorted([*bodies(400), *(b"free %d" % one for one in range(400))])
        for key in range(7):
            mine = [int(one) for one in found if one.isdigit() and int(one) % 7 == key]
            assert mine == list(range(key, 400, 7))
        with pytest.raises(errors.NotFoundError, match="queue 5"):
            await chosen
        assert producer.pending_messages == 0


@on_loop
async def test_what_comes_later_waits_for_what_may_need_another_queue() -> None:
    """The first message of a key was refused, the second is under way: the third must not overtake it."""
    async with world() as here, here.producer(timeout_s=30) as producer:
        here.topics.topics["T"]["a"] = 8
        assert (await producer.send(message(b"0"), key="k")).queue != 0
        here.topics.topics["T"]["a"] = here.store.queues = 1
        arrived: list[asyncio.Event] = []
        both, release = asyncio.Event(), asyncio.Event()

        async def send(frame: Frame) -> Reply:
            arrived.append(both if not arrived else release)
            if len(arrived) == 2:
                both.set()
            if len(arrived) <= 2:
                await arrived[-1].wait()
            return await here.store.send(frame)

        here.a.scripts[NUMBERED] = send
        asked = len(here.a.of(RequestCode.GET_ROUTEINFO_BY_TOPIC))
        futures = [await producer.submit(message(b"1"), key="k")]
        await until(lambda: len(arrived) == 1, "the first request is under way")
        futures.append(await producer.submit(message(b"2"), key="k"))
        await until(lambda: len(here.a.of(RequestCode.GET_ROUTEINFO_BY_TOPIC)) > asked, "the route is asked for")
        for _ in range(100):  # its answer arrives
            await asyncio.sleep(0)
        futures.append(await producer.submit(message(b"3"), key="k"))
        for _ in range(100):
            await asyncio.sleep(0)
        release.set()
        assert {one.queue for one in await asyncio.gather(*futures)} == {0}
        assert here.store.bodies() == bodies(4)


@on_loop
async def test_what_comes_by_a_new_route_waits_for_what_was_placed_by_the_old_one() -> None:
    """The first message of a key is under way to a queue that is gone; the second has seen the new route."""
    async with world() as here, here.producer(timeout_s=30) as producer:
        here.topics.topics["T"]["a"] = 8
        assert (await producer.send(message(b"0"), key="k")).queue != 0
        here.topics.topics["T"]["a"] = here.store.queues = 1
        arrived, release = asyncio.Event(), asyncio.Event()

        async def send(frame: Frame) -> Reply:
            if not arrived.is_set():
                arrived.set()
                await release.wait()
            return await here.store.send(frame)

        here.a.scripts[NUMBERED] = send
        futures = [await producer.submit(message(b"1"), key="k")]
        await arrived.wait()
        await producer._cluster.routes.refresh("T")
        futures.append(await producer.submit(message(b"2"), key="k"))
        for _ in range(100):
            await asyncio.sleep(0)
        release.set()
        assert {one.queue for one in await asyncio.gather(*futures)} == {0}
        assert here.store.bodies() == bodies(3)


@on_loop
async def test_a_half_message_that_was_waited_for_is_not_waited_for_for_ever() -> None:
    """It goes another way than the numbered ones, whose queue is gone, and which must not overtake it."""
    async with world() as here, here.producer(timeout_s=30) as producer:
        here.topics.topics["T"]["a"] = 8
        assert (await producer.send(message(b"0"), key="k")).queue != 0
        here.topics.topics["T"]["a"] = here.store.queues = 1
        arrived, release = asyncio.Event(), asyncio.Event()

        async def refuse(frame: Frame) -> Reply:
            arrived.set()
            await release.wait()
            return frame.answer(AnswerCode.MESSAGE_ILLEGAL, remark="no")

        here.a.scripts[RequestCode.SEND_MESSAGE_V2] = refuse
        prepared = outgoing(message(b"half"), 1 << 20, producer_group="g", transaction_id="t")
        prepared.key = "k"
        half = producer.add(prepared)
        await arrived.wait()
        numbered_one = await producer.submit(message(b"1"), key="k")
        await until(lambda: len(here.numbered()) == 2, "it is refused")
        release.set()
        with pytest.raises(errors.MessageRefusedError):
            await half
        async with asyncio.timeout(10):
            assert (await numbered_one).queue == 0


@on_loop
async def test_a_real_brokers_topic_can_be_made_smaller_under_a_running_producer(tmp_path: Path) -> None:
    """Every message is stored once, each key's in order."""
    with running(alone(tmp_path)) as broker:
        async with Admin(broker.address, timeout_s=60) as admin, Producer(broker.address, timeout_s=60) as producer:
            await admin.put_topic(TopicInfo("T", 8, 8))
            await producer.send_many([message(b"before")] * 8)
            await admin.put_topic(TopicInfo("T", 1, 1))
            futures = [await producer.submit(message(b"%d" % one), key=str(one % 5)) for one in range(200)]
            assert {one.queue for one in await asyncio.gather(*futures)} == {0}
        await until(lambda: sum(map(len, stored(broker, "T").values())) >= 208, "all are in their queues")
        found = [int(one) for one in stored(broker, "T")[0] if one.isdigit()]
        for key in range(5):
            assert [one for one in found if one % 5 == key] == list(range(key, 200, 5))


@on_loop
async def test_messages_that_wait_for_other_queues_fail_in_time_if_there_are_none() -> None:
    """A route that is out of date for longer than a message may take."""
    async with world() as here, here.producer(timeout_s=2.0) as producer:
        here.store.queues = 0
        with pytest.raises(errors.NoQueueError, match="there is no queue") as caught:
            await producer.send(message(b"x"), key="k")
        assert caught.value.outcome == "not_applied"


@on_loop
async def test_a_group_that_is_restarted_stores_everything_once(tmp_path: Path) -> None:
    """A whole broker: its log remembers the numbers."""
    config = alone(tmp_path)
    with running(config) as broker:
        producer = Producer(broker.address, timeout_s=90)
        async with Admin(broker.address, timeout_s=30) as admin:
            await admin.put_topic(TopicInfo("T", 4, 4))
        before = await producer.send_many([message(one) for one in bodies(100)], key="k")
        assert [one.offset for one in before] == list(range(100))
        futures = [await producer.submit(message(b"%d" % one), key="k") for one in range(100, 1000)]
        await asyncio.sleep(0)
    with running(config) as broker:
        await asyncio.gather(*futures)
        await until(lambda: sum(map(len, stored(broker, "T").values())) >= 1000, "all are in their queue")
        (found,) = stored(broker, "T").values()
        assert found == bodies(1000)
        await producer.close()
