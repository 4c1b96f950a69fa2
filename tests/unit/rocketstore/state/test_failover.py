"""What a group's members know after failovers, lost snapshots and expired logs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dledger.errors import CorruptLogError
from rocketstore.commit_log.port import PutDone
from rocketstore.message.message import Message
from rocketstore.state import broker_state, publisher
from rocketstore.state.applier import SNAPSHOT_FILE
from rocketstore.state.broker_state import StateBehindError, StateBlockedError, StateIncompleteError
from rocketstore.state.changes import QueueOffset, TopicConfig
from rocketstore.types import BROKER_STATE_TOPIC, BrokerRole, GetMessageStatus, GetResult, PutResult
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.state.conftest import Member

AddMember = Callable[[str], Member]
HOUR_MS = 3_600_000


def put_topic(member: Member, name: str) -> None:
    assert member.do(lambda done: member.state.put_topic(TopicConfig(name), done)).outcome == "stored"


def names(member: Member) -> list[str]:
    return [topic.name for topic in member.state.topics()]


def end(member: Member) -> int:
    return member.store.max_offset(BROKER_STATE_TOPIC, 0)


def lose_snapshot(member: Member) -> None:
    (member.directory / SNAPSHOT_FILE).unlink(missing_ok=True)


def test_a_successor_knows_everything_that_was_answered(add_member: AddMember) -> None:
    first, second = add_member("1"), add_member("2")
    first.promote()
    first.store.put(Message("T", b""))
    put_topic(first, "T")
    first.do(lambda done: first.state.commit_offsets("g", [("T", 0, 1)], done=done))
    first.do(lambda done: first.state.commit_delay_offsets({1: 5}, done))
    first.store.role = BrokerRole.SLAVE

    second.promote()

    assert names(second) == ["T"]
    assert second.state.offsets("g") == [QueueOffset("T", 0, 1)]
    assert second.state.delay_offset(1) == 5


def test_what_waited_since_an_earlier_time_as_master_is_not_written(add_member: AddMember) -> None:
    """Another one may have led in between, and the change may be of what that one has changed."""
    first = add_member("1")
    first.promote()
    answers: list[PutResult] = []
    first.state.put_topic(TopicConfig("late"), answers.append)
    first.store.role = BrokerRole.SLAVE
    first.promote()
    assert [(one.outcome, one.reason) for one in answers] == [
        ("not_applied", "broker state: another master has led since; not written")
    ]
    put_topic(first, "T")
    assert names(first) == ["T"]


def test_a_new_master_publishes_the_full_state_once(add_member: AddMember) -> None:
    first, second = add_member("1"), add_member("2")
    first.promote()
    assert end(first) == 0  # there is none yet
    put_topic(first, "T")
    before = end(first)
    first.store.role = BrokerRole.SLAVE
    second.promote()
    second.settle()
    second.settle()

    assert end(second) == before + 1


def test_a_full_state_that_was_refused_is_published_again(add_member: AddMember, clock: ManualClock) -> None:
    """After a second, and later each time: making it takes long, and what refused it may go on doing so.

    Once it was stored, the next one that is refused is tried again as soon as the first.
    """
    first, second = add_member("1"), add_member("2")
    first.promote()
    put_topic(first, "T")
    before = end(first)
    first.store.role = BrokerRole.SLAVE
    second.store.refusals += [broker_state._SLAVE] * 3
    second.promote()

    for left, wait_ms in ((2, 1000), (1, 2000), (0, 4000)):
        assert len(second.store.refusals) == left
        clock.now_ms += wait_ms - 1
        second.settle()
        assert len(second.store.refusals) == left
        clock.now_ms += 1
        second.settle()
    assert end(second) == before + 1

    second.store.refusals.append(broker_state._SLAVE)  # the next one, long after
    clock.now_ms += second.settings.full_interval_ms
    second.settle()
    clock.now_ms += 1000
    second.settle()
    assert end(second) == before + 2


def test_a_full_state_is_written_in_several_batches(add_member: AddMember, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log takes no batch of any size; whoever has nothing else gets all of it."""
    monkeypatch.setattr(publisher, "FULL_PART_BYTES", 500)
    monkeypatch.setattr(publisher, "FULL_BYTES_AT_ONCE", 2000)
    first, second = add_member("1"), add_member("2")
    first.promote()
    for number in range(100):
        put_topic(first, f"topic-{number:03d}")
    first.store.role = BrokerRole.SLAVE
    sizes: list[int] = []
    submit = second.store.submit

    def noting(messages: Sequence[Message], done: PutDone, **how: Any) -> None:  # noqa: ANN401  # the store's own
        sizes.append(sum(len(one.body) for one in messages))
        submit(messages, done, **how)

    monkeypatch.setattr(second.store, "submit", noting)
    before = end(second)
    second.promote()

    assert len(sizes) > 2
    assert max(sizes) <= 2000
    third = add_member("3")
    third.store.expire(BROKER_STATE_TOPIC, 0, before)
    third.promote()
    assert names(third) == [f"topic-{number:03d}" for number in range(100)]


