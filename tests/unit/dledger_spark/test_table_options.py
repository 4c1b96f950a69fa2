"""What a query says of a table wins over what the table says, under whichever of an option's names."""

from __future__ import annotations

import pytest

from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions, WriteOptions
from dledger_spark.source.datasource import for_reads, for_writes

TABLE = {"topic": "b", "bootstrap.servers": "a:1", "group": "g"}


def test_a_query_wins_over_its_table_by_what_options_mean() -> None:
    """``topic`` and ``subscribe`` are one option of reads, as ``bootstrap.servers`` and ``nameServer`` are."""
    read = ReadOptions.parse(for_reads(TABLE, {"SUBSCRIBE": "x", "nameserver": "c:3"}))
    write = WriteOptions.parse(for_writes(TABLE, {"kafka.bootstrap.servers": "c:3"}))

    assert (read.topics, read.servers, read.group) == (("x",), ("c:3",), "g")
    assert (write.topic, write.servers) == ("b", ("c:3",))


def test_what_a_query_itself_says_twice_is_refused() -> None:
    """Neither is the later one."""
    with pytest.raises(OptionError, match="subscribe and topic mean the same"):
        ReadOptions.parse(for_reads(TABLE, {"subscribe": "x", "topic": "y"}))
