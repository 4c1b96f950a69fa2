"""``SimpleConsumer`` at a whole broker: messages one by one, however many consumers there are."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.remoting.frame import Frame
from rocketstore.client import Message
from rocketstore.client.aio import Producer, SimpleConsumer, simple_consumer
from rocketstore.client.aio.connections import BrokerConnections as Connections
from rocketstore.client.aio.consumer_options import Sql
from rocketstore.client.aio.errors import (
    ClientClosedError,
    ConnectionEndedError,
    ForbiddenError,
    NotFoundError,
    TimedOutError,
)
from rocketstore.client.aio.received import PoppedMessage, read_popped
from rocketstore.client.aio.routes import RouteCache, RoutedBroker
from rocketstore.message.record import encode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import write_header
from rocketstore.remoting.pop import PopAnswer
from rocketstore.state.changes import TopicConfig
from tests.support.on_loop import on_loop, until
from tests.unit.rocketstore.broker.popping.harness import PopBroker

TOPIC, GROUP = "orders", "mailer"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PopBroker]:
    with PopBroker(tmp_path) as running:
        yield running


def simple(broker: PopBroker, **settings: object) -> SimpleConsumer:
    given: dict[str, object] = {"group": GROUP, "topics": TOPIC, "start": "first"} | settings
    return SimpleConsumer(broker.server.address, **given)  # type: ignore[arg-type]  # of several types


def bodies(messages: list[PoppedMessage]) -> list[bytes]:
    return [one.body for one in messages]


@on_loop
async def test_what_is_acknowledged_never_comes_again(broker: PopBroker) -> None:
    """The rest does, when its time is over, with one more attempt and the topic that it was sent to."""
    await asyncio.to_thread(broker.send, [b"a", b"b"])
    async with simple(broker, invisible_s=60.0) as consumer:
        first, second = await consumer.receive(2)
        assert (first.body, first.attempts, first.topic, first.queue.topic) == (b"a", 0, TOPIC, TOPIC)
        await consumer.ack(first)
        await consumer.change_invisible(second, 0.5)
        (again,) = await consumer.receive(2, 60.0)
        assert (again.body, again.attempts, again.topic) == (b"b", 1, TOPIC)
        assert again.queue.topic == f"%RETRY%{GROUP}_{TOPIC}"
        with pytest.raises(NotFoundError):
            await consumer.ack(second)
        await consumer.ack(again)
        assert await consumer.receive(2, 0.1) == []


@on_loop
async def test_a_refused_ack_says_whether_it_may_have_been_this_one(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: if its first answer is lost, the ack is repeated, and refused because the message is settled."""
    await asyncio.to_thread(broker.send, [b"a"])
    async with simple(broker) as consumer:
        (message,) = await consumer.receive(1)
        ask = Connections.ask
        lost = [RequestCode.BATCH_ACK_MESSAGE]

        async def asked(self: Connections, address: str, code: int, *more: object, **others: object) -> Frame:
            answer = await ask(self, address, code, *more, **others)  # type: ignore[arg-type]  # as they came
            if code in lost:
                lost.remove(RequestCode(code))
                raise ConnectionEndedError("the answer is lost")
            return answer

        monkeypatch.setattr(Connections, "ask", asked)
        outcomes = []
        for _ in range(2):
            with pytest.raises(NotFoundError) as refused:
                await consumer.ack(message)
            outcomes.append(refused.value.outcome)
        assert outcomes == ["unknown", "not_applied"]


class Held(asyncio.Event):
    """Answers to receives arrive once it is set."""

    count = 0
    """How many the broker has given."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Receives are late at once."""
    call, arrive = Connections.call, Held()

    async def called(self: Connections, address: str, request: Frame, timeout_s: float) -> Frame:
        answer = await call(self, address, request, timeout_s)
        if request.code == RequestCode.POP_MESSAGE:
            arrive.count += 1
            await arrive.wait()
        return answer

    monkeypatch.setattr(Connections, "call", called)
    monkeypatch.setattr(simple_consumer, "SPARE_S", 0.05)
    monkeypatch.setattr(simple_consumer, "PAUSE_S", 0.01)
    return arrive