def test_who_lost_its_snapshot_recovers_from_a_full_state(add_member: AddMember) -> None:
    first, second = add_member("1"), add_member("2")
    first.promote()
    put_topic(first, "T")
    first.store.role = BrokerRole.SLAVE
    second.promote()
    published = end(second)
    put_topic(second, "U")
    lose_snapshot(first)
    first.store.expire(BROKER_STATE_TOPIC, 0, published - 1)
    first.restart(clean=False)

    first.promote()

    assert names(first) == ["T", "U"]


def test_who_misses_changes_does_not_become_master_until_a_full_state_comes(
    add_member: AddMember, clock: ManualClock, master: Member
) -> None:
    put_topic(master, "T")
    put_topic(master, "U")
    late = add_member("late")
    late.store.expire(BROKER_STATE_TOPIC, 0, 1)
    with pytest.raises(StateIncompleteError):
        late.state.catch_up(1)

    clock.now_ms += 6 * HOUR_MS
    master.settle()
    late.settle()

    late.state.catch_up(1)
    assert names(late) == ["T", "U"]


def test_a_master_publishes_again_before_its_full_state_expires(master: Member, clock: ManualClock) -> None:
    put_topic(master, "T")
    before = end(master)
    for hours in range(1, 25):
        clock.now_ms += HOUR_MS
        master.settle()
        assert end(master) == before + hours // 6


def test_a_master_publishes_again_when_its_full_state_has_expired(master: Member, clock: ManualClock) -> None:
    put_topic(master, "T")
    before = end(master)
    master.store.expire(BROKER_STATE_TOPIC, 0, before)
    clock.now_ms += 10_000
    master.settle()

    assert end(master) == before + 1


def test_a_full_state_in_many_parts_is_taken_whole(
    add_member: AddMember, master: Member, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "FULL_PART_BYTES", 500)
    for number in range(50):
        put_topic(master, f"T{number:02}")
    before = end(master)
    clock.now_ms += 6 * HOUR_MS
    master.settle()
    assert end(master) > before + 5
    late = add_member("late")
    late.store.expire(BROKER_STATE_TOPIC, 0, before)

    late.promote()

    assert names(late) == [f"T{number:02}" for number in range(50)]


def test_a_full_state_of_which_a_part_is_missing_does_not_count(add_member: AddMember, master: Member) -> None:
    parts = b'{"v":1,"full":{"id":"a","part":%d,"parts":3,"upto":%d},"changes":[]}'
    put_topic(master, "T")
    upto = end(master)
    for part in (0, 2, 1, 2):
        master.store.put(Message(BROKER_STATE_TOPIC, parts % (part, upto)))
    master.settle()

    assert names(master) == ["T"]


