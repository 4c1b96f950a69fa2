"""Pulling: at once, waiting, by tag, within limits; what no client may see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from dledger.config import ConnectionLimits
from dledger.values import MIB
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.codec import SERVICE
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BROKER_STATE_TOPIC, BrokerRole, GetResult
from tests.support.http2 import Http2Link, call_frames
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import Harness, failing


@pytest.fixture
def broker() -> Iterator[Harness]:
    """A broker with a topic T of 4 queues."""
    with Harness() as harness:
        yield harness


class Pending:
    """A pull on a thread of its own."""

    def __init__(self, pull: Callable[[], pb.PullResponse]) -> None:
        self._answers: list[pb.PullResponse] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(pull()))
        self._thread.start()

    def answer(self) -> pb.PullResponse:
        self._thread.join(10)
        return self._answers[0]

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def send(broker: Harness, *tags: str, topic: str = "T", queue_id: int = 0) -> None:
    """One message per tag."""
    messages = [pb.Message(topic=topic, queue_id=queue_id, body=b"x", properties={"TAGS": tag}) for tag in tags]
    assert all(one.status == "PUT_OK" for one in broker.send(*messages))


def waiting(broker: Harness) -> int:
    """How many pulls wait."""
    status = broker.call("Status", pb.StatusRequest(), pb.StatusResponse)
    return int(status.runtime["pullsWaiting"])


def test_records_come_one_after_the_other(broker: Harness) -> None:
    """The answer holds stored records as they are, and where to go on."""
    send(broker, "a", "b", "c")

    answer = broker.pull(max_messages=2)

    assert answer.records == b"".join(one.record for one in broker.store.log.records[:2])
    assert (answer.status, answer.count, answer.next_offset) == ("FOUND", 2, 2)
    assert (answer.min_offset, answer.max_offset) == (0, 3)


def test_without_waiting_an_end_is_told_at_once(broker: Harness) -> None:
    """OFFSET_OVERFLOW_ONE: there is nothing yet."""
    send(broker, "a")

    answer = broker.pull(offset=1)

    assert (answer.status, answer.next_offset, answer.count) == ("OFFSET_OVERFLOW_ONE", 1, 0)


def test_a_waiting_pull_is_answered_by_the_arrival_of_a_message(broker: Harness) -> None:
    """Long polling, without looking again and again; other queues do not wake it."""
    pending = Pending(lambda: broker.pull(queue_id=1, wait_ms=9000))
    wait_until(lambda: waiting(broker) == 1, "the pull waits")
    wait_until(lambda: broker.store.gets == 1, "it has looked")

    send(broker, "a", queue_id=0)
    send(broker, "b", queue_id=1)

    assert pending.answer().count == 1
    assert broker.store.gets == 2
    wait_until(lambda: waiting(broker) == 0, "nobody waits any more")


def test_a_message_that_arrives_between_looking_and_waiting_is_not_missed(broker: Harness) -> None:
    """The waiter is armed before the store is asked."""
    real = broker.store.get

    def get_then_send(*args: object, **options: object) -> object:
        result = real(*args, **options)  # type: ignore[arg-type]
        if broker.store.gets == 1:
            threading.Thread(target=lambda: send(broker, "a")).start()
            wait_until(lambda: bool(broker.store.log.records), "the message is stored")
        return result

    broker.store.get = get_then_send  # type: ignore[method-assign,assignment]

    assert broker.pull(wait_ms=9000).count == 1


def test_waiting_ends_with_the_time(broker: Harness) -> None:
    """Then the answer says that there is nothing."""
    began = time.monotonic()

    answer = broker.pull(wait_ms=50)

    assert (answer.count, answer.status) == (0, "NO_MATCHED_LOGIC_QUEUE")
    assert time.monotonic() - began >= 0.05


def test_nobody_waits_longer_than_allowed() -> None:
    """pull_wait_ms_max, and shortPollingTimeMills where long polling is off."""
    for config in (
        BrokerConfig(pull_wait_ms_max=10),
        BrokerConfig(long_polling_enable=False, short_polling_time_mills=10),
    ):
        with Harness(config) as broker:
            assert broker.pull(wait_ms=60_000).count == 0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("", 4), ("*", 4), ("a", 1), ("a || c", 2), (" a||b ", 2), ("none", 0)],
)
def test_only_messages_with_a_wanted_tag_are_given(broker: Harness, expression: str, expected: int) -> None:
    """``*`` is all; what does not match is passed over, not asked for again."""
    send(broker, "a", "b", "c", "")

    answer = broker.pull(tag_expression=expression)

    assert (answer.count, answer.next_offset) == (expected, 4)


def test_tags_with_one_hash_are_told_apart(broker: Harness) -> None:
    """ "Aa" and "BB" have the same Java hash code, the consume queue cannot tell them apart."""
    send(broker, "Aa", "BB")

    answer = broker.pull(tag_expression="BB")

    assert (answer.count, answer.records) == (1, broker.store.log.records[1].record)


def test_a_pull_with_tags_waits_for_one_of_them_and_remembers_what_it_passed(broker: Harness) -> None:
    """Arrivals of other tags do not even wake it; the next offset is behind them."""
    send(broker, "x")
    pending = Pending(lambda: broker.pull(tag_expression="a", wait_ms=9000))
    wait_until(lambda: broker.store.gets == 1, "it has looked")

    send(broker, "y", "z")
    assert pending.waits
    assert broker.store.gets == 1
    send(broker, "a")

    answer = pending.answer()
    assert (answer.count, answer.next_offset) == (1, 4)


def test_a_wait_in_vain_still_tells_what_was_passed(broker: Harness) -> None:
    """NO_MATCHED_MESSAGE with the advanced offset, so that it is not read again."""
    send(broker, "x", "x")

    answer = broker.pull(tag_expression="a", wait_ms=20)

    assert (answer.status, answer.next_offset) == ("NO_MATCHED_MESSAGE", 2)


@pytest.mark.parametrize("expression", ["|| ||", "||".join(f"t{number}" for number in range(1025))])
def test_a_strange_tag_expression_is_refused(broker: Harness, expression: str) -> None:
    """Rather than matching nothing for ever."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "tag expression"):
        broker.pull(tag_expression=expression)


