"""Reading a lot of the committed log at once: chunks, places, digests (``dledger.store.bulk_reader``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from dledger.errors import (
    CorruptLogError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    ShutdownError,
    UntimedLogError,
)
from dledger.store.bulk_reader import BulkReader
from dledger.store.file_store import FileStore
from dledger.store.log_files import LogFiles
from dledger.types import Boundary, LogChunk, LogIndex, LogPlace, Magic, Position, Term
from tests.support.page_cache import _all_in_memory as _all_in_memory
from tests.unit.dledger.store.support import SEGMENT_BYTES, fill, open_store, small_config

pytestmark = pytest.mark.usefixtures("_all_in_memory")
RECORD_BYTES = 248
PER_SEGMENT = 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """60 entries of 248 bytes over four segments, 16 in each; 50 of them committed."""
    store = open_store(small_config(tmp_path))
    fill(store, 60, size=RECORD_BYTES - 48)
    store.set_committed(LogIndex(49))
    yield store
    store.close()


def position_of(index: int) -> int:
    """Where the entry begins in ``store``."""
    return index // PER_SEGMENT * SEGMENT_BYTES + index % PER_SEGMENT * RECORD_BYTES


def raw(store: FileStore, start: int, stop: int) -> bytes:
    """The bytes as the files have them."""
    files = sorted(path for path in store.data_directories[0].iterdir() if path.name.isdigit())
    return b"".join(path.read_bytes() for path in files)[start:stop]


def chunks(log: BulkReader, first: int, end: int, max_bytes: int) -> list[LogChunk]:
    """A range, chunk by chunk."""
    found: list[LogChunk] = []
    while first < end:
        found.append(log.read_chunk(LogIndex(first), LogIndex(end), max_bytes))
        first = found[-1].end_index
    return found


@pytest.mark.parametrize("max_bytes", [1, RECORD_BYTES, 1000, 1 << 20])
def test_chunks_are_the_files_bytes_in_order_and_within_their_limit(store: FileStore, max_bytes: int) -> None:
    """Whole records of one segment each, as large as allowed, none missing, none twice."""
    found = chunks(store.bulk_reader(), 3, 50, max_bytes)

    assert [one.first_index for one in found[1:]] == [one.end_index for one in found[:-1]]
    assert (found[0].first_index, found[-1].end_index) == (3, 50)
    for one in found:
        assert one.position == position_of(one.first_index)
        assert one.segment_base == one.position - one.position % SEGMENT_BYTES
        assert len(one.data) == one.count * RECORD_BYTES <= max(max_bytes, RECORD_BYTES)
        assert one.data == raw(store, one.position, one.position + len(one.data))
        fits = max(1, max_bytes // RECORD_BYTES)
        assert one.count == min(fits, PER_SEGMENT - one.first_index % PER_SEGMENT, 50 - one.first_index)
        assert (one.committed_index, one.begin_index) == (49, 0)


def test_nothing_beyond_the_committed_index_is_given(store: FileStore) -> None:
    """Whatever end is asked for: what is not committed may still be replaced."""
    assert store.bulk_reader().read_chunk(LogIndex(48), LogIndex(60), 1 << 20).end_index == 50
    assert store.bulk_reader().committed_range().end == LogPlace(LogIndex(50), Position(position_of(49) + RECORD_BYTES))
    assert store.bulk_reader().place_at_position(position_of(55)).index == 50
    with pytest.raises(IndexOutOfRangeError, match="49"):
        store.bulk_reader().read_chunk(LogIndex(50), LogIndex(51), 1 << 20)
    with pytest.raises(IndexOutOfRangeError, match="49"):
        store.bulk_reader().place_of_index(LogIndex(51))


def test_what_retention_has_removed_is_named(tmp_path: Path) -> None:
    """Which entries are lost, and where one can go on."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(9), Term(1), Position(2 * SEGMENT_BYTES + 100), 7))
    store.append_as_leader(Term(1), [b"x", b"y"])
    store.set_committed(LogIndex(11))

    with pytest.raises(IndexBeforeBeginError, match=r"entries 4 to 9 .* before entry 10, at position 8292"):
        store.bulk_reader().read_chunk(LogIndex(4), LogIndex(11), 100)
    with pytest.raises(IndexBeforeBeginError, match=r"entries 4 to 6 "):
        store.bulk_reader().read_chunk(LogIndex(4), LogIndex(7), 100)
    with pytest.raises(IndexBeforeBeginError, match=r"entry 4 is"):
        store.bulk_reader().place_of_index(LogIndex(4))
    begin = LogPlace(LogIndex(10), Position(2 * SEGMENT_BYTES + 100))
    assert store.bulk_reader().committed_range().begin == begin == store.bulk_reader().place_at_position(0)
    assert store.bulk_reader().read_chunk(LogIndex(10), LogIndex(12), 1000).count == 2
    store.close()


