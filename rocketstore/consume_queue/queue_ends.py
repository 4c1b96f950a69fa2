"""Records where every queue ended at a clean stop, so that a start need read but the last unit of ten thousand queues.

The file is written after the checkpoint and names it. It is valid only after a clean stop, with that checkpoint, and
for queues whose files still have the same names, sizes and times. All other queues are read as usual.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.types import QueueKey

QUEUE_ENDS_FILE: Final = "queueEnds.json"
_CRC_BYTES: Final = 9
"""Eight hexadecimal digits and a line feed."""

_log = logging.getLogger("rocketstore")


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
    content = json.dumps({"checkpoint": place, "queues": topics}, separators=(",", ":")).encode()
    make_dirs_durably(fs, path.parent)
    replace_durably(fs, path, b"%08x\n" % zlib.crc32(content) + content)


def read_queue_ends(path: Path, place: tuple[int, int]) -> dict[QueueKey, QueueEnd]:
    """The contents of the file if it belongs to that checkpoint; otherwise empty."""
    try:
        data = read_whole(path)
        if data[:_CRC_BYTES] != b"%08x\n" % zlib.crc32(data[_CRC_BYTES:]):
            return {}
        found = json.loads(data[_CRC_BYTES:])
        if found["checkpoint"] != [*place]:
            return {}
        return {
            (topic, int(queue_id)): QueueEnd(*end)
            for topic, queues in found["queues"].items()
            for queue_id, end in queues.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s cannot be read, so all consume queues are: %s", path, error)
        return {}
