"""The log that core tests run on: the simulator's, with retention by hand."""

from __future__ import annotations

from dledger.errors import CorruptLogError
from dledger.types import LogIndex, Term
from dledger.values import MIB
from tests.sim.sim_log import SimLog


class DiskLog(SimLog):
    """A crash loses what was not flushed; ``disk_full`` refuses appends."""

    def __init__(self) -> None:
        super().__init__(segment_bytes=MIB)
        self.damage: dict[LogIndex, CorruptLogError] = {}
        """What look-ups of an entry, or of a range that it lies in, raise."""

    def _check(self, first: LogIndex, last: LogIndex) -> None:
        for index, damage in self.damage.items():
            if first <= index <= last:
                raise damage

    def term_at(self, index: LogIndex) -> Term:
        self._check(index, index)
        return super().term_at(index)

    def chain_crc_at(self, index: LogIndex) -> int:
        self._check(index, index)
        return super().chain_crc_at(index)

    def channel_runs(self, first_index: LogIndex, last_index: LogIndex) -> list[tuple[int, int, int]]:
        self._check(first_index, last_index)
        return super().channel_runs(first_index, last_index)

    def expire(self, index: LogIndex) -> None:
        """Forget everything up to ``index``, which cannot be the last entry, as retention does."""
        self.set_committed(LogIndex(index + 1))
        self.flush()
        self.drop_before(LogIndex(index + 1))
