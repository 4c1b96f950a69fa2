"""The files of timed messages in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rocketstore.timer.entries import Entries, TimedEntry, decode_entries
from rocketstore.timer.files import HourFile, TimerFiles
from rocketstore.timer.progress import TimedProgress


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
        for entry in entries:
            self._data[file.path] += entry.encode()
            file.note(entry, entry.encode())

    def entries(self, hour: int) -> Entries:
        return self._entries(hour)

    def _entries(self, hour: int) -> Entries:
        file = self._hours.get(hour)
        return decode_entries(b"" if file is None else self._data[file.path])

    def flush(self) -> None:
        """Nothing to do."""

    def delete_settled(self, progress: TimedProgress) -> int:
        """As the files do."""
        self._settled = progress
        gone = [hour for hour, file in self._hours.items() if self._is_settled(hour, file)]
        for hour in gone:
            del self._hours[hour]
        return len(gone)
