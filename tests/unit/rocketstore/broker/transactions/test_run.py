"""What a master does with ends that are slow, late or of unknown outcome, and what it leaves to the next one."""

from __future__ import annotations

import pytest

from dledger.errors import ShutdownError
from rocketstore.broker.transactions.run import NotReadyError
from rocketstore.message.message import Message
from rocketstore.types import OP_TOPIC, ScannedRecords
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.broker.transactions.bench import GROUP, half
from tests.unit.rocketstore.broker.transactions.fakes import Log, Master


def test_an_end_of_unknown_outcome_is_looked_for_before_another_is_taken(log: Log, clock: ManualClock) -> None:
    """Dispatch may be far behind."""
    master = Master(log, clock)
    place = master.prepare()
    master.store.behind = True
    master.store.modes["T"] = "unknown"
    assert master.end(place)
    assert master.after(1000) == []
    log.committed = len(log.records)
    master.after(1000)
    assert not master.end(place)
    master.store.behind = False
    master.store.dispatch()
    master.after(1000)
    assert (len(master.messages("T")), len(master.messages(OP_TOPIC)), len(master.run.halves)) == (1, 1, 0)


def test_a_rollback_of_unknown_outcome_is_looked_for_too(log: Log, clock: ManualClock) -> None:
    """Its op is in the log, which is not dispatched yet: a commit must not follow."""
    master = Master(log, clock)
    master.store.put(Message("other", b""))
    place = master.prepare()
    master.store.behind = True
    master.store.modes[OP_TOPIC] = "unknown"
    assert master.end(place, commit=False)
    log.committed = len(log.records)
    master.after(1000)
    assert not master.end(place)
    master.store.behind = False
    master.store.dispatch()
    master.after(1000)
    assert (len(master.messages("T")), len(master.messages(OP_TOPIC)), len(master.run.halves)) == (0, 1, 0)


def test_an_end_that_comes_before_its_half_message_is_the_only_one(log: Log, clock: ManualClock) -> None:
    """A producer knows of its half message before our thread does, and may send the end twice."""
    master = Master(log, clock)
    place = master.store.put(half(b"x")).stored
    assert place is not None
    master.store.modes["T"] = "late"
    assert master.end(place)
    assert not master.end(place)
    master.run.step()
    assert len(master.run.halves) == 1
    assert not master.end(place)
    log.committed = len(log.records)
    master.store.held.pop()()
    master.store.dispatch()
    master.after(1000)
    assert (len(master.messages("T")), len(master.messages(OP_TOPIC)), len(master.run.halves)) == (1, 1, 0)


