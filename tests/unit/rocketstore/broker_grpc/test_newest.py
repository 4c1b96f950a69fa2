"""A topic's messages from the newest one backwards, or from the oldest one on, across its queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dledger.errors import InvalidRequestError
from dledger.rpc import loops
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.topics import Topics
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc import newest
from rocketstore.broker_grpc.newest import BYTES_MAX, GONE_MAX, MESSAGES_MAX, NewestMessages
from rocketstore.broker_grpc.surveys import Surveys
from rocketstore.client.admin import Admin
from rocketstore.client.aio.received import split_records
from rocketstore.client.errors import NotFoundError
from rocketstore.client.producer import Producer
from rocketstore.client.topics import TopicInfo
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.server import BrokerServer
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus, GetResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import FakeState
from tests.unit.rocketstore.test_server import plain

Place = tuple[int, int]
"""Queue and offset."""
TIMES = some.lists(some.lists(some.integers(0, 5), max_size=6), min_size=1, max_size=4)
HOLE = -1
SORTED_HOLES = some.lists(
    some.lists(some.integers(1, 9), max_size=8)
    .map(sorted)
    .flatmap(
        lambda times: some.lists(some.booleans(), min_size=len(times), max_size=len(times)).map(
            lambda there: [time if it else HOLE for time, it in zip(times, there, strict=True)]
        )
    ),
    min_size=1,
    max_size=4,
)
HOLES = some.lists(some.lists(some.integers(HOLE, 5), max_size=8), min_size=1, max_size=4)


class Queues(MessageStore):
    """Queues of messages named after their places, with these store times; those before ``lows`` are removed.

    Where the time is ``HOLE``, the log has no message; a get from there gives the next one.
    """

    def __init__(self, times: Sequence[Sequence[int]]) -> None:
        self.times = [list(one) for one in times]
        self.lows = [0] * len(times)
        self.read_queues: int | None = None  # as many as there are
        self.unreadable: set[Place] = set()
        self.reads: list[Place] = []
        self.body = b""

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self.lows[queue_id]

    def max_offset(self, topic: str, queue_id: int) -> int:
        return len(self.times[queue_id])

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        there = self.lows[queue_id] <= queue_offset < len(self.times[queue_id])
        return self.times[queue_id][queue_offset] if there else -1

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        times = self.times[queue_id]
        later = [at for at, time in enumerate(times) if time != HOLE and time >= timestamp_ms]
        return min(later, default=len(times))

    def get(self, topic: str, queue_id: int, offset: int, **_: object) -> GetResult:
        self.reads.append((queue_id, offset))
        times = self.times[queue_id]
        while offset < len(times) and (times[offset] == HOLE or (queue_id, offset) in self.unreadable):
            offset += 1
        if offset >= len(times):
            return GetResult(GetMessageStatus.MESSAGE_WAS_REMOVING, offset, 0, 9)
        body = b"%d:%d" % (queue_id, offset) + self.body
        record = encode_record(Message("T", body, queue_id), queue_offset=offset)
        return GetResult(GetMessageStatus.FOUND, offset + 1, 0, 9, (record,))


class NoState(BrokerState):
    """None is needed."""

    def __init__(self) -> None:
        pass


def ask(queues: Queues, **wanted: object) -> pb.NewestResponse:
    """Of topic T, which has as many queues to write to as there are."""
    count = len(queues.times)
    topic = TopicConfig(
        "T", write_queues=count, read_queues=count if queues.read_queues is None else queues.read_queues
    )
    access = Topics(LiveConfig(BrokerConfig()), FakeState(topic), None, None)  # type: ignore[arg-type]  # it only looks
    readers = ReadThreads(1)
    try:
        surveys = Surveys(queues, NoState(), access, readers)
        request = pb.NewestRequest(**{"topic": "T", "max_messages": 3, **wanted})  # type: ignore[arg-type]  # by name
        data = loops.run(NewestMessages(queues, access, readers, surveys).answer(request.SerializeToString()))
        return pb.NewestResponse.FromString(data)
    finally:
        readers.close()


def places(answer: pb.NewestResponse) -> list[Place]:
    bodies = [one.body for one in split_records(b"".join(answer.records))]
    return [(int(queue), int(offset)) for queue, offset in (one.split(b"-")[0].split(b":") for one in bodies)]


def pages(queues: Queues, **wanted: object) -> Iterator[list[Place]]:
    ends: Sequence[int] = ()
    while True:
        answer = ask(queues, ends=ends, **wanted)
        yield places(answer)
        if not answer.more:
            return
        ends = answer.ends


def merged(times: Sequence[Sequence[int]]) -> list[Place]:
    """The queue whose last message is the newest gives the next one; of equals, the first."""
    left = [[(time, at) for at, time in enumerate(one) if time != HOLE] for one in times]
    found = []
    while any(left):
        queue = max((one for one in range(len(left)) if left[one]), key=lambda one: (left[one][-1][0], -one))
        found.append((queue, left[queue].pop()[1]))
    return found


@given(TIMES, some.integers(1, 4))
def test_all_messages_come_once_and_the_newest_first(times: list[list[int]], size: int) -> None:
    """Page by page, those of one queue by offset even if its clock went back."""
    found = list(pages(Queues(times), max_messages=size))

    assert [place for page in found for place in page] == merged(times)
    assert [len(page) for page in found[:-1]] == [size] * (len(found) - 1)


@given(HOLES, some.integers(1, 4))
def test_places_without_a_message_are_passed_over(times: list[list[int]], size: int) -> None:
    """The message behind one comes once, and those before it when it is their turn."""
    found = list(pages(Queues(times), max_messages=size))

    assert [place for page in found for place in page] == merged(times)


@given(SORTED_HOLES, some.integers(1, 4))
def test_the_oldest_may_come_first(times: list[list[int]], size: int) -> None:
    """Page by page, in the other direction; of equally old ones, that of the first queue."""
    found = list(pages(Queues(times), max_messages=size, oldest_first=True))

    wanted = [(time, queue, at) for queue, all_ in enumerate(times) for at, time in enumerate(all_) if time != HOLE]
    assert [place for page in found for place in page] == [(queue, at) for _, queue, at in sorted(wanted)]


@given(SORTED_HOLES, some.integers(0, 10), some.integers(0, 10), some.booleans())
def test_only_messages_of_a_span_of_time_are_shown(
    times: list[list[int]], since: int, before: int, oldest_first: bool
) -> None:
    """Its begin included, its end not, whichever way they come; without an end, all later ones."""
    queues = Queues(times)
    found = list(pages(queues, oldest_first=oldest_first, since_ms=since, before_ms=before))

    shown = [place for page in found for place in page]
    end = before or 99
    assert shown == [one for one in _all(queues, oldest_first) if since <= times[one[0]][one[1]] < end]
    assert sorted(queues.reads) == sorted(shown)


def _all(queues: Queues, oldest_first: bool) -> list[Place]:
    return [place for page in pages(Queues(queues.times), oldest_first=oldest_first) for place in page]


def test_a_log_that_grows_is_read_on_to_its_end() -> None:
    """The oldest first: what comes meanwhile is on a later page, in a new queue, too."""
    queues = Queues([[1, 2, 3, 4]])
    first = ask(queues, oldest_first=True)
    queues.times.append([8, 9])
    queues.lows.append(0)
    queues.times[0].append(10)

    second = ask(queues, oldest_first=True, ends=first.ends, max_messages=9)

    assert places(first) == [(0, 0), (0, 1), (0, 2)]
    assert (places(second), second.more) == ([(0, 3), (1, 0), (1, 1), (0, 4)], False)


@given(TIMES, some.data())
def test_what_comes_and_goes_between_two_pages_harms_neither(times: list[list[int]], data: some.DataObject) -> None:
    """Nothing is there twice; nothing of what stays is missing; what is newer than the first page is not mixed in."""
    queues = Queues(times)
    there = {(queue, offset) for queue, some_ in enumerate(times) for offset in range(len(some_))}
    found: list[Place] = []
    for page in pages(queues, max_messages=2):
        found += page
        queues.times[data.draw(some.integers(0, len(times) - 1))].append(9)
        queue = data.draw(some.integers(0, len(times) - 1))
        queues.lows[queue] = min(queues.lows[queue] + data.draw(some.integers(0, 1)), len(times[queue]))

    assert len(set(found)) == len(found)
    assert set(found) <= there
    stays = {(queue, offset) for queue, offset in there if offset >= queues.lows[queue]}
    assert stays <= set(found)


def test_a_queue_made_after_the_first_page_has_nothing_older() -> None:
    """It would otherwise be shown on the second."""
    queues = Queues([[1, 2, 3, 4]])
    ends = ask(queues).ends
    queues.times.append([8, 9])
    queues.lows.append(0)

    answer = ask(queues, ends=ends)

    assert (places(answer), answer.more) == ([(0, 0)], False)


def test_one_queue_may_be_chosen() -> None:
    """Then the others are not read."""
    queues = Queues([[1, 2], [3, 4, 5, 6], [7]])

    assert [place for page in pages(queues, queue_id=1) for place in page] == [(1, 3), (1, 2), (1, 1), (1, 0)]
    assert {queue for queue, _ in queues.reads} == {1}


@pytest.mark.parametrize("oldest_first", [False, True])
def test_queues_that_are_only_written_to_are_shown(oldest_first: bool) -> None:
    """A topic that grows or shrinks has more of one kind for a while; their messages are there."""
    queues = Queues([[2], [1, 3]])
    queues.read_queues = 1

    assert sorted(places(ask(queues, oldest_first=oldest_first))) == [(0, 0), (1, 0), (1, 1)]


def test_only_what_is_shown_is_read() -> None:
    """However many queues and messages there are."""
    queues = Queues([range(queue, 1000, 64) for queue in range(64)])
    ask(queues, max_messages=20)

    assert len(queues.reads) == 20


def test_messages_removed_meanwhile_are_passed_over_but_not_without_end() -> None:
    """An answer may then have none, and say that there are more."""
    queues = Queues([range(2 * GONE_MAX + 5)])
    queues.unreadable = {(0, offset) for offset in range(3, 2 * GONE_MAX + 5)}
    holes = Queues([[*range(3), *[HOLE] * (2 * GONE_MAX + 2)]])
    found = list(pages(queues))
    assert [len(page) for page in pages(holes)] == [0, 0, 3]

    assert found[0] == []
    assert len(found) == 3
    assert [place for page in found for place in page] == [(0, 2), (0, 1), (0, 0)]


def test_a_message_removed_at_this_moment_does_not_repeat_the_next_one() -> None:
    """A get from its place gives that one, which has been shown."""
    queues = Queues([[1, 2, 3]])
    queues.unreadable = {(0, 1)}

    assert list(pages(queues)) == [[(0, 2), (0, 0)]]


def test_an_answer_has_room_for_one_message_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no more bytes than it may have if there are several."""
    queues = Queues([[1, 2, 3]])
    queues.body = b"-" + b"x" * 1000
    monkeypatch.setattr(newest, "BYTES_MAX", 2500)
    assert [len(page) for page in pages(queues)] == [2, 1]
    monkeypatch.setattr(newest, "BYTES_MAX", 1)
    assert list(pages(queues)) == [[(0, 2)], [(0, 1)], [(0, 0)]]
    assert BYTES_MAX == 1 << 20


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"max_messages": 0}, InvalidRequestError),
        ({"max_messages": MESSAGES_MAX + 1}, InvalidRequestError),
        ({"ends": [1, -1]}, InvalidRequestError),
        ({"since_ms": -1}, InvalidRequestError),
        ({"before_ms": -1}, InvalidRequestError),
        ({"topic": "other"}, Refusal),
        ({"queue_id": 1}, Refusal),
        ({"queue_id": -1}, Refusal),
    ],
)
def test_what_makes_no_sense_is_refused(wanted: dict[str, object], error: type[Exception]) -> None:
    """Nothing is read."""
    queues = Queues([[1]])
    with pytest.raises(error):
        ask(queues, **wanted)
    assert queues.reads == []


