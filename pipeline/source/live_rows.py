"""The rows of a range of a running group's log: what tasks do, in batches and in streams alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from dledger.types import LogChunk
from pipeline.decode import DecodeContext
from pipeline.decode.batches import decode_stretch
from pipeline.schema import Projection
from pipeline.source.group_log import GroupLog, TrimmedError
from pipeline.source.progress import data_lost
from pipeline.source.ranges import IndexRange
from pipeline.source.rows import projected

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowReader:
    """How to make rows of log bytes. Pickles. ``context`` tells all but where the bytes are from."""

    group: str
    projection: Projection
    context: DecodeContext
    fail_on_data_loss: bool = True

    def read(self, log: GroupLog, wanted: IndexRange) -> Iterator[pa.RecordBatch]:
        """Every row of the range, in order. Raises ``DataLossError``, ``BrokenRecordError``."""
        first = wanted.first
        while first < wanted.end:
            try:
                for chunk in log.chunks(first, wanted.end):
                    yield from self._rows(chunk)
                    first = chunk.first_index + chunk.count
            except TrimmedError as trimmed:
                lost_end = min(max(trimmed.begin_index, first + 1), wanted.end)
                if self.fail_on_data_loss:
                    raise data_lost(self.group, first, lost_end) from None
                _log.warning("entries %d to %d of %s are no longer kept", first, lost_end - 1, self.group)
                first = lost_end

    def _rows(self, chunk: LogChunk) -> Iterator[pa.RecordBatch]:
        context = replace(
            self.context,
            base=chunk.position,
            segment=f"{chunk.segment_base:020d}",
            segment_base=chunk.segment_base,
        )
        return projected(decode_stretch(chunk.data, self.projection.columns, context), self.projection)
