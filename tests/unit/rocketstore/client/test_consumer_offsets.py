"""The consumer: where it starts, what it commits, seeks, and who else moves its offsets."""

from __future__ import annotations

from collections import deque
from typing import Any

import grpc
import pytest

from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.errors import NotFoundError
from rocketstore.client.group_offsets import Beginnings
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.consuming import committed, consumer, drain, put


# --- where it starts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("start", "expected"), [("first", 2), ("last", 10), (1_700_000_004_500, 5), (0, 0), (1_800_000_000_000, 10)]
)
def test_where_a_new_group_starts(brokers: FakeBrokers, start: object, expected: int) -> None:
    """At what is left of the queue, behind it, or at a time."""
    put(brokers, 10, at_ms=1_700_000_000_000)
    brokers.queues["orders", 0].base = 2

    with consumer(brokers, start=start) as source:
        assert source.positions() == {0: expected, 1: 0, 2: 0, 3: 0}


def test_a_group_goes_on_where_it_was(brokers: FakeBrokers) -> None:
    """A committed offset, also 0, wins over ``start``."""
    put(brokers, 10)
    put(brokers, 10, 1)
    brokers.offsets.update({("billing", "orders", 0): 7, ("billing", "orders", 1): 0})

    with consumer(brokers, start="last") as source:
        assert source.positions() == {0: 7, 1: 0, 2: 0, 3: 0}
        assert source.poll(1, 5)


def test_the_start_of_a_new_group_is_committed(brokers: FakeBrokers) -> None:
    """Else what comes between two starts at the end would be lost."""
    put(brokers, 10)
    with consumer(brokers, start="last") as source:
        assert source.poll(1, 0.01) == []
    put(brokers, 1, start=10)

    with consumer(brokers, start="last") as source:
        assert drain(source, 1) == [b"0-10"]


def test_where_a_new_group_begins_is_stored_before_anything_is_read(brokers: FakeBrokers) -> None:
    """In all queues, also those of its other members: what is sent while all of them are dead is not missed."""
    put(brokers, 10)
    killed = consumer(brokers, start="last", instance=(0, 2), auto_commit_s=None)
    assert killed.positions() == {0: 10, 2: 0}
    assert committed(brokers) == {0: 10, 1: 0, 2: 0, 3: 0}
    put(brokers, 1, start=10)
    put(brokers, 1, 1)

    with consumer(brokers, start="last") as source:
        assert sorted(drain(source, 2)) == [b"0-10", b"1-0"]
    killed.close()