def test_negative_numbers_are_refused(broker: Harness) -> None:
    """They cannot be meant."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "negative"):
        broker.pull(offset=-1)


def test_only_what_exists_and_may_be_read_is_served(broker: Harness) -> None:
    """Unknown and hidden topics do not exist, permissions and queue counts hold."""
    broker.state.table["W"] = TopicConfig("W", 1, 1, 2)

    with failing(grpc.StatusCode.NOT_FOUND):
        broker.pull(topic="unknown")
    with failing(grpc.StatusCode.NOT_FOUND):
        broker.pull(topic=BROKER_STATE_TOPIC)
    with failing(grpc.StatusCode.PERMISSION_DENIED):
        broker.pull(topic="W")
    with failing(grpc.StatusCode.OUT_OF_RANGE, "4 read queues"):
        broker.pull(queue_id=4)


def test_a_slave_serves_pulls(broker: Harness) -> None:
    """From what is committed and dispatched there."""
    send(broker, "a")
    broker.become(BrokerRole.SLAVE)

    assert broker.pull().count == 1


def test_no_more_pulls_wait_than_allowed() -> None:
    """pulls_waiting_max; who does not want to wait is served all the same."""
    with Harness(BrokerConfig(pulls_waiting_max=1)) as broker:
        pending = Pending(lambda: broker.pull(wait_ms=9000))
        wait_until(lambda: waiting(broker) == 1, "the pull waits")

        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "pulls_waiting_max"):
            broker.pull(wait_ms=9000)
        assert [one.subject for one in broker.conditions.now()] == ["pulls_waiting_max"]
        assert broker.pull().count == 0

        send(broker, "a")
        assert pending.answer().count == 1


def test_a_client_that_goes_takes_its_waiting_pull_along(broker: Harness) -> None:
    """The table does not fill with pulls that nobody wants any more."""
    with failing(grpc.StatusCode.DEADLINE_EXCEEDED):
        broker.call("Pull", pb.PullRequest(topic="T", wait_ms=50_000), pb.PullResponse, timeout_s=0.1)

    wait_until(lambda: waiting(broker) == 0, "the pull is gone")


def test_a_stream_answers_in_order(broker: Harness) -> None:
    """One answer per request."""
    send(broker, "a", "b", "c")
    requests = [pb.PullRequest(topic="T", offset=offset, max_messages=1).SerializeToString() for offset in (2, 0, 1)]

    answers = [pb.PullResponse.FromString(one) for one in broker.stream("PullStream", iter(requests))]

    assert [one.next_offset for one in answers] == [3, 1, 2]


def test_a_stopping_broker_answers_waiting_pulls(broker: Harness) -> None:
    """With what there is, which is nothing."""
    pending = Pending(lambda: broker.pull(wait_ms=50_000))
    wait_until(lambda: waiting(broker) == 1, "the pull waits")

    broker.stop(grace_s=10)

    assert pending.answer().count == 0


def test_what_a_deleted_topic_of_the_same_name_held_is_not_given(broker: Harness) -> None:
    """Pulls, ranges and offsets by time begin behind it, also in a queue that nothing was sent to since."""
    send(broker, "old", "old", "new")
    send(broker, "old", queue_id=1)
    broker.state.begins = {("T", 0): 2, ("T", 1): 1}

    below = broker.pull(offset=1)
    pulled = broker.pull(offset=2)
    empty = broker.pull(offset=1, queue_id=1)
    ranges = [
        broker.call("QueueRange", pb.QueueRequest(topic="T", queue_id=queue_id), pb.QueueRangeResponse)
        for queue_id in (0, 1)
    ]
    by_time = broker.call("OffsetByTime", pb.OffsetByTimeRequest(topic="T", timestamp_ms=0), pb.OffsetResponse)

    assert (below.status, below.next_offset, below.min_offset, below.max_offset) == ("OFFSET_TOO_SMALL", 2, 2, 3)
    assert (pulled.count, pulled.next_offset, pulled.min_offset) == (1, 3, 2)
    assert (empty.count, empty.min_offset, empty.max_offset) == (0, 1, 1)
    assert [(one.min_offset, one.max_offset, one.last_update_ms > 0) for one in ranges] == [(2, 3, True), (1, 1, False)]
    assert by_time.offset == 2


def test_a_group_s_name_is_checked_before_it_is_counted(broker: Harness) -> None:
    """It becomes a name in statistics, so it must not be as long as a request."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "group"):
        broker.pull(group="g" * 128)
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "group"):
        broker.pull(group="a/b")
    assert broker.pull(group="g").count == 0


