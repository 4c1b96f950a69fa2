"""Where a log ends on a disk: a torn end does, damage does not, whatever ``verifyCrc`` says."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.records import ENTRY, ENTRY_HEADER_BYTES
from dledger.store.durable_state import read_checkpoint
from dledger_spark.decode import DecodeContext, named_columns
from dledger_spark.directory import SplitSizes, open_directory, plan_splits, read_split
from dledger_spark.directory.files import LogSegment
from dledger_spark.errors import BrokenRecordError, LogDirectoryError
from dledger_spark.options import VerifyCrc
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import BLANK, BLANK_MAGIC, HEAD_V4, HEAD_V4_BYTES, encode_record
from rocketstore.store.directory import StoreCheckpoint
from tests.support.log_bytes import write_disk_log

FILE_BYTES = 32 * 1024
COUNT = 100
DAMAGED = 80
"""The record that is damaged: it stands in the last segment, with others behind it."""
MODES: tuple[VerifyCrc, ...] = ("false", "fail", "column", "skip")
PLACES = {
    "magic": HEAD_V4.behind("magic") - 1,
    "size": HEAD_V4.behind("size") - 1,
    "size, high": HEAD_V4.behind("size") - 2,
    "body": HEAD_V4_BYTES + 4,
}
"""In a message, by what is damaged: which byte gets one bit turned."""

IPV4 = HostAddress(bytes(4), 1)
Place = tuple[Path, int]


def some_messages() -> list[Message]:
    rng = random.Random(7)
    return [Message("T", rng.randbytes(rng.randrange(300, 700)), store_timestamp=one) for one in range(COUNT)]


def write_plain(root: Path, *, durable: int | None, born_host: HostAddress = IPV4) -> tuple[list[Place], int]:
    """A stopped broker's plain log: where its records are, and where it ends. ``durable``: how many records."""
    (root / "commitlog").mkdir(parents=True)
    data, places = bytearray(), []
    for message in some_messages():
        message.born_host = born_host
        room = FILE_BYTES - len(data) % FILE_BYTES
        if len(encode_record(message)) + 8 > room:
            data += BLANK.pack(room, BLANK_MAGIC) + bytes(room - 8)
        places.append((root / "commitlog" / f"{len(data) // FILE_BYTES * FILE_BYTES:020d}", len(data) % FILE_BYTES))
        data += encode_record(message, physical_offset=len(data))
    end = len(data)
    data += bytes(-len(data) % FILE_BYTES)
    for start in range(0, len(data), FILE_BYTES):
        (root / "commitlog" / f"{start:020d}").write_bytes(data[start : start + FILE_BYTES])
    if durable is not None:
        bound = end if durable == COUNT else int(places[durable][0].name) + places[durable][1]
        (root / "checkpoint").write_bytes(StoreCheckpoint(replay_from=bound, queue_units=0, index_end=0).encode())
    return places, end


def turn_bit(place: Place, at: int) -> None:
    """Turn one bit of a record: of the byte ``at`` in it."""
    path, start = place
    with path.open("r+b") as file:
        file.seek(start + at)
        byte = file.read(1)[0]
        file.seek(start + at)
        file.write(bytes([byte ^ 4]))


def read(path: Path, mode: VerifyCrc, *, allow_uncommitted: bool = False) -> list[dict[str, object]]:
    """All rows."""
    log = open_directory(path, allow_uncommitted=allow_uncommitted)
    context = DecodeContext(content=log.content(), verify_crc=mode)
    columns = named_columns(("body", "crcOk") if mode == "column" else ("body",), context)
    splits = plan_splits(log, log.begin, log.end, SplitSizes(1 << 20))
    return [row for one in splits for batch in read_split(one, columns, context) for row in batch.to_pylist()]


def expect_damage(read_all: Callable[[], list[dict[str, object]]], mode: VerifyCrc, what: str, place: Place) -> None:
    """That the one damaged record is told, left out or marked, as the mode says, and no other is lost."""
    if what != "body" or mode == "fail":
        with pytest.raises(BrokenRecordError, match=rf"segment {place[0].name}, offset \d+: "):
            read_all()
        return
    rows = read_all()
    bodies = [message.body for message in some_messages()]
    assert len(rows) == COUNT - (mode == "skip")
    if mode == "column":
        assert [number for number, row in enumerate(rows) if not row["crcOk"]] == [DAMAGED]
    same = [row["body"] for number, row in enumerate(rows) if mode == "skip" or number != DAMAGED]
    assert same == bodies[:DAMAGED] + bodies[DAMAGED + 1 :]


