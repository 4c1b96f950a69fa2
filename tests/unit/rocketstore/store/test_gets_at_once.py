"""Gets that need no disk: what a get gives, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.store.reads import StoreReader
from rocketstore.types import GetMessageStatus, QueueUnit
from tests.support.page_cache import _all_in_memory as _all_in_memory
from tests.unit.rocketstore.bench import fill, running, small_config
from tests.unit.rocketstore.fakes import UnitQueue
from tests.unit.rocketstore.store.test_message_store_replicated import master
from tests.unit.rocketstore.store.test_reads import FILLER, MANY, Bench

pytestmark = pytest.mark.usefixtures("_all_in_memory")
COUNT = 50
"""Messages in each of the two queues."""


@contextmanager
def filled(root: Path, *, replicated: bool) -> Iterator[MessageStore]:
    """A store with all of a queue's units in one file."""
    config = small_config(root / "store", mapped_file_size_commit_log=256 * KIB, mapped_file_size_consume_queue=20_000)
    if not replicated:
        with running(config) as store:
            fill(store, 2 * COUNT)
            yield store
        return
    with master(
        small_config(root / "store", mapped_file_size_consume_queue=20_000, enable_dledger_commit_log=True)
    ) as store:
        fill(store, 2 * COUNT)
        yield store


