"""A follower with a state machine takes a new begin of its log only with the state up to it (S8, S9)."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import Mock

import pytest

from dledger.core.messages import PushCommit, PushInstall, SnapshotFetch
from dledger.core.ports import ProducersAt
from dledger.errors import DiskFullError, ResponseCode
from dledger.types import GENESIS, NO_INDEX, Boundary, EntryId, LogIndex, Position, Term
from tests.support.cluster import N1
from tests.support.members import configuration
from tests.support.solo import Solo, Source

BEGIN = Boundary(LogIndex(50), Term(1), Position(4000), 77)
INSTALL = PushInstall(Term(1), 7, EntryId(BEGIN.term, BEGIN.index), BEGIN.chain_crc, BEGIN.position)


@dataclass
class Machine:
    """A state machine that has applied nothing."""

    applied_index: LogIndex = NO_INDEX
    snapshot_index: LogIndex = NO_INDEX
    producers: ProducersAt | None = None

    def wall_ms(self) -> int:
        return 0


def follower() -> tuple[Solo, Source]:
    """Five entries, two of them committed, taken from n1, which leads term 1."""
    solo, source = Solo(machine=Machine()), Source(1, 1, 1, 1, 1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, 4, commit=1))
    return solo, source


def boundary_of(source: Source, index: int) -> Boundary:
    entry = source.log.read(LogIndex(index))
    end = source.log.positions(LogIndex(index + 1), LogIndex(index + 1))[0]
    return Boundary(entry.index, entry.term, Position(end), entry.chain_crc)


def test_an_install_asks_for_a_snapshot_and_leaves_the_log() -> None:
    """S8: the old log stays until the state is there; the leader hears why, and repeats itself."""
    solo, _ = follower()

    (answer,) = solo.push(N1, INSTALL)
    (again,) = solo.push(N1, INSTALL)

    assert (answer.code, again.code) == (ResponseCode.FALL_BEHIND_TOO_MUCH, ResponseCode.FALL_BEHIND_TOO_MUCH)
    assert solo.fetches == [SnapshotFetch(N1, LogIndex(50))] * 2
    assert (solo.log.begin, solo.log.last.index, solo.state.commit_index) == (GENESIS, 4, 1)


def test_nothing_is_fetched_for_an_install_that_the_leader_does_not_confirm() -> None:
    """S10: whoever names a leader must not make followers fetch."""
    solo, _ = follower()

    solo.push(N1, INSTALL, confirm=False)
    solo.confirm(N1, 1, begin=GENESIS)
    solo.take()

    assert solo.fetches == []


def test_a_loaded_snapshot_resets_the_log_and_the_leader_goes_on_from_there() -> None:
    """S8: its last entry counts as committed and verified, as its configuration does."""
    solo, _ = follower()
    told = configuration("0123", index=40)

    assert solo.node.handler.adopt_snapshot(BEGIN, told)
    solo.take()
    solo.flush()

    assert (solo.log.begin, solo.log.last, solo.state.commit_index) == (BEGIN, EntryId(Term(1), LogIndex(50)), 50)
    assert solo.state.membership.committed == told
    (answer,) = solo.push(N1, INSTALL)
    assert (answer.code, answer.verified_index) == (ResponseCode.SUCCESS, 50)
    assert solo.fetches == []


def test_a_newer_configuration_outlives_the_one_of_the_snapshot() -> None:
    """M10: the leader told it when it asked for the installation."""
    solo, _ = follower()
    newer = configuration("0123", index=60)
    solo.push(N1, PushInstall(Term(1), 7, EntryId(BEGIN.term, BEGIN.index), 77, BEGIN.position, newer))
    assert solo.state.membership.committed == newer

    assert solo.node.handler.adopt_snapshot(BEGIN, configuration("012", index=40))

    assert solo.state.membership.committed == newer
    assert solo.log.installed_configuration == newer  # which the next start finds


@pytest.mark.parametrize("index", [1, 2, 4])
def test_a_log_that_holds_the_last_entry_of_a_snapshot_stays(index: int) -> None:
    """What follows it here may have been acknowledged; up to it, all is committed."""
    solo, source = follower()
    at = (
        boundary_of(source, index)
        if index < 4
        else Boundary(LogIndex(4), Term(1), solo.log.end_position, solo.log.last_chain_crc)
    )

    assert solo.node.handler.adopt_snapshot(at, None)

    assert (solo.log.begin, solo.log.last.index, solo.state.commit_index) == (GENESIS, 4, index)


def test_an_unlike_entry_in_the_place_of_a_snapshots_last_one_goes() -> None:
    """It was never committed."""
    solo, _ = follower()
    at = Boundary(LogIndex(3), Term(2), Position(9000), 5)

    assert solo.node.handler.adopt_snapshot(at, None)

    assert (solo.log.begin, solo.log.last.index) == (at, 3)
    (answer,) = solo.push(N1, PushCommit(Term(1), 8, LogIndex(3)))
    assert (answer.code, answer.verified_index) == (ResponseCode.SUCCESS, 3)


def test_a_full_disk_leaves_the_log_for_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is there already."""
    solo, _ = follower()
    monkeypatch.setattr(solo.log, "reset", Mock(side_effect=DiskFullError("full")))

    assert not solo.node.handler.adopt_snapshot(BEGIN, None)

    assert (solo.log.last.index, solo.state.commit_index) == (4, 1)
