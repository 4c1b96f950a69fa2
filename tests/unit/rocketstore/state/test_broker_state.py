"""One member's broker state: what it answers, and what is left after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dledger.errors import DiskError, DLedgerError, InvalidRequestError, ShutdownError
from dledger.store.fs import FileSystem
from rocketstore.message.message import Message
from rocketstore.state import publisher
from rocketstore.state.applier import BrokerSnapshot, read_snapshot
from rocketstore.state.broker_state import BrokerState, StateIncompleteError, StateSettings
from rocketstore.state.changes import GroupConfig, MalformedStateError, QueueOffset, TopicConfig
from rocketstore.state.tables import Tables
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC, BrokerRole, GetResult, PutMessageStatus, PutResult
from tests.support.fake_store import FakeStore
from tests.support.waiting import ManualClock, wait_until
from tests.unit.rocketstore.state.conftest import Member

BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason="busy")
UNKNOWN = PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason="no quorum in time")


def fill(member: Member, topic: str, count: int) -> None:
    """Messages of a topic, which is made if need be."""
    if member.state.topic(topic) is None:
        member.do(lambda done: member.state.put_topic(TopicConfig(topic), done))
    for _ in range(count):
        assert member.store.put(Message(topic, b"x")).ok


def commit(member: Member, offset: int, *, reset: bool = False, group: str = "g") -> PutResult:
    return member.do(lambda done: member.state.commit_offsets(group, [("T", 0, offset)], reset, done))


def state_messages(member: Member) -> int:
    return member.store.max_offset(BROKER_STATE_TOPIC, 0)


def test_a_change_is_visible_once_it_is_answered(master: Member) -> None:
    fill(master, "T", 9)

    assert master.do(lambda done: master.state.put_topic(TopicConfig("T", 4, 4), done)).outcome == "stored"
    assert commit(master, 7).outcome == "stored"
    assert master.do(lambda done: master.state.commit_delay_offsets({2: 5}, done)).outcome == "stored"

    assert master.state.topics() == [TopicConfig("T", 4, 4)]
    assert master.state.topic("T") == TopicConfig("T", 4, 4)
    assert master.state.groups() == ["g"]
    assert master.state.offsets("g") == master.state.offsets("g", "T") == [QueueOffset("T", 0, 7)]
    assert master.state.offsets("g", "other") == master.state.offsets("nobody") == []
    assert master.state.offset("g", "T", 0) == 7
    assert master.state.offset("g", "T", 1) == -1
    assert (master.state.delay_offset(2), master.state.delay_offset(3)) == (5, 0)


def test_a_change_is_not_answered_before_it_is_applied(master: Member) -> None:
    answers: list[PutResult] = []
    master.store.dispatched_to = len(master.log.records)
    master.state.put_topic(TopicConfig("T"), answers.append)
    master.settle()
    assert answers == []

    master.store.dispatched_to = None
    master.store.dispatch()
    master.settle()

    assert [answer.outcome for answer in answers] == ["stored"]


def test_a_change_is_not_answered_before_it_is_stored(master: Member) -> None:
    answers: list[PutResult] = []
    master.store.hold_results = True
    master.state.put_topic(TopicConfig("T"), answers.append)
    master.settle()
    assert master.state.topic("T") is not None
    assert answers == []

    master.store.release_results()
    master.settle()

    assert [answer.outcome for answer in answers] == ["stored"]


def test_what_waits_together_becomes_one_message(master: Member) -> None:
    fill(master, "T", 100)
    answers: list[PutResult] = []
    before = state_messages(master)
    for number in range(100):
        master.state.commit_offsets(f"g{number % 7}", [("T", 0, number)], done=answers.append)
    master.settle()

    assert state_messages(master) == before + 1
    assert [answer.outcome for answer in answers] == ["stored"] * 100
    assert master.state.offset("g1", "T", 0) == 99


def test_a_message_has_a_bounded_size(master: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "BATCH_BYTES_MAX", 1000)
    answers: list[PutResult] = []
    before = len(master.log.records)
    for number in range(100):
        master.state.put_topic(TopicConfig(f"T{number}"), answers.append)
    master.settle()

    assert len(answers) == 100
    assert all(len(one.record) < 1300 for one in master.log.records[before:])


def test_too_many_changes_at_once_are_refused(master: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "PENDING_MAX", 2)
    answers: list[PutResult] = []
    for number in range(3):
        master.state.put_topic(TopicConfig(f"T{number}"), answers.append)

    assert [answer.outcome for answer in answers] == ["not_applied"]
    master.settle()
    assert sorted(answer.outcome for answer in answers) == ["not_applied", "stored", "stored"]


def test_an_offset_goes_back_only_with_reset(master: Member) -> None:
    fill(master, "T", 9)
    commit(master, 7)

    assert commit(master, 3).outcome == "stored"
    assert master.state.offset("g", "T", 0) == 7

    assert commit(master, 3, reset=True).outcome == "stored"
    assert master.state.offset("g", "T", 0) == 3


def test_a_commit_that_repeats_what_is_noted_writes_nothing(master: Member) -> None:
    fill(master, "T", 9)
    commit(master, 7)
    before = state_messages(master)

    assert commit(master, 7).ok
    assert commit(master, 2).ok
    assert master.do(lambda done: master.state.commit_offsets("g", [], done=done)).ok

    assert state_messages(master) == before


def test_an_offset_beyond_the_queues_end_is_refused(master: Member) -> None:
    """It would hide messages that are still to come, and could not be put right without a reset."""
    fill(master, "T", 3)

    with pytest.raises(InvalidRequestError):
        commit(master, 4)
    with pytest.raises(InvalidRequestError):
        commit(master, 4, reset=True)
    assert commit(master, 3).ok


def test_what_is_put_but_not_dispatched_may_be_committed(master: Member) -> None:
    master.do(lambda done: master.state.put_topic(TopicConfig("T"), done))
    master.store.dispatched_to = len(master.log.records)
    fill(master, "T", 3)
    answers: list[PutResult] = []
    master.state.commit_offsets("g", [("T", 0, 3)], done=answers.append)
    with pytest.raises(InvalidRequestError):
        commit(master, 4)
    master.settle()
    master.store.dispatched_to = None
    master.store.dispatch()
    master.settle()

    assert [answer.outcome for answer in answers] == ["stored"]


@pytest.mark.parametrize("group", ["", "a b", "x" * 128, "a/../b"])
def test_a_bad_name_is_refused_at_once(master: Member, group: str) -> None:
    with pytest.raises(MalformedStateError):
        commit(master, 0, group=group)
    with pytest.raises(MalformedStateError):
        master.state.delete_topic(group, print)


def test_a_group_comes_with_its_first_commit_and_goes_when_deleted(master: Member) -> None:
    master.do(lambda done: master.state.commit_offsets("idle", [], done=done))
    assert master.state.groups() == ["idle"]

    master.do(lambda done: master.state.delete_group("idle", done))
    assert master.state.groups() == []


def test_a_new_group_has_room_for_its_retry_topic_and_an_old_one_stays(master: Member) -> None:
    """The limit is RocketMQ's for groups, and is named. One that was made before there was a limit goes on."""
    with pytest.raises(MalformedStateError, match="1 to 120 of the characters"):
        commit(master, 0, group="g" * 121)
    with pytest.raises(MalformedStateError, match="1 to 120 of the characters"):
        master.state.put_group(GroupConfig("g" * 121), print)
    fill(master, "T", 3)
    assert commit(master, 1, group="g" * 120).ok
    master.state._applier.tables.groups["g" * 121] = {}
    assert commit(master, 1, group="g" * 121).ok


