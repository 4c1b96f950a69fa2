"""The chain of checksums where reading begins anew: at splits of a directory, at ranges and chunks of a group."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dledger.store.durable_state import create_checkpoint, read_checkpoint
from dledger.store.fs import FileSystem
from dledger.types import LogChunk, LogIndex, Position
from dledger_spark.decode import DecodeContext, named_columns
from dledger_spark.directory import LogDirectory, Split, SplitSizes, open_directory, plan_splits, read_split
from dledger_spark.errors import BrokenRecordError
from dledger_spark.options import VerifyCrc
from dledger_spark.schema import Projection, arrow_schema
from dledger_spark.source.client_log import CommittedRange, IndexRange
from dledger_spark.source.live import RowReader
from rocketstore.message.message import Message
from tests.support.fake_group_log import FakeGroupLog
from tests.support.log_bytes import Stretch, write_disk_log

COUNT = 300
SIZES = SplitSizes(8192)
BITS = {"magic": (3, 2), "term": (23, 4), "chain": (37, 1)}
"""In an entry's header: a byte, and the bit of it that is turned. A message's magic number becomes a NOOP's."""
MODES: tuple[VerifyCrc, ...] = ("fail", "column", "skip")


def some_messages() -> list[Message]:
    rng = random.Random(3)
    return [Message("T", rng.randbytes(rng.randrange(700)), number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's directory: several segments, several splits each."""
    return write_disk_log(tmp_path_factory.mktemp("node"), some_messages(), segment_bytes=32 * 1024).directory


@pytest.fixture(params=["index", "no index"])
def directory(request: pytest.FixtureRequest, pristine: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(pristine, tmp_path / "log")
    if request.param == "no index":
        shutil.rmtree(tmp_path / "log" / "index")
    return tmp_path / "log"


def splits_of(log: LogDirectory) -> list[Split]:
    return plan_splits(log, log.begin, log.end, SIZES)


def turn_bit(log: LogDirectory, position: int, what: str) -> None:
    segment = log.segment_at(position)
    assert segment is not None
    offset, bit = BITS[what]
    with segment.path.open("r+b") as file:
        file.seek(position - segment.base + offset)
        byte = file.read(1)[0]
        file.seek(position - segment.base + offset)
        file.write(bytes([byte ^ bit]))


def read(log: LogDirectory, mode: VerifyCrc, *names: str, splits: Sequence[Split] = ()) -> list[dict[str, object]]:
    context = DecodeContext(content="message" if splits else log.content(), verify_crc=mode)
    found: list[dict[str, object]] = []
    for one in splits or splits_of(log):
        for batch in read_split(one, named_columns(names, context), context):
            found += batch.to_pylist()
    return found


def expect_one_damaged(log: LogDirectory, position: int) -> None:
    """That every mode knows this entry for damaged, and no other."""
    with pytest.raises(BrokenRecordError, match="damaged record"):
        read(log, "fail", "position")
    marked = read(log, "column", "position", "crcOk")
    assert [row["position"] for row in marked if not row["crcOk"]] == [position]
    assert len(marked) == COUNT
    assert position not in {row["position"] for row in read(log, "skip", "position")}
    assert len(read(log, "skip", "position")) == COUNT - 1


@pytest.mark.parametrize("what", BITS)
def test_the_first_header_of_a_split_is_checked(directory: Path, what: str) -> None:
    """Of the log's first split, of one within a segment, and of the first one of a segment."""
    log = open_directory(directory)
    splits = splits_of(log)
    within = next(one for one in splits if one.segment_base < one.begin)
    begins_segment = next(one for one in splits if 0 < one.begin == one.segment_base)

    for split in (splits[0], within, begins_segment):
        turn_bit(log, split.begin, what)
        expect_one_damaged(log, split.begin)
        turn_bit(log, split.begin, what)


@pytest.mark.parametrize("what", BITS)
def test_a_damaged_header_before_a_split_is_not_blamed_on_its_first(directory: Path, what: str) -> None:
    """Also if it is the checksum itself that is damaged: what it should have been is known from the entry before."""
    log = open_directory(directory)
    for end in (
        splits_of(log)[1].begin,
        next(one.begin for one in splits_of(log) if 0 < one.begin == one.segment_base),
    ):
        last = max(
            int(str(row["position"])) for row in read(log, "false", "position") if int(str(row["position"])) < end
        )

        turn_bit(log, last, what)
        expect_one_damaged(log, last)
        turn_bit(log, last, what)


def test_a_range_begins_with_a_checked_header(directory: Path) -> None:
    """Also where ``startingOffsets`` cuts a segment."""
    log = open_directory(directory)
    begin = int(str(read(log, "false", "position")[10]["position"]))
    turn_bit(log, begin, "term")

    rows = read(log, "column", "crcOk", splits=plan_splits(log, begin, log.end, SIZES))

    assert [row["crcOk"] for row in rows[:2]] == [False, True]


def test_a_trimmed_log_begins_with_a_checked_header(directory: Path) -> None:
    """The checkpoint keeps the checksum of the last entry that was removed."""
    log = open_directory(directory)
    first, second = log.segments[:2]
    last_gone = [row for row in read(log, "false", "position", "segment") if row["segment"] == first.name][-1]
    gone = first.header(int(str(last_gone["position"])))
    assert gone is not None
    found = read_checkpoint(directory / "checkpoint")
    begin = replace(found.begin, index=LogIndex(gone.index), position=Position(second.base), chain_crc=gone.chain_crc)
    create_checkpoint(FileSystem(), directory / "checkpoint", replace(found, begin=begin))
    first.path.unlink()

    whole = read(open_directory(directory), "column", "crcOk")
    turn_bit(log, second.base, "term")
    damaged = read(open_directory(directory), "column", "crcOk")

    assert all(row["crcOk"] for row in whole)
    assert [row["crcOk"] for row in damaged[:2]] == [False, True]


def test_what_was_trimmed_meanwhile_vouches_for_nothing(directory: Path) -> None:
    """The segment before a split is gone when its task begins: its first header is not checked, all others are."""
    log = open_directory(directory)
    split = next(one for one in splits_of(log) if 0 < one.begin == one.segment_base)
    log.segments[0].path.unlink()

    assert all(row["crcOk"] for row in read(log, "column", "crcOk", splits=[split]))


def test_a_magic_number_is_checked_without_checksums(directory: Path) -> None:
    """A message that has become a NOOP shows itself by what it holds, with the index or without."""
    log = open_directory(directory)
    position = int(str(read(log, "false", "position")[40]["position"]))
    turn_bit(log, position, "magic")

    with pytest.raises(BrokenRecordError, match="magic 3 where 1 was expected"):
        read(log, "false", "body")


def test_the_index_tells_which_entries_are_no_noops(tmp_path: Path) -> None:
    """Entries of any content: the magic number in the index says what the one in the header was."""
    log = open_directory(write_disk_log(tmp_path, [b"%d" % one for one in range(100)], noop_every=16).directory)
    position = int(str(read(log, "false", "position")[40]["position"]))
    assert len(read(log, "false", "position")) == 100
    turn_bit(log, position, "magic")

    with pytest.raises(BrokenRecordError, match="magic 3 where 1 was expected"):
        read(log, "false", "body")
    assert [row["position"] for row in read(log, "column", "position", "crcOk") if not row["crcOk"]] == [position]


def test_javas_noops_are_none_by_its_index(tmp_path: Path) -> None:
    """Java's leader calls every entry normal in its index, and writes no checksums: then the header counts."""
    log = open_directory(write_disk_log(tmp_path, [b"%d" % one for one in range(20)], noop_every=16).directory)
    segment, index = log.segments[0].path, tmp_path / "dledger-n0" / "index" / f"{0:020d}"
    data, units = bytearray(segment.read_bytes()), bytearray(index.read_bytes())
    at = 0
    for number in range(22):
        data[at + 36 : at + 44] = bytes(8)
        units[number * 32 : number * 32 + 4] = (1).to_bytes(4, "big")
        at += int.from_bytes(data[at + 4 : at + 8], "big")
    segment.write_bytes(data)
    index.write_bytes(units)

    assert len(read(open_directory(log.path), "false", "body")) == 20


class StretchLog(FakeGroupLog):
    """A group's log with bytes in it; a chunk holds three entries."""

    def __init__(self, stretch: Stretch, begin: int = 0) -> None:
        self.stretch = stretch
        bounds = [*stretch.starts, len(stretch.data)]
        super().__init__([end - start for start, end in pairwise(bounds)], begin=begin)

    def committed(self) -> CommittedRange:
        return replace(super().committed(), holds_messages=True)

    def chunks(self, first: int, end: int) -> Iterator[LogChunk]:
        for one in range(first, end, 3):
            parts = list(super().chunks(one, min(one + 3, end)))
            begin, stop = parts[0].position, parts[-1].position + len(parts[-1].data)
            yield replace(parts[0], count=len(parts), data=bytes(self.stretch.data[begin:stop]))


def live_stretch() -> Stretch:
    stretch = Stretch()
    for number in range(12):
        stretch.add_message(Message("T", b"body %d" % number, number))
    return stretch


def read_live(log: StretchLog, mode: VerifyCrc, first: int = 0) -> list[dict[str, object]]:
    context = DecodeContext(verify_crc=mode)
    columns = named_columns(("index", "crcOk"), context)
    reader = RowReader("g", Projection(columns, arrow_schema(columns)), context)
    return [row for batch in reader.read(log, IndexRange(first, 12)) for row in batch.to_pylist()]


@pytest.mark.parametrize("what", BITS)
@pytest.mark.parametrize(("damaged", "first"), [(0, 0), (3, 0), (5, 0), (4, 4), (1, 1), (6, 4)])
def test_the_first_header_of_a_range_and_of_a_chunk_is_checked(what: str, damaged: int, first: int) -> None:
    """In a running group: the entries before a range are asked for, those before a chunk are known."""
    stretch = live_stretch()
    offset, bit = BITS[what]
    stretch.data[stretch.starts[damaged] + offset] ^= bit
    log = StretchLog(stretch)

    marked = read_live(log, "column", first)

    assert [number for number, row in enumerate(marked, first) if not row["crcOk"]] == [damaged]
    assert [row["index"] for row in read_live(log, "skip", first)] == [
        one for one in range(first, 12) if one != damaged
    ]
    with pytest.raises(BrokenRecordError, match=f"offset {stretch.starts[damaged]}: "):
        read_live(log, "fail", first)


@pytest.mark.parametrize("mode", ["false", *MODES])
def test_bytes_that_no_entry_begins_with_are_told_with_their_place(mode: VerifyCrc) -> None:
    """In a running group: which entry, in which segment, at which offset, and what to do about it."""
    stretch = live_stretch()
    stretch.data[stretch.starts[7] + 3] = 5
    place = (
        f"segment {0:020d}, offset {stretch.starts[7]} (entry 7, position {stretch.starts[7]}): no entry starts here"
    )

    with pytest.raises(BrokenRecordError, match=re.escape(place)) as raised:
        read_live(StretchLog(stretch), mode)

    assert "dledger pipeline audit" in str(raised.value)


@pytest.mark.parametrize("begin", [3, 4, 5])
def test_a_range_is_checked_as_far_as_the_entries_before_it_are_kept(begin: int) -> None:
    """A log that was trimmed just before the range: what is left vouches for it, and nothing is wrong if nothing is."""
    log = StretchLog(live_stretch(), begin)

    assert all(row["crcOk"] for row in read_live(log, "column", 5))


def test_a_damaged_checksum_before_a_range_is_not_blamed_on_its_first() -> None:
    """The entry before the range stores another checksum than it should."""
    stretch = live_stretch()
    stretch.data[stretch.starts[4] + 37] ^= 1

    assert all(row["crcOk"] for row in read_live(StretchLog(stretch), "column", 5))


def test_nothing_more_is_fetched_if_checksums_do_not_matter() -> None:
    """The entries before a range cost a request."""
    context = DecodeContext()
    columns = named_columns(("index",), context)
    log = StretchLog(live_stretch(), begin=5)
    asked: list[int] = []
    real = log.chunks
    log.chunks = lambda first, end: asked.append(first) or real(first, end)  # type: ignore[method-assign,func-returns-value]  # notes what is asked for

    rows = list(RowReader("g", Projection(columns, arrow_schema(columns)), context).read(log, IndexRange(5, 12)))

    assert sum(batch.num_rows for batch in rows) == 7
    assert asked == [5]
