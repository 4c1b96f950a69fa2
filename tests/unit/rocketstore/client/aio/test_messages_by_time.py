"""A topic's messages from the newest one backwards, or from the oldest one on, across its queues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rocketstore.client.aio import admin_messages
from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_messages import Page, read_page, span_of
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.aio.errors import ForbiddenError, MessageRefusedError, NotFoundError
from rocketstore.client.aio.producer import Producer
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from tests.support.on_loop import on_loop, until
from tests.unit.rocketstore.test_server import plain, running

Place = tuple[int, int]
"""Queue and offset."""
HOLE = -1
TIMES = some.lists(some.lists(some.integers(0, 5), max_size=20), min_size=1, max_size=4)
SORTED_HOLES = some.lists(
    some.lists(some.integers(1, 9), max_size=12)
    .map(sorted)
    .flatmap(
        lambda times: some.lists(some.booleans(), min_size=len(times), max_size=len(times)).map(
            lambda there: [time if it else HOLE for time, it in zip(times, there, strict=True)]
        )
    ),
    min_size=1,
    max_size=4,
)
HOLES = some.lists(some.lists(some.integers(HOLE, 5), max_size=20), min_size=1, max_size=4)


class Queues:
    """Queues of messages with these store times; those before ``lows`` are removed.

    Where the time is ``HOLE``, there is no message; a pull from there gives the next one. ``fit``: so many messages fit
    into one answer.
    """

    def __init__(self, times: Sequence[Sequence[int]], fit: int = 100) -> None:
        self.times = [list(one) for one in times]
        self.lows = [0] * len(times)
        self.fit = fit
        self.size = 100
        self.pulls: list[tuple[int, int, int]] = []
        self.pulled_bytes = 0

    async def pull(self, queue: MessageQueue, offset: int, count: int) -> tuple[list[Message], int]:
        number = queue.queue_id
        times = self.times[number]
        self.pulls.append((number, offset, count))
        if offset >= len(times):
            return [], len(times)
        if offset < self.lows[number]:
            return [], self.lows[number]
        there = [at for at in range(offset, len(times)) if times[at] != HOLE][: min(count, self.fit)]
        found = [Message("T", b"", number, queue_offset=at, store_timestamp=times[at], size=self.size) for at in there]
        self.pulled_bytes += self.size * len(found)
        return found, there[-1] + 1 if there else len(times)


def queue(number: int) -> MessageQueue:
    return MessageQueue("T", "b", number)


def ask(
    queues: Queues, ends: Mapping[MessageQueue, int] | None = None, *, size: int = 3, oldest_first: bool = False
) -> Page:
    spans = [
        span_of(queue(number), queues.lows[number], len(times), ends or {}, oldest_first=oldest_first)
        for number, times in enumerate(queues.times)
    ]
    return asyncio.run(read_page(spans, queues.pull, size))


def places(page: Page) -> list[Place]:
    return [(one.queue_id, one.queue_offset) for one in page.messages]


def pages(queues: Queues, *, size: int = 3, oldest_first: bool = False) -> Iterator[list[Place]]:
    ends: Mapping[MessageQueue, int] = {}
    while True:
        page = ask(queues, ends, size=size, oldest_first=oldest_first)
        yield places(page)
        if not page.ends:
            return
        ends = page.ends


def merged(times: Sequence[Sequence[int]]) -> list[Place]:
    """The queue whose last message is the newest gives the next one; of equals, the first."""
    left = [[(time, at) for at, time in enumerate(one) if time != HOLE] for one in times]
    found = []
    while any(left):
        first = max((one for one in range(len(left)) if left[one]), key=lambda one: (left[one][-1][0], -one))
        found.append((first, left[first].pop()[1]))
    return found


@given(TIMES, some.integers(1, 7), some.integers(1, 5))
def test_all_messages_come_once_and_the_newest_first(times: list[list[int]], size: int, fit: int) -> None:
    """Page by page, those of one queue by offset even if its clock went back, however few fit into one answer."""
    found = list(pages(Queues(times, fit), size=size))

    assert [place for page in found for place in page] == merged(times)
    assert [len(page) for page in found[:-1]] == [size] * (len(found) - 1)


@given(HOLES, some.integers(1, 4), some.integers(1, 5))
def test_places_without_a_message_are_passed_over(times: list[list[int]], size: int, fit: int) -> None:
    """The message behind one comes once, and those before it when it is their turn."""
    found = list(pages(Queues(times, fit), size=size))

    assert [place for page in found for place in page] == merged(times)


@given(SORTED_HOLES, some.integers(1, 4), some.integers(1, 5))
def test_the_oldest_may_come_first(times: list[list[int]], size: int, fit: int) -> None:
    """Page by page, in the other direction; of equally old ones, that of the first queue."""
    found = list(pages(Queues(times, fit), size=size, oldest_first=True))

    wanted = [(time, number, at) for number, all_ in enumerate(times) for at, time in enumerate(all_) if time != HOLE]
    assert [place for page in found for place in page] == [(number, at) for _, number, at in sorted(wanted)]


def test_a_log_that_grows_is_read_on_to_its_end() -> None:
    """The oldest first: what comes meanwhile is on a later page, in a new queue, too."""
    queues = Queues([[1, 2, 3, 4]])
    first = ask(queues, oldest_first=True)
    queues.times.append([8, 9])
    queues.lows.append(0)
    queues.times[0].append(10)

    second = ask(queues, first.ends, oldest_first=True, size=9)

    assert places(first) == [(0, 0), (0, 1), (0, 2)]
    assert (places(second), second.ends) == ([(0, 3), (1, 0), (1, 1), (0, 4)], {})


@given(TIMES, some.data())
def test_what_comes_and_goes_between_two_pages_harms_neither(times: list[list[int]], data: some.DataObject) -> None:
    """Nothing is there twice; nothing of what stays is missing; what is newer than the first page is not mixed in."""
    queues = Queues(times)
    there = {(number, offset) for number, some_ in enumerate(times) for offset in range(len(some_))}
    found: list[Place] = []
    for page in pages(queues, size=2):
        found += page
        queues.times[data.draw(some.integers(0, len(times) - 1))].append(9)
        number = data.draw(some.integers(0, len(times) - 1))
        queues.lows[number] = min(queues.lows[number] + data.draw(some.integers(0, 1)), len(times[number]))

    assert len(set(found)) == len(found)
    assert set(found) <= there
    assert {(number, offset) for number, offset in there if offset >= queues.lows[number]} <= set(found)


def test_a_queue_made_after_the_first_page_has_nothing_older() -> None:
    """It would otherwise be shown on the second."""
    queues = Queues([[1, 2, 3, 4]])
    ends = ask(queues).ends
    queues.times.append([8, 9])
    queues.lows.append(0)

    page = ask(queues, ends)

    assert (places(page), page.ends) == ([(0, 0)], {})


@pytest.mark.parametrize("oldest_first", [False, True])
def test_little_more_is_pulled_than_is_shown(oldest_first: bool) -> None:
    """However many messages there are, and in as many queues; in few requests if they are in one."""
    many = Queues([range(number, 10_000, 64) for number in range(64)])
    one = Queues([range(10_000)])
    for queues, pulls in ((many, 64 + 20), (one, 4)):
        assert len(ask(queues, size=20, oldest_first=oldest_first).messages) == 20
        assert len(queues.pulls) <= pulls
        assert queues.pulled_bytes <= (64 + 5 * 20) * queues.size


def test_empty_places_are_not_passed_over_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may then have no message, and say that there are more."""
    monkeypatch.setattr(admin_messages, "EMPTY_PULLS_MAX", 3)
    queues = Queues([[*range(3), *[HOLE] * 5000]])

    found = list(pages(queues))

    assert found[0] == []
    assert [place for page in found for place in page] == [(0, 2), (0, 1), (0, 0)]