def test_a_group_made_anew_gets_nothing_of_a_deleted_one(master: Member) -> None:
    """Neither what it had to try again, also what waits for that, nor its dead letters; others keep theirs."""
    retry, dead, other = "%RETRY%g", "%DLQ%g", "%RETRY%gg"
    master.do(lambda done: master.state.commit_offsets("g", [], done=done))
    for name in (retry, dead, other):
        fill(master, name, 3)
    for _ in range(5):
        assert master.store.put(Message(SCHEDULE_TOPIC, b"x")).ok

    assert master.do(lambda done: master.state.delete_group("g", done)).ok

    assert (master.state.groups(), [one.name for one in master.state.topics()]) == ([], [other])
    for name in (retry, dead, other):
        master.do(partial(master.state.put_topic, TopicConfig(name, 8, 8)))
    assert [master.state.begin_offset(name, 0) for name in (retry, dead, other)] == [3, 3, 0]
    waits = [QueueOffset(SCHEDULE_TOPIC, 0, at) for at in (4, 5)]
    assert [master.state.place_for(retry, 0, one) for one in waits] == [None, 0]
    assert [master.state.place_for(other, 0, one) for one in waits] == [0, 0]


def test_what_waits_for_a_deleted_topic_is_told_by_the_progress_of_its_own_level(master: Member) -> None:
    """Another level may be far ahead, or behind: a topic made anew gets nothing that was sent to the old one."""
    fill(master, "T", 1)
    for queue_id, messages in ((0, 6), (1, 5)):
        for _ in range(messages):
            assert master.store.put(Message(SCHEDULE_TOPIC, b"x", queue_id)).ok
    master.do(lambda done: master.state.commit_delay_offsets({1: 6, 2: 1}, done))

    assert master.do(lambda done: master.state.delete_topic("T", done)).ok
    assert master.do(partial(master.state.put_topic, TopicConfig("T", 1, 1))).ok

    waits = [QueueOffset(SCHEDULE_TOPIC, 1, at) for at in (4, 5)]
    assert [master.state.place_for("T", 0, one) for one in waits] == [None, 0]


