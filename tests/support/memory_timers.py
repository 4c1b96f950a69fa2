"""The files of timed messages in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dledger.errors import CorruptLogError
from rocketstore.timer.files import FollowedHours, TimedListener, TimerFiles
from rocketstore.timer.hours import (
    ADVICE,
    CHANGED,
    HOUR_MS,
    Entries,
    FirstDue,
    HourExtent,
    HourFile,
    TimedEntry,
    TimedProgress,
    Wanted,
    decode_entries,
    select,
    still_open,
)

_T = TypeVar("_T")


class MemoryTimers(TimerFiles):
    """Nothing of it is durable."""

    def __init__(self) -> None:
        super().__init__(Path("timers"))
        self._data: dict[Path, bytearray] = {}

    def _create(self, hour: int) -> HourFile:
        file = self._hours[hour] = HourFile(Path(str(hour)))
        self._data[file.path] = bytearray()
        return file

    def _write(self, file: HourFile, entries: Sequence[TimedEntry]) -> None:
        encoded = [one.encode() for one in entries]
        self._data[file.path] += b"".join(encoded)
        self._note(file, entries, encoded)

    def _read(self, hour: int, read: Callable[[HourExtent], _T]) -> _T | None:
        raise AssertionError("there is nothing to read")

    def entries(self, hour: int) -> Entries:
        file = self._hours.get(hour)
        if hour in self._damaged:
            raise CorruptLogError(self.path(hour), 0, CHANGED, ADVICE)
        return decode_entries(b"" if file is None else self._data[file.path])

    def first_due(self, hour: int, wanted: Wanted, count: int) -> FirstDue:
        rows = self.entries(hour)
        return FirstDue(select(rows, wanted(rows))).cut(count)

    def find(self, hour: int, origin: int) -> TimedEntry | None:
        rest = still_open(self.entries(hour))
        rest = rest[rest["origin"] == origin]
        return TimedEntry(*map(int, rest[0])) if len(rest) else None

    def follow(self, begin_ms: int, end_ms: int, listener: TimedListener) -> FollowedHours:
        wanted = [hour for hour in self.hours() if begin_ms <= hour * HOUR_MS < end_ms]
        end_ms = min([end_ms, *(hour * HOUR_MS for hour in wanted if hour in self._damaged)])
        if end_ms > begin_ms:
            self._listener, self._listener_before = listener, end_ms
        return FollowedHours([self.entries(hour) for hour in wanted if hour * HOUR_MS < end_ms], end_ms)

    def harm(self, hour: int) -> None:
        """Damage an hour's file."""
        self._damaged.add(hour)

    def mend(self, hour: int) -> None:
        """It was built again."""
        self._damaged.discard(hour)

    def flush(self) -> None:
        """Nothing to do."""

    def delete_settled(self, progress: TimedProgress) -> int:
        """As the files do."""
        self._settled = progress
        gone = [hour for hour, file in self._hours.items() if self._is_settled(hour, file)]
        for hour in gone:
            del self._hours[hour]
        return len(gone)
