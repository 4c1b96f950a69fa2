"""Offsets of a stream: what the checkpoint holds, and what is refused in it."""

from __future__ import annotations

import json

import pytest

from dledger_spark.source.stream import LogOffset, OffsetError, check_same_log, first_of_batch, parse_offset

OFFSET = LogOffset("cluster", "group", 12, 5)


def test_offset_survives_the_checkpoint() -> None:
    """What is written as JSON is read as the same offset."""
    assert parse_offset(json.loads(json.dumps(OFFSET.to_dict()))) == OFFSET


@pytest.mark.parametrize(
    "damage",
    [
        {"index": -1},
        {"index": "12"},
        {"index": True},
        {"initial": None},
        {"cluster": 7},
        {"group": None},
        {"v": 0},
        {"v": True},
        {"more": 1},
        {"index": 1 << 63},
    ],
)
def test_offset_that_was_not_written_by_us_is_refused(damage: dict[str, object]) -> None:
    """Nothing is guessed: a wrong offset reads the wrong rows."""
    with pytest.raises(OffsetError, match="checkpoint"):
        parse_offset({**OFFSET.to_dict(), **damage})


def test_offset_of_a_newer_version_is_refused_with_the_version() -> None:
    """It may mean something that this version does not know."""
    with pytest.raises(OffsetError, match=r"newer version \(2, this one knows 1\)"):
        parse_offset({**OFFSET.to_dict(), "v": 2, "epoch": 3})


def test_offset_without_a_field_is_refused() -> None:
    """Half an offset is none."""
    raw = OFFSET.to_dict()
    del raw["initial"]

    with pytest.raises(OffsetError):
        parse_offset(raw)


@pytest.mark.parametrize(("cluster", "group"), [("other", "group"), ("cluster", "other")])
def test_offset_of_another_log_is_refused(cluster: str, group: str) -> None:
    """An index means nothing in another log."""
    with pytest.raises(OffsetError, match="checkpointLocation"):
        check_same_log(OFFSET, cluster, group)


def test_first_batch_begins_where_its_end_says() -> None:
    """``initialOffset`` is asked again until the first batch is committed, and "latest" has moved by then."""
    end = LogOffset("c", "g", 11_580, 3)
    moved = LogOffset("c", "g", 29_280, 29_280)

    assert first_of_batch(moved, end) == 3


def test_later_batches_begin_where_the_one_before_ended() -> None:
    """``initial`` counts for the first batch only."""
    assert first_of_batch(LogOffset("c", "g", 10, 3), LogOffset("c", "g", 20, 3)) == 10