def test_a_slave_refuses_changes(add_member: Callable[[str], Member]) -> None:
    slave = add_member("slave")

    answer = slave.do(lambda done: slave.state.put_topic(TopicConfig("T"), done))

    assert (answer.ok, answer.outcome) == (False, "not_applied")


@pytest.mark.parametrize("result", [BUSY, UNKNOWN])
def test_what_the_log_answers_reaches_every_caller(master: Member, result: PutResult) -> None:
    answers: list[PutResult] = []
    master.store.refusals.append(result)
    master.state.put_topic(TopicConfig("T"), answers.append)
    master.state.put_topic(TopicConfig("U"), answers.append)
    master.settle()

    assert answers == [result, result]
    assert master.do(lambda done: master.state.put_topic(TopicConfig("T"), done)).ok


def test_a_log_that_does_not_answer_is_not_waited_for_for_ever(master: Member, clock: ManualClock) -> None:
    answers: list[PutResult] = []
    master.store.hold_results = True
    master.state.put_topic(TopicConfig("T"), answers.append)
    master.settle()
    master.state.put_topic(TopicConfig("U"), answers.append)
    clock.now_ms += master.settings.timeout_ms
    master.settle()

    assert [answer.outcome for answer in answers] == ["unknown", "not_applied"]


def test_a_clean_restart_needs_no_replay(master: Member) -> None:
    fill(master, "T", 9)
    commit(master, 7)
    master.restart()

    assert master.state.offset("g", "T", 0) == 7


def test_a_restart_without_snapshot_replays_the_log(master: Member) -> None:
    fill(master, "T", 9)
    commit(master, 7)
    commit(master, 2, reset=True)
    master.restart(clean=False)
    assert master.state.offset("g", "T", 0) == -1

    master.promote()

    assert master.state.offset("g", "T", 0) == 2


def test_snapshots_are_written_now_and_then(master: Member, clock: ManualClock) -> None:
    fill(master, "T", 9)
    commit(master, 7)
    clock.now_ms += master.settings.snapshot_interval_ms
    master.settle()
    commit(master, 8)
    master.restart(clean=False)

    assert master.state.offset("g", "T", 0) == 7
    master.promote()
    assert master.state.offset("g", "T", 0) == 8


