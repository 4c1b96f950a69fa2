"""Damaged index files: a query gives all that is there, or says to ask again; and files are built again in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dledger.errors import CorruptLogError, ShutdownError
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.index.service import IndexDamagedError, IndexService
from rocketstore.store.scrub import NotYetReadableError, rebuild
from rocketstore.types import RecordHead, ScannedRecords
from tests.support.damage import turn
from tests.support.sweeps import fewer
from tests.unit.rocketstore.heads import STORE_MS, keyed
from tests.unit.rocketstore.index.test_service import EVER, FixedClock

SLOTS = 1030  # more than one block of them


def record(number: int) -> RecordHead:
    """Record ``number``: each parity has a key, each ten has one, each record its own."""
    return keyed(
        number * 100,
        f"{('even', 'odd')[number % 2]} ten{number // 10}",
        unique=str(number),
        store_ms=STORE_MS + number * 700,
    )


class ListedLog(PlainCommitLog):
    """A log that is a list of records, one every 100 bytes."""

    min_offset = 0

    def __init__(self, records: Sequence[RecordHead]) -> None:
        self.records = list(records)
        self.readable = 1 << 60

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """At most five, of the ``readable`` ones."""
        first = -(-offset // 100)
        heads = [one for one in self.records[first : min(first + 5, self.readable)] if bytes_max]
        return ScannedRecords(heads, (first + len(heads)) * 100)


def opened(directory: Path, entries: int, *, durable_end: int | None = None) -> IndexService:
    service = IndexService(directory, SLOTS, entries, clock=FixedClock())
    service.load(clean_stop=True, index_timestamp_ms=0, durable_end=durable_end)
    return service


def restarted(directory: Path, entries: int, log: ListedLog) -> IndexService:
    """After a clean stop; what it says is missing is indexed again."""
    service = IndexService(directory, SLOTS, entries, clock=FixedClock())
    found = service.load(clean_stop=True, index_timestamp_ms=0, durable_end=log.records[-1].offset)
    if found.replay_from is not None:
        service.append([one for one in log.records if one.offset >= found.replay_from])
    return service


def right(service: IndexService, log: ListedLog) -> bool:
    """Whether every query finds exactly what is there; False if one says to ask again. Fails if one is wrong."""
    count, refused = len(log.records), False
    expected = {
        "even": [one for one in range(count) if one % 2 == 0],
        "odd": [one for one in range(count) if one % 2],
        **{f"ten{ten}": list(range(ten * 10, min(ten * 10 + 10, count))) for ten in range(count // 10)},
        **{str(one): [one] for one in range(count)},
        "none": [],
    }
    for key, numbers in expected.items():
        for begin_ms, end_ms in ((0, EVER), (STORE_MS + 7_000, STORE_MS + 20_000)):
            wanted = [one * 100 for one in reversed(numbers) if begin_ms <= STORE_MS + one * 700 <= end_ms]
            try:
                found = service.query("T", key, 64, begin_ms, end_ms).offsets
            except IndexDamagedError:
                refused = True
                continue
            assert [one for one in found if begin_ms <= STORE_MS + one // 100 * 700 <= end_ms] == wanted[:64]
    return not refused


def mended(service: IndexService, log: ListedLog) -> None:
    """Build again whatever is damaged, until every query is answered."""
    for _ in range(len(service.files) + 1):
        if right(service, log):
            return
        for path in service.damaged:
            rebuild(service, path, log)
    raise AssertionError("the index does not get whole")


DAMAGE = st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 255))


@settings(deadline=None, max_examples=fewer(25, 4), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(damage=st.lists(DAMAGE, min_size=1, max_size=3), entries=st.sampled_from([40, 300, 700]), running=st.booleans())
def test_whatever_byte_is_turned_no_query_is_short(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int, int]], entries: int, *, running: bool
) -> None:
    """In any file, at any place that is in use, while the index is open or between two starts."""
    directory = tmp_path_factory.mktemp("index")
    log = ListedLog([record(number) for number in range(100)])
    service = opened(directory, entries)
    service.append(log.records)
    service.flush()
    used = [(file.path, file.shape.entries_at + file.header.next_entry * 20) for file in service.files]
    for which, at, mask in damage:
        path, size = used[which % len(used)]
        turn(path, at % size, mask)
    if not running:
        service = restarted(directory, entries, log)
    mended(service, log)
    log.records += [record(number) for number in range(100, 130)]
    service.append(log.records)
    mended(service, log)
    service.flush()
    mended(restarted(directory, entries, log), log)


def damaged_index(directory: Path, entries: int = 100) -> tuple[IndexService, ListedLog, Path]:
    """An index of several files, of which the second is damaged, and is known to be."""
    log = ListedLog([record(number) for number in range(100)])
    service = opened(directory, entries)
    service.append(log.records)
    path = service.files[1].path
    turn(path, service.shape.entries_at + 20 * 20, 0xFF)
    assert not right(service, log)
    assert service.damaged == (path,)
    return service, log, path


def test_a_file_is_built_again_as_it_was(tmp_path: Path) -> None:
    """Byte for byte, and what is said of it is kept."""
    service, log, path = damaged_index(tmp_path)
    with path.open("rb") as file:
        damaged = file.read()
    turn(path, service.shape.entries_at + 20 * 20, 0xFF)
    whole = path.read_bytes()
    turn(path, service.shape.entries_at + 20 * 20, 0xFF)
    assert damaged != whole
    rebuild(service, path, log)
    assert path.read_bytes() == whole
    assert right(service, log)
    assert service.damaged == ()
    assert not list(tmp_path.glob("*.tmp"))


def test_the_last_file_is_built_again_while_it_grows(tmp_path: Path) -> None:
    """What is indexed meanwhile is in it, once."""
    log = ListedLog([record(number) for number in range(20)])
    service = opened(tmp_path, 1000)
    service.append(log.records)
    path = service.files[0].path
    turn(path, service.shape.entries_at + 20 * 20, 0xFF)
    assert not right(service, log)

    def grow() -> None:
        more = [record(number) for number in range(len(log.records), len(log.records) + 3)]
        if len(log.records) < 50:
            log.records += more
            service.append(more)

    rebuild(service, path, log, grow)
    assert right(service, log)
    log.records += [record(len(log.records))]
    service.append(log.records[-1:])
    assert right(service, log)


def test_who_is_stopped_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    service, log, path = damaged_index(tmp_path)
    before = path.read_bytes()

    def stop() -> None:
        raise ShutdownError("stopping")

    with pytest.raises(ShutdownError):
        rebuild(service, path, log, stop)
    assert (path.read_bytes(), service.damaged) == (before, (path,))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_expires_is_forgotten(tmp_path: Path) -> None:
    service, log, path = damaged_index(tmp_path)
    service.delete_expired(service.files[2].header.begin_offset)
    assert not path.exists()
    rebuild(service, path, log)
    assert service.damaged == ()


def test_what_has_expired_is_not_in_a_file_that_is_built_again(tmp_path: Path) -> None:
    service, log, path = damaged_index(tmp_path)
    service.delete_expired(service.files[0].header.end_offset + 1)
    log.min_offset = service.files[0].header.begin_offset + 500
    rebuild(service, path, log)
    assert service.files[0].header.begin_offset == log.min_offset


def test_a_walk_finds_what_no_query_meets(tmp_path: Path) -> None:
    """Every block of every file, again and again, a bounded number of bytes at a time; told once."""
    told: list[CorruptLogError] = []
    log = ListedLog([record(number) for number in range(100)])
    service = IndexService(tmp_path, SLOTS, 100, clock=FixedClock(), on_damage=told.append)
    service.load(clean_stop=True, index_timestamp_ms=0)
    service.append(log.records)
    rounds = 0
    while not service.verify(1000)[1]:
        rounds += 1
    assert rounds >= service.shape.entries_at * len(service.files) // 8000
    for file in (service.files[0], service.files[2]):
        turn(file.path, 60, 0x10)
    turn(service.files[3].path, 3, 0x10)
    for _ in range(2):
        while not service.verify(1000)[1]:
            pass
    assert (
        {error.path for error in told} == {service.files[number].path for number in (0, 2, 3)} == set(service.damaged)
    )
    assert len(told) == 3
    mended(service, log)


def test_a_file_of_another_program_is_taken_over_if_it_is_of_one_piece(tmp_path: Path) -> None:
    """RocketMQ keeps no sums; from then on the file has some."""
    log = ListedLog([record(number) for number in range(100)])
    service = opened(tmp_path, 100)
    service.append(log.records)
    service.flush()
    for path in Path(f"{tmp_path}-sums").iterdir():
        path.unlink()
    service = opened(tmp_path, 100)
    turn(service.files[1].path, service.shape.entries_at + 30 * 20 + 3, 0x04)  # a hash
    assert not right(service, log)
    assert service.damaged == (service.files[1].path,)
    mended(service, log)
    service.flush()
    assert len(list(Path(f"{tmp_path}-sums").iterdir())) == len(service.files)


def test_a_file_waits_to_be_built_again_for_what_may_not_be_read_yet(tmp_path: Path) -> None:
    """A member that has started again does not know how much is committed; its index may know more."""
    log = ListedLog([record(number) for number in range(20)])
    service = opened(tmp_path, 1000)
    service.append(log.records)
    with pytest.raises(IndexDamagedError):
        service.contradicted(500)
    path = service.files[0].path
    log.readable = 13

    with pytest.raises(NotYetReadableError):
        rebuild(service, path, log)

    assert service.damaged == (path,)
    log.readable = 20
    rebuild(service, path, log)
    assert right(service, log)


def test_a_record_that_contradicts_its_file_again_does_not_have_it_built_again_for_ever(tmp_path: Path) -> None:
    """The file was made out of the log meanwhile: what it says of this record is then what the log says."""
    log = ListedLog([record(number) for number in range(20)])
    service = opened(tmp_path, 1000)
    service.append(log.records)
    with pytest.raises(IndexDamagedError):
        service.contradicted(500)
    mended(service, log)

    service.contradicted(500)

    assert service.damaged == ()
    with pytest.raises(IndexDamagedError):
        service.contradicted(600)


def test_sums_of_files_that_are_gone_are_removed(tmp_path: Path) -> None:
    service = opened(tmp_path, 100)
    service.append([record(number) for number in range(100)])
    service.flush()
    service.files[-1].path.unlink()
    again = opened(tmp_path, 100)
    assert {path.name for path in Path(f"{tmp_path}-sums").iterdir()} == {file.path.name for file in again.files}
