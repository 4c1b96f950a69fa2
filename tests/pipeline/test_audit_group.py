"""The job ``audit`` over a real group: running, then stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.local_group import LocalGroup
from dledger.types import NodeId
from pipeline.audit.replica import open_replicas
from pipeline.jobs.audit import AuditOptions, run
from tests.integration.harness import SMALL_SEGMENTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BLOCK_BYTES = 64 * 1024
BODY_BYTES = 1000
DAMAGED = 700
"""An entry in the middle of the first segment."""


def test_a_flipped_bit_is_found_in_a_running_group_and_in_its_directories(spark: SparkSession, tmp_path: Path) -> None:
    """Both ways name the same node, entry and byte; without damage both say equal."""
    with LocalGroup(tmp_path, flush="async", settings=SMALL_SEGMENTS) as group:
        with group.client() as client:
            results = client.append_many([os.urandom(BODY_BYTES) for _ in range(3000)], timeout_s=20)
        group.wait_converged()
        live = AuditOptions(block_bytes=BLOCK_BYTES, connection={"bootstrap.servers": group.addresses[0]})
        stopped = AuditOptions(tuple(group.store_dir(node) for node in group.nodes), BLOCK_BYTES)
        equal = run(spark, live)
        position = int(results[DAMAGED].position or 0) + 48 + 17
        path = group.store_dir(NodeId("n1")) / "data" / f"{0:020d}"
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, position)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), position)

        found = run(spark, live)

    offline = run(spark, stopped)
    assert (equal.fact("verdict"), equal.problems) == ("equal", ())
    assert int(equal.fact("digested") or 0) == 3 * int(equal.fact("compared") or 0) > 3_000_000
    last = open_replicas(stopped.directories)[0].entry(int(equal.fact("up to entry") or 0))
    assert last is not None
    assert equal.fact("chain crc") == f"{last.chain_crc:#010x}"
    for report in (found, offline):
        assert report.exit_code == 1
        (row,) = report.table("findings").rows
        named = dict(zip((one.name for one in report.table("findings").columns), row, strict=True))
        wanted = {"kind": "entry differs", "damaged": "n1", "position": position, "field": "body byte 17"}
        assert {name: named[name] for name in wanted} == wanted
        assert named["index"] == results[DAMAGED].index
        assert named["segment"] == f"{0:020d}"
