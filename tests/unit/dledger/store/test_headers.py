"""What look-ups in a log say when a bit has turned in its index or in its data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.core.ports import Log
from dledger.errors import CorruptLogError
from dledger.records import INDEX_UNIT_BYTES
from dledger.store.file_store import FileStore
from dledger.store.format import CHAIN_CRC_OFFSET, CHANNEL_OFFSET, HEADER, HEADERS, EntryHeader, header_chain_crc
from dledger.store.headers import chain_crcs
from dledger.types import LogIndex, Position, Term
from tests.unit.dledger.store.support import (
    INDEX_SEGMENT_BYTES,
    SEGMENT_BYTES,
    FakeClock,
    UnsyncedFs,
    fill,
    open_store,
    small_config,
)

ENTRIES = 60
_MIDDLE = 25
LookUp = Callable[[Log], object]

LOOK_UPS: dict[str, LookUp] = {
    "term_at": lambda log: [log.term_at(LogIndex(index)) for index in range(ENTRIES)],
    "chain_crc_at": lambda log: [log.chain_crc_at(LogIndex(index)) for index in range(ENTRIES)],
    "first_index_of_term": lambda log: [log.first_index_of_term(Term(term)) for term in range(5)],
    "positions": lambda log: log.positions(LogIndex(0), LogIndex(ENTRIES - 1)),
    "channel_runs": lambda log: log.channel_runs(LogIndex(0), LogIndex(ENTRIES - 1)),
    "slice_run": lambda log: [log.slice_run(LogIndex(index), 1000) for index in range(ENTRIES)],
    "read_run": lambda log: [log.read_run(LogIndex(index), LogIndex(index)) for index in range(ENTRIES)],
    "read": lambda log: [log.read(LogIndex(index)) for index in range(ENTRIES)],
    "read_at": lambda log: [log.read_at(Position(at)) for at in log.positions(LogIndex(0), LogIndex(ENTRIES - 1))],
}


def _filled(path: Path) -> FileStore:
    """Three terms, over several segments of data and of the index; entry 25 is a producer's."""
    store = open_store(small_config(path))
    fill(store, 20, size=200)
    fill(store, 5, size=200, term=2)
    store.append_as_leader(Term(2), [b"a producer's".ljust(200)], channel=7)
    fill(store, 14, size=200, term=2)
    fill(store, 20, size=200, term=3)
    store.flush()
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = _filled(tmp_path)
    yield opened
    opened.close()


def _turn(path: Path, offset: int, mask: int = 1) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ mask]), offset)
    finally:
        os.close(fd)


def _index_place(store: FileStore, index: int) -> tuple[Path, int]:
    position = index * INDEX_UNIT_BYTES
    base = position - position % INDEX_SEGMENT_BYTES
    return store.directory / "index" / f"{base:020d}", position - base


def _data_place(store: FileStore, index: int) -> tuple[Path, int]:
    position = store.positions(LogIndex(index), LogIndex(index))[0]
    base = position - position % SEGMENT_BYTES
    return store.data_directories[0] / f"{base:020d}", position - base


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
@pytest.mark.parametrize("byte", [3, 11, 15, 23, 31], ids=["magic", "position", "size", "index", "term"])
def test_a_turned_bit_in_an_index_unit_changes_no_answer_and_is_put_right(
    store: FileStore, look_up: LookUp, byte: int
) -> None:
    """The index is derived: whatever it says is held against data, and a wrong unit is written again from there."""
    expected = look_up(store)
    path, offset = _index_place(store, _MIDDLE)
    sound = path.read_bytes()
    _turn(path, offset + byte)

    found = look_up(store)
    store.chain_crc_at(LogIndex(_MIDDLE))

    assert found == expected
    assert path.read_bytes() == sound


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_zeroed_index_units_change_no_answer_and_are_put_right(store: FileStore, look_up: LookUp) -> None:
    """A page of the index that was lost is made again from data, over all its units."""
    expected = look_up(store)
    paths = [_index_place(store, index)[0] for index in range(12, 52, 10)]
    sound = [path.read_bytes() for path in paths]
    for path in paths:
        path.write_bytes(bytes(INDEX_SEGMENT_BYTES))

    found = look_up(store)
    store.channel_runs(LogIndex(0), LogIndex(ENTRIES - 1))

    assert found == expected
    assert [path.read_bytes() for path in paths] == sound


