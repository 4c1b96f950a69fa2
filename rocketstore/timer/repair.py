"""One hour's file of timed messages while it is built again from the log, because it was damaged. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rocketstore.timer.entries import TimedEntry


class HourRepair:
    """``known`` gets the entries of records before ``until`` (a queue offset), ``added`` those that come meanwhile.

    The caller serializes: one thread adds to ``known``, dispatch to ``added`` under the files' lock.
    """

    def __init__(self, hour: int, until: int) -> None:
        self.hour: Final = hour
        self.until: Final = until
        self.known = bytearray()
        self.added: list[TimedEntry] = []

    def take(self, entries: Iterable[TimedEntry]) -> None:
        """Entries of the log, in its order; those of other hours are left out."""
        for entry in entries:
            if entry.hour == self.hour and entry.queue_offset < self.until:
                self.known += entry.encode()