def test_the_beginning_of_a_group_does_not_undo_what_a_faster_member_stored(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began between our look and our commit."""
    put(brokers, 10)
    survey = Beginnings.survey

    def late(self: Beginnings, *where: Any) -> Any:  # noqa: ANN401  # passed through
        found = survey(self, *where)
        brokers.offsets.update({("billing", "orders", queue_id): 4 if not queue_id else 0 for queue_id in range(4)})
        return found

    monkeypatch.setattr(Beginnings, "survey", late)
    with consumer(brokers, start="last") as source:
        assert source.positions()[0] == 4
        assert drain(source, 1) == [b"0-4"]


# --- commits ---------------------------------------------------------------------------------------------------------
def test_commit_says_what_was_handed_out(brokers: FakeBrokers) -> None:
    """Not what is in stock; nothing new, nothing sent."""
    put(brokers, 10)

    with consumer(brokers, auto_commit_s=None) as source:
        drain(source, 4)
        source.commit()
        assert committed(brokers) == {0: 4, 1: 0, 2: 0, 3: 0}
        sent = len(brokers.commits)
        source.commit()
        assert len(brokers.commits) == sent
        drain(source, 3)

    assert committed(brokers)[0] == 7
    assert not any(commit.reset for commit in brokers.commits)


def test_auto_commit_spares_what_may_still_be_worked_on(brokers: FakeBrokers) -> None:
    """A poll commits what earlier polls gave, never what it gives itself."""
    put(brokers, 10)

    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 2)
        assert committed(brokers).get(0, 0) < 2
        drain(source, 1)
        assert committed(brokers)[0] == 2


def test_an_exception_does_not_commit_what_was_in_hand(brokers: FakeBrokers) -> None:
    """The message on which it failed comes again."""
    put(brokers, 10)

    def fail_at_the_fourth() -> None:
        with consumer(brokers) as source:
            for message in source:
                if message.queue_offset == 3:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_the_fourth()

    assert committed(brokers)[0] == 3


def test_a_failed_auto_commit_is_tried_again(brokers: FakeBrokers) -> None:
    """Polling goes on."""
    put(brokers, 3)
    refusals = deque([(grpc.StatusCode.INVALID_ARGUMENT, "scripted", dict[str, str]())])

    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 1)
        brokers.nodes[0].fail_calls["CommitOffsets"] = refusals
        drain(source, 1)
        drain(source, 1)
        assert committed(brokers)[0] == 2


def test_close_tells_that_it_could_not_commit(brokers: FakeBrokers) -> None:
    """And ends all the same; closing again is no error."""
    put(brokers, 3)
    source = consumer(brokers, timeout_s=0.3)
    drain(source, 3)
    for node in brokers.nodes:
        node.stop()

    with pytest.raises(UnavailableError):
        source.close()
    source.close()
    with pytest.raises(UnavailableError, match="closed"):
        source.poll()


# --- seek ------------------------------------------------------------------------------------------------------------
def test_seek_goes_back_and_so_does_the_next_commit(brokers: FakeBrokers) -> None:
    """A commit that goes back says so; later ones do not, nor the one of the beginning."""
    put(brokers, 10)

    with consumer(brokers, queues=[0]) as source:
        drain(source, 8)
        source.commit()
        source.seek(0, 2)
        assert drain(source, 1) == [b"0-2"]
        source.commit()
        assert committed(brokers)[0] == 3
        drain(source, 1)
        source.commit()

    assert [commit.reset for commit in brokers.commits] == [False, False, True, False]


def test_seek_ends_a_long_poll(brokers: FakeBrokers) -> None:
    """It does not wait for the answer that nobody wants any more."""
    put(brokers, 3)

    with consumer(brokers, queues=[0], pull_wait_ms=60_000) as source:
        drain(source, 3)
        wait_until(lambda: brokers.nodes[0].pulled[-1].offset == 3, "a long poll")
        source.seek(0, 0)
        assert drain(source, 3) == [b"0-0", b"0-1", b"0-2"]


@pytest.mark.parametrize(("start", "expected"), [("first", 0), ("last", 10), (1_700_000_004_000, 4)])
def test_seek_to_a_time_or_an_end(brokers: FakeBrokers, start: object, expected: int) -> None:
    """All assigned queues at once."""
    put(brokers, 10, at_ms=1_700_000_000_000)

    with consumer(brokers) as source:
        drain(source, 6)
        source.seek_to(start)  # type: ignore[arg-type]  # parametrised
        assert source.positions()[0] == expected


def test_seek_refuses_what_is_not_there(brokers: FakeBrokers) -> None:
    """A queue that is not assigned, an offset that cannot be."""
    with consumer(brokers, queues=[0]) as source:
        with pytest.raises(NotFoundError):
            source.seek(1, 0)
        with pytest.raises(ConfigError):
            source.seek(0, -1)


# --- somebody else moves the offsets ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("place", "expected"), [(0, b"0-0"), (3, b"0-3"), (8, b"0-8")])
def test_a_running_consumer_goes_on_where_its_group_was_reset_to(
    brokers: FakeBrokers, caplog: pytest.LogCaptureFixture, place: int, expected: bytes
) -> None:
    """Back or forth, with the next commit, which does not undo it; what it had in stock is dropped."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 5)
        source.commit()
        brokers.offsets["billing", "orders", 0] = place

        assert drain(source, 1) == [expected]
        assert committed(brokers)[0] == place

    assert committed(brokers)[0] == place + 1
    assert f"queue 0 from 5 to {place}" in caplog.text


def test_a_reset_reaches_a_consumer_that_is_at_the_end(brokers: FakeBrokers) -> None:
    """It has nothing to commit, and looks all the same."""
    put(brokers, 3)
    with consumer(brokers, queues=[0], auto_commit_s=0) as source:
        drain(source, 3)
        source.commit()
        brokers.offsets["billing", "orders", 0] = 1

        assert drain(source, 2) == [b"0-1", b"0-2"]


def test_closing_does_not_undo_a_reset(brokers: FakeBrokers) -> None:
    """Also with messages in hand."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=None) as source:
        drain(source, 5)
        source.commit()
        drain(source, 2)
        brokers.offsets["billing", "orders", 0] = 1

    assert committed(brokers)[0] == 1


def test_a_second_consumer_of_the_group_is_noticed(brokers: FakeBrokers, caplog: pytest.LogCaptureFixture) -> None:
    """Both read every queue: whoever is behind goes on where the other one has committed, and says so."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=0) as behind, consumer(brokers, queues=[0]) as ahead:
        drain(behind, 1)
        drain(ahead, 6)
        ahead.commit()

        assert drain(behind, 1) == [b"0-6"]

    assert "another consumer of the group reads the same queues" in caplog.text


def test_an_own_commit_without_an_answer_is_nobody_elses(
    brokers: FakeBrokers, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stored although it failed: nothing is skipped, and nobody is warned."""
    put(brokers, 10)
    with consumer(brokers, queues=[0], auto_commit_s=None, timeout_s=0.5) as source:
        drain(source, 4)
        brokers.answers_to_commits = False
        with pytest.raises(DLedgerError):
            source.commit()
        brokers.answers_to_commits = True
        assert committed(brokers)[0] == 4

        drain(source, 1)
        source.commit()

    assert committed(brokers)[0] == 5
    assert "changed elsewhere" not in caplog.text
