"""Reading raw committed bytes: what a dispatcher of the log's records lives on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, IndexOutOfRangeError
from dledger.monitoring import Instruments
from dledger.records import INDEX_UNIT_BYTES
from dledger.store import reader
from dledger.store.file_store import FileStore
from dledger.types import Boundary, LogIndex, Position, Term
from tests.support.damage import turn
from tests.unit.dledger.store.support import SEGMENT_BYTES, fill, open_store, small_config, spoil

RECORD_BYTES = 248


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """60 entries of 248 bytes over four segments, 16 in each."""
    store = open_store(small_config(tmp_path))
    fill(store, 60, size=RECORD_BYTES - 48)
    yield store
    store.close()


def test_nothing_is_committed_until_it_is_said(store: FileStore) -> None:
    """The committed position is the end of the committed entry's record, or where the log begins."""
    assert store.committed_position == 0
    assert store.read_committed(Position(0), 1 << 20).data == b""
    store.set_committed(LogIndex(2))

    assert store.committed_position == 3 * RECORD_BYTES
    assert len(store.read_committed(Position(0), 1 << 20).data) == 3 * RECORD_BYTES


def test_walking_the_log_gives_every_committed_record_once(store: FileStore) -> None:
    """Across segments, whose blanks are skipped, and whatever the limit."""
    store.set_committed(LogIndex(49))
    expected = [store.read(LogIndex(index)).position for index in range(50)]

    for max_bytes in (1, 1000, 1 << 20):
        position, seen = 0, list[int]()
        while (found := store.read_committed(Position(position), max_bytes)).data:
            whole = [at for at in range(0, len(found.data) - RECORD_BYTES + 1, RECORD_BYTES) if found.data[at + 3] == 1]
            assert whole, "at least one whole record"
            seen += [found.position + at for at in whole]
            position = found.position + len(whole) * RECORD_BYTES
        assert seen == expected
        assert position == store.committed_position


def test_positions_below_the_begin_mean_the_begin(tmp_path: Path) -> None:
    """Retention has taken what was before; a dispatcher that comes late begins with what is kept."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(9), Term(1), Position(2 * SEGMENT_BYTES + 100), 7))
    assert store.committed_position == 2 * SEGMENT_BYTES + 100
    store.append_as_leader(Term(1), [b"x"])
    store.set_committed(LogIndex(10))

    found = store.read_committed(Position(0), 1 << 20)

    assert (found.position, len(found.data)) == (2 * SEGMENT_BYTES + 100, 49)
    assert store.copy_committed(0, 8) is None
    store.close()


def test_what_is_no_entrys_position_is_refused(store: FileStore) -> None:
    """Every header says where it stands."""
    store.set_committed(LogIndex(49))
    with pytest.raises(IndexOutOfRangeError, match="no entry starts at position 60"):
        store.read_committed(Position(60), 1 << 20)


def test_beyond_the_committed_position_there_is_nothing(store: FileStore) -> None:
    """Also where a dispatcher is ahead of what a restarted node knows to be committed."""
    store.set_committed(LogIndex(2))
    for position in (3 * RECORD_BYTES, 4 * RECORD_BYTES, 1 << 30):
        found = store.read_committed(Position(position), 1 << 20)
        assert (found.position, found.data) == (position, b"")


def test_copies_are_exact_committed_and_of_one_segment(store: FileStore) -> None:
    """None for anything else, never a part."""
    store.set_committed(LogIndex(49))
    assert store.copy_committed(48, 200) == store.read(LogIndex(0)).body
    end = store.committed_position

    assert store.copy_committed(end - 10, 10) is not None
    assert store.copy_committed(end - 10, 11) is None
    assert store.copy_committed(-1, 4) is None
    assert store.copy_committed(0, -1) is None
    assert store.copy_committed(SEGMENT_BYTES - 4, 8) is None


def test_the_committed_position_is_known_again_after_a_restart(store: FileStore, tmp_path: Path) -> None:
    """As far as the checkpoint recorded it."""
    store.set_committed(LogIndex(20))
    store.flush()
    position = store.committed_position
    assert store.flushed_position == store.end_position
    store.close()

    again = open_store(small_config(tmp_path))

    assert again.committed_position == position
    assert [path.name for path in again.data_directories] == ["data"]
    again.close()


def test_every_index_has_an_end_and_every_position_a_last_entry_before_it(store: FileStore) -> None:
    """What lags are measured by: beyond the log's ends it is the ends, in between each is the other's inverse."""
    ends = [store.end_of(LogIndex(index)) for index in range(60)]

    assert store.end_of(LogIndex(-1)) == 0
    assert ends[0] == RECORD_BYTES
    assert ends[59] == store.end_of(LogIndex(1000)) == store.end_position
    assert [store.last_index_before(end) for end in ends] == list(range(60))
    assert store.last_index_before(0) == -1
    assert store.last_index_before(RECORD_BYTES - 1) == 0


def test_ends_below_the_begin_are_the_begin(tmp_path: Path) -> None:
    """A follower that lags behind what is kept lags by all that is kept."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(9), Term(1), Position(2 * SEGMENT_BYTES + 100), 7))
    store.append_as_leader(Term(1), [b"x"])

    assert store.end_of(LogIndex(3)) == 2 * SEGMENT_BYTES + 100
    assert store.end_of(LogIndex(10)) == store.end_position
    assert store.last_index_before(0) == 9
    store.close()


