"""The stream reader beyond its planning, which is ``StreamProgress``'s: what it publishes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dledger.errors import UnavailableError
from dledger_spark.errors import OptionError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import Projection
from dledger_spark.source.stream import LogOffset, LogStreamReader


def test_a_publication_that_fails_is_told_once_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried with every batch, and a server may be away for hours."""
    answers = [False, False, True, False, False]
    asked: list[int] = []

    def publish(_group: str, index: int) -> None:
        asked.append(index)
        if not answers[len(asked) - 1]:
            raise UnavailableError("nobody is there")

    options = ReadOptions.parse({"bootstrap.servers": "a:1", "consumerGroup": "spark"})
    reader: Any = LogStreamReader(options, Projection((), pa.schema([])))  # Any: what it asks is replaced
    reader._log = SimpleNamespace(publish=publish)

    with caplog.at_level(logging.WARNING):
        for index in range(1, 6):
            reader.commit(LogOffset("c", "g", index, 0).to_dict())

    assert asked == [1, 2, 3, 4, 5]
    assert [record.getMessage().count("group spark cannot be published") for record in caplog.records] == [1, 1]


def test_a_stream_that_has_read_nothing_publishes_nothing() -> None:
    """Its beginning is no progress: a group that was further would seem to have gone back."""
    published: list[int] = []
    reader: Any = LogStreamReader(  # Any: what it asks is replaced
        ReadOptions.parse({"bootstrap.servers": "a:1", "consumerGroup": "spark"}), Projection((), pa.schema([]))
    )
    reader._log = SimpleNamespace(publish=lambda _group, index: published.append(index))

    for index in (7, 7, 9, 9, 12):
        reader.commit(LogOffset("c", "g", index, 7).to_dict())

    assert published == [9, 12]


def test_a_new_stream_looks_for_its_topics_as_a_batch_does() -> None:
    """A mistyped name would otherwise be a stream without rows for ever."""
    options = ReadOptions.parse({"bootstrap.servers": "a:1", "subscribe": "nowhere"})
    reader: Any = LogStreamReader(options, Projection((), pa.schema([])))  # Any: what it asks is replaced

    def missing() -> None:
        raise OptionError("there is no topic nowhere")

    reader._log = SimpleNamespace(check_topics=missing)
    with pytest.raises(OptionError, match="there is no topic nowhere"):
        reader.initialOffset()