@pytest.mark.parametrize("ends", [[0], [99], [5, 7, 1 << 62]])
def test_ends_of_somebody_else_show_what_is_there(ends: list[int]) -> None:
    """Made up, or of another topic: nothing beyond the queue is read."""
    queues = Queues([[1, 2]])
    queues.lows[0] = 1

    assert places(ask(queues, ends=ends)) in ([], [(0, 1)])


def test_a_real_broker_answers(tmp_path: Path) -> None:
    """Whole messages, the newest first, across its queues."""
    server = BrokerServer(plain(tmp_path)).start()
    address = f"127.0.0.1:{server.port}"
    try:
        with Admin([address], timeout_s=20) as admin, Producer([address], timeout_s=20) as producer:
            admin.put_topic(TopicInfo("T", 4, 4))
            for number in range(10):
                producer.send(Message("T", b"%d" % number), queue_id=number % 3)
            wait_until(lambda: sum(one.max_offset for one in admin.queue_ranges("T")) == 10, "dispatch")

            found, ends = admin.newest("T", max_messages=6)
            rest, over = admin.newest("T", ends, max_messages=6)
            of_first, _ = admin.newest("T", queue_id=0)
            with pytest.raises(NotFoundError):
                admin.newest("U")
    finally:
        server.stop()

    assert {one.body for one in found + rest} == {b"%d" % number for number in range(10)}
    times = [one.decode().store_timestamp for one in found + rest]
    assert times == sorted(times, reverse=True)
    assert (len(found), len(rest), over) == (6, 4, ())
    assert [one.body for one in of_first] == [b"9", b"6", b"3", b"0"]
