"""The log that core tests run on: the simulator's, with retention by hand."""

from __future__ import annotations

from dledger.config import MIB
from dledger.types import LogIndex
from tests.sim.sim_log import SimLog


class DiskLog(SimLog):
    """A crash loses what was not flushed; ``disk_full`` refuses appends."""

    def __init__(self) -> None:
        super().__init__(segment_bytes=MIB)

    def expire(self, index: LogIndex) -> None:
        """Forget everything up to ``index``, which cannot be the last entry, as retention does."""
        self.set_committed(LogIndex(index + 1))
        self.flush()
        self.drop_before(LogIndex(index + 1))
