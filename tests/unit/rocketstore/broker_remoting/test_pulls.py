"""Pulling: at once, waiting, by tag, within limits; what no client may see."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker.pull import Waiter
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.pulls import SUBSCRIPTION, SUSPEND
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BROKER_STATE_TOPIC, BrokerRole
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

LONG_MS = 9000


class Pulled(NamedTuple):
    """What the answer to a pull says; its remark is the store's status."""

    code: AnswerCode
    remark: str
    next_offset: int
    min_offset: int
    max_offset: int
    records: bytes


def pulled(answer: Frame) -> Pulled:
    names = ("nextBeginOffset", "minOffset", "maxOffset")
    after, low, high = (int(answer.fields[name]) for name in names)
    return Pulled(AnswerCode(answer.code), answer.remark, after, low, high, answer.body)


def fields(tags: str = "*", wait_ms: int = 0, offset: int = 0, **others: object) -> dict[str, object]:
    """A pull of topic T with its own subscription."""
    flag = SUBSCRIPTION | (SUSPEND if wait_ms else 0)
    wish = {"sysFlag": flag, "subscription": tags, "expressionType": "TAG", "suspendTimeoutMillis": wait_ms}
    return pull_fields("g", "T", offset) | wish | others


def begin(client: RemotingSocket, tags: str = "*", *, wait_ms: int = LONG_MS, **others: object) -> int:
    return client.begin(RequestCode.PULL_MESSAGE, fields(tags, wait_ms, **others))  # type: ignore[arg-type]  # by name


def pull(client: RemotingSocket, tags: str = "*", *, wait_ms: int = 0, **others: object) -> Pulled:
    return pulled(client.answer_to(begin(client, tags, wait_ms=wait_ms, **others)))


def refused(client: RemotingSocket, tags: str = "*", *, wait_ms: int = 0, **others: object) -> tuple[int, str]:
    answer = client.answer_to(begin(client, tags, wait_ms=wait_ms, **others))
    return answer.code, answer.remark


def send(broker: RemotingHarness, *tags: str, queue_id: int = 0) -> None:
    """One message per tag, over a connection of its own."""
    with broker.dial() as producer:
        for tag in tags:
            assert producer.send(queue_id=queue_id, properties=f"TAGS\x01{tag}\x02" if tag else "").code == 0


def waiting(broker: RemotingHarness) -> int:
    """How many pulls wait."""
    return len(broker.broker.pulling.waiting)


def record(broker: RemotingHarness, at: int) -> bytes:
    return broker.store.log.records[at].record


def test_records_come_one_after_the_other(broker: RemotingHarness, client: RemotingSocket) -> None:
    """The answer holds stored records as they are, and where to go on."""
    send(broker, "a", "b", "c")
    answer = pull(client, maxMsgNums=2)
    assert answer == (AnswerCode.SUCCESS, "FOUND", 2, 0, 3, record(broker, 0) + record(broker, 1))


def test_without_waiting_an_end_is_told_at_once(broker: RemotingHarness, client: RemotingSocket) -> None:
    """There is nothing yet."""
    send(broker, "a")
    assert pull(client, offset=1) == (AnswerCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 1, 0, 1, b"")