def test_a_disk_that_refuses_the_snapshot_stops_nothing(tmp_path: Path) -> None:
    class FullDisk(FileSystem):
        def create(self, path: Path) -> int:
            raise OSError(28, "no space left")

    state = BrokerState(FakeStore(), tmp_path, fs=FullDisk())
    state.load()
    state.catch_up()
    state.step()
    state.put_topic(TopicConfig("T"), lambda _result: None)
    state.step()
    state.step()

    state.shutdown()

    assert state.topics() == [TopicConfig("T")]


def test_a_snapshot_of_another_log_is_not_believed(master: Member, add_member: Callable[[str], Member]) -> None:
    """The directory was copied, or the log was wiped and is longer again than when the snapshot was written."""
    master.do(lambda done: master.state.put_topic(TopicConfig("Here"), done))
    master.state.shutdown()
    other_log = type(master.log)()
    other = Member(other_log, master.directory, master.clock, master.settings)
    for name in ("A", "B", "C"):
        other.store.role = BrokerRole.SYNC_MASTER
        other.store.put(Message(BROKER_STATE_TOPIC, b'{"v":1,"changes":[{"op":"put_topic","name":"%s","read":1,'
                                b'"write":1,"perm":6}]}' % name.encode()))  # fmt: skip
    other.promote()

    assert [topic.name for topic in other.state.topics()] == ["A", "B", "C"]


def test_a_log_that_lost_its_tail_takes_changes_again(master: Member) -> None:
    """An asynchronously flushed plain log after a power cut: the snapshot is ahead of it."""
    fill(master, "T", 9)
    commit(master, 7)
    commit(master, 8)
    master.state.shutdown()
    master.store.cut(BROKER_STATE_TOPIC, 0, state_messages(master) - 1)
    master.store.role = BrokerRole.SLAVE
    state = BrokerState(master.store, master.directory, clock=master.clock)
    state.load()
    master.state = state

    master.promote()

    assert state.offset("g", "T", 0) == 8
    assert commit(master, 9).outcome == "stored"
    assert state.offset("g", "T", 0) == 9


def test_a_snapshot_waits_until_the_log_is_durable_up_to_it(master: Member, clock: ManualClock) -> None:
    """Else a power cut leaves offsets behind the log's end, and what comes there next is skipped."""
    fill(master, "T", 9)
    master.state.flush()
    before = read_snapshot(master.directory)
    master.log.flushed_offset = master.log.end
    commit(master, 7)

    clock.now_ms += 30_000
    master.settle()
    master.state.flush()
    assert read_snapshot(master.directory) == before
    commit(master, 8)
    master.log.flushed_offset = master.log.end
    clock.now_ms += 1000
    master.settle()

    found = read_snapshot(master.directory)
    assert found is not None
    assert Tables(found.changes).groups["g"] == {("T", 0): 7}, "what was kept for it, however fast the log grows"


@pytest.mark.parametrize("problem", [DiskError("the log is gone"), ShutdownError("the log is gone")])
def test_a_stop_makes_the_log_durable_before_the_snapshot(
    master: Member, caplog: pytest.LogCaptureFixture, problem: DLedgerError
) -> None:
    fill(master, "T", 9)
    master.state.flush()
    before = read_snapshot(master.directory)
    master.log.flushed_offset = 0
    commit(master, 7)
    master.log.flush_error = problem
    master.state.shutdown()
    assert read_snapshot(master.directory) == before
    assert "the log is gone" in caplog.text

    master.log.flush_error = None
    master.state.shutdown()

    found = read_snapshot(master.directory)
    assert found is not None
    assert Tables(found.changes).groups["g"] == {("T", 0): 7}


