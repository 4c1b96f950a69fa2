"""Rows of what is derived, and the files they become; without Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dledger_spark.errors import PipelineError
from dledger_spark.rebuild import INDEX, QUEUES
from dledger_spark.rebuild.rows import COLUMNS, KEYS_FILE, FileShapes, RebuildRow, Written, write_rows
from rocketstore.consume_queue.files import UNIT
from rocketstore.index.file import IndexShape
from rocketstore.index.format import KEY

SHAPES = FileShapes(200, IndexShape(10, 20), keys_only=False)


def queue_row(position: int, first: int, count: int = 2, *, queue_id: int = 0) -> RebuildRow:
    units = np.array([(position + number, 100, 7) for number in range(count)], UNIT)
    numbers = np.arange(first, first + count).astype("<i8")
    return RebuildRow(QUEUES, "T", queue_id, position, numbers.tobytes(), units.tobytes())


def key_row(position: int, count: int = 3) -> RebuildRow:
    keys = np.array([(number, position, 1) for number in range(count)], KEY)
    return RebuildRow(INDEX, "", 0, position, b"", keys.tobytes())


def batches(*rows: RebuildRow) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist([dict(zip(COLUMNS, row, strict=True))]) for row in rows]


SORTED = (key_row(0), key_row(500), queue_row(0, 0), queue_row(500, 2), queue_row(100, 0, 1, queue_id=1))


def test_what_is_written_is_counted(tmp_path: Path) -> None:
    """Keys and units apart; a unit whose place is taken is not in the files, so it does not count."""
    rows = (*SORTED[:3], queue_row(500, 1), SORTED[4])  # offset 1 a second time

    assert write_rows(tmp_path, SHAPES, batches(*rows)) == Written(units=4, keys=6)

    files = {str(path.relative_to(tmp_path)).rsplit("/", 1)[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"index", "consumequeue/T/0", "consumequeue/T/1"}


def test_keys_alone_are_written_as_they_come(tmp_path: Path) -> None:
    written = write_rows(tmp_path, FileShapes(200, SHAPES.index, keys_only=True), batches(*SORTED[:2]))

    assert written == Written(keys=6)
    assert (tmp_path / "index" / KEYS_FILE).read_bytes() == SORTED[0].data + SORTED[1].data


@pytest.mark.parametrize("order", [(1, 0), (3, 2), (2, 0), (4, 2), (2, 2)])
def test_rows_that_are_not_sorted_are_refused(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Written out of order they would make files that no broker writes."""
    with pytest.raises(PipelineError, match="sorted by part, topic, queueId, position"):
        write_rows(tmp_path, SHAPES, batches(*(SORTED[number] for number in order)))
