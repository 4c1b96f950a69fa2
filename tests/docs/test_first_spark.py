"""The lines of docs/spark.md and of the demo for Spark, carried out against a group that the demo left running."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dledger.client import DLedgerClient, ReadMode
from dledger.types import LogIndex, Magic
from dledger_cli.commands.demo import read_entries, spark_lines
from dledger_cli.local.group import LocalGroup
from tests.docs.documents import ROOT
from tests.support.spark import spark as spark
from tests.support.spark import spark_sockets as spark_sockets
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.lane("spark"), pytest.mark.spark]

ADDRESSES = "127.0.0.1:30911,127.0.0.1:30912,127.0.0.1:30913"
LINES = [b"line %d" % number for number in range(300)]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalGroup]:
    """Three nodes that hold lines, as after ``dledger demo --keep``."""
    with LocalGroup(tmp_path, settings={"segment_bytes": "256k", "index_segment_bytes": "64k"}) as running:
        running.leader()
        with closing(running.client()) as client:
            client.append_many(LINES)
        yield running


def bodies(group: LocalGroup) -> list[bytes]:
    """What the log holds."""
    with closing(DLedgerClient(group.addresses)) as client:
        entries = read_entries(client, LogIndex(0), mode=ReadMode.LINEARIZABLE)
        return [entry.body for entry in entries if entry.magic is Magic.NORMAL]


def test_the_lines_are_the_demo_s() -> None:
    """Whoever copies them from the document or from the terminal types the same."""
    text = (ROOT / "docs" / "spark.md").read_text()
    section = text[text.index("## With the demo") : text.index("## What can be read")]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)

    assert "".join(blocks).splitlines() == list(spark_lines(ADDRESSES))


@pytest.mark.smoke
def test_they_read_follow_and_write(spark: SparkSession, group: LocalGroup, capfd: pytest.CaptureFixture[str]) -> None:
    """One after the other, as somebody would type them."""
    session, read, follow, write = spark_lines(",".join(group.addresses))
    names: dict[str, Any] = {}  # Any: what somebody's Python session holds

    exec(session, names)
    assert names["spark"].getActiveSession() is not None
    exec(read, names)
    shown = capfd.readouterr().out
    assert "line 0" in shown
    assert "only showing top 20 rows" in shown

    exec(follow, names)
    query = names["query"]
    try:
        wait_until(lambda: query.lastProgress is not None, "the stream to run")
        exec(write, names)
        assert bodies(group) == [*LINES, b"hello from Spark"]
        wait_until(lambda: sum(one["numInputRows"] for one in query.recentProgress) == 1, "the stream to show the row")
        assert query.exception() is None
    finally:
        query.stop()