def test_a_filter_that_matches_nothing_is_answered_with_where_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that may wait looks for a limited time only; the next one goes on there."""
    monkeypatch.setattr("rocketstore.broker.pull.SCAN_MS_MAX", 0)
    with Harness() as broker:
        send(broker, *["a"] * 5)

        answer = broker.pull(tag_expression="b", wait_ms=60_000, max_messages=2)

        assert (answer.status, answer.next_offset) == ("NO_MATCHED_MESSAGE", 2)


def test_answers_that_a_client_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of an answer is given back when it was taken, not when it was made; others are served meanwhile."""
    config = BrokerConfig(limits=ConnectionLimits(answer_bytes_max=8 * MIB))
    with Harness(config) as broker, Http2Link("127.0.0.1", broker.port) as link:
        for _ in range(4):
            broker.send(pb.Message(topic="T", body=bytes(MIB)))
        read = broker.store.get
        read_bytes: list[int] = []

        def counted(*args: Any, **options: Any) -> GetResult:  # noqa: ANN401 - whatever a store is asked
            result = read(*args, **options)
            read_bytes.append(sum(map(len, result.records)))
            return result

        monkeypatch.setattr(broker.store, "get", counted)
        wish = pb.PullRequest(topic="T", max_messages=2, max_bytes=3 * MIB).SerializeToString()
        link.begin(window_bytes=0)
        for number in range(30):
            link.send(call_frames(1 + 2 * number, f"/{SERVICE}/Pull", wish))
        wait_until(lambda: len(read_bytes) > 0, "some are read")

        for _ in range(20):
            assert broker.pull(max_messages=1, max_bytes=10).count == 1

    assert sum(size for size in read_bytes if size > MIB + 1000) <= 8 * MIB
