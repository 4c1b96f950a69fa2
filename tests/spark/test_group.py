"""A group of three as a source: one member's damage spoils no read, damage that all have is an error, and bytes that
change on their way are noticed by whoever checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from dledger.types import LogChunk, LogIndex
from dledger_cli.local.group import LocalGroup
from tests.integration.harness import SMALL_SEGMENTS
from tests.support.damage import turn
from tests.support.running_group import RunningGroup
from tests.support.spark_nodes import EntryNode, entry_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 2000
BODY_BYTES = 1000
IN_BODY, IN_HEADER = 48 + 900, 23
"""Places in an entry whose bits are turned: in its body, and in its term."""
READ_FROM = ("leader", "follower", "any")


class Damaged:
    """A running group whose leader's files have two bits turned, in entries that begin ranges: one in a body, one in a
    term. It may not mend that (``auto_repair``), so that whoever reads has to do without.
    """

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        with group.client() as client:
            bodies = [f"{number}".encode().ljust(BODY_BYTES) for number in range(COUNT)]
            self.places = client.append_many(bodies, timeout_s=60)
        group.wait_converged()
        for number, at in ((700, IN_BODY), (1500, IN_HEADER)):
            self._turn_bit(self.places[number].position or 0, at)

    def _turn_bit(self, position: int, at: int) -> None:
        data = self.group.store_dir(self.group.leader()) / "data"
        base = max(int(path.name) for path in data.iterdir() if path.name.isdecimal() and int(path.name) <= position)
        with (data / f"{base:020d}").open("r+b") as file:
            byte = os.pread(file.fileno(), 1, position - base + at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), position - base + at)

    @property
    def options(self) -> dict[str, str]:
        """To read all of it."""
        return {"bootstrap.servers": ",".join(self.group.addresses), "startingOffsets": "earliest"}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damaged]:
    settings = {**SMALL_SEGMENTS, "auto_repair": "false"}
    with LocalGroup(tmp_path_factory.mktemp("three"), flush="async", settings=settings) as group:
        yield Damaged(group)


def read(spark: SparkSession, options: dict[str, str], **more: str) -> DataFrame:
    return spark.read.format("dledger").options(**{**options, **more}).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row["body"])) for row in frame.select("body").collect())


@pytest.mark.parametrize("read_from", READ_FROM)
def test_a_damaged_leader_spoils_no_batch(spark: SparkSession, damaged: Damaged, read_from: str) -> None:
    """All rows, with checksums that match, whoever is asked first: what the leader has damaged another member sends."""
    frame = read(spark, damaged.options, readFrom=read_from, verifyCrc="fail", minPartitions="4")

    assert numbers(frame) == list(range(COUNT))


@pytest.mark.parametrize("read_from", READ_FROM)
def test_a_damaged_leader_spoils_no_stream(
    spark: SparkSession, damaged: Damaged, tmp_path: Path, read_from: str
) -> None:
    """Every row once, over several batches; told to go on behind what is lost, it takes nothing for lost."""
    more = {"readFrom": read_from, "maxOffsetsPerTrigger": "700", "failOnDataLoss": "false"}
    frame = spark.readStream.format("dledger").schema("index bigint").options(**damaged.options, **more).load()
    writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "out")).trigger(availableNow=True)

    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.awaitTermination()

    found = sorted(row["index"] for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert found == [one.index for one in damaged.places]
    assert len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) > 2


# --- damage that nobody can mend ------------------------------------------------------------------------------------

RUINED_SEGMENT_BYTES = 64 * 1024
RUINED_BODY, RUINED_HEADER = 100, 200
"""Entries that all members have damaged."""


@dataclass(frozen=True)
class Ruined:
    """Three members with the same two bits turned in all of their files: there is nobody to fetch them from.

    ``places`` are where the two entries begin.
    """

    group: RunningGroup
    places: dict[int, int]


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ruined]:
    group = RunningGroup(tmp_path_factory.mktemp("ruined"), segment_bytes=RUINED_SEGMENT_BYTES)
    try:
        group.append(300, BODY_BYTES)
        group.wait_converged()
        log = group.nodes[0].log
        places = {index: log.positions(LogIndex(index), LogIndex(index))[0] for index in (RUINED_BODY, RUINED_HEADER)}
        for index, at in ((RUINED_BODY, IN_BODY), (RUINED_HEADER, IN_HEADER)):
            segment, offset = divmod(places[index], RUINED_SEGMENT_BYTES)
            for number in range(3):
                turn(group.segment(number, segment), offset + at)
        yield Ruined(group, places)
    finally:
        group.stop()


def options_of(ruined: Ruined, first: int, end: int) -> dict[str, str]:
    """To read the entries from ``first`` up to ``end`` (exclusive), going on behind what retention has removed."""
    return {
        "bootstrap.servers": ",".join(str(node.client_address) for node in ruined.group.nodes),
        "startingOffsets": f'{{"index": {first}}}',
        "endingOffsets": f'{{"index": {end}}}',
        "failOnDataLoss": "false",
    }


@pytest.mark.parametrize(
    ("first", "index", "verify_crc"),
    [
        (0, RUINED_BODY, "false"),
        (0, RUINED_BODY, "skip"),
        (RUINED_BODY, RUINED_BODY, "column"),
        (RUINED_HEADER, RUINED_HEADER, "fail"),
    ],
)
def test_what_all_members_have_damaged_is_an_error(
    spark: SparkSession, ruined: Ruined, first: int, index: int, verify_crc: str
) -> None:
    """A body and a header, within a range and as the first of one: the error names file and place.

    Members send nothing that does not check out, asked to check or not. It is never taken for what retention has
    removed, although the query may go on behind that.
    """
    with pytest.raises(PySparkException) as raised:
        read(spark, options_of(ruined, first, 300), readFrom="any", verifyCrc=verify_crc).count()

    segment, offset = divmod(ruined.places[index], RUINED_SEGMENT_BYTES)
    assert f"{segment * RUINED_SEGMENT_BYTES:020d}: damaged at offset {offset}: " in str(raised.value)
    assert "no longer kept" not in str(raised.value)


def test_what_lies_before_and_behind_damage_is_read(spark: SparkSession, ruined: Ruined) -> None:
    """Damage costs no more than the entries that have it (and the checks that need them)."""
    for first, end in ((1, RUINED_BODY), (RUINED_BODY + 1, RUINED_HEADER), (RUINED_HEADER + 2, 300)):
        frame = read(spark, options_of(ruined, first, end), readFrom="any")

        assert sorted(row["index"] for row in frame.select("index").collect()) == list(range(first, end))


# --- bytes that change on their way ---------------------------------------------------------------------------------

SENT = 300
SENT_BODY, SENT_HEADER = 30, 150
"""Numbers of entries that arrive damaged."""


@dataclass
class Garbling:
    """A node whose files are whole, but of whose answers two entries arrive with a bit turned: by an adapter or memory
    behind the member's own check, or a member of a version that made none.
    """

    node: EntryNode

    def __post_init__(self) -> None:
        log = self.node.server.log
        self.positions = {
            number: log.positions(LogIndex(self.index(number)), LogIndex(self.index(number)))[0]
            for number in (SENT_BODY, SENT_HEADER)
        }
        self._read_chunk = self.node.server.bulk.read_chunk

    def index(self, number: int) -> int:
        """Of the entry with this number as its body: entry 0 is the leader's."""
        return number + 1

    def read_chunk(self, first_index: LogIndex, end_index: LogIndex, max_bytes: int) -> LogChunk:
        """As the node reads it, and then not."""
        chunk = self._read_chunk(first_index, end_index, max_bytes)
        data = bytearray(chunk.data)
        for number, at in ((SENT_BODY, IN_BODY), (SENT_HEADER, IN_HEADER)):
            offset = self.positions[number] + at - chunk.position
            if 0 <= offset < len(data):
                data[offset] ^= 4
        return replace(chunk, data=bytes(data))