def test_a_half_message_that_ends_while_it_is_read_does_not_end_again(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests read it before our thread comes to it; it comes to it, and to the end, before the slower has."""
    master = Master(log, clock)
    place = master.store.put(half(b"x")).stored
    assert place is not None
    read = master.store.read_record

    def slowly(offset: int) -> bytes | None:
        monkeypatch.setattr(master.store, "read_record", read)
        assert master.end(place, commit=False)
        master.after(1000)
        assert len(master.run.halves) == 0
        return read(offset)

    monkeypatch.setattr(master.store, "read_record", slowly)
    assert not master.end(place)
    master.after(1000)
    assert (master.messages("T"), len(master.messages(OP_TOPIC))) == ([], 1)


def test_an_end_whose_half_message_cannot_be_read_just_now_may_be_repeated(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = Master(log, clock)
    place = master.prepare()
    read = master.store.read_record

    def fails(_offset: int) -> bytes | None:
        raise ShutdownError("scripted")

    monkeypatch.setattr(master.store, "read_record", fails)
    assert not master.end(place)
    monkeypatch.setattr(master.store, "read_record", read)
    assert master.end(place)
    assert len(master.messages("T")) == 1


def test_an_end_of_unknown_outcome_that_is_nowhere_may_be_repeated(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock)
    place = master.prepare()
    master.store.modes["T"] = "unknown"
    assert master.end(place)
    log.cut(len(log.records) - 2)  # it never got there
    master.after(1000)
    assert not master.end(place)
    master.store.put(Message("other", bytes(500)))  # the log has grown past where it would be
    master.after(1000)
    assert master.end(place)
    assert len(master.messages("T")) == 1


def test_a_deposed_master_ends_nothing(log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was deposed while it read the half message, and is the master of the next term by now."""
    master = Master(log, clock)
    place = master.prepare()
    master.run.step()
    read = master.store.read_record

    def deposed(offset: int) -> bytes | None:
        master.run.stop()
        return read(offset)

    monkeypatch.setattr(master.store, "read_record", deposed)
    with pytest.raises(NotReadyError):
        master.run.end(place.queue_offset, place.offset, GROUP, commit=True, done=lambda _problem: None)
    assert master.messages("T") == []


def test_the_next_master_knows_what_is_open_and_nothing_else(log: Log, clock: ManualClock) -> None:
    """It reads from the oldest open transaction on, and the ops that concern it and later ones."""
    first = Master(log, clock)
    places = [first.prepare(b"%d" % number) for number in range(6)]
    for number in (0, 1, 3, 5):
        assert first.end(places[number], commit=number != 1)
        first.after(2000)
    first.run.stop()
    assert set(first.state.noted.values()) - {2} == set()
    second = Master(log, clock, first.state)
    assert [one.queue_offset for one in second.run.halves] == [2, 4]
    assert [second.end(place) for place in places] == [False, False, True, False, True, False]
    second.after(2000)
    assert sorted(one.body for one in second.messages("T")) == [b"0", b"2", b"3", b"4", b"5"]
    second.after(2000)
    assert set(second.state.noted.values()) == {6}


def test_a_log_that_cannot_be_read_just_now_keeps_an_end_in_doubt(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = Master(log, clock)
    place = master.prepare()
    master.store.modes["T"] = "unknown"
    assert master.end(place)
    log.cut(len(log.records) - 2)
    master.store.put(Message("other", bytes(500)))
    scan = log.scan

    def fails(offset: int, bytes_max: int) -> ScannedRecords:
        monkeypatch.setattr(log, "scan", scan)
        raise ShutdownError("later")

    monkeypatch.setattr(log, "scan", fails)
    master.run.step()
    assert not master.end(place)
    master.after(10_000)
    assert master.end(place)


def test_an_end_in_doubt_in_an_unreadable_part_of_the_log_holds_up_no_other_transaction(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Producers are asked about the others all the while; the one in doubt is not ended again."""
    master = Master(log, clock)
    doubtful = master.prepare()
    master.store.modes["T"] = "unknown"
    assert master.end(doubtful)
    log.cut(len(log.records) - 2)
    master.store.put(Message("other", bytes(500)))
    other = master.store.put(half(b"other")).stored
    assert other is not None

    def fails(offset: int, bytes_max: int) -> ScannedRecords:
        raise ShutdownError("unreadable")

    with monkeypatch.context() as patched:
        patched.setattr(log, "scan", fails)
        master.after(60_000)
        assert other.queue_offset in {one.queue_offset for one in master.asked}
        assert not master.end(doubtful)
        assert master.end(other)
    assert len([one for one in caplog.records if "cannot be read" in one.message]) == 1
    master.after(10_000)
    assert master.end(doubtful)


def test_a_half_message_that_retention_has_removed_is_open_no_more(
    log: Log, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could commit it or say what became of it; it took up its group's room, and was asked about in vain."""
    master = Master(log, clock)
    immune = master.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="86400")
    gone = master.prepare()
    kept = master.prepare()
    log.expired = kept.offset

    asked = master.after(60_000)

    assert [one.queue_offset for one in master.run.halves] == [kept.queue_offset]
    assert asked == [1]
    assert not master.end(gone)
    assert master.end(kept)
    for place in (immune, gone):
        assert f"half message {place.queue_offset} of {GROUP} has expired" in caplog.text


def test_a_removed_half_message_whose_end_is_on_its_way_waits_for_it(log: Log, clock: ManualClock) -> None:
    """Its commit may be in the log; what became of it is told first."""
    master = Master(log, clock)
    place = master.prepare()
    master.store.modes["T"] = "late"
    assert master.end(place)
    log.expired = place.offset + 1
    master.after(1000)
    assert len(master.run.halves) == 1
    log.committed = len(log.records)
    master.store.held.pop()()
    master.store.dispatch()
    master.after(1000)
    assert (len(master.messages("T")), len(master.run.halves)) == (1, 0)
