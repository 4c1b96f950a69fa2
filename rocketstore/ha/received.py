"""A stretch of the log that a slave has received, verified record by record before it is written or acknowledged.

RocketMQ's slave writes what arrives as it is, half a record included, and acknowledges it. Here a part of a record
waits in memory for the rest, so that a slave's log always ends with a whole record, and what is acknowledged can be
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from dledger.errors import DLedgerError
from rocketstore.message.columns import RecordColumns, read_sound_records
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import BLANK
from rocketstore.message.scan import RecordScanOutcome

RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
"""The limit of a record: what a slave may have to keep in memory."""


class DamagedStreamError(DLedgerError):
    """Raised if what arrives is not the continuation of the log: a gap, or no records; says where."""


class ReceivedStretch(NamedTuple):
    """Verified bytes of the log, all in one file: records, or a part of the blank at its end."""

    offset: int
    data: bytes
    store_timestamp: int
    """Of the last record; 0 in a blank."""


class ReceivedLog:
    """Turns what arrives into stretches to be written. ``end``: of what has been given out.

    ``blank_left``: so many bytes of a blank, of which a part has been given out, come next.
    """

    def __init__(self, end: int, segment_bytes: int, delay_levels: DelayLevels, *, blank_left: int = 0) -> None:
        self.end = end
        self.blank_left = blank_left
        self._segment_bytes = segment_bytes
        self._delay_levels = delay_levels
        self._pending: list[bytes] = []  # joined once: a record of megabytes may come in many pieces
        self._pending_bytes = 0
        self._needed = 0  # so many bytes, before it is worth looking again

    @property
    def received(self) -> int:
        """The end of what has arrived."""
        return self.end + self._pending_bytes

    def feed(self, offset: int, data: bytes) -> Iterator[ReceivedStretch]:
        """The records that have become whole. Raises ``DamagedStreamError``."""
        if offset != self.received:
            raise DamagedStreamError(f"the master sends offset {offset}, but {self.received} comes next")
        if self._pending:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes < self._needed:
                return
            data = b"".join(self._pending)
            self._pending, self._pending_bytes = [], 0
        while data:
            if self.blank_left:
                part = data[: self.blank_left]
                yield self._given(part, 0)
                self.blank_left -= len(part)
                data = data[len(part) :]
                continue
            if len(data) < self._needed:
                break
            file_left = self._segment_bytes - self.end % self._segment_bytes
            whole = self._verified(data[:file_left] if len(data) > file_left else data, file_left)
            if whole.consumed:
                yield self._given(data[: whole.consumed], _last_timestamp(whole))
                data = data[whole.consumed :]
            if whole.end == "blank":
                self.blank_left = whole.needed
            elif whole.end == "more":
                self._needed = whole.needed
                break
        if data:
            self._pending, self._pending_bytes = [data], len(data)

    def _given(self, data: bytes, store_timestamp: int) -> ReceivedStretch:
        stretch = ReceivedStretch(self.end, data, store_timestamp)
        self.end += len(data)
        self._needed = 0
        return stretch

    def _verified(self, data: bytes, file_left: int) -> RecordScanOutcome:
        """Raises ``DamagedStreamError``."""
        found = read_sound_records(data, self.end, delay_levels=self._delay_levels)
        if found.end == "damaged":
            raise DamagedStreamError(f"the master sends no sound record: {found.reason}")
        left = file_left - found.consumed
        if found.end == "blank" and found.needed != left:
            raise DamagedStreamError(f"a blank of {found.needed} bytes where the file has {left} left")
        if found.needed > min(left - BLANK.size, RECORD_BYTES_MAX) and found.end == "more":
            raise DamagedStreamError(f"a record of {found.needed} bytes at offset {self.end + found.consumed}")
        if found.end == "more" and left < BLANK.size:
            raise DamagedStreamError(f"the file ends at offset {self.end + file_left} without a blank")
        return found


def _last_timestamp(found: RecordScanOutcome) -> int:
    heads = found.heads
    if isinstance(heads, RecordColumns):
        return int(heads.store_timestamps[-1])
    return heads[-1].store_timestamp if heads else 0
