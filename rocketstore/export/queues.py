"""Where the numbering of every queue goes on, and queue files that say so for queues whose messages have expired.

RocketMQ counts on from a queue's last unit, so a queue without messages needs one all the same: it names a record
before the log's begin, as the units of expired messages do. (A filler as the last unit would not do: RocketMQ would
take its size for the end of the log.)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from dledger.errors import InvalidRequestError
from dledger.store.format import parse_segment_name, segment_name
from dledger.store.fs import FileSystem, create_durably, make_dirs_durably
from rocketstore.consume_queue.units import FILLER_BYTES, UNIT, UNIT_BYTES, pack_unit
from rocketstore.message.record import decode_record
from rocketstore.queue_numbers import decode_numbering
from rocketstore.types import QueueKey, QueueUnit, RecordHead

GONE: Final = QueueUnit(0, 1, 0)
"""A message that expired; the log must begin later."""
_log = logging.getLogger("rocketstore")


class NextOffsets:
    """The next queue offset of every queue, collected in log order."""

    def __init__(self) -> None:
        self.of: dict[QueueKey, int] = {}

    def take(self, head: RecordHead) -> None:
        """Count a message."""
        key, following = (head.topic, head.queue_id), head.queue_offset + 1
        if following > self.of.get(key, 0):
            self.of[key] = following

    def take_set(self, record: bytes) -> None:
        """Count what a master wrote of all queues (see ``queue_numbers``)."""
        try:
            part = decode_numbering(decode_record(record).body)
        except InvalidRequestError as error:
            _log.error("a record of queue numbers is skipped: %s", error)
            return
        self.raise_to(part.next_offsets)

    def raise_to(self, ends: Mapping[QueueKey, int]) -> None:
        """At least these."""
        for key, end in ends.items():
            if end > self.of.get(key, 0):
                self.of[key] = end


def stored_ends(queues_dir: Path) -> dict[QueueKey, int]:
    """The ends of a cleanly stopped broker's queues according to their files. Raises ``OSError``."""
    found: dict[QueueKey, int] = {}
    for directory in queues_dir.glob("*/*"):
        if not directory.name.isdecimal() or not directory.is_dir():
            continue
        bases = [base for one in directory.iterdir() if (base := parse_segment_name(one.name)) is not None]
        for base in sorted(bases, reverse=True):
            content = (directory / segment_name(base)).read_bytes()
            sizes = np.frombuffer(content, UNIT, len(content) // UNIT_BYTES)["size"]
            used = np.flatnonzero(sizes > 0)
            if len(used):
                found[directory.parent.name, int(directory.name)] = base // UNIT_BYTES + int(used[-1]) + 1
                break
    return found


def write_expired(fs: FileSystem, queues_dir: Path, file_bytes: int, ends: Mapping[QueueKey, int]) -> None:
    """Make a file for each of these queues, whose numbering goes on at these offsets. Raises ``OSError``."""
    units = file_bytes // UNIT_BYTES
    for (topic, queue_id), end in ends.items():
        directory = queues_dir / topic / str(queue_id)
        make_dirs_durably(fs, directory)
        before = (end - 1) % units

        def fill(fd: int, before: int = before) -> None:
            os.ftruncate(fd, file_bytes)
            fs.write(fd, FILLER_BYTES * before + pack_unit(GONE), 0)

        create_durably(fs, directory / segment_name((end - 1 - before) * UNIT_BYTES), fill)


def without_messages(ends: Mapping[QueueKey, int], have: Collection[QueueKey]) -> dict[QueueKey, int]:
    """Those of queues that have no message in the log."""
    return {key: end for key, end in ends.items() if key not in have and end > 0}