def test_a_full_state_replaces_tables_that_differ(add_member: AddMember, master: Member, clock: ManualClock) -> None:
    slave = add_member("slave")
    put_topic(master, "T")
    slave.settle()
    del slave.state._applier.tables.topics["T"]  # however that could happen
    clock.now_ms += 6 * HOUR_MS
    master.settle()
    slave.settle()

    assert names(slave) == ["T"]


def test_a_change_stored_between_a_state_and_its_publication_is_not_lost(add_member: AddMember, master: Member) -> None:
    """A put of unknown outcome may still be stored before the full state that does not know of it."""
    put_topic(master, "T")
    upto = end(master)
    late_change = b'{"v":1,"changes":[{"op":"put_topic","name":"Late","read":1,"write":1,"perm":6}]}'
    full = b'{"v":1,"full":{"id":"a","part":0,"parts":1,"upto":%d},"changes":[{"op":"put_topic","name":"T","read":8,'
    master.store.put(Message(BROKER_STATE_TOPIC, late_change))
    master.store.put(Message(BROKER_STATE_TOPIC, full % upto + b'"write":8,"perm":6}]}'))
    put_topic(master, "U")
    fresh = add_member("fresh")
    fresh.store.expire(BROKER_STATE_TOPIC, 0, upto)

    fresh.promote()

    assert names(fresh) == names(master) == ["Late", "T", "U"]


def test_a_node_that_meets_a_newer_message_stops_and_does_not_lead(add_member: AddMember, master: Member) -> None:
    slave = add_member("slave")
    put_topic(master, "T")
    master.store.put(Message(BROKER_STATE_TOPIC, b'{"v":4,"changes":[]}'))
    slave.settle()
    assert names(slave) == ["T"]

    with pytest.raises(StateBlockedError):
        slave.state.catch_up(1)


def test_catching_up_does_not_skip_what_is_not_readable_yet(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted member's queue knows messages behind the commit position."""
    put_topic(master, "T")
    slave = add_member("slave")
    unreadable = GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, 0, 0, 1)
    monkeypatch.setattr(slave.store, "get", lambda *_args, **_kwargs: unreadable)
    with pytest.raises(StateBehindError):
        slave.state.catch_up(0.02)
    monkeypatch.undo()

    slave.state.catch_up(1)

    assert names(slave) == ["T"]


