"""How much there may be of topics, queues, groups and offsets; met before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger.errors import InvalidRequestError
from dledger.monitoring import ConditionKind, Conditions
from rocketstore.message.message import Message
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.state.changes import TopicConfig
from rocketstore.state.publisher import LimitReachedError, StateLimits
from rocketstore.types import BROKER_STATE_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.state.conftest import Member

BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason="busy")
LIMITS = StateLimits(queues_max=20, groups_max=2, offsets_max=5)


@pytest.fixture
def settings() -> StateSettings:
    return StateSettings(limits=LIMITS)


def make(member: Member, name: str, queues: int, *, automatic: bool = False) -> PutResult:
    topic = TopicConfig(name, queues, queues)
    return member.do(lambda done: member.state.put_topic(topic, done, automatic=automatic))


def commit(member: Member, group: str, *queues: int, topic: str = "T") -> PutResult:
    offsets = [(topic, queue, 0) for queue in queues]
    return member.do(lambda done: member.state.commit_offsets(group, offsets, done=done))


def test_offsets_of_what_does_not_exist_are_refused(master: Member) -> None:
    """Topics and queues; a queue that has messages counts although its topic has fewer by now."""
    with pytest.raises(InvalidRequestError, match="topic 'T' does not exist"):
        commit(master, "g", 0)
    make(master, "T", 2)
    with pytest.raises(InvalidRequestError, match=r"T has 2 queues, .*no queue 2"):
        commit(master, "g", 0, 2)
    assert master.state.groups() == []

    master.store.put(Message("T", b"x", queue_id=2))
    assert commit(master, "g", 0, 2).ok


def test_all_topics_together_have_a_limited_number_of_queues(master: Member) -> None:
    """The error says what helps, and deleting helps."""
    make(master, "A", 12)
    make(master, "B", 8)

    before = master.store.max_offset(BROKER_STATE_TOPIC, 0)
    with pytest.raises(
        LimitReachedError, match=r"have 20 queues, and at most 20 are allowed .* delete topics or raise"
    ):
        make(master, "C", 1)
    with pytest.raises(LimitReachedError):
        make(master, "A", 13)
    assert master.store.max_offset(BROKER_STATE_TOPIC, 0) == before

    assert make(master, "A", 4).ok
    assert make(master, "C", 8).ok
    master.do(lambda done: master.state.delete_topic("B", done))
    assert make(master, "D", 8).ok


def test_topics_made_by_sending_leave_room_for_others(master: Member) -> None:
    """One in ten queues is for topics that somebody makes by name."""
    make(master, "A", 18, automatic=True)

    with pytest.raises(LimitReachedError, match="2 are reserved for topics created by an administrator"):
        make(master, "B", 1, automatic=True)
    assert make(master, "B", 2).ok


def test_what_is_under_way_counts(master: Member) -> None:
    """Many at once do not slip through, and one that was refused leaves nothing behind."""
    answers: list[PutResult] = []
    for name in ("A", "B"):
        master.state.put_topic(TopicConfig(name, 10, 10), answers.append)
    with pytest.raises(LimitReachedError):
        master.state.put_topic(TopicConfig("C", 1, 1), answers.append)
    master.store.refusals.append(BUSY)
    master.settle()

    assert [answer.ok for answer in answers] == [False, False]
    assert make(master, "C", 20).ok


def test_queues_of_deleted_topics_count_in_the_end(master: Member) -> None:
    """Their files stay until the log has expired, so making and deleting topics must have an end, too."""
    for number in range(20):
        make(master, f"T{number}", 1)
        master.store.put(Message(f"T{number}", b"x"))
        master.do(lambda done, number=number: master.state.delete_topic(f"T{number}", done))  # type: ignore[misc]
    assert make(master, "U", 20).ok

    with pytest.raises(LimitReachedError):
        make(master, "V", 1)
    make(master, "U", 19)
    master.store.put(Message("gone", b"x"))
    with pytest.raises(LimitReachedError, match="queues of deleted topics"):
        make(master, "V", 1)


def test_groups_and_their_offsets_are_limited(master: Member) -> None:
    """Groups may be deleted, and go on being noted where they are."""
    make(master, "T", 8)
    commit(master, "a", 0, 1, 2)
    commit(master, "b", 0)

    with pytest.raises(LimitReachedError, match=r"2 consumer groups, .* delete groups"):
        commit(master, "c")
    with pytest.raises(LimitReachedError, match=r"4 group offsets are stored, and at most 5 .* delete groups"):
        commit(master, "b", 1, 2)
    assert commit(master, "b", 0, 1).ok

    master.do(lambda done: master.state.delete_group("a", done))
    assert commit(master, "c", 0, 1, 2).ok
    master.do(lambda done: master.state.delete_topic("T", done))
    make(master, "U", 5)
    assert commit(master, "b", 0, 1, 2, 3, 4, topic="U").ok


def test_groups_under_way_count(master: Member) -> None:
    """Many that begin at once do not slip through; a second commit of one of them is no other group."""
    make(master, "T", 1)
    answers: list[PutResult] = []
    for group in ("a", "b", "a"):
        master.state.commit_offsets(group, [("T", 0, 0)], done=answers.append)

    with pytest.raises(LimitReachedError, match="consumer groups"):
        commit(master, "c", 0)

    master.settle()
    assert [answer.ok for answer in answers] == [True] * 3


def test_applying_a_change_never_refuses(add_member: Callable[[str], Member], master: Member) -> None:
    """Members with other limits, and those of an older version, have the same tables."""
    make(master, "A", 20)
    commit(master, "g", 0, topic="A")
    slave = add_member("slave")
    slave.state.shutdown()
    slave.settings = StateSettings(limits=StateLimits(queues_max=1, groups_max=1, offsets_max=1))
    slave.restart()
    slave.settle()
    assert slave.state.topics() == master.state.topics()
    assert slave.state.offsets("g") == master.state.offsets("g")

    master.store.role = BrokerRole.SLAVE
    slave.promote()
    assert make(slave, "A", 20).ok
    assert make(slave, "A", 19).ok
    assert commit(slave, "g", 0, topic="A").ok
    with pytest.raises(LimitReachedError):
        make(slave, "B", 1)


def test_a_limit_that_is_reached_is_reported(master: Member, clock: ManualClock) -> None:
    """As a condition that ends by itself when nothing was refused for a while."""
    conditions = Conditions("n0", clock)
    state = BrokerState(
        master.store, master.directory, clock=clock, settings=StateSettings(limits=LIMITS), conditions=conditions
    )
    with pytest.raises(LimitReachedError):
        state.put_topic(TopicConfig("T", 21, 21), lambda _result: None)
    assert conditions.holds(ConditionKind.AT_LIMIT, "queues_max")
    clock.now_ms += 60_000
    assert not conditions.holds(ConditionKind.AT_LIMIT)