@pytest.fixture(params=[False, True], ids=["plain", "replicated"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MessageStore]:
    with filled(tmp_path, replicated=request.param) as store:
        yield store


@pytest.mark.parametrize("max_bytes", [1 << 20, 700])
@pytest.mark.parametrize("max_count", [1, 7, 32, 1000])
def test_what_is_in_memory_is_given_as_by_a_get(store: MessageStore, max_count: int, max_bytes: int) -> None:
    """The same records, next offset and bounds."""
    for queue_id in (0, 1):
        for offset in range(COUNT):
            at_once = store.get_at_once("T", queue_id, offset, max_count=max_count, max_bytes=max_bytes)
            assert at_once == store.get("T", queue_id, offset, max_count=max_count, max_bytes=max_bytes)
            assert at_once is not None
            assert at_once.records


@pytest.mark.parametrize(("queue_id", "offset"), [(0, -1), (0, COUNT + 1), (2, 0)])
def test_a_get_decides_where_there_is_no_message(store: MessageStore, queue_id: int, offset: int) -> None:
    assert store.get_at_once("T", queue_id, offset, max_count=32, max_bytes=1 << 20) is None


def test_the_end_of_a_queue_is_known_at_once(store: MessageStore) -> None:
    """Consumers that have all messages ask for more most of the time."""
    found = store.get_at_once("T", 0, COUNT, max_count=32, max_bytes=1 << 20)

    assert found == store.get("T", 0, COUNT, max_count=32, max_bytes=1 << 20)
    assert found is not None
    assert found.status is GetMessageStatus.OFFSET_OVERFLOW_ONE


def test_what_is_not_in_memory_is_left_to_a_get(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: pages that were dropped, a part of them, a file system that cannot say."""

    def refused(_fd: int, _buffers: list[bytearray], _offset: int, _flags: int) -> int:
        raise BlockingIOError

    for answer in (refused, lambda _fd, buffers, _offset, _flags: len(buffers[0]) - 1):
        monkeypatch.setattr(os, "preadv", answer)
        assert store.get_at_once("T", 0, 0, max_count=32, max_bytes=1 << 20) is None
        assert len(store.get("T", 0, 0, max_count=32).records) == 32


def test_what_lies_far_apart_is_not_read_with_all_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plain log, where one read has them all."""
    monkeypatch.setattr("rocketstore.commit_log.plain._AT_ONCE_BYTES_MAX", 1000)
    with filled(tmp_path, replicated=False) as store:
        found = [store.get_at_once("T", 0, 0, max_count=count, max_bytes=1 << 20) for count in (2, 32)]

        assert [one and len(one.records) for one in found] == [2, None]


def test_gets_at_once_count_like_others(store: MessageStore) -> None:
    before = store.stats.groups()

    found = store.get_at_once("T", 0, 3, max_count=5, max_bytes=1 << 20, group="g")

    assert not before
    assert found is not None
    totals = store.stats.groups()["g", "T"]
    assert (totals.messages, totals.size_bytes) == (5, sum(map(len, found.records)))


def test_damage_is_never_given(tmp_path: Path) -> None:
    """Not even with what precedes it; a get reports it."""
    with filled(tmp_path, replicated=False) as store:
        third = store.unit("T", 0, 3)
        assert third is not None
        with (tmp_path / "store" / "commitlog" / f"{0:020d}").open("r+b") as file:
            file.seek(third.offset + 100)
            file.write(b"?")

        found = store.get_at_once("T", 0, 0, max_count=32, max_bytes=1 << 20)
        assert found is not None
        assert (len(found.records), found.next_offset) == (3, 3)
        assert store.get_at_once("T", 0, 3, max_count=32, max_bytes=1 << 20) is None
        with pytest.raises(CorruptLogError):
            store.get("T", 0, 3, max_count=32)


def at_once(bench: Bench, offset: int = 0, max_bytes: int = 1 << 20) -> int:
    """How many messages a get at once gives."""
    found = bench.reader.get_at_once("T", 0, offset, max_count=32, max_bytes=max_bytes)
    assert found is None or found.status is GetMessageStatus.FOUND
    assert found is None or found.next_offset == offset + len(found.records)
    return 0 if found is None else len(found.records)


def test_what_may_not_be_read_yet_is_not_given() -> None:
    """A restarted member of a group has units of records that may still be replaced."""
    bench = Bench(10)
    bench.log.max_offset = bench.queue.all[4].offset + 1

    assert [at_once(bench, offset) for offset in (0, 3, 4, 5)] == [4, 1, 0, 0]


def test_a_unit_of_another_message_ends_it() -> None:
    """What the log says instead, a get finds out; the unit after it is sound."""
    bench = Bench(10)
    bench.queue.all[4] = bench.queue.all[5]

    assert [at_once(bench, offset) for offset in (0, 4, 5)] == [4, 0, 5]


@pytest.mark.parametrize("unit", [FILLER, QueueUnit(1000, -1, 0), QueueUnit(1000, 1 << 30, 0)])
def test_a_unit_that_cannot_be_one_ends_it(unit: QueueUnit) -> None:
    """Nothing is read for it, whatever its size."""
    bench = Bench(10)
    bench.queue.all[4] = unit

    assert [at_once(bench, offset) for offset in (0, 4, 5)] == [4, 0, 5]


def test_a_message_larger_than_the_limit_is_left_to_a_get() -> None:
    """Which gives at least one."""
    bench = Bench(3, body=100)

    assert at_once(bench, max_bytes=10) == 0
    assert at_once(bench, max_bytes=2 * bench.queue.all[0].size) == 2


def test_what_is_far_from_the_end_is_left_to_a_get() -> None:
    """It has other limits there, and may suggest a slave."""
    assert at_once(Bench(100, memory_bytes=1000)) == 0
    assert at_once(Bench(100, memory_bytes=MANY)) == 32


def test_a_queue_without_messages_is_left_to_a_get() -> None:
    """Its status is another one than at the end of others."""
    assert Bench(0).reader.get_at_once("T", 0, 0, max_count=32, max_bytes=1000) is None


def test_the_settings_limit_what_is_given() -> None:
    bench = Bench(100, config=MessageStoreConfig(max_transfer_count_on_message_in_memory=9))

    assert at_once(bench) == 9


def test_a_queue_that_is_not_in_memory_is_left_to_a_get() -> None:
    class Cold(UnitQueue):
        """Its files must be read."""

        def units_at_once(self, offset: int, count: int) -> list[QueueUnit]:
            return []

    bench = Bench(10)
    bench.queue = Cold(bench.queue.all)
    reader: StoreReader = bench.reader

    assert reader.get_at_once("T", 0, 0, max_count=32, max_bytes=1 << 20) is None
    assert len(bench.get(0).records) == 10