@pytest.mark.parametrize("durable", [COUNT, None], ids=["with a checkpoint", "without"])
@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_damage_in_the_last_segment_does_not_end_a_plain_log(
    tmp_path: Path, mode: VerifyCrc, what: str, durable: int | None
) -> None:
    """It is a damaged record like any other: what stands behind it shows it, or the checkpoint says so."""
    places, _ = write_plain(tmp_path, durable=durable)
    turn_bit(places[DAMAGED], PLACES[what])

    expect_damage(lambda: read(tmp_path, mode), mode, what, places[DAMAGED])


@pytest.mark.parametrize("what", PLACES)
def test_a_checkpoint_tells_that_the_very_last_record_was_whole(tmp_path: Path, what: str) -> None:
    """Nothing stands behind it, so only the checkpoint can tell damage from a torn end."""
    places, _ = write_plain(tmp_path, durable=COUNT)
    turn_bit(places[-1], PLACES[what])

    for path in (tmp_path, tmp_path / "commitlog"):
        with pytest.raises(BrokenRecordError, match=places[-1][0].name):
            read(path, "fail")


@pytest.mark.parametrize("durable", [COUNT - 1, COUNT - 3, None])
@pytest.mark.parametrize("torn", ["zeros", "garbage", "body"])
def test_a_torn_end_ends_a_plain_log(tmp_path: Path, torn: str, durable: int | None) -> None:
    """What a crash left of the last record is no row and no error, where nothing says that it was durable."""
    places, end = write_plain(tmp_path, durable=durable)
    path, start = places[-1]
    keeps = {"zeros": 0, "garbage": 0, "body": 200}[torn]
    rest = end % FILE_BYTES - start - keeps
    with path.open("r+b") as file:
        file.seek(start + keeps)
        file.write(random.Random(1).randbytes(rest) if torn == "garbage" else bytes(rest))

    for mode in MODES:
        assert [row["body"] for row in read(tmp_path, mode)] == [one.body for one in some_messages()[:-1]]


@pytest.mark.parametrize("what", ["magic", "body"])
def test_behind_what_is_durable_a_log_ends_as_it_does_for_a_broker(tmp_path: Path, what: str) -> None:
    """A power cut may have left any page out there: the broker will cut at the first bad record."""
    places, _ = write_plain(tmp_path, durable=DAMAGED)
    turn_bit(places[DAMAGED], PLACES[what])

    assert len(read(tmp_path, "fail")) == DAMAGED


def test_a_record_that_seems_to_reach_over_all_others_does_not_hide_them(tmp_path: Path) -> None:
    """A wrong length that leads into the zeros behind the log: not a torn end, for whole records are within it."""
    places, end = write_plain(tmp_path, durable=None)
    path, start = places[DAMAGED]
    with path.open("r+b") as file:
        file.seek(start)
        file.write((end % FILE_BYTES - start + 64).to_bytes(4, "big"))

    with pytest.raises(BrokenRecordError, match=f"offset {start}: a record extends beyond"):
        read(tmp_path, "false")


def test_a_plain_log_that_lost_its_last_file_is_refused(tmp_path: Path) -> None:
    """The checkpoint knows that there was more; reading what is left has to be asked for."""
    places, _ = write_plain(tmp_path, durable=COUNT)
    places[-1][0].unlink()

    with pytest.raises(LogDirectoryError, match="set allowUncommitted=true to read what is there"):
        open_directory(tmp_path)

    left = sum(place[0] != places[-1][0] for place in places)
    assert len(read(tmp_path, "fail", allow_uncommitted=True)) == left


def write_node(base: Path) -> tuple[Path, list[Place]]:
    """A node's directory, and where its messages are."""
    log = write_disk_log(base, some_messages(), segment_bytes=FILE_BYTES)
    places = []
    for row in log.rows:
        position = int(str(row["position"]))
        segment = position - position % FILE_BYTES
        places.append((log.directory / "data" / f"{segment:020d}", position - segment))
    return log.directory, places