@pytest.mark.parametrize("field", [3, 7, 15, 23, 31, CHANNEL_OFFSET + 3, CHAIN_CRC_OFFSET, 40, 47])
@pytest.mark.parametrize("name", ["term_at", "chain_crc_at", "channel_runs", "read_run", "read"])
def test_a_turned_bit_in_a_header_is_told_where_it_is(store: FileStore, name: str, field: int) -> None:
    """What decides is proven by the chain: any bit of a header's 48 bytes is damage of data, at that entry."""
    path, offset = _data_place(store, _MIDDLE)
    told: list[CorruptLogError] = []
    store.on_damage(told.append)
    _turn(path, offset + field)

    with pytest.raises(CorruptLogError) as caught:
        LOOK_UPS[name](store)

    assert (caught.value.path, caught.value.offset, caught.value.index) == (path, offset, _MIDDLE)
    assert told == [caught.value]


def test_a_chain_crc_that_was_zeroed_is_damage_in_an_imported_log_too(tmp_path: Path) -> None:
    """Java leaves both CRCs 0: an entry that has one of them was written here."""
    store = open_store(small_config(tmp_path, import_unchecked=True))
    fill(store, ENTRIES)
    store.flush()
    path, offset = _data_place(store, _MIDDLE)
    with path.open("r+b") as file:
        file.seek(offset + CHAIN_CRC_OFFSET)
        file.write(bytes(4))

    with pytest.raises(CorruptLogError):
        store.term_at(LogIndex(_MIDDLE))
    store.close()


@pytest.mark.parametrize("index", [19, 20, 39, 40], ids=["end of 1", "begin of 2", "end of 2", "begin of 3"])
def test_a_wrong_term_in_the_index_moves_no_boundary(store: FileStore, index: int) -> None:
    """Entries on both sides of one are proven: either unit alone could give it away by one."""
    path, offset = _index_place(store, index)
    _turn(path, offset + 31, 3)

    assert [store.first_index_of_term(Term(term)) for term in (1, 2, 3, 4)] == [0, 20, 40, 60]


def test_a_wrong_term_at_the_end_of_the_index_hides_no_entry(store: FileStore) -> None:
    """Nothing behind the last entry could give it away."""
    fill(store, 1, term=4)
    path, offset = _index_place(store, ENTRIES)
    _turn(path, offset + 31, 5)

    assert store.first_index_of_term(Term(4)) == ENTRIES


def test_terms_are_found_whatever_a_header_says_that_is_not_asked(store: FileStore) -> None:
    """The entries on both sides of a boundary prove it; damage elsewhere is not in its way."""
    path, offset = _data_place(store, 30)
    _turn(path, offset + 23, 7)

    assert [store.first_index_of_term(Term(term)) for term in (1, 2, 3, 4)] == [0, 20, 40, 60]


def test_a_read_gives_what_is_sound_before_damage_and_names_the_damaged_entry(store: FileStore) -> None:
    """Over several entries: those before the damage are served, and going on there tells which entry it is."""
    path, offset = _data_place(store, _MIDDLE)
    _turn(path, offset + 100)

    entries = store.read_range(LogIndex(5), LogIndex(ENTRIES - 1), 1 << 20)
    with pytest.raises(CorruptLogError, match="bodyCrc of entry 25 does not match") as caught:
        store.read_range(LogIndex(_MIDDLE), LogIndex(ENTRIES - 1), 1 << 20)

    assert [entry.index for entry in entries] == list(range(5, _MIDDLE))
    assert (caught.value.path, caught.value.offset, caught.value.index) == (path, offset, _MIDDLE)
    assert store.read(LogIndex(_MIDDLE + 1)).index == _MIDDLE + 1


def test_a_verified_run_with_a_turned_bit_in_a_body_is_not_given(store: FileStore) -> None:
    """What a follower lacks is read from the disk: damage is told here, not at the follower."""
    path, offset = _data_place(store, _MIDDLE)
    first, last = LogIndex(_MIDDLE - 1), LogIndex(_MIDDLE + 1)
    _turn(path, offset + 100)

    with pytest.raises(CorruptLogError) as caught:
        store.read_run(first, last, verified=True)

    assert caught.value.index == _MIDDLE


def test_an_entry_behind_a_damaged_header_is_found_all_the_same(store: FileStore) -> None:
    """A damaged header withholds itself, not what the index and the rest of the chain still prove."""
    path, offset = _data_place(store, _MIDDLE)
    _turn(path, offset + CHANNEL_OFFSET)

    assert [store.read(LogIndex(index)).index for index in (_MIDDLE - 1, _MIDDLE + 1)] == [_MIDDLE - 1, _MIDDLE + 1]