@on_loop
async def late_answer(broker: PopBroker, held: Held) -> None:
    await asyncio.to_thread(broker.send, [b"a"])
    async with simple(broker) as consumer:
        assert await consumer.receive(1, 0.1) == []
        asked = asyncio.get_running_loop().time()
        held.set()
        (message,) = await consumer.receive(1, 20.0)
        assert message.expires_at < asked + consumer.options.invisible_s, "counted from when it was given out"
        await consumer.ack(message)


def test_the_messages_of_a_late_answer_are_received(broker: PopBroker, held: Held) -> None:
    """Nobody else gets them before their time is over, and then with one more attempt."""
    late_answer(broker, held)


@on_loop
async def silent_master(broker: PopBroker, held: Held) -> None:
    async with simple(broker) as consumer:
        assert await consumer.receive(1, 0.0) == []
        ((key, asked),) = consumer._asked.items()
        await until(lambda: held.count == 1, "the broker has no message for it")
        routes = consumer._cluster.routes
        known = routes.broker(key[1])
        assert known is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(routes), "broker", lambda *_: dataclasses.replace(known, addresses={0: "127.0.0.1:9"}))
            await asyncio.wait({asked}, timeout=60.0)
        assert isinstance(asked.exception(), TimedOutError)
        await asyncio.to_thread(broker.send, [b"a"])
        held.set()
        assert bodies(await consumer.receive(1, 20.0)) == [b"a"]


def test_a_silent_master_is_given_up_when_there_is_another(broker: PopBroker, held: Held) -> None:
    """It need not be waited for until its time is over."""
    silent_master(broker, held)


