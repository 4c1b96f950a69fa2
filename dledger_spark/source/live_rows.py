"""Reads the rows of a range of a running group's log, in tasks of batches and streams."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from dledger.errors import invariant
from dledger.types import LogChunk
from dledger_spark.decode import DecodeContext, walk
from dledger_spark.decode.batches import decode_stretch
from dledger_spark.decode.checksums import chain_after
from dledger_spark.decode.context import CHAIN_BEGIN, Chain
from dledger_spark.decode.decoder import looks_at_checksums
from dledger_spark.errors import BrokenRecordError
from dledger_spark.schema import Projection
from dledger_spark.source.client_log import ClientLog
from dledger_spark.source.group_log import TrimmedError
from dledger_spark.source.progress import data_lost
from dledger_spark.source.ranges import IndexRange
from dledger_spark.source.rows import projected

_log = logging.getLogger(__name__)
_LEAD: Final = 2
"""How many entries before a range are requested: the last one, and the one that verifies its header."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Converts log bytes to rows. Pickles. ``context`` contains everything but the source of the bytes."""

    group: str
    projection: Projection
    context: DecodeContext
    fail_on_data_loss: bool = True

    def read(self, log: ClientLog, wanted: IndexRange) -> Iterator[pa.RecordBatch]:
        """Every row of the range, in order. Raises ``DataLossError``, ``BrokenRecordError``."""
        yield from projected(self._found(log, wanted), self.projection)

    def _found(self, log: ClientLog, wanted: IndexRange) -> Iterator[pa.RecordBatch]:
        first = wanted.first
        context = replace(self.context, chain_before=self._chain_before(log, first))
        while first < wanted.end:
            try:
                for chunk in log.chunks(first, wanted.end):
                    context = yield from self._rows(chunk, context)
                    first = chunk.first_index + chunk.count
            except TrimmedError as trimmed:
                lost_end = min(trimmed.begin_index, wanted.end)
                invariant(
                    lost_end > first, "trimmed entries are before the start of the log", first=first, end=lost_end
                )
                if self.fail_on_data_loss:
                    raise data_lost(self.group, first, lost_end) from None
                _log.warning("entries %d to %d of %s are no longer kept", first, lost_end - 1, self.group)
                first = lost_end
                context = replace(context, chain_before=None)

    def _rows(self, chunk: LogChunk, context: DecodeContext) -> Generator[pa.RecordBatch, None, DecodeContext]:
        context = replace(
            context,
            base=chunk.position,
            segment=f"{chunk.segment_base:020d}",
            segment_base=chunk.segment_base,
        )
        try:
            return (yield from decode_stretch(chunk.data, self.projection.columns, context, chunk.first_index))
        except BrokenRecordError as error:
            raise BrokenRecordError(
                f"{error}. A member of group {self.group} sent it; another may have an intact copy: try another "
                "readFrom, and run dledger pipeline audit to find the damaged log"
            ) from error

    def _chain_before(self, log: ClientLog, first: int) -> Chain | None:
        """The chain before the first entry, if checksums matter: computed from the two previous ones, if kept."""
        if not looks_at_checksums(self.projection.columns, self.context):
            return None
        for count in range(min(_LEAD, first), 0, -1):
            try:
                data = b"".join(chunk.data for chunk in log.chunks(first - count, first))
            except TrimmedError:
                continue
            starts = walk(data, "entry").starts
            return chain_after(np.frombuffer(data, np.uint8), starts) if len(starts) == count else None
        return CHAIN_BEGIN if first == 0 else None
