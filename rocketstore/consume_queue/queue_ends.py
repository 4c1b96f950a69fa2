"""Records where every queue ended at a clean stop, so that a start need read but the last unit of ten thousand queues.

The file is written after the checkpoint and names it. It is valid only after a clean stop, with that checkpoint, and
for queues whose files still have the same names, sizes and times. All other queues are read as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dledger.store.fs import FileSystem
from rocketstore.mapped.stop_record import read_stop_record, write_stop_record
from rocketstore.types import QueueKey

QUEUE_ENDS_FILE: Final = "queueEnds.json"


class QueueEnd(NamedTuple):
    """One queue. ``end`` is in bytes, ``begin`` in units."""

    files: list[list[int]]
    """The start of each file, and its modification time (ns)."""
    end: int
    begin: int
    begin_for: tuple[int, int]
    """Valid while the log's begin is between these two."""
    max_physical: int


def write_queue_ends(fs: FileSystem, path: Path, place: tuple[int, int], ends: Mapping[QueueKey, QueueEnd]) -> None:
    """Replace the file. ``place``: replay position and queue units of the checkpoint. Raises ``OSError``."""
    topics: dict[str, dict[str, QueueEnd]] = {}
    for (topic, queue_id), end in ends.items():
        topics.setdefault(topic, {})[str(queue_id)] = end
    write_stop_record(fs, path, {"checkpoint": place, "queues": topics})


def read_queue_ends(path: Path, place: tuple[int, int]) -> dict[QueueKey, QueueEnd]:
    """The contents of the file if it belongs to that checkpoint; otherwise empty."""

    def parse(found: Any) -> dict[QueueKey, QueueEnd]:  # noqa: ANN401  # JSON
        if found["checkpoint"] != [*place]:
            return {}
        return {
            (topic, int(queue_id)): QueueEnd(*end)
            for topic, queues in found["queues"].items()
            for queue_id, end in queues.items()
        }

    return read_stop_record(path, parse) or {}