@pytest.mark.parametrize("checkpoint", [True, False], ids=["with a checkpoint", "without"])
@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_damage_in_the_last_segment_does_not_end_what_is_written(
    tmp_path: Path, mode: VerifyCrc, what: str, *, checkpoint: bool
) -> None:
    """``allowUncommitted`` reads to the last whole record: to the one behind the damage, or to an error."""
    directory, places = write_node(tmp_path)
    shutil.rmtree(directory / "index")
    if not checkpoint:
        (directory / "checkpoint").unlink()
    size_end = ENTRY.behind("size")
    at = {"magic": 2, "size": size_end - 1, "size, high": size_end - 2, "body": ENTRY_HEADER_BYTES + PLACES["body"]}
    turn_bit(places[DAMAGED], at[what])

    expect_damage(lambda: read(directory, mode, allow_uncommitted=True), mode, what, places[DAMAGED])


def test_what_was_flushed_is_stepped_over_with_the_index(tmp_path: Path) -> None:
    """A damaged length hides nothing if the checkpoint and the index say what follows."""
    directory, places = write_node(tmp_path)
    turn_bit(places[DAMAGED], 7)

    rows = read(directory, "column", allow_uncommitted=True)

    assert [number for number, row in enumerate(rows) if not row["crcOk"]] == [DAMAGED]
    assert len(rows) == COUNT


def test_a_torn_end_ends_what_is_written(tmp_path: Path) -> None:
    """The last entry, not flushed, has half a body: it is no row."""
    directory, places = write_node(tmp_path)
    path, start = places[-1]
    with path.open("r+b") as file:
        file.seek(start + 200)
        file.write(bytes(FILE_BYTES - start - 200))
    (directory / "checkpoint").unlink()

    for mode in MODES:
        assert len(read(directory, mode, allow_uncommitted=True)) == COUNT - 1


def test_a_node_that_lost_its_last_segment_is_refused(tmp_path: Path) -> None:
    """All that was flushed was committed; a copy that lacks the last segment is not a shorter log."""
    directory, places = write_node(tmp_path)
    found = read_checkpoint(directory / "checkpoint")
    assert found.committed == found.flushed.index
    places[-1][0].unlink()

    with pytest.raises(LogDirectoryError, match="the copy is incomplete"):
        open_directory(directory)


def test_what_is_there_of_a_node_that_lost_its_last_segment_is_read_to_its_end(tmp_path: Path) -> None:
    """With ``allowUncommitted``: its last entry is the last one that there is, whatever was flushed once."""
    directory, places = write_node(tmp_path)
    lost = places[-1][0]
    lost.unlink()

    log = open_directory(directory, allow_uncommitted=True)

    assert log.committed == sum(path != lost for path, _ in places) - 1


@pytest.mark.parametrize("born_host", [IPV4, HostAddress(bytes(16), 1)], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("later", [True, False])
def test_only_later_records_behind_a_bad_one_are_proof_of_damage(
    tmp_path: Path, born_host: HostAddress, *, later: bool
) -> None:
    """What a store has truncated without zeros ends up behind what it has written since."""
    places, _ = write_plain(tmp_path, durable=None, born_host=born_host)
    path, start = places[DAMAGED]
    message = Message("T", bytes(100), store_timestamp=DAMAGED if later else COUNT, born_host=born_host)
    written = encode_record(message, physical_offset=int(path.name) + start)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(written)  # shorter than what was there

    if later:
        with pytest.raises(BrokenRecordError):
            read(tmp_path, "false")
    else:
        assert len(read(tmp_path, "false")) == DAMAGED + 1


def test_a_torn_end_full_of_small_numbers_is_looked_through_at_once(tmp_path: Path) -> None:
    """Each of them looks like the begin of an entry; only what stands at its own place is looked at closely."""
    directory, places = write_node(tmp_path)
    (directory / "checkpoint").unlink()
    path, start = places[DAMAGED]
    with path.open("r+b") as file:
        file.seek(start)
        file.write((1).to_bytes(4, "big") * ((path.stat().st_size - start) // 4))
    looked_at = Counter[str]()
    real = LogSegment.read

    def counted(segment: LogSegment, position: int, length: int) -> bytes:
        looked_at[segment.name] += 1
        return real(segment, position, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogSegment, "read", counted)
        log = open_directory(directory, allow_uncommitted=True)

    assert log.committed == DAMAGED - 1
    assert looked_at.total() < 20