@pytest.mark.parametrize("end", [0, 1])
def test_damage_is_told_with_file_and_offset(store: FileStore, end: int) -> None:
    """A chunk's first and last record must be where the index says; a reader is not given what cannot be walked."""
    at = position_of(20) if end == 0 else position_of(24)
    path = store.data_directories[0] / f"{SEGMENT_BYTES:020d}"
    with path.open("r+b") as file:
        file.seek(at - SEGMENT_BYTES + 4)
        file.write(b"\xff")

    with pytest.raises(CorruptLogError) as caught:
        store.bulk_reader().read_chunk(LogIndex(20), LogIndex(25), 1 << 20)

    assert (caught.value.path, caught.value.offset) == (path, at - SEGMENT_BYTES)
    assert "--repair" in caught.value.advice


def test_places(store: FileStore) -> None:
    """Of entries, and of positions: the first entry that begins there or later; the end for what is beyond."""
    log = store.bulk_reader()
    end = LogPlace(LogIndex(50), Position(position_of(49) + RECORD_BYTES))

    assert log.place_of_index(LogIndex(20)) == LogPlace(LogIndex(20), Position(position_of(20)))
    assert log.place_of_index(LogIndex(50)) == end
    assert log.place_at_position(0).index == 0
    assert log.place_at_position(position_of(20)).index == 20
    assert log.place_at_position(position_of(20) + 1).index == 21
    assert log.place_at_position(SEGMENT_BYTES - 1).index == 16
    assert log.place_at_position(1 << 40) == end


def test_an_empty_log_has_an_empty_range(tmp_path: Path) -> None:
    """And no chunk and no digest in it."""
    store = open_store(small_config(tmp_path))

    nothing = LogPlace(LogIndex(0), Position(0))
    assert store.bulk_reader().committed_range().begin == store.bulk_reader().committed_range().end == nothing
    assert store.bulk_reader().place_of_index(LogIndex(0)) == nothing
    assert store.bulk_reader().digest(0, 1 << 40, 4096) is None
    with pytest.raises(IndexOutOfRangeError):
        store.bulk_reader().read_chunk(LogIndex(0), LogIndex(1), 100)
    store.close()


# --- times ----------------------------------------------------------------------------------------------------------


def timed(store: FileStore, *stamps: int | None) -> BulkReader:
    """Entries that begin with their time; None: a NOOP, in either form."""
    for number, stamp in enumerate(stamps):
        if stamp is not None:
            store.append_as_leader(Term(1), [stamp.to_bytes(8, "big") + bytes(150)])
        elif number % 2:
            store.append_as_leader(Term(1), [b"?"], Magic.NOOP)
        else:
            store.append_as_leader(Term(1), [b"?"], channel=0x4E4F4F50)
    store.set_committed(store.last.index)
    return store.bulk_reader(store_time=lambda body: int.from_bytes(body[:8], "big"))


@pytest.mark.parametrize("stamps", [[5], [5, 5, 7, 7, 7, 9, 30], [None], [None, None, None]])
@pytest.mark.parametrize("noops", ["none", "between", "around"])
def test_the_first_message_of_a_time(tmp_path: Path, stamps: list[int | None], noops: str) -> None:
    """Equal to looking at every entry, also where NOOPs, which have no time, lie between."""
    if noops == "between":
        stamps = [one for stamp in stamps for one in (stamp, None, None)]
    elif noops == "around":
        stamps = [None, None, *stamps, None]
    store = open_store(small_config(tmp_path))
    log = timed(store, *stamps)

    for wanted in range(35):
        expected = next((at for at, one in enumerate(stamps) if one is not None and one >= wanted), len(stamps))
        assert log.place_at_time(wanted).index == expected
    store.close()


def test_a_log_without_times_says_so(store: FileStore) -> None:
    """Only a broker's messages have one."""
    with pytest.raises(UntimedLogError, match="index or position"):
        store.bulk_reader().place_at_time(5)


