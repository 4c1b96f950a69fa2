"""What a slave has received: a stretch of the log, verified record by record before it is written or acknowledged.

RocketMQ's slave writes what arrives as it is, half a record included, and acknowledges it. Here a part of a record
waits in memory for the rest, so that a slave's log always ends with a whole record, and what is acknowledged can be
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from dledger.errors import DLedgerError
from rocketstore.message.columns import RecordColumns, read_sound_records
from rocketstore.message.delay import DelayLevels
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
    """Turns what arrives into stretches to be written. ``end``: of what has been given out."""

    def __init__(self, end: int, segment_bytes: int, delay_levels: DelayLevels) -> None:
        self.end = end
        self._segment_bytes = segment_bytes
        self._delay_levels = delay_levels
        self._pending = b""
        self._needed = 0  # the bytes of the record that is pending; 0: not known yet
        self._blank_left = 0

    @property
    def received(self) -> int:
        """The end of what has arrived."""
        return self.end + len(self._pending)

    def feed(self, offset: int, data: bytes) -> Iterator[ReceivedStretch]:
        """What has become whole. Raises ``DamagedStreamError``."""
        if offset != self.received:
            raise DamagedStreamError(f"the master sends offset {offset}, but {self.received} comes next")
        at = 0
        while self._pending and at < len(data):  # so that the rest need not be copied behind it
            missing = data[at : at + (self._needed or BLANK.size) - len(self._pending)]
            at += len(missing)
            self._pending += missing
            if len(self._pending) >= (self._needed or BLANK.size):
                first, self._pending = self._pending, b""
                yield from self._whole(first)
        if at < len(data):
            yield from self._whole(data[at:] if at else data)

    def _whole(self, data: bytes) -> Iterator[ReceivedStretch]:
        """What is whole at the begin of ``data``; the rest becomes pending."""
        while data:
            if self._blank_left:
                part = data[: self._blank_left]
                yield self._given(part, 0)
                self._blank_left -= len(part)
                data = data[len(part) :]
                continue
            file_left = self._segment_bytes - self.end % self._segment_bytes
            found = self._verified(data[:file_left] if len(data) > file_left else data, file_left)
            if found.consumed:
                yield self._given(data[: found.consumed], _last_timestamp(found))
                data = data[found.consumed :]
            if found.end == "blank":
                self._blank_left = found.needed
            elif found.end == "more":
                self._needed = found.needed
                break
        self._pending = data

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
