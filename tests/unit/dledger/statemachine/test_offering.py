"""Which snapshot another member is given, and what happens to one that arrived damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c

from dledger.errors import DLedgerError, FencedError, SnapshotBusyError
from dledger.statemachine.host import SnapshotOffers
from dledger.statemachine.snapshots import (
    PRODUCERS_FILE,
    STATE_FILE,
    SnapshotFile,
    SnapshotMeta,
    SnapshotStore,
    encode_meta,
)
from dledger.store.fs import FileSystem
from dledger.types import NO_INDEX, Boundary, LogIndex, Position, Term


class Offering:
    """Snapshots of entries 5 and 9, and who asked for a newer one."""

    def __init__(self, directory: Path) -> None:
        self.store = SnapshotStore(FileSystem(), directory)
        self.written: list[str] = []
        self.refusal: DLedgerError | None = None
        self.offers = SnapshotOffers(self.store, lambda: self.refusal, lambda: self.written.append("asked"))
        self.metas = [self._build(LogIndex(5)), self._build(LogIndex(9))]

    def _build(self, index: LogIndex) -> SnapshotMeta:
        state = b"state of %d" % index
        files = {STATE_FILE: SnapshotFile(len(state), crc32c(state)), PRODUCERS_FILE: SnapshotFile(0, 0)}
        meta = SnapshotMeta(Boundary(index, Term(1), Position(4000), 7), None, 0, 1, files)
        with self.store.build(index) as builder:
            builder.write(STATE_FILE, state)
            builder.write(PRODUCERS_FILE, b"")
            builder.commit(meta)
        return meta

    def given(self, at_least: int, index: int = NO_INDEX) -> bytes:
        with self.offers.offered(LogIndex(at_least), LogIndex(index)) as offer:
            return offer.description


@pytest.fixture
def offering(tmp_path: Path) -> Offering:
    return Offering(tmp_path)


@pytest.mark.parametrize(("at_least", "index", "given"), [(3, -1, 1), (3, 5, 0), (6, 5, 1), (3, 7, 1), (9, 9, 1)])
def test_the_newest_is_given_unless_an_interrupted_one_can_go_on(
    offering: Offering, at_least: int, index: int, given: int
) -> None:
    """One that is gone, or does not help any more, is replaced by the newest."""
    assert offering.given(at_least, index) == encode_meta(offering.metas[given])


def test_it_stays_while_it_is_given(offering: Offering) -> None:
    """So does the log after it, without which it would be of no use."""
    with offering.offers.offered(LogIndex(3), LogIndex(5)) as offer:
        offering._build(LogIndex(12))
        offering.store.prune()
        assert offering.store.needed_from == 5
        assert offer.piece(STATE_FILE, 9, 100) == b"5"
    assert offering.store.needed_from == 12


def test_one_that_is_too_old_makes_this_member_write_another(offering: Offering) -> None:
    """The peer asks again."""
    with pytest.raises(SnapshotBusyError, match="retry later"):
        offering.given(10)
    assert offering.written == ["asked"]


def test_a_fenced_member_gives_none(offering: Offering) -> None:
    """Its history is not the group's."""
    offering.refusal = FencedError("fenced")
    with pytest.raises(FencedError):
        offering.given(3)


def test_a_doubted_snapshot_counts_on_unless_it_is_damaged(offering: Offering) -> None:
    """The damage may have happened on the way, or where it arrived."""
    offering.offers.doubt(LogIndex(9))
    offering.offers.doubt(NO_INDEX)
    assert offering.given(3) == encode_meta(offering.metas[1])
    (offering.store.directory / f"{9:020d}" / STATE_FILE).write_bytes(b"state of 8")

    offering.offers.doubt(LogIndex(9))

    assert offering.given(3) == encode_meta(offering.metas[0])
    assert offering.written == ["asked"]
