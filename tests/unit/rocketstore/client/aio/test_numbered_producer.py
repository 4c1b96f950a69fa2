"""``Producer.numbered``: numbers of the application, with which it goes on after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from rocketstore.client import blocking
from rocketstore.client.aio import errors, numbered, pipeline, routes
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.aio.errors import NO_OFFSET
from rocketstore.client.aio.producer import Producer, ProducerOptions
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop, until
from tests.support.scripted_server import refuses, silence, stores_silently
from tests.unit.rocketstore.client.aio.test_numbered import NUMBERED, bodies, message, world
from tests.unit.rocketstore.client.aio.test_real_broker import stored
from tests.unit.rocketstore.test_server import alone, running


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNKNOWN_REFRESH_S", 0.02)


@on_loop
async def test_a_program_goes_on_with_the_number_of_its_next_message() -> None:
    """Messages that an earlier program has sent are stored once, and in order, also if it was killed meanwhile."""
    async with world() as here:
        async with here.producer() as producer, producer.numbered("job/0") as job:
            assert await job.next_number() == 0
            await asyncio.gather(*[await job.submit(message(one), n, queue=1) for n, one in enumerate(bodies(60))])
            assert await job.next_number() == 60
        async with here.producer() as producer:
            again = producer.numbered("job/0")
            futures = [await again.submit(message(b"%d" % one), one, queue=1) for one in range(40, 100)]
            found = await asyncio.gather(*futures)
            assert [one.offset for one in found] == [NO_OFFSET] * 20 + list(range(60, 100))
            assert await again.next_number() == 100
        assert here.store.bodies() == bodies(100)
        assert {one.producer for one in here.numbered()} == {"job/0"}


@on_loop
async def test_lost_answers_store_nothing_twice_and_nothing_out_of_order() -> None:
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        here.store.answers.extend([stores_silently, stores_silently])
        futures = [await job.submit(message(one), n, key="k") for n, one in enumerate(bodies(300))]
        for attempt in (1, 2):
            await until(lambda: len(here.a.of(NUMBERED)) >= attempt, "it is stored, and not answered")  # noqa: B023
            here.a.hang_up()
        await asyncio.gather(*futures)
        assert here.store.bodies() == bodies(300)


@on_loop
async def test_numbers_are_consecutive_until_the_next_one_is_asked_for() -> None:
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        with pytest.raises(errors.NumberOutOfOrderError, match="numbers count from 0"):
            await job.submit(message(b"x"), -1)
        await job.submit(message(b"0"), 0)
        with pytest.raises(errors.NumberOutOfOrderError, match="message 2 of producer job is out of order: 1 is next"):
            await job.submit(message(b"2"), 2)
        with pytest.raises(errors.MessageRefusedError):
            await job.submit(Message("", b""), 1)
        await job.submit(message(b"1"), 1)
        assert await job.next_number() == 2
        assert here.store.bodies() == bodies(2)


@on_loop
async def test_behind_a_message_that_is_not_stored_all_fail_until_the_program_goes_on_there() -> None:
    """Whether a broker refuses it, or the program gives up: also those that were not sent yet."""
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        blamed = {"status": "MESSAGE_ILLEGAL", "outcome": "not_applied", "message": "1"}
        here.store.answers.append(lambda frame: frame.answer(AnswerCode.MESSAGE_ILLEGAL, "too large", blamed))
        futures = [await job.submit(message(one), n) for n, one in enumerate(bodies(3))]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(one).__name__ for one in outcomes] == [
            "SendResult",
            "MessageRefusedError",
            "NumberOutOfOrderError",
        ]
        late = await job.submit(message(b"late"), 3)
        with pytest.raises(errors.NumberOutOfOrderError, match=r"call next_number\(\) and go on from there") as caught:
            await late
        assert caught.value.outcome == "not_applied"
        start = await job.next_number()
        assert start == 1
        await asyncio.gather(*[await job.submit(message(b"%d" % one), one) for one in range(start, 5)])
        assert here.store.bodies() == bodies(5)


@on_loop
async def test_a_gap_behind_a_cancelled_message_is_not_jumped() -> None:
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        await job.submit(message(b"0"), 0)
        assert await job.next_number() == 1
        first, second, third = [await job.submit(message(b"%d" % one), one) for one in (1, 2, 3)]
        second.cancel()
        assert (await first).queue >= 0
        with pytest.raises(errors.NumberOutOfOrderError):
            await third
        assert await job.next_number() == 2
        await (await job.submit(message(b"2"), 2))
        assert here.store.bodies() == bodies(3)


@on_loop
async def test_more_than_may_be_on_its_way_waits_and_fails_behind_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered, "NUMBERED_BYTES_MAX", 2000)
    monkeypatch.setattr(numbered, "BATCH_MESSAGES", 10)
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        here.store.answers.append(refuses(AnswerCode.NO_PERMISSION, "not you"))
        futures = [await job.submit(message(one), n) for n, one in enumerate(bodies(200))]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes[0], errors.ForbiddenError)
        assert {type(one).__name__ for one in outcomes[1:]} <= {"ForbiddenError", "NumberOutOfOrderError"}
        assert await job.next_number() == 0
        await asyncio.gather(*[await job.submit(message(one), n) for n, one in enumerate(bodies(200))])
        assert here.store.bodies() == bodies(200)


@on_loop
async def test_a_message_without_an_answer_may_be_stored_and_the_next_number_says_whether_it_is() -> None:
    async with world() as here, here.producer(timeout_s=2.0) as producer:
        job = producer.numbered("job")
        assert await job.next_number() == 0
        here.store.answers.extend([silence] * 100)
        with pytest.raises(errors.TimedOutError) as caught:
            await (await job.submit(message(b"0"), 0))
        assert caught.value.outcome == "unknown"
        here.store.answers.clear()
        assert await job.next_number() == 0
        await (await job.submit(message(b"0"), 0))
        assert here.store.bodies() == [b"0"]


@on_loop
async def test_a_name_that_is_forgotten_says_so() -> None:
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        with pytest.raises(errors.ProducerForgottenError, match="begin at 0, under a new name"):
            await (await job.submit(message(b"7"), 7))


@on_loop
async def test_brokers_that_number_nothing_say_so() -> None:
    """Apache's: whatever is asked of them."""
    async with world() as here, here.producer() as producer:
        here.a.announced = {}
        job = producer.numbered("job")
        with pytest.raises(errors.RequestNotKnownError, match="the broker a does not number messages, as only"):
            await job.next_number()
        with pytest.raises(errors.RequestNotKnownError, match="the broker a does not number messages, as only"):
            await (await job.submit(message(b"0"), 0))