# --- digests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [256, 1000, 4096, 10_000, 1 << 20])
def test_digests_cover_the_committed_log_once(store: FileStore, block_bytes: int) -> None:
    """Aligned blocks up to the committed position, across segments; CRC, entries and chain are the log's own."""
    end = store.bulk_reader().committed_range().end.position
    position, next_index = 0, 0
    while (block := store.bulk_reader().digest(position, 1 << 40, block_bytes)) is not None:
        assert block.position == position
        assert block.size == min(block_bytes - position % block_bytes, end - position)
        assert block.crc32c == crc32c(raw(store, position, position + block.size))
        assert block.first_index == next_index
        inside = [one for one in range(50) if position <= position_of(one) < position + block.size]
        assert list(range(block.first_index, block.last_index + 1)) == inside
        assert block.chain_crc == (store.chain_crc_at(block.last_index) if block.last_index >= 0 else 0)
        position, next_index = position + block.size, block.last_index + 1
    assert (position, next_index) == (end, 50)


def test_a_digest_ends_where_it_is_asked_to(store: FileStore) -> None:
    """An audit compares members up to the lowest committed position of all."""
    block = store.bulk_reader().digest(4096, 5000, 4096)

    assert block is not None
    assert (block.position, block.size) == (4096, 904)
    assert store.bulk_reader().digest(5000, 5000, 4096) is None
    with pytest.raises(InvalidRequestError):
        store.bulk_reader().digest(0, 5000, 0)


def test_digests_begin_where_the_log_does(tmp_path: Path) -> None:
    """The block that holds the begin is shorter; members that begin elsewhere have other blocks there."""
    store = open_store(small_config(tmp_path))
    begin = 2 * SEGMENT_BYTES + 100
    store.reset(Boundary(LogIndex(9), Term(1), Position(begin), 7))
    store.append_as_leader(Term(1), [b"x" * 500])
    store.set_committed(LogIndex(10))

    block = store.bulk_reader().digest(0, 1 << 40, 512)

    assert block is not None
    assert (block.position, block.size, block.first_index, block.last_index) == (begin, 412, 10, 10)
    rest = store.bulk_reader().digest(begin + 412, 1 << 40, 512)
    assert rest is not None
    assert (rest.size, rest.first_index, rest.last_index) == (136, 11, 10)
    assert rest.chain_crc == block.chain_crc == store.chain_crc_at(LogIndex(10))
    store.close()