def test_truncation_at_a_turned_index_unit_cuts_at_the_right_place(store: FileStore) -> None:
    """What is to stay is proven before anything is cut."""
    expected = [store.read(LogIndex(index)) for index in range(40)]
    for index in (39, 40, 41):
        path, offset = _index_place(store, index)
        _turn(path, offset + 11)

    store.truncate(LogIndex(40))
    fill(store, 5, size=90, term=4)
    store.flush()

    assert [store.read(LogIndex(index)) for index in range(40)] == expected
    assert store.read(LogIndex(44)).term == 4


def test_retention_removes_nothing_that_only_damage_vouches_for(tmp_path: Path) -> None:
    """The begin of a shortened log is told to followers: it is proven. What is damaged goes with the next segment."""
    clock = FakeClock()
    store = open_store(small_config(tmp_path, disk_check_ratio=1e-9, retention_hours=1), clock=clock)
    fill(store, ENTRIES, size=200)
    store.flush()
    store.set_committed(LogIndex(ENTRIES - 1))
    clock.now_ms = 4_000_000_000_000
    last_of_segment = store.last_index_before(3 * SEGMENT_BYTES)
    path, offset = _data_place(store, last_of_segment)
    _turn(path, offset + CHAIN_CRC_OFFSET)

    damaged = store._files.data.files()[2].base

    assert damaged not in [one.base for one in store._removable()]
    store.retire(LogIndex(ENTRIES - 1), store.measure_room())

    begin = store.begin
    assert begin.index != last_of_segment
    assert begin.chain_crc == store.chain_crc_at(LogIndex(begin.index))
    store.close()


@given(
    rows=st.lists(
        st.tuples(
            st.integers(-1, 3),
            st.integers(48, 1 << 30),
            st.integers(0, 1 << 62),
            st.integers(0, 1 << 62),
            st.integers(0, 1 << 62),
            st.integers(0, 1 << 30),
            st.integers(0, (1 << 32) - 1),
            st.integers(0, (1 << 32) - 1),
            st.integers(0, 1 << 30),
            st.integers(0, (1 << 32) - 1),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_chain_crcs_of_many_headers_are_those_of_each(rows: list[tuple[int, ...]]) -> None:
    """The table-driven CRC over columns gives what ``crc32c`` gives header by header."""
    headers = [EntryHeader(*row[:9]) for row in rows]
    packed = b"".join(HEADER.pack(*row[:9]) for row in rows)
    seeds = np.array([row[9] for row in rows], np.uint32)

    found = chain_crcs(np.frombuffer(packed, HEADERS), seeds).tolist()

    assert found == [header_chain_crc(header, row[9]) for header, row in zip(headers, rows, strict=True)]


REFUSED_MAX = 1000
"""Far more than a read may write, so that one that never ends fails soon."""


class _KeepsNoIndex(UnsyncedFs):
    """Writes of an index unit succeed, and the disk has what it had: once ``on``."""

    on = False
    refused = 0

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        if not (self.on and len(data) == INDEX_UNIT_BYTES):
            super().write(fd, data, offset)
            return
        self.refused += 1
        assert self.refused < REFUSED_MAX, "a read writes the index for ever"


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_an_index_that_does_not_keep_what_is_written_is_told_and_not_written_for_ever(
    tmp_path: Path, look_up: LookUp
) -> None:
    """A read ends, with an error that names the file, or with what the data alone says."""
    _filled(tmp_path).close()
    fs = _KeepsNoIndex()
    with closing(open_store(small_config(tmp_path), fs=fs)) as store:
        for path in sorted((store.directory / "index").iterdir()):
            _turn(path, 8 + 3 * INDEX_UNIT_BYTES)
        fs.on = True

        with suppress(CorruptLogError):
            look_up(store)


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
@pytest.mark.parametrize("kind", ["index", "data"])
def test_two_segments_that_are_one_file_never_give_other_entries(
    tmp_path: Path, kind: str, link: Callable[[Path, Path], None]
) -> None:
    """What is written to one would be in the other: the index is made again, damage in data is told."""
    before = _filled(tmp_path)
    bodies = [before.read(LogIndex(index)).body for index in range(ENTRIES)]
    before.close()
    first, second = sorted((before.directory / kind).iterdir())[1:3]
    second.unlink()
    link(first, second)

    if kind == "data":
        with pytest.raises(CorruptLogError, match=second.name):
            open_store(small_config(tmp_path))
        return
    for _ in range(2):
        with closing(open_store(small_config(tmp_path))) as store:
            assert [store.read(LogIndex(index)).body for index in range(ENTRIES)] == bodies
            assert [store.term_at(LogIndex(index)) for index in (0, 24, 59)] == [1, 2, 3]