@pytest.fixture(scope="module")
def garbling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Garbling]:
    with entry_node(tmp_path_factory.mktemp("garbling")) as node, pytest.MonkeyPatch.context() as patch:
        node.append(0, SENT, padding=BODY_BYTES)
        made = Garbling(node)
        patch.setattr(node.server.bulk, "read_chunk", made.read_chunk)
        yield made


@pytest.mark.parametrize("first", [0, SENT_BODY, SENT_HEADER])
def test_checksums_of_a_running_group_are_checked(spark: SparkSession, garbling: Garbling, first: int) -> None:
    """A body and a header, within a range and as the first of one: told, marked or left out, and no other entry."""
    bad = [number for number in (SENT_BODY, SENT_HEADER) if number >= first]
    options = {**garbling.node.options, "startingOffsets": f'{{"index": {garbling.index(first)}}}'}

    marked = read(spark, options, verifyCrc="column").filter("not crcOk").select("position").collect()
    kept = read(spark, options, verifyCrc="skip")

    assert sorted(row["position"] for row in marked) == [garbling.positions[number] for number in bad]
    assert numbers(kept) == [number for number in range(first, SENT) if number not in bad]
    with pytest.raises(PySparkException, match="its checksum does not match"):
        read(spark, options, verifyCrc="fail").count()


def test_an_error_of_a_running_group_names_the_entry(spark: SparkSession, garbling: Garbling) -> None:
    """And its segment on the member that sent it, and what to do."""
    with pytest.raises(PySparkException) as raised:
        read(spark, garbling.node.options, verifyCrc="fail").count()

    assert f"segment {0:020d}, offset {garbling.positions[SENT_BODY]}: " in str(raised.value)
    assert f"(entry {garbling.index(SENT_BODY)})" in str(raised.value)
    assert "try another readFrom" in str(raised.value)