@on_loop
async def test_one_of_several_brokers_is_named() -> None:
    """Each counts for itself; only its queues are written."""
    async with world("a", "b") as here, here.producer() as producer:
        with pytest.raises(errors.NotFoundError, match="there are several brokers: name one"):
            await producer.numbered("job").next_number()
        await producer.numbered("job").close()
        job = producer.numbered("job", broker="b")
        found = [await (await job.submit(message(one), n)) for n, one in enumerate(bodies(6))]
        assert {(one.broker, one.queue) for one in found} == {("b", 0), ("b", 1)}
        with pytest.raises(errors.NotFoundError, match="no writable queue 0 at a"):
            await (await job.submit(message(b"6"), 6, queue=MessageQueue("T", "a", 0)))


@on_loop
async def test_names_are_checked_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "NAMED_MAX", 2)
    async with world() as here, here.producer() as producer:
        with pytest.raises(ConfigError, match="is not a valid producer name"):
            producer.numbered("no name")
        first, second, third = (producer.numbered(one) for one in "abc")
        assert (await first.next_number(), await second.next_number()) == (0, 0)
        with pytest.raises(ConfigError, match="2 numbered producers are open: close those that are done"):
            await third.next_number()
        await second.close()
        assert await third.next_number() == 0


@on_loop
async def test_closing_the_producer_gives_every_message_an_outcome() -> None:
    async with world() as here:
        here.store.answers.extend([silence] * 100)
        producer = Producer(here.a.address, timeout_s=60, options=ProducerOptions(close_timeout_s=0.1))
        job = producer.numbered("job")
        sent = [await job.submit(message(one), n) for n, one in enumerate(bodies(3))]
        await until(lambda: here.a.of(NUMBERED), "they are on their way")
        await producer.close()
        outcomes = [one.exception() for one in sent]
        assert {one.outcome for one in outcomes if isinstance(one, errors.ClientError)} == {"unknown"}
        with pytest.raises(errors.ClientClosedError):
            await job.submit(message(b"3"), 3)


@on_loop
async def test_a_blocking_program_goes_on_at_a_broker(tmp_path: Path) -> None:
    """A whole broker, which was restarted meanwhile: its log remembers the numbers."""

    def first(address: str) -> None:
        with blocking.Producer(address, timeout_s=60) as producer, producer.numbered("job/0") as job:
            futures = [job.submit(message(b"%d" % one), one, queue=one % 2) for one in range(500)]
            assert [one.result(60).offset for one in futures] == [one // 2 for one in range(500)]

    def second(address: str) -> None:
        with blocking.Producer(address, timeout_s=60) as producer:
            job = producer.numbered("job/0")
            assert job.next_number() == 500
            futures = [job.submit(message(b"%d" % one), one, queue=one % 2) for one in range(480, 600)]
            job.flush()
            assert all(one.done() for one in futures)
            assert futures[-1].result().offset == 299
            with pytest.raises(errors.NumberOutOfOrderError):
                job.submit(message(b"x"), 7)

    config = alone(tmp_path)
    with running(config) as broker:
        async with Admin(broker.address, timeout_s=30) as admin:
            await admin.put_topic(TopicInfo("T", 2, 2))
        await asyncio.to_thread(first, broker.address)
    with running(config) as broker:
        await asyncio.to_thread(second, broker.address)
        await until(lambda: sum(map(len, stored(broker, "T").values())) >= 600, "all are in their queues")
        for queue, found in stored(broker, "T").items():
            assert found == [b"%d" % one for one in range(queue, 600, 2)]


@on_loop
async def test_a_message_submitted_beside_a_close_has_an_outcome() -> None:
    """Also one whose topic is being looked up; its program would wait for ever."""
    async with world() as here, here.producer() as producer:
        job = producer.numbered("job")
        here.store.answers.append(stores_silently)
        first = await job.submit(message(b"0"), 0)
        await until(lambda: here.a.of(NUMBERED), "it is stored, and not answered")
        closing = asyncio.ensure_future(job.close())
        await asyncio.sleep(0)
        route = here.a.scripts[RequestCode.GET_ROUTEINFO_BY_TOPIC]
        here.a.scripts[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda frame: (
            None if frame.fields["topic"] == "new" else route(frame)
        )
        beside = await job.submit(Message("new", b"1"), 1)
        here.a.hang_up()
        await first
        await closing
        with pytest.raises(errors.ClientClosedError) as caught:
            async with asyncio.timeout(10):
                await beside
        assert caught.value.outcome == "not_applied"