def test_catching_up_ends_with_the_wish_for_it(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that is stopped, or leads no longer, does not wait for what is not readable."""
    put_topic(master, "T")
    slave, cancelled = add_member("slave"), threading.Event()
    monkeypatch.setattr(
        slave.store, "get", lambda *_args, **_kwargs: GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, 0, 0, 1)
    )
    cancelled.set()

    with pytest.raises(StateBehindError, match="was cancelled"):
        slave.state.catch_up(60, cancelled)


def test_a_damaged_message_leaves_the_state_incomplete(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read here is not what every node skips: others have it."""
    for name in ("T", "U", "V"):
        put_topic(master, name)
    slave = add_member("slave")
    get = slave.store.get

    def damaged_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        if offset <= 1 < offset + max_count:
            raise CorruptLogError(slave.directory, 1, "planted", "none")
        return get(topic, queue_id, offset, max_count=max_count)

    monkeypatch.setattr(slave.store, "get", damaged_get)

    with pytest.raises(StateIncompleteError):
        slave.state.catch_up(1)

    assert names(slave) == ["T", "V"]


def test_a_record_whose_bytes_are_damaged_leaves_the_state_incomplete(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_topic(master, "T")
    put_topic(master, "U")
    slave = add_member("slave")
    get = slave.store.get

    def flipped_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        found = get(topic, queue_id, offset, max_count=max_count)
        records = [record.replace(b'"name":"T"', b'"name":"X"') for record in found.records]
        return replace(found, records=tuple(records))

    monkeypatch.setattr(slave.store, "get", flipped_get)

    with pytest.raises(StateIncompleteError):
        slave.state.catch_up(1)

    assert names(slave) == ["U"]


def test_a_gap_in_the_queue_leaves_the_state_incomplete(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("T", "U", "V"):
        put_topic(master, name)
    slave = add_member("slave")
    get = slave.store.get

    def gappy_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        found = get(topic, queue_id, offset, max_count=max_count)
        return replace(found, records=tuple(record for record in found.records if b'"U"' not in record))

    monkeypatch.setattr(slave.store, "get", gappy_get)

    with pytest.raises(StateIncompleteError):
        slave.state.catch_up(1)

    assert names(slave) == ["T", "V"]


def test_messages_that_vanish_while_they_are_read_leave_the_state_incomplete(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_topic(master, "T")
    put_topic(master, "U")
    slave = add_member("slave")
    get = slave.store.get

    def late_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        if offset == 0:
            return GetResult(GetMessageStatus.MESSAGE_WAS_REMOVING, 1, 0, 2)
        return get(topic, queue_id, offset, max_count=max_count)

    monkeypatch.setattr(slave.store, "get", late_get)

    with pytest.raises(StateIncompleteError):
        slave.state.catch_up(1)

    assert names(slave) == ["U"]


def test_going_back_to_before_a_full_state_is_done_once(
    add_member: AddMember, master: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If what lies between a state and its publication is not readable here, trying again for ever does not help."""
    put_topic(master, "T")
    put_topic(master, "U")
    full = b'{"v":1,"full":{"id":"a","part":0,"parts":1,"upto":1},"changes":[]}'
    master.store.put(Message(BROKER_STATE_TOPIC, full))
    slave = add_member("slave")
    get = slave.store.get

    def damaged_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        if offset <= 1 < offset + max_count:
            raise CorruptLogError(slave.directory, 1, "planted", "none")
        return get(topic, queue_id, offset, max_count=max_count)

    monkeypatch.setattr(slave.store, "get", damaged_get)

    with pytest.raises(StateIncompleteError):
        slave.state.catch_up(1)


def test_catching_up_waits_for_dispatch(add_member: AddMember, master: Member) -> None:
    put_topic(master, "T")
    slave = add_member("slave")
    slave.store.dispatched_to = 0
    slave.restart(clean=False)
    slave.store.dispatched_to = 0
    put_topic(master, "U")

    with pytest.raises(StateBehindError):
        slave.state.catch_up(0.02)


def test_a_new_disk_behind_an_expired_log_is_not_complete_before_it_knows_whether_there_was_state(
    add_member: AddMember,
) -> None:
    """Its tables are empty because nothing came yet: a topic that everybody else has would not exist."""
    member = add_member("new")
    member.store.numbers_known = False
    before = member.state.is_applied
    with pytest.raises(StateIncompleteError):
        member.state.catch_up(1)
    member.store.numbers_known = True
    member.state.catch_up(1)

    assert (before, member.state.is_applied) == (False, True)


def test_a_broker_that_goes_on_with_what_is_left_is_complete(add_member: AddMember) -> None:
    """A plain one, whose queues somebody removed: nobody can tell it more."""
    member = add_member("plain")
    member.settings = replace(member.settings, accept_incomplete=True)
    member.restart()
    member.store.numbers_known = False

    member.state.catch_up(1)

    assert member.state.is_applied


def test_what_was_put_before_a_topic_was_deleted_is_not_in_its_successor(add_member: AddMember) -> None:
    """Also what is not dispatched yet: its producer knows that it was stored before."""
    master = add_member("1")
    master.promote()
    put_topic(master, "T")
    for _ in range(2):
        master.store.put(Message("T", b""))
    master.store.dispatched_to = len(master.log.records)
    master.store.put(Message("T", b"late"))
    master.store.put(Message("T", b"late", 3))
    answers: list[object] = []
    master.state.delete_topic("T", answers.append)
    master.store.dispatched_to = None
    master.store.dispatch()
    master.settle()

    put_topic(master, "T")
    assert len(answers) == 1
    assert [master.state.begin_offset("T", queue_id) for queue_id in (0, 3)] == [3, 1]