def test_a_waiting_pull_is_answered_by_the_arrival_of_a_message(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Long polling, without looking again and again; other queues do not wake it."""
    pending = begin(client, queueId=1)
    wait_until(lambda: waiting(broker) == 1 and broker.store.gets == 1, "it has looked, and waits")
    send(broker, "a", queue_id=0)
    send(broker, "b", queue_id=1)
    assert pulled(client.answer_to(pending)).records == record(broker, 1)
    assert broker.store.gets == 2
    wait_until(lambda: waiting(broker) == 0, "nobody waits any more")


def test_a_message_that_arrives_between_looking_and_waiting_is_not_missed(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter is armed before the store is asked."""
    real, waits, wait = broker.store.get, [], Waiter.wait

    async def noted(waiter: Waiter, timeout_s: float) -> None:
        waits.append(waiter.woken)
        await wait(waiter, timeout_s)

    monkeypatch.setattr(Waiter, "wait", noted)

    def get_then_send(*args: object, **options: object) -> object:
        result = real(*args, **options)  # type: ignore[arg-type]
        if broker.store.gets == 1:
            send(broker, "a")  # once it is answered, whoever waits has been woken
        return result

    broker.store.get = get_then_send  # type: ignore[method-assign,assignment]
    assert pull(client, wait_ms=LONG_MS).records == record(broker, 0)
    assert waits == [True]


def test_waiting_ends_with_the_time(client: RemotingSocket) -> None:
    """Then the answer says that there is nothing."""
    began = time.monotonic()
    answer = pull(client, wait_ms=50)
    assert (answer.code, answer.remark, answer.records) == (AnswerCode.PULL_NOT_FOUND, "NO_MATCHED_LOGIC_QUEUE", b"")
    assert time.monotonic() - began >= 0.05


def test_nobody_waits_longer_than_allowed() -> None:
    """Whatever the client says."""
    with RemotingHarness(BrokerConfig(pull_wait_ms_max=10)) as broker, broker.dial() as client:
        assert pull(client, wait_ms=60_000).code == AnswerCode.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("", "abc-"), ("*", "abc-"), ("a", "a"), ("a || c", "ac"), (" a||b ", "ab"), ("none", "")],
)
def test_only_messages_with_a_wanted_tag_are_given(
    broker: RemotingHarness, client: RemotingSocket, expression: str, expected: str
) -> None:
    """``*`` is all; what does not match is passed over, not asked for again."""
    send(broker, "a", "b", "c", "")
    answer = pull(client, expression)
    assert answer.records == b"".join(record(broker, "abc-".index(one)) for one in expected)
    assert answer.next_offset == 4


def test_tags_with_one_hash_are_told_apart(broker: RemotingHarness, client: RemotingSocket) -> None:
    """``Aa`` and ``BB`` have the same Java hash code, the consume queue cannot tell them apart."""
    send(broker, "Aa", "BB")
    assert pull(client, "BB").records == record(broker, 1)