@on_loop
async def test_a_silent_master_is_waited_for_while_nobody_is_known_to_lead(
    broker: PopBroker, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An election is under way: it may lead again, and its answer has messages that nobody else gets."""
    await asyncio.to_thread(broker.send, [b"a"])
    async with simple(broker) as consumer:
        assert await consumer.receive(1, 0.1) == []
        (asked,) = consumer._asked.values()
        routes = consumer._cluster.routes
        looked: list[RoutedBroker] = []

        def leaderless(self: RouteCache, name: str) -> RoutedBroker | None:
            known = find(self, name)
            if known is None:
                return None
            looked.append(dataclasses.replace(known, addresses={1: known.master}))
            return looked[-1]

        find = type(routes).broker
        with monkeypatch.context() as patch:
            patch.setattr(type(routes), "broker", leaderless)
            await until(lambda: len(looked) > 2 or asked.done(), "it looks again who leads")
        held.set()
        assert bodies(await consumer.receive(1, 20.0)) == [b"a"]


@on_loop
async def test_a_message_whose_time_is_nearly_over_is_not_handed_out(broker: PopBroker) -> None:
    """It waited for the program, and somebody else gets it before it can be handled."""
    await asyncio.to_thread(broker.send, [b"a", b"b"])
    async with simple(broker) as consumer:
        late, fresh = await consumer.receive(2)
        consumer._prefetched.put([late, fresh])  # as if another broker had answered, too
        late.received_at -= 0.6 * consumer.options.invisible_s
        assert bodies(await consumer.receive(2, 0.1)) == [fresh.body]


@on_loop
async def test_a_changed_time_counts_from_the_request(broker: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker counts from when it took it: an answer that is late must not make the message anybody's for longer."""
    await asyncio.to_thread(broker.send, [b"a"])
    ask, asked_at = Connections.ask, list[float]()

    async def asked(self: Connections, address: str, code: int, *more: object, **others: object) -> Frame:
        if code == RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
            asked_at.append(asyncio.get_running_loop().time())
        return await ask(self, address, code, *more, **others)  # type: ignore[arg-type]  # as they came

    async with simple(broker) as consumer:
        (message,) = await consumer.receive(1)
        monkeypatch.setattr(Connections, "ask", asked)
        await consumer.change_invisible(message, 40.0)
        assert message.expires_at <= asked_at[0] + 40.0


@on_loop
async def test_consumers_may_outnumber_queues(broker: PopBroker) -> None:
    """Each of ten gets messages of two queues, and none is given out twice."""
    await asyncio.to_thread(broker.send, [b"%d" % number for number in range(40)])
    consumers = [simple(broker) for _ in range(10)]
    taken = [await one.receive(4) for one in consumers]
    assert all(len(one) == 4 for one in taken)
    assert len({body for one in taken for body in bodies(one)}) == 40
    for one in consumers:
        await one.close()


@on_loop
async def test_a_waiting_consumer_gets_what_arrives(broker: PopBroker) -> None:
    """At once: it need not ask again."""
    async with simple(broker) as consumer, Producer(broker.server.address) as producer:
        waiting = asyncio.create_task(consumer.receive(1, 30.0))
        await until(lambda: broker.broker.counters().pop.waiting == 1, "the broker has it wait")
        await producer.send(Message(TOPIC, b"new"))
        assert bodies(await waiting) == [b"new"]


@on_loop
async def test_only_what_is_wanted_comes(broker: PopBroker) -> None:
    """By tags, of which brokers compare hashes, and by conditions."""
    for tags, body in (("Aa", b"same hash"), ("BB", b"wanted"), ("C", b"other")):
        await asyncio.to_thread(broker.send, [body], 0, TOPIC, {"TAGS": tags, "n": str(len(tags))})
    async with simple(broker, topics={TOPIC: "BB"}) as consumer:
        assert bodies(await consumer.receive()) == [b"wanted"]
    assert broker.window().commit == 1
    async with simple(broker, group="sql", topics={TOPIC: Sql("n < 2")}) as consumer:
        assert bodies(await consumer.receive()) == [b"other"]


@pytest.mark.slow  # for the time that it was not kept
@on_loop
async def test_a_message_can_be_given_back_or_kept(broker: PopBroker) -> None:
    """By its new handle: the message knows it."""
    await asyncio.to_thread(broker.send, [b"a"])
    async with simple(broker, invisible_s=5.0) as consumer:
        (message,) = await consumer.receive(1)
        await consumer.change_invisible(message, 3600.0)
        assert message.expires_at > asyncio.get_running_loop().time() + 3000
        assert await consumer.receive(1, 5.5) == []
        await consumer.change_invisible(message, 0, is_attempt=False)
        (again,) = await consumer.receive(1, 20.0)
        assert again.attempts == 0
        await consumer.ack(again)


@on_loop
async def test_an_iteration_acknowledges_with_the_next(broker: PopBroker) -> None:
    """The last one only if it is asked for another."""
    await asyncio.to_thread(broker.send, [b"a", b"b"])
    async with simple(broker) as consumer:
        found = []
        async for message in consumer:
            found.append(message.body)
            if len(found) == 2:
                break
        assert found == [b"a", b"b"]
    assert (broker.window().commit, broker.window().reserved) == (1, 2)


@on_loop
async def test_handlers_acknowledge_or_have_it_come_again(broker: PopBroker) -> None:
    """A handler that raises has its message come again; the others are done. Closing ends ``run``."""
    await asyncio.to_thread(broker.send, [b"%d" % number for number in range(20)])
    seen: list[tuple[bytes, int]] = []
    consumer = simple(broker, retry_s=0.0)

    async def handler(message: PoppedMessage) -> None:
        seen.append((message.body, message.attempts))
        if message.body == b"7" and not message.attempts:
            raise ValueError("not yet")

    running = asyncio.create_task(consumer.run(handler, workers=3))
    await until(lambda: (b"7", 1) in seen and len(seen) == 21, "all are handled")
    await until(lambda: broker.window().commit == 20, "all are acknowledged")
    await consumer.close()
    await running


@on_loop
async def test_what_a_handler_works_on_stays_invisible(broker: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it works: its time is prolonged again and again, long before it is over."""
    monkeypatch.setattr(simple_consumer, "RENEW_SHARE", 0.001)
    await asyncio.to_thread(broker.send, [b"slow"])
    done = asyncio.Event()
    calls = 0

    async def handler(message: PoppedMessage) -> None:
        nonlocal calls
        calls += 1
        for _ in range(3):
            before = message.expires_at
            await until(lambda before=before: message.expires_at > before, "it is prolonged")  # type: ignore[misc]
        done.set()

    async with simple(broker, invisible_s=60.0) as consumer:
        running = asyncio.create_task(consumer.run(handler, workers=2))
        await done.wait()
        await until(lambda: broker.window().commit == 1, "it is acknowledged")
        await consumer.close()
        await running
    assert calls == 1


@on_loop
async def test_what_was_not_handed_out_is_given_back(broker: PopBroker) -> None:
    """A consumer that closes leaves nothing invisible but what its program has."""
    await asyncio.to_thread(broker.send, [b"a", b"b", b"c"])
    consumer = simple(broker)
    messages = await consumer.receive(3)
    consumer._prefetched.put(messages[1:])  # as if another broker had answered, too
    await consumer.close()
    await consumer.close()
    with pytest.raises(ClientClosedError):
        await consumer.receive()
    async with simple(broker) as other:
        assert sorted(bodies(await other.receive(3, 20.0))) == [b"b", b"c"]


@on_loop
async def test_what_is_not_asked_for_in_time_is_given_back_and_that_is_no_attempt(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer with several topics or brokers that works for long has messages of the others meanwhile: if each time
    were an attempt, they would be dead letters that nobody has ever been given.
    """
    await asyncio.to_thread(broker.run, broker.broker.topics.put([TopicConfig("others", 1, 1)]))
    await asyncio.to_thread(broker.send, [b"a"])
    await asyncio.to_thread(broker.send, [b"b"], 0, "others")
    monkeypatch.setattr(simple_consumer, "KEPT_SHARE", 0.01)
    topics = [TOPIC, "others"]
    async with simple(broker, topics=topics) as busy, simple(broker, topics=topics) as idle:
        (first,) = await busy.receive(1, 20.0)
        await busy.ack(first)
        (second,) = await idle.receive(1, 20.0)  # which would be invisible for a minute
        assert (second.attempts, {first.topic, second.topic}) == (0, set(topics))
        await idle.ack(second)


@on_loop
async def test_a_pulling_group_is_refused(broker: PopBroker) -> None:
    """P11: with what to do."""

    async def pull() -> None:
        broker.broker.popping.use.pulled(GROUP, TOPIC)

    await asyncio.to_thread(broker.run, pull())
    async with simple(broker) as consumer:
        with pytest.raises(ForbiddenError, match="by pulls, and cannot be by pop"):
            await consumer.receive(1, 0.1)


@on_loop
async def test_a_topic_that_does_not_exist_is_told(broker: PopBroker) -> None:
    """At the start."""
    consumer = simple(broker, topics="nowhere")
    with pytest.raises(NotFoundError):
        await consumer.start()
    await consumer.close()


@pytest.mark.parametrize(
    "settings",
    [{"group": ""}, {"topics": []}, {"topics": "a b"}, {"invisible_s": 0.5}, {"wait_s": 99}, {"start": "middle"}],
)
def test_arguments_that_do_not_fit_are_refused(settings: dict[str, object]) -> None:
    """With each of them."""
    given: dict[str, object] = {"group": GROUP, "topics": TOPIC} | settings
    with pytest.raises(ConfigError):
        SimpleConsumer("127.0.0.1:1", **given)  # type: ignore[arg-type]  # of several types


def test_check_points_of_apaches_brokers_are_made_here() -> None:
    """They give the numbers, and their own clients put them together."""
    records = b"".join(encode_record(Message(TOPIC, b"x", 2), queue_offset=one) for one in (7, 9))
    answer = write_header(PopAnswer(100, 60_000, 3, 0, "0 2 7", "0 2 7,9"))
    first, second = read_popped(answer, records, TOPIC, "b", 0.0)
    assert str(first.point) == "7 100 60000 3 0 b 2 7"
    assert str(second.point) == "7 100 60000 3 0 b 2 9"