def test_nothing_lies_behind_the_ends_of_a_plain_log_that_lost_its_tail(
    master: Member, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier program wrote snapshots that were ahead of the log: the next messages would be skipped."""
    fill(master, "T", 9)
    fill(master, "SCHEDULE_TOPIC_XXXX", 4)
    commit(master, 9)
    master.do(lambda done: master.state.commit_delay_offsets({1: 4, 2: 0}, done))
    master.state.shutdown()
    master.store.cut("T", 0, 5)
    master.store.cut("SCHEDULE_TOPIC_XXXX", 0, 3)
    master.log.is_replicated = False
    master.store.role = BrokerRole.SLAVE
    state = BrokerState(master.store, master.directory, clock=master.clock)
    state.load()
    master.state = state

    master.promote()

    assert state.offset("g", "T", 0) == 5
    assert (state.delay_offset(1), state.delay_offset(2)) == (3, 0)
    assert "group g in T queue 0 continues at 5, not at 9" in caplog.text
    assert commit(master, 5).outcome == "stored"


def test_the_log_is_kept_from_the_first_change_that_no_snapshot_holds(master: Member) -> None:
    """Retention must not take what a restart needs."""
    (needed_from,) = master.store.keepers
    fill(master, "T", 9)
    master.state.flush()
    fill(master, "T", 2)
    assert needed_from(master.log.end) == master.log.end

    first = master.log.end
    commit(master, 7)
    commit(master, 8)
    assert needed_from(master.log.end) == first
    assert needed_from(first - 1) == first - 1

    master.state.flush()
    assert needed_from(master.log.end) == master.log.end


def test_the_log_is_kept_while_the_disk_refuses_the_snapshot(master: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """What should be in it is in the log alone."""

    def refused(_fs: object, _directory: Path, _snapshot: BrokerSnapshot) -> None:
        raise OSError(28, "no space left")

    (needed_from,) = master.store.keepers
    fill(master, "T", 9)
    master.state.flush()
    first = master.log.end
    commit(master, 7)
    with monkeypatch.context() as patch:
        patch.setattr("rocketstore.state.files.write_snapshot", refused)
        master.state.flush()
    assert needed_from(master.log.end) == first

    master.state.flush()
    assert needed_from(master.log.end) == master.log.end


def test_a_malformed_message_is_skipped_and_counted(master: Member) -> None:
    master.store.put(Message(BROKER_STATE_TOPIC, b"nonsense"))
    master.store.put(Message(BROKER_STATE_TOPIC, b"{}"))
    assert master.do(lambda done: master.state.put_topic(TopicConfig("T"), done)).ok

    assert master.state.runtime_info()["brokerStateMalformed"] == "2"
    assert master.state.topic("T") is not None


def test_a_topic_made_again_begins_behind_the_old_messages(master: Member) -> None:
    """The queue's numbering goes on: other nodes may still have the old units, and would take new ones for repeats."""
    master.do(lambda done: master.state.put_topic(TopicConfig("T"), done))
    fill(master, "T", 3)
    commit(master, 3)
    assert master.state.begin_offset("T", 0) == 0

    master.do(lambda done: master.state.delete_topic("T", done))
    assert master.state.topics() == []
    assert master.state.offsets("g") == []
    master.do(lambda done: master.state.put_topic(TopicConfig("T"), done))
    fill(master, "T", 2)

    assert master.state.begin_offset("T", 0) == 3
    assert master.store.max_offset("T", 0) == 5
    master.restart()
    assert master.state.begin_offset("T", 0) == 3


def test_a_topic_made_again_begins_behind_what_was_put_and_not_dispatched(master: Member) -> None:
    """Whose put was confirmed before the topic was removed knows that he wrote to the old one."""
    master.do(lambda done: master.state.put_topic(TopicConfig("T"), done))
    fill(master, "T", 1)
    master.store.dispatched_to = len(master.log.records)
    fill(master, "T", 3)
    assert master.store.max_offset("T", 0) == 1
    answers: list[PutResult] = []
    master.state.delete_topic("T", answers.append)
    master.settle()
    master.store.dispatched_to = None
    master.store.dispatch()
    master.settle()

    master.do(lambda done: master.state.put_topic(TopicConfig("T"), done))

    assert [answer.outcome for answer in answers] == ["stored"]
    assert master.state.begin_offset("T", 0) == 4


def test_the_begin_of_a_topic_is_forgotten_once_the_queue_begins_there(master: Member, clock: ManualClock) -> None:
    fill(master, "T", 3)
    master.do(lambda done: master.state.delete_topic("T", done))
    clock.now_ms += master.settings.full_interval_ms
    master.settle()
    assert master.state.begin_offset("T", 0) == 3

    master.store.expire("T", 0, 3)
    clock.now_ms += master.settings.full_interval_ms
    master.settle()

    assert master.state.begin_offset("T", 0) == 0


def test_the_full_state_is_not_tried_before_the_store_takes_messages(
    master: Member, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain master's state starts before its store: a try then would fail, with a warning, and be repeated late."""
    fill(master, "T", 1)
    clock.now_ms += master.settings.full_interval_ms
    master.store.refusal = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="stopped")
    master.store.refusals.append(master.store.refusal)
    before = state_messages(master)
    master.settle()
    assert (state_messages(master), len(master.store.refusals), caplog.messages) == (before, 1, [])

    master.store.refusal = None
    master.store.refusals.clear()
    master.settle()

    assert state_messages(master) == before + 1


def test_a_store_that_does_not_run_is_waited_for(
    master: Member, add_member: Callable[[str], Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shut(*_args: object, **_kwargs: object) -> GetResult:
        raise ShutdownError("the store is not running")

    master.do(lambda done: master.state.put_topic(TopicConfig("T"), done))
    slave = add_member("slave")
    monkeypatch.setattr(slave.store, "get", shut)
    slave.settle()
    monkeypatch.undo()
    slave.settle()

    assert slave.state.topics() == [TopicConfig("T")]


def test_a_failed_thread_refuses_everything_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    state = BrokerState(store, tmp_path)
    state.load()
    monkeypatch.setattr(store, "get", None)
    state.start()
    wait_until(lambda: state.fatal is not None, "the failure")

    assert state.wait(lambda done: state.put_topic(TopicConfig("T"), done)).outcome == "not_applied"
    assert isinstance(state.fatal, TypeError)
    state.shutdown()


def test_rocketmq_files_are_read_where_nothing_else_is(tmp_path: Path, add_member: Callable[[str], Member]) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:17}}}')
    old = add_member("old")
    new = add_member("new")
    old.promote()
    new.settle()

    assert old.state.offset("g", "T", 0) == new.state.offset("g", "T", 0) == 17


