"""The job ``audit`` within Spark."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger_spark.audit.replica import BLOCK_BYTES, ReplicaDigest, differ
from dledger_spark.jobs.audit import AuditOptions, differences, run
from dledger_spark.source.blocks import BlocksDataSource
from tests.unit.dledger_spark.audit.members import flip_in_entry, make_group, segment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_flipped_bit_is_found_by_digests_that_spark_compares(spark: SparkSession, tmp_path: Path) -> None:
    """From directories to the report: the entry, the field and the replica, exit code 1; equal ones are 0."""
    nodes = tuple(make_group(tmp_path, 3))
    options = AuditOptions(nodes, block_bytes=1000, split_bytes=3000)
    equal = run(spark, options)
    flip_in_entry(nodes[1], 60, 70)
    segment(nodes[2], 0).unlink()

    found = run(spark, options)

    assert (equal.fact("verdict"), equal.exit_code, equal.problems) == ("equal", 0, ())
    compared = equal.fact("compared")
    assert equal.fact("digested") == 3 * int(compared or 0)
    assert (found.fact("verdict"), found.exit_code) == ("different", 1)
    kinds = [(row[0], row[1], row[5], row[7]) for row in found.table("findings").rows]
    assert kinds == [("segment missing", "n2", None, None), ("entry differs", "n1", 60, "body byte 22")]
    assert json.dumps(found.to_json())


def test_blocks_are_a_format_of_their_own(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever wants other figures of the digests than the job gives reads them himself."""
    nodes = make_group(tmp_path, 2)
    spark.dataSource.register(BlocksDataSource)

    rows = spark.read.format("dledger-blocks").load(",".join(map(str, nodes))).collect()

    assert {row["replica"] for row in rows} == {"n0", "n1"}
    assert sum(row["bytes"] for row in rows if row["replica"] == "n0") == 15_100 < BLOCK_BYTES
    with pytest.raises(Exception, match="did you mean blockBytes"):
        spark.read.format("dledger-blocks").option("blockByte", 1).load("x").collect()


def test_what_no_replica_has_is_no_agreement(spark: SparkSession, tmp_path: Path) -> None:
    """A segment that is missing everywhere has the same digest everywhere."""
    nodes = tuple(make_group(tmp_path, 3))
    for node in nodes:
        segment(node, 0).unlink()

    found = run(spark, AuditOptions(nodes, block_bytes=1000, split_bytes=3000))

    assert (found.fact("verdict"), found.exit_code) == ("different", 1)
    names = [str(row[1]) for row in found.table("findings").rows if row[0] == "segment missing"]
    assert sorted(", ".join(names).split(", ")) == ["n0", "n1", "n2"]


def test_spark_finds_the_blocks_that_differ(spark: SparkSession) -> None:
    """By any of what a digest says, on any of the replicas, or on all of them; the same blocks as the rule in words."""
    states = [(1000, 7, ""), (1000, 8, ""), (900, 7, ""), (0, 0, "missing")]
    blocks = dict(enumerate(itertools.product(states, repeat=3)))
    digests = {
        position: [ReplicaDigest(f"n{node}", position, *state) for node, state in enumerate(block)]
        for position, block in blocks.items()
    }
    rows = [
        (one.replica, one.position, one.size, one.crc32c, one.error or None)
        for block in digests.values()
        for one in block
    ]
    frame = spark.createDataFrame(rows, "replica string, position long, bytes long, crc32c long, error string")

    found = differences(frame, 2)

    assert [position for position, _ in found.blocks] == [at for at, block in digests.items() if differ(block)]
    assert all(list(block) == digests[at] for at, block in found.blocks)
    assert 0 < found.count < len(blocks)
