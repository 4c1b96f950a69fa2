"""Reading entries by columns: what is read one by one, however many they are, and nothing that is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, IndexOutOfRangeError
from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.file_store import FileStore
from dledger.store.format import columns_of
from dledger.types import EntryColumns, LogIndex, Magic, Term
from tests.unit.dledger.store.support import fill, open_store, small_config

BODY = 200
SEGMENT = 64 * 1024
ENTRIES = 250


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """Entries of two terms, with no-ops of both kinds and two producers' entries between them."""
    config = small_config(tmp_path, segment_bytes=SEGMENT, index_segment_bytes=10 * SEGMENT)
    with closing(open_store(config)) as opened:
        fill(opened, 100, size=BODY)
        opened.append_as_leader(Term(2), [b"a no-op".ljust(BODY)], Magic.NOOP)
        opened.append_as_leader(Term(2), [b"%d" % number * 20 for number in range(5)], channel=7)
        opened.append_as_leader(Term(2), [b"x" * BODY], channel=8)
        fill(opened, ENTRIES - opened.last.index - 1, size=BODY, term=2, batch=70)
        opened.flush()
        yield opened


@pytest.mark.parametrize("first", [0, 1, 99, 100, 101, 107, 240, ENTRIES - 1])
@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 34, 300])
def test_columns_hold_what_entries_do(store: FileStore, first: int, count: int) -> None:
    """Up to the end of the segment, in few entries or in many."""
    last = LogIndex(min(first + count, ENTRIES) - 1)
    found = store.read_columns(LogIndex(first), last, 1 << 20)
    held = found.first_index + len(found.bodies)

    assert found == columns_of([store.read(LogIndex(index)) for index in range(first, held)])
    assert held == last + 1 or held == store.last_index_before(SEGMENT) + 1 or held == store.last_index_before(1 << 20)


def _all(store: FileStore, max_bytes: int) -> Iterator[EntryColumns]:
    index = LogIndex(0)
    while index <= store.last.index:
        found = store.read_columns(index, store.last.index, max_bytes)
        yield found
        index = LogIndex(found.end.index + 1)


@pytest.mark.parametrize("max_bytes", [0, 1000, 20_000, 1 << 20])
def test_whatever_a_read_holds_the_next_one_goes_on_from_its_end(store: FileStore, max_bytes: int) -> None:
    """At least one entry, and no more than what was asked for."""
    parts = list(_all(store, max_bytes))
    assert [body for one in parts for body in one.bodies] == [
        store.read(LogIndex(index)).body for index in range(ENTRIES)
    ]
    for one in parts:
        size = sum(map(len, one.bodies)) + ENTRY_HEADER_BYTES * len(one.bodies)
        assert size <= max_bytes or len(one.bodies) == 1
        assert one.end.chain_crc == store.chain_crc_at(one.end.index)


@pytest.mark.parametrize("offset", [20, ENTRY_HEADER_BYTES + 5], ids=["header", "body"])
def test_they_end_before_a_damaged_entry(store: FileStore, offset: int) -> None:
    """Nothing unverified is applied; going on there tells which entry it is."""
    position = store.positions(LogIndex(50), LogIndex(50))[0]
    fd = os.open(store.data_directories[0] / f"{0:020d}", os.O_RDWR)
    try:
        os.pwrite(fd, b"\xff", position + offset)
    finally:
        os.close(fd)

    assert store.read_columns(LogIndex(3), store.last.index, 1 << 20).end.index == 49
    with pytest.raises(CorruptLogError) as caught:
        store.read_columns(LogIndex(50), store.last.index, 1 << 20)
    assert caught.value.index == 50


def test_there_must_be_a_first_one(store: FileStore) -> None:
    """As in any other read."""
    with pytest.raises(IndexOutOfRangeError):
        store.read_columns(LogIndex(ENTRIES), LogIndex(ENTRIES), 1 << 20)