def test_shutdown_answers_what_waits(master: Member) -> None:
    answers: list[PutResult] = []
    master.store.hold_results = True
    master.state.put_topic(TopicConfig("T"), answers.append)
    master.settle()
    master.state.put_topic(TopicConfig("U"), answers.append)
    master.state.shutdown()
    master.state.put_topic(TopicConfig("V"), answers.append)

    assert [answer.outcome for answer in answers] == ["unknown", "not_applied", "not_applied"]


def test_threads_make_changes_without_anybody_stepping(tmp_path: Path) -> None:
    store = FakeStore(role=BrokerRole.SLAVE)
    state = BrokerState(store, tmp_path)
    state.load()
    state.start()
    state.catch_up()
    store.role = BrokerRole.SYNC_MASTER
    assert state.wait(lambda done: state.put_topic(TopicConfig("T"), done)).ok
    for _ in range(200):
        store.put(Message("T", b""))

    def commit_all(group: str) -> None:
        for offset in range(200):
            assert state.wait(lambda done: state.commit_offsets(group, [("T", 0, offset)], done=done)).ok  # noqa: B023

    threads = [threading.Thread(target=commit_all, args=(f"g{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state.shutdown()

    assert [state.offset(f"g{number}", "T", 0) for number in range(4)] == [199] * 4


def test_an_incomplete_plain_broker_may_go_on(tmp_path: Path, clock: ManualClock) -> None:
    store = FakeStore(clock=clock)
    for _ in range(4):
        store.put(Message(BROKER_STATE_TOPIC, b'{"v":1,"changes":[]}'))
    store.expire(BROKER_STATE_TOPIC, 0, 2)
    strict = BrokerState(store, tmp_path, clock=clock)
    strict.load()
    with pytest.raises(StateIncompleteError):
        strict.catch_up()
    lenient = BrokerState(store, tmp_path, clock=clock, settings=StateSettings(accept_incomplete=True))
    lenient.load()

    lenient.catch_up()

    assert lenient.runtime_info()["brokerStateComplete"] == "true"