def test_a_page_has_room_for_one_message_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no more bytes than it may have if there are several."""
    queues = Queues([[1, 2, 3]])
    monkeypatch.setattr(admin_messages, "PAGE_BYTES_MAX", 250)
    assert [len(page) for page in pages(queues)] == [2, 1]
    monkeypatch.setattr(admin_messages, "PAGE_BYTES_MAX", 1)
    assert list(pages(queues)) == [[(0, 2)], [(0, 1)], [(0, 0)]]


def test_large_messages_are_pulled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones before them must not let a page pull, and keep, gigabytes."""
    monkeypatch.setattr(admin_messages, "PULLED_BYTES_MAX", 10_000)
    queues = Queues([range(1000)], fit=2)
    queues.size = 4000

    found = list(pages(queues, size=20))

    assert [place for page in found for place in page] == [(0, offset) for offset in range(999, -1, -1)]
    assert queues.pulled_bytes < 3 * 1000 * queues.size


def test_a_topic_of_very_large_messages_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queues cannot be compared without one message of each; of one queue, each page has one."""
    monkeypatch.setattr(admin_messages, "PULLED_BYTES_MAX", 1000)
    queues = Queues([[1, 2]] * 30)

    with pytest.raises(MessageRefusedError, match="of 30 queues have more than 0 MiB: choose one queue"):
        ask(queues)
    assert places(ask(Queues([[1, 2]]))) == [(0, 1), (0, 0)]


@pytest.mark.parametrize("end", [0, 99, 1 << 62])
@pytest.mark.parametrize("oldest_first", [False, True])
def test_ends_of_somebody_else_show_what_is_there(end: int, oldest_first: bool) -> None:
    """Made up, or of another topic: nothing outside the queue is pulled."""
    queues = Queues([[1, 2]])
    queues.lows[0] = 1

    assert places(ask(queues, {queue(0): end}, oldest_first=oldest_first)) in ([], [(0, 1)])
    assert all(offset == 1 for _, offset, _ in queues.pulls)


@on_loop
async def test_a_broker_is_asked_for_a_topic_a_queue_and_a_span_of_time(tmp_path: Path) -> None:
    """Its begin included, its end not; whole messages."""
    with running(plain(tmp_path)) as broker:
        async with Admin(broker.address, timeout_s=60) as admin, Producer(broker.address, timeout_s=60) as producer:
            await admin.put_topic(TopicInfo("T", 4, 4))
            times: list[int] = []
            for number in range(10):
                await producer.send(Message("T", b"%d" % number), queue=number % 3)
                await until(
                    lambda: sum(broker.store.max_offset("T", one) for one in range(4)) > len(times), "it is there"
                )
                times.append((await admin.newest("T", max_messages=1)).messages[0].store_timestamp)
                await until(lambda: time.time() * 1000 > times[-1] + 1, "the next one is newer")

            found, ends = await admin.newest("T", max_messages=6)
            rest, over = await admin.newest("T", ends, max_messages=6)
            (info,) = await admin.topic("T")
            chosen = await admin.newest("T", queue=MessageQueue("T", info.broker, 0))
            timed = await admin.newest("T", stored=(times[2], times[5]), oldest_first=True)
            later = await admin.newest("T", stored=(times[8], 0))

            assert [one.body for one in found + rest] == [b"%d" % number for number in range(9, -1, -1)]
            assert (len(found), over) == (6, {})
            assert [one.body for one in chosen.messages] == [b"9", b"6", b"3", b"0"]
            assert [one.body for one in timed.messages] == [b"2", b"3", b"4"]
            assert [one.body for one in later.messages] == [b"9", b"8"]
            with pytest.raises(NotFoundError, match="topic U does not exist"):
                await admin.newest("U")
            with pytest.raises(NotFoundError, match="no queue 4 that can be read"):
                await admin.newest("T", queue=MessageQueue("T", info.broker, 4))
            for count in (0, 101):
                with pytest.raises(MessageRefusedError, match="a page has 1 to 100 messages"):
                    await admin.newest("T", max_messages=count)
            await admin.put_topic(TopicInfo("written", 1, 1, permission=2))
            with pytest.raises(ForbiddenError, match="topic written does not allow reads"):
                await admin.newest("written")
