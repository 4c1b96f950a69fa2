"""Large reads of the committed log without a lock: raw chunks, block checksums, places of entries.

Everything is read with ``pread``, never through the mapping: copying a megabyte out of a mapping holds the
interpreter's lock, and so delays appends and heartbeats; ``pread`` and CRC32C release it. One call does one bounded
piece of work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from crc32c import crc32c

from dledger.errors import (
    CorruptLogError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    UntimedLogError,
)
from dledger.store.format import HEADER, EntryHeader, magic_of, scan_run
from dledger.store.log_files import LogFiles, LogState
from dledger.store.reader import LogReader
from dledger.types import BlockDigest, EntryRun, LogChunk, LogIndex, LogPlace, LogRange, Magic, Position
from dledger.values import MIB

_COLD: Final = sys.maxsize
"""Everything that begins below this is read with ``pread``."""
_DIGEST_STEP_BYTES: Final = MIB
_HEAD_BYTES: Final = 256
"""The part of a body that ``StoreTime`` gets."""

_Result = TypeVar("_Result")
StoreTime = Callable[[bytes], int | None]
"""The store time, in milliseconds since 1970, of the record at the start of a body; None if there is no record."""


class BulkReader(LogReader):
    """Serves readers of large parts of a node's log. Safe from any thread."""

    def __init__(
        self,
        files: LogFiles,
        state: LogState,
        check: Callable[[], None],
        store_time: StoreTime | None,
        *,
        unchecked: bool,
    ) -> None:
        """``check`` is called before every read; it may raise an error instead."""
        super().__init__(files, state, unchecked=unchecked)
        self._check = check
        self._time_of = store_time

    def _stable(self, read: Callable[[], _Result]) -> _Result:
        self._check()
        return super()._stable(read)

    def committed_range(self) -> LogRange:
        """The committed entries held."""
        return self._stable(self._committed_range)

    def _committed_range(self) -> LogRange:
        state = self._state
        begin, committed = state.begin, max(state.committed, state.begin.index)
        first = LogIndex(begin.index + 1)
        start = self._position_of(first, committed)
        return LogRange(LogPlace(first, start), LogPlace(LogIndex(committed + 1), self._end_of(committed)))

    def _end_of(self, index: int) -> Position:
        begin = self._state.begin
        if index <= begin.index:
            return begin.position
        header = self._files.located(index, _COLD)
        return Position(header.position + header.size)

    def _position_of(self, index: int, committed: int) -> Position:
        return Position(self._files.located(index, _COLD).position) if index <= committed else self._end_of(committed)

    # --- chunks -----------------------------------------------------------------------------------------------------

    def read_chunk(self, first_index: LogIndex, end_index: LogIndex, max_bytes: int) -> LogChunk:
        """Entries from ``first_index`` to before ``end_index``, at least one, of one segment, within ``max_bytes``.

        All are verified; the chunk ends before one that is damaged.

        Raises ``IndexBeforeBeginError`` naming what is lost, ``IndexOutOfRangeError`` if ``first_index`` is not
        committed, ``CorruptLogError`` naming file and offset.
        """
        return self._stable(lambda: self._read_chunk(first_index, end_index, max_bytes))

    def _read_chunk(self, first: LogIndex, end: LogIndex, max_bytes: int) -> LogChunk:
        state, files = self._state, self._files
        begin, committed = state.begin, state.committed
        self._check_kept(first, end)
        if first > committed:
            raise IndexOutOfRangeError(f"entry {first} is not committed here: the last committed entry is {committed}")
        run = self._run(*files.longest_run(first, min(end - 1, committed), max_bytes, _COLD), _COLD)
        count, data = self._sound_entries(run)
        return LogChunk(
            first_index=first,
            count=count,
            position=run.position,
            segment_base=Position(files.data.base_of(run.position)),
            data=data,
            committed_index=LogIndex(committed),
            begin_index=LogIndex(begin.index + 1),
        )

    def _sound_entries(self, run: EntryRun) -> tuple[int, bytes]:
        """How many entries precede the first damaged one, and their bytes. Raises if the first one is damaged."""
        with suppress(CorruptLogError):
            headers = self._files.headers_in(run.data, run.position, run.first_index, run.last_index)
            self._headers.require_chained(headers, run.previous_chain_crc)
            self._headers.require_bodies(headers, run.data)
            return len(headers), run.data
        scan = scan_run(run, unchecked=self._unchecked)  # many times slower
        if not scan.count:
            self._blame(run, scan)
        return scan.count, run.data[: scan.end_offset]

    def _check_kept(self, first: int, end: int) -> None:
        self._state.check_index(self._state.last.index)  # whether the store is open
        begin = self._state.begin
        if first <= begin.index:
            lost = min(max(end - 1, first), begin.index)
            what = f"entry {first} is" if lost == first else f"entries {first} to {lost} are"
            raise IndexBeforeBeginError(
                f"{what} no longer kept here: retention has removed everything before entry {begin.index + 1}, "
                f"at position {begin.position}. Start reading there, or read from a copy that has them; raise "
                "retention_hours if readers lag this far"
            )

    # --- places -----------------------------------------------------------------------------------------------------

    def place_of_index(self, index: LogIndex) -> LogPlace:
        """Where an entry begins; the committed log's end for the next one. Raises like ``read_chunk``."""

        def find() -> LogPlace:
            committed = max(self._state.committed, self._state.begin.index)
            self._check_kept(index, index + 1)
            if index > committed + 1:
                raise IndexOutOfRangeError(
                    f"entry {index} is not committed here: the last committed entry is {committed}"
                )
            return LogPlace(index, self._position_of(index, committed))

        return self._stable(find)

    def place_at_position(self, position: int) -> LogPlace:
        """The first committed entry that begins at or after ``position``; the first kept one for earlier positions."""

        def find() -> LogPlace:
            state = self._state
            committed = max(state.committed, state.begin.index)
            return self._place(self._files.first_index_at(position, state.begin.index + 1, committed), committed)

        return self._stable(find)

    def place_at_time(self, store_time_ms: int) -> LogPlace:
        """The first committed message that was stored at ``store_time_ms`` or later. A broker's log only.

        Messages are stored in the order of their times. Raises ``UntimedLogError`` for any other log.
        """
        store_time = self._time_of
        if store_time is None:
            raise UntimedLogError(
                "entries of this log have no timestamps, only a broker's messages do: start from an index or position"
            )
        return self._stable(lambda: self._place_at_time(store_time_ms, store_time))

    def _place_at_time(self, store_time_ms: int, store_time: StoreTime) -> LogPlace:
        """Binary search; an entry without a time (a NOOP) takes that of the next message."""
        committed = max(self._state.committed, self._state.begin.index)
        low, high = self._state.begin.index + 1, committed + 1
        while low < high:
            middle = (low + high) // 2
            probe = middle
            while probe < high and (stored := self._store_time(probe, store_time)) is None:
                probe += 1
            if probe == high:
                high = middle
            elif stored is not None and stored < store_time_ms:
                low = probe + 1
            else:
                high = middle
        while low <= committed and self._store_time(low, store_time) is None:
            low += 1
        return self._place(low, committed)

    def _store_time(self, index: int, store_time: StoreTime) -> int | None:
        run = self._read_run(LogIndex(index), LogIndex(index), verified=True, hot_from=_COLD)
        header = EntryHeader(*HEADER.unpack_from(run.data))
        if magic_of(header.magic, header.channel) is not Magic.NORMAL:
            return None
        return store_time(run.data[HEADER.size : HEADER.size + _HEAD_BYTES])

    def _place(self, index: int, committed: int) -> LogPlace:
        return LogPlace(LogIndex(index), self._position_of(index, committed))

    # --- digests ----------------------------------------------------------------------------------------------------

    def digest(self, position: int, end_position: int, block_bytes: int) -> BlockDigest | None:
        """The checksum of the kept and committed part, before the end, of the block containing ``position``.

        None if there is nothing from ``position`` on. A position below the log's begin means the begin. Raises like
        ``read_chunk``.
        """
        if block_bytes <= 0:
            raise InvalidRequestError(f"block_bytes={block_bytes} must be positive")
        return self._stable(lambda: self._digest(position, end_position, block_bytes))

    def _digest(self, position: int, end_position: int, block_bytes: int) -> BlockDigest | None:
        self._state.check_index(self._state.last.index)  # whether the store is open
        begin, committed = self._state.begin, max(self._state.committed, self._state.begin.index)
        position = max(position, begin.position)
        start = max(position - position % block_bytes, begin.position)
        stop = min(position - position % block_bytes + block_bytes, end_position, self._end_of(committed))
        if position >= stop:
            return None
        first = self._files.first_unit_at(start, begin.index + 1, committed)
        last = self._files.first_unit_at(stop, first, committed) - 1
        return BlockDigest(
            position=Position(start),
            size=stop - start,
            crc32c=self._crc(start, stop),
            first_index=LogIndex(first),
            last_index=LogIndex(last),
            chain_crc=self._stored_chain_crc(last),
        )

    def _stored_chain_crc(self, index: int) -> int:
        """The stored value: a digest covers what is stored, damaged or not."""
        begin = self._state.begin
        if index == begin.index:
            return begin.chain_crc
        header = self._files.header_at(self._files.unit(index).position, _COLD)
        if header is None:
            raise self._files.suspect(index)
        return header.chain_crc

    def _crc(self, start: int, stop: int) -> int:
        crc, segment_bytes = 0, self._files.segment_bytes
        while start < stop:
            length = min(stop - start, _DIGEST_STEP_BYTES, segment_bytes - start % segment_bytes)
            data = self._files.read(start, length, _COLD)
            if len(data) < length:
                raise self._corrupt(start, f"the file ends {len(data)} bytes after this")
            crc = crc32c(data, crc)
            start += length
        return int(crc)