def test_a_store_tells_of_batches_and_flushes_and_of_no_single_entry(tmp_path: Path) -> None:
    """The port is called once per batch and once per flush, with what they held."""
    told: list[tuple[object, ...]] = []

    class Noting(Instruments):
        def wrote(self, entries: int, size_bytes: int, *, as_leader: bool) -> None:
            told.append(("wrote", entries, size_bytes, as_leader))

        def flushed(self, size_bytes: int, took_s: float) -> None:
            assert took_s >= 0
            told.append(("flushed", size_bytes))

    store = open_store(small_config(tmp_path), instruments=Noting())
    store.append_as_leader(Term(1), [b"a" * 52, b"b" * 52])
    store.append_as_leader(Term(1), [b"c" * 52])
    store.flush()
    store.flush()
    store.close()

    assert told == [("wrote", 2, 200, True), ("wrote", 1, 100, True), ("flushed", 300)]


MANY = 300


@pytest.fixture
def long_store(tmp_path: Path) -> Iterator[FileStore]:
    """300 entries of 248 bytes in one segment, which are verified together; the last ten are not committed."""
    store = open_store(small_config(tmp_path, segment_bytes=1 << 20, index_segment_bytes=1 << 15))
    fill(store, MANY, size=RECORD_BYTES - 48)
    store.set_committed(LogIndex(MANY - 11))
    yield store
    store.close()


def data_file(store: FileStore) -> Path:
    """The only segment."""
    return store.data_directories[0] / f"{0:020d}"


@pytest.mark.parametrize("first", [0, 1, 150])
@pytest.mark.parametrize("max_bytes", [100 * RECORD_BYTES, 100 * RECORD_BYTES + 60, 1 << 20])
def test_many_records_are_the_files_bytes(long_store: FileStore, first: int, max_bytes: int) -> None:
    """All that fit, also a part of the next one, nothing that is not committed."""
    start, end = first * RECORD_BYTES, (MANY - 10) * RECORD_BYTES

    found = long_store.read_committed(Position(start), max_bytes)

    assert found.position == start
    assert found.data == data_file(long_store).read_bytes()[start : min(start + max_bytes, end)]


@pytest.mark.parametrize("at", [7, 31, 40, 48, RECORD_BYTES - 1])
@pytest.mark.parametrize("index", [1, 120, MANY - 12])
def test_of_many_records_those_before_a_damaged_one_are_given(long_store: FileStore, index: int, at: int) -> None:
    """One turned bit in its size, position, CRC or body; read from there on, it is told."""
    expected = data_file(long_store).read_bytes()[: index * RECORD_BYTES]
    turn(data_file(long_store), index * RECORD_BYTES + at)

    assert long_store.read_committed(Position(0), 1 << 20).data == expected
    with pytest.raises((CorruptLogError, IndexOutOfRangeError)):
        long_store.read_committed(Position(index * RECORD_BYTES), 1 << 20)


@pytest.mark.parametrize("index", [0, 1, 120, MANY - 20])
def test_an_unreadable_sector_is_damage_of_the_entry_that_lies_there(
    long_store: FileStore, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """Told with the entry, which a broker's dispatch waits for, to who repairs it; what lies before it is given.

    No mapping is asked: it would end the process.
    """
    met: list[CorruptLogError] = []
    long_store.on_damage(met.append)
    monkeypatch.setattr(reader, "HOT_BYTES", 0)
    spoil(monkeypatch, data_file(long_store), index * RECORD_BYTES + 100)
    bad = (index * RECORD_BYTES + 100) // 512 * 512 // RECORD_BYTES  # the first entry that has a byte of the sector
    expected = data_file(long_store).read_bytes()[: bad * RECORD_BYTES]

    given = b""
    while len(given) < len(expected):
        given += long_store.read_committed(Position(len(given)), 100 * RECORD_BYTES).data
        given = given[: len(given) // RECORD_BYTES * RECORD_BYTES]  # the last one may not be whole
    assert given == expected
    with pytest.raises(CorruptLogError) as told:
        long_store.read_committed(Position(len(given)), 100 * RECORD_BYTES)
    assert (told.value.path, told.value.index) == (data_file(long_store), bad)
    place = (bad * RECORD_BYTES + 48, RECORD_BYTES - 48)
    reads: list[Callable[[], object]] = [
        lambda: long_store.read_body(*place),
        lambda: long_store.read_run(LogIndex(bad), LogIndex(bad)),
        lambda: long_store.read(LogIndex(bad)),
        lambda: long_store.copy_committed(bad * RECORD_BYTES, RECORD_BYTES),
    ]
    for read in reads:
        met.clear()
        with pytest.raises(CorruptLogError) as told:
            read()
        assert told.value.index == bad
        assert met == [told.value]
    assert long_store.read_bodies([place]) == [None]


@pytest.mark.parametrize("at", [3, 11, 15, 23, 31])
@pytest.mark.parametrize("index", [0, 120, MANY - 11])
def test_many_records_are_given_whatever_the_index_says(long_store: FileStore, index: int, at: int) -> None:
    """A turned bit in any field of a unit costs time, not records."""
    (path,) = (one for one in (long_store.data_directories[0].parent / "index").iterdir() if one.name == f"{0:020d}")
    expected = data_file(long_store).read_bytes()[: (MANY - 10) * RECORD_BYTES]
    turn(path, index * INDEX_UNIT_BYTES + at)

    assert long_store.read_committed(Position(0), 1 << 20).data == expected