def test_a_flipped_bit_changes_its_block_alone(store: FileStore) -> None:
    """Which is what an audit lives on."""
    before = [store.bulk_reader().digest(at, 1 << 40, 512) for at in range(0, 8192, 512)]
    path = store.data_directories[0] / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(1500)
        byte = file.read(1)[0]
        file.seek(1500)
        file.write(bytes([byte ^ 4]))

    after = [store.bulk_reader().digest(at, 1 << 40, 512) for at in range(0, 8192, 512)]

    assert [at for at in range(16) if before[at] != after[at]] == [1500 // 512]


def test_a_closed_store_answers_nothing(tmp_path: Path) -> None:
    """Readers of a stopping node go elsewhere; what was known last stays known."""
    store = open_store(small_config(tmp_path))
    fill(store, 5)
    store.set_committed(LogIndex(4))
    known = store.committed_position
    store.close()

    assert store.committed_position == known
    for ask in (
        lambda: store.bulk_reader().read_chunk(LogIndex(0), LogIndex(5), 100),
        lambda: store.bulk_reader().digest(0, 1000, 4096),
        lambda: store.bulk_reader().place_of_index(LogIndex(0)),
    ):
        with pytest.raises(ShutdownError):
            ask()


def test_a_chunk_ends_before_a_damaged_entry_which_is_then_told(store: FileStore) -> None:
    """What leaves a member is verified: the sound entries first, then the error with file, offset and entry."""
    told: list[CorruptLogError] = []
    store.on_damage(told.append)
    path = next(path for path in sorted(store.data_directories[0].iterdir()) if path.name.isdigit())
    damaged = position_of(5)
    with path.open("r+b") as file:
        file.seek(damaged + 100)
        byte = file.read(1)[0]
        file.seek(damaged + 100)
        file.write(bytes([byte ^ 4]))

    chunk = store.bulk_reader().read_chunk(LogIndex(2), LogIndex(50), 1 << 20)
    assert (chunk.count, len(chunk.data)) == (3, 3 * RECORD_BYTES)
    with pytest.raises(CorruptLogError) as caught:
        store.bulk_reader().read_chunk(chunk.end_index, LogIndex(50), 1 << 20)
    assert (caught.value.path, caught.value.offset, caught.value.index) == (path, damaged, 5)
    assert told == [caught.value]
    assert store.bulk_reader().read_chunk(LogIndex(6), LogIndex(50), 1 << 20).first_index == 6


# --- bodies ---------------------------------------------------------------------------------------------------------

BODY_BYTES = RECORD_BYTES - 48


def places_of(*indexes: int) -> list[tuple[int, int]]:
    """Where these entries of ``store`` have their bodies."""
    return [(position_of(index) + 48, BODY_BYTES) for index in indexes]


@pytest.mark.parametrize(
    "places",
    [
        places_of(*range(50)),
        places_of(*range(0, 50, 3)),
        places_of(0, 1, 30, 31, 49),
        places_of(5, 4, 4, 3, 20, 2),
        [],
    ],
)
def test_bodies_read_together_are_those_read_one_by_one(store: FileStore, places: list[tuple[int, int]]) -> None:
    """Next to each other, with others between, over the ends of segments, in any order."""
    found = store.read_bodies(places)

    assert None not in found
    assert found == [store.read_body(*place) for place in places]
    assert store.read_bodies_at_once(places) == found


@pytest.mark.parametrize(
    "wrong",
    [
        *places_of(50, 59),
        (position_of(7) + 48, BODY_BYTES - 1),
        (position_of(7) + 48, BODY_BYTES + RECORD_BYTES),
        (position_of(7) + 48, -48),
        (position_of(7) + 47, BODY_BYTES),
        (position_of(7) - 1, BODY_BYTES),
        (47, BODY_BYTES),
        (-1, BODY_BYTES),
        (1 << 62, BODY_BYTES),
        (position_of(7) + 48, 0x7FFF_FFFF),
    ],
)
def test_what_is_no_committed_entry_is_not_read_with_those_around_it(store: FileStore, wrong: tuple[int, int]) -> None:
    """Not committed, another length, another place: none, and the others are given."""
    before, after = places_of(5, 6), places_of(8, 9)

    found = store.read_bodies([*before, wrong, *after])

    assert found[2] is None
    assert found[:2] + found[3:] == [store.read_body(*place) for place in before + after]
    assert store.read_bodies_at_once([*before, wrong, *after]) == found


@pytest.mark.parametrize("at", [4, 7, 24, 31, 40, 48, 100, RECORD_BYTES - 1])
def test_of_bodies_read_together_the_damaged_one_is_missing(store: FileStore, at: int) -> None:
    """One turned bit in its size, position, CRC or body, in the mapping as much as on the disk."""
    bodies = store.read_bodies(places_of(*range(16, 26)))
    with (store.data_directories[0] / f"{SEGMENT_BYTES:020d}").open("r+b") as file:
        file.seek(position_of(20) - SEGMENT_BYTES + at)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))

    found = store.read_bodies(places_of(*range(16, 26)))

    assert found == [*bodies[:4], None, *bodies[5:]]
    assert store.read_bodies_at_once(places_of(*range(16, 26))) == found


def test_bodies_that_retention_has_removed_are_missing(tmp_path: Path) -> None:
    """As for one read alone."""
    store = open_store(small_config(tmp_path))
    store.reset(Boundary(LogIndex(9), Term(1), Position(2 * SEGMENT_BYTES + 100), 7))
    store.append_as_leader(Term(1), [b"x", b"y"])
    store.set_committed(LogIndex(11))
    begin = 2 * SEGMENT_BYTES + 100

    assert store.read_bodies([(48, 1), (begin + 48, 1), (begin + 97, 1)]) == [None, b"x", b"y"]
    assert store.read_bodies_at_once([(48, 1), (begin + 48, 1), (begin + 97, 1)]) == [None, b"x", b"y"]
    store.close()


def test_bodies_at_once_are_those_in_memory(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries 0 to 15 are in the first segment, of which nothing is in memory."""
    places = places_of(0, 1, 15, 16, 17)
    bodies, whole = store.read_bodies(places), LogFiles.read_at_once
    monkeypatch.setattr(
        LogFiles,
        "read_at_once",
        lambda files, position, length: b"" if position < SEGMENT_BYTES else whole(files, position, length),
    )

    assert store.read_bodies_at_once(places) == [None, None, None, *bodies[3:]]


def test_bodies_at_once_are_none_of_a_log_that_changes_meanwhile(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their places may hold other entries by then."""
    whole = LogFiles.read_at_once

    def read(files: LogFiles, position: int, length: int) -> bytes:
        found = whole(files, position, length)
        store._state.generation += 1
        return found

    monkeypatch.setattr(LogFiles, "read_at_once", read)

    assert store.read_bodies_at_once(places_of(0, 1)) == [None, None]