def test_a_pull_with_tags_waits_for_one_of_them_and_remembers_what_it_passed(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Arrivals of other tags do not even wake it; the next offset is behind them."""
    send(broker, "x")
    pending = begin(client, "a")
    wait_until(lambda: waiting(broker) == 1 and broker.store.gets == 1, "it has looked")
    send(broker, "y", "z")
    assert (waiting(broker), broker.store.gets) == (1, 1)
    send(broker, "a")
    answer = pulled(client.answer_to(pending))
    assert (answer.records, answer.next_offset) == (record(broker, 3), 4)


def test_a_wait_in_vain_still_tells_what_was_passed(broker: RemotingHarness, client: RemotingSocket) -> None:
    """So that it is not read again."""
    send(broker, "x", "x")
    answer = pull(client, "a", wait_ms=20)
    assert (answer.code, answer.remark) == (AnswerCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert answer.next_offset == 2


@pytest.mark.parametrize(
    "expression", ["|| ||", "||".join(f"t{number}" for number in range(1025))], ids=["no tag", "too many"]
)
def test_a_strange_tag_expression_is_refused(client: RemotingSocket, expression: str) -> None:
    """Rather than matching nothing for ever."""
    code, reason = refused(client, expression)
    assert (code, "tag expression" in reason) == (AnswerCode.SUBSCRIPTION_PARSE_FAILED, True)


def test_only_what_exists_and_may_be_read_is_served(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Unknown and hidden topics do not exist, permissions and queue counts hold."""
    broker.state.table["W"] = TopicConfig("W", 1, 1, 2)
    for topic, code in (
        ("unknown", AnswerCode.TOPIC_NOT_EXIST),
        (BROKER_STATE_TOPIC, AnswerCode.TOPIC_NOT_EXIST),
        ("W", AnswerCode.NO_PERMISSION),
    ):
        assert refused(client, topic=topic)[0] == code, topic
    for queue_id in (4, -1):
        said, reason = refused(client, queueId=queue_id)
        assert (said, "queue" in reason) == (AnswerCode.SYSTEM_ERROR, True)


def test_a_slave_serves_pulls(broker: RemotingHarness, client: RemotingSocket) -> None:
    """From what is committed and dispatched there."""
    send(broker, "a")
    broker.become(BrokerRole.SLAVE)
    assert pull(client).records == record(broker, 0)


def test_no_more_pulls_wait_than_allowed() -> None:
    """pulls_waiting_max; who does not want to wait is served all the same."""
    with RemotingHarness(BrokerConfig(pulls_waiting_max=1)) as broker, broker.dial() as client:
        pending = begin(client)
        wait_until(lambda: waiting(broker) == 1, "the pull waits")
        code, reason = refused(client, wait_ms=LONG_MS)
        assert (code, "pulls_waiting_max" in reason) == (AnswerCode.SYSTEM_BUSY, True)
        assert [one.subject for one in broker.conditions.now()] == ["pulls_waiting_max"]
        assert pull(client).code == AnswerCode.PULL_NOT_FOUND
        send(broker, "a")
        assert pulled(client.answer_to(pending)).records == record(broker, 0)


def test_a_client_that_goes_takes_its_waiting_pull_along(broker: RemotingHarness) -> None:
    """The table does not fill with pulls that nobody wants any more."""
    with broker.dial() as client:
        begin(client, wait_ms=50_000)
        wait_until(lambda: waiting(broker) == 1, "the pull waits")
    wait_until(lambda: waiting(broker) == 0, "the pull is gone")


def test_a_stopping_broker_answers_waiting_pulls(broker: RemotingHarness, client: RemotingSocket) -> None:
    """With what there is, which is nothing."""
    pending = begin(client, wait_ms=50_000)
    wait_until(lambda: waiting(broker) == 1, "the pull waits")
    broker.stop(grace_s=10)
    assert pulled(client.answer_to(pending)).code == AnswerCode.PULL_NOT_FOUND


def test_what_a_deleted_topic_of_the_same_name_held_is_not_given(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Pulls, ranges and offsets by time begin behind it, also in a queue that nothing was sent to since."""
    send(broker, "old", "old", "new")
    send(broker, "old", queue_id=1)
    broker.state.begins = {("T", 0): 2, ("T", 1): 1}

    def offset(code: RequestCode, queue_id: int) -> int:
        where = {"topic": "T", "queueId": queue_id, "timestamp": 0}
        return int(client.ask(code, where).fields["offset"])

    assert pull(client, offset=1) == (AnswerCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 2, 2, 3, b"")
    assert pull(client, offset=2) == (AnswerCode.SUCCESS, "FOUND", 3, 2, 3, record(broker, 2))
    empty = pull(client, offset=1, queueId=1)
    assert (empty.records, empty.min_offset, empty.max_offset) == (b"", 1, 1)
    ends = [
        [offset(code, queue) for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)] for queue in (0, 1)
    ]
    assert ends == [[2, 3], [1, 1]]
    assert offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, 0) == 2


@pytest.mark.parametrize("group", ["g" * 128, "a/b"])
def test_a_groups_name_is_checked_before_it_is_counted(client: RemotingSocket, group: str) -> None:
    """It becomes a name in statistics, so it must not be as long as a request."""
    code, reason = refused(client, consumerGroup=group)
    assert (code, "group" in reason) == (AnswerCode.SYSTEM_ERROR, True)


def test_a_filter_that_matches_nothing_is_answered_with_where_to_go_on(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull that may wait looks for a limited time only; the next one goes on there."""
    monkeypatch.setattr("rocketstore.broker.pull.SCAN_MS_MAX", 0)
    send(broker, *["a"] * 5)
    answer = pull(client, "b", wait_ms=60_000, maxMsgNums=2)
    assert (answer.remark, answer.next_offset) == ("NO_MATCHED_MESSAGE", 2)
