"""A group of three as a source: who sends the log, and what checksums say of one member's copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from cluster.local_group import LocalGroup
from tests.integration.harness import SMALL_SEGMENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 2000
BODY_BYTES = 1000
DAMAGED_BODY, DAMAGED_HEADER = 700, 1500
"""Numbers of entries that the leader's copy has damaged: a bit of the body, and one of the term."""


class Damaged:
    """A running group whose leader's files have two bits turned, in entries that begin ranges."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        with group.client() as client:
            bodies = [f"{number}".encode().ljust(BODY_BYTES) for number in range(COUNT)]
            self.places = client.append_many(bodies, timeout_s=20)
        group.wait_converged()
        self._turn_bit(self.places[DAMAGED_BODY].position or 0, 48 + 900)
        self._turn_bit(self.places[DAMAGED_HEADER].position or 0, 23)

    def _turn_bit(self, position: int, at: int) -> None:
        data = self.group.store_dir(self.group.leader()) / "data"
        base = max(int(path.name) for path in data.iterdir() if path.name.isdecimal() and int(path.name) <= position)
        with (data / f"{base:020d}").open("r+b") as file:
            byte = os.pread(file.fileno(), 1, position - base + at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), position - base + at)

    def index(self, number: int) -> int:
        """Of the entry with this number as its body."""
        return self.places[number].index

    @property
    def options(self) -> dict[str, str]:
        """To read all of it, in ranges of which one begins with each of the damaged entries."""
        addresses = ",".join(self.group.addresses)
        return {"bootstrap.servers": addresses, "readFrom": "leader", "startingOffsets": "earliest"}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damaged]:
    with LocalGroup(tmp_path_factory.mktemp("three"), flush="async", settings=SMALL_SEGMENTS) as group:
        yield Damaged(group)


def read(spark: SparkSession, damaged: Damaged, **options: str) -> DataFrame:
    return spark.read.format("dledger").options(**{**damaged.options, **options}).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row["body"])) for row in frame.select("body").collect())


def test_followers_send_the_log_to_batches(spark: SparkSession, damaged: Damaged) -> None:
    """All rows, and not the leader's bytes, which are damaged; from any member all rows, too."""
    followers = read(spark, damaged, readFrom="follower", verifyCrc="fail", minPartitions="4")
    anyone = read(spark, damaged, readFrom="any", minPartitions="4")

    assert numbers(followers) == list(range(COUNT))
    assert anyone.count() == COUNT


@pytest.mark.parametrize("read_from", ["follower", "any"])
def test_any_member_sends_the_log_to_a_stream(
    spark: SparkSession, damaged: Damaged, tmp_path: Path, read_from: str
) -> None:
    """Every row once, over several batches."""
    options = {**damaged.options, "readFrom": read_from, "maxOffsetsPerTrigger": "700"}
    frame = spark.readStream.format("dledger").schema("index bigint").options(**options).load()
    writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "out")).trigger(availableNow=True)

    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.awaitTermination()

    found = sorted(row["index"] for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert found == [one.index for one in damaged.places]
    assert len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) > 2


@pytest.mark.parametrize("first", [0, DAMAGED_BODY, DAMAGED_HEADER])
def test_checksums_of_a_running_group_are_checked(spark: SparkSession, damaged: Damaged, first: int) -> None:
    """A body and a header, within a range and as the first of one: told, marked or left out, and no other entry."""
    bad = [damaged.index(number) for number in (DAMAGED_BODY, DAMAGED_HEADER) if number >= first]
    options = {"startingOffsets": f'{{"index": {damaged.index(first)}}}'}

    marked = read(spark, damaged, verifyCrc="column", **options).filter("not crcOk").select("position").collect()
    kept = read(spark, damaged, verifyCrc="skip", **options)

    positions = [damaged.places[number].position for number in (DAMAGED_BODY, DAMAGED_HEADER) if number >= first]
    assert sorted(row["position"] for row in marked) == positions
    assert sorted(row["index"] for row in kept.select("index").collect()) == [
        one.index for one in damaged.places[first:] if one.index not in bad
    ]
    with pytest.raises(PySparkException, match="its checksum does not match its bytes"):
        read(spark, damaged, verifyCrc="fail", **options).count()


def test_an_error_of_a_running_group_names_the_entry(spark: SparkSession, damaged: Damaged) -> None:
    """And its segment on the member that sent it, and what to do."""
    with pytest.raises(PySparkException) as raised:
        read(spark, damaged, verifyCrc="fail").count()

    position = damaged.places[DAMAGED_BODY].position or 0
    assert f"segment {0:020d}, offset {position}: " in str(raised.value)
    assert f"(entry {damaged.index(DAMAGED_BODY)})" in str(raised.value)
    assert "try another readFrom" in str(raised.value)
