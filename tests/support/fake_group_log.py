"""A group's log in memory, for the readers: sizes of entries, what is kept, what is committed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from dledger.types import LogChunk, LogIndex, Position
from dledger_spark.source.client_log import ClientLog, CommittedRange, TrimmedError

HEADER_BYTES = 48


class FakeGroupLog(ClientLog):
    """Entry n takes ``sizes[n]`` bytes. Everything is committed unless ``committed_end`` says less."""

    __setattr__ = object.__setattr__  # the real one is frozen

    def __init__(self, sizes: Sequence[int], *, begin: int = 0, cluster: str = "c", group: str = "g") -> None:
        self.cluster = cluster
        self.group = group
        self.begin = begin
        self.sizes = list(sizes)
        self.committed_end: int | None = None
        self.leads = True
        """Whether a leader can be sure that everything is committed."""
        self.published: list[tuple[str, int]] = []
        self.trims: list[int] = []
        """New begins, one at each further call that looks at places."""
        self.calls = 0

    @property
    def starts(self) -> list[int]:
        """Where each entry begins, and where the last one ends."""
        return [0, *accumulate(self.sizes)]

    @property
    def end(self) -> int:
        """The committed end."""
        return len(self.sizes) if self.committed_end is None else self.committed_end

    def committed(self) -> CommittedRange:
        return CommittedRange(self.cluster, self.group, self.begin, self.end)

    def confirmed_end(self) -> int | None:
        return len(self.sizes) if self.leads else None

    def positions_of(self, indexes: Sequence[int]) -> list[int]:
        self._look()
        if min(indexes) < self.begin:
            raise TrimmedError(self.begin)
        assert max(indexes) <= self.end, "asked for a place that is not committed"
        return [self.starts[index] for index in indexes]

    def indexes_at(self, positions: Sequence[int]) -> list[int]:
        self._look()
        starts = self.starts[: self.end]
        return [max(self.begin, bisect_left(starts, position)) for position in positions]

    def chunks(self, first: int, end: int) -> Iterator[LogChunk]:
        assert end <= self.end, "asked for entries that are not committed"
        for index in range(first, end):
            if index < self.begin:
                raise TrimmedError(self.begin)
            yield LogChunk(
                first_index=LogIndex(index),
                count=1,
                position=Position(self.starts[index]),
                segment_base=Position(0),
                data=bytes(self.sizes[index]),
                committed_index=LogIndex(self.end - 1),
                begin_index=LogIndex(self.begin),
            )

    def index_at(self, time_ms: int) -> int:
        """Entry n was stored at n milliseconds."""
        return min(max(time_ms, self.begin), self.end)

    def publish(self, consumer_group: str, index: int) -> None:
        self.published.append((consumer_group, index))

    def _look(self) -> None:
        self.calls += 1
        if self.trims:
            self.begin = self.trims.pop(0)
