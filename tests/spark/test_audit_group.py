"""The job ``audit`` over a real group: running, then stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dledger.client import DLedgerClient
from dledger.errors import DLedgerError
from dledger.types import NodeId
from dledger_cli.local.group import LocalGroup
from dledger_spark.audit.replica import open_replicas
from dledger_spark.jobs.audit import AuditOptions, run
from tests.integration.harness import SMALL_SEGMENTS
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BLOCK_BYTES = 64 * 1024
BODY_BYTES = 1000
DAMAGED = 700
"""An entry in the middle of the first segment."""


def test_a_flipped_bit_is_found_in_a_running_group_and_in_its_directories(spark: SparkSession, tmp_path: Path) -> None:
    """Both ways name the same node and entry; without damage both say equal, and once it is mended they do so again.

    At first the members may not mend anything (``auto_repair``): else the damage might be gone before it is found.
    """
    nodes = [NodeId(f"n{number}") for number in range(3)]
    stopped = AuditOptions(tuple(tmp_path / f"dledger-{node}" for node in nodes), BLOCK_BYTES)
    path = tmp_path / "dledger-n1" / "data" / f"{0:020d}"
    with LocalGroup(tmp_path, flush="async", settings={**SMALL_SEGMENTS, "auto_repair": "false"}) as group:
        with group.client() as client:
            results = client.append_many([os.urandom(BODY_BYTES) for _ in range(3000)], timeout_s=60)
        group.wait_converged()
        equal = run(spark, live_options(group))
        entry = int(results[DAMAGED].position or 0)
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, entry + 48 + 17)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), entry + 48 + 17)

        found = run(spark, live_options(group))

    offline = run(spark, stopped)
    assert (equal.fact("verdict"), equal.problems) == ("equal", ())
    assert int(equal.fact("digested") or 0) == 3 * int(equal.fact("compared") or 0) > 3_000_000
    last = open_replicas(stopped.directories)[0].entry(int(equal.fact("up to entry") or 0))
    assert last is not None
    assert equal.fact("chain crc") == f"{last.chain_crc:#010x}"
    in_file = {"position": entry + 48 + 17, "field": "body byte 17"}
    for report, place in ((found, {"position": entry}), (offline, in_file)):  # nodes send no damaged byte
        assert report.exit_code == 1
        (row,) = report.table("findings").rows
        named = dict(zip((one.name for one in report.table("findings").columns), row, strict=True))
        wanted = {"kind": "entry differs", "damaged": "n1", "index": results[DAMAGED].index, **place}
        assert {name: named[name] for name in wanted} == wanted
        assert named["segment"] == f"{0:020d}"

    with LocalGroup(tmp_path, flush="async", settings=SMALL_SEGMENTS) as group:
        wait_until((tmp_path / "dledger-n1" / "damaged-1" / "data" / path.name).exists, "n1 mends it")
        with group.client() as client:
            wait_until(lambda: not conditions(client), "nothing is the matter any more")
        mended = run(spark, live_options(group))
    assert (mended.fact("verdict"), mended.problems) == ("equal", ())
    assert run(spark, stopped).fact("verdict") == "equal"
    assert len({(tmp_path / f"dledger-{node}" / "data" / path.name).read_bytes() for node in nodes}) == 1


def live_options(group: LocalGroup) -> AuditOptions:
    """To audit it while it runs."""
    return AuditOptions(block_bytes=BLOCK_BYTES, connection={"bootstrap.servers": group.addresses[0]})


def conditions(client: DLedgerClient) -> list[str]:
    """What is the matter with the members that answer, or that one does not."""
    statuses = client.members_status().values()
    return [
        text
        for one in statuses
        for text in ([str(one)] if isinstance(one, DLedgerError) else [each.kind for each in one.conditions])
    ]
