"""Reading entries without a lock, beside writers (``log_files`` explains why that is safe)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn, TypeVar

import numpy as np
from crc32c import crc32c

from dledger.errors import CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError, InvalidRequestError
from dledger.records import BLANK_MAGIC, ENTRY, ENTRY_HEADER_BYTES
from dledger.store.durable_state import REPAIR_ADVICE, Mark
from dledger.store.format import BLANK, HEADER, EntryHeader, Scan, columns_of, decode_run, is_magic, scan_run
from dledger.store.headers import Headers, channel_runs_of
from dledger.store.log_files import LogFiles, LogState, SuspectEntryError
from dledger.store.mmap_file import UnreadableError
from dledger.types import Entry, EntryColumns, EntryId, EntryRun, LogBytes, LogIndex, Position, Term
from dledger.values import MIB

_Result = TypeVar("_Result")

_PLACE_AND_CRC = ENTRY.struct("size", "position", "chain_crc", "body_crc")
_MANY_BYTES = 16384
"""Shorter data is verified entry by entry, which is faster."""
_COLUMNS_MIN = 32
"""Fewer entries are decoded one by one, which is faster."""
_GAP_BYTES = 4096
"""Bodies with no more than this between them are read together."""
HOT_BYTES = 64 * MIB
"""The most recently written data is in memory, where the mapping is fastest to read; older data may not be."""


_MENDS_MAX: Final = 3
"""How often one read rewrites an entry's index unit before it concludes that the index keeps nothing."""


class LogReader:
    """The read half of a file store."""

    def __init__(self, files: LogFiles, state: LogState, *, unchecked: bool) -> None:
        self._files = files
        self._state = state
        self._unchecked = unchecked
        self._headers = Headers(files, state, unchecked=unchecked)
        self._committed_end = (state.begin.index, state.begin.position)  # an entry and its end; replaced as a whole
        self._latest_read: tuple[int, EntryRun] | None = None
        """The last run read and the generation before that: the next follower is usually sent the same one."""
        self._latest_written: tuple[int, EntryRun] | None = None
        """The last run written as leader, likewise."""

    def _stable(self, read: Callable[[], _Result]) -> _Result:
        """Repeat ``read`` until nothing was dropped or overwritten meanwhile; only then are its errors real.

        A wrong index unit is rewritten from data; damage in data, including unreadable sectors, is reported to the
        repair, and so is an index that does not keep what is written to it.
        """
        state = self._state
        mended: Counter[int] = Counter()
        while True:
            generation = state.generation
            try:
                result = read()
            except (CorruptLogError, IndexBeforeBeginError, UnreadableError) as error:
                if generation != state.generation or state.closed:
                    state.check_index(state.last.index)
                    continue
                if isinstance(error, SuspectEntryError) and mended[error.suspect] < _MENDS_MAX:
                    mended[error.suspect] += 1
                    self._mend(error, generation)
                    continue
                if isinstance(error, UnreadableError):
                    damage = error.as_damage(self._entry_around(error.position))
                    state.on_damage(damage)
                    raise damage from error
                if isinstance(error, CorruptLogError):
                    state.on_damage(error)
                raise
            if generation == state.generation:
                return result

    def _entry_around(self, position: int) -> int | None:
        """The entry containing a position, by the index alone; None if the index has none."""
        first, last = self._state.begin.index + 1, self._state.last.index
        with suppress(CorruptLogError, IndexBeforeBeginError):
            found = self._files.first_unit_at(position + 1, first, last) - 1
            return found if found >= first else None
        return None

    def _mend(self, suspect: SuspectEntryError, generation: int) -> None:
        """Mend the index at an entry, unless the log has changed. Raises ``CorruptLogError`` for damaged data."""
        state = self._state
        try:
            with state.shape_lock:
                if generation == state.generation:
                    self._headers.mend(suspect.suspect)
        except CorruptLogError as damage:
            state.on_damage(damage)
            raise
        except OSError as error:
            raise state.poisoned("rewriting the index", error) from error

    @property
    def _hot_from(self) -> int:
        return self._state.end - HOT_BYTES

    def term_at(self, index: LogIndex) -> Term:
        return self._stable(lambda: self._term_at(index))

    def chain_crc_at(self, index: LogIndex) -> int:
        return self._stable(lambda: self._chain_crc_at(index))

    def _term_at(self, index: int) -> Term:
        state = self._state
        state.check_index(index)
        begin, last = state.begin, state.last  # each read once: another thread may replace them
        if index == begin.index:
            return begin.term
        return last.term if index == last.index else Term(self._headers.proven(index, self._hot_from).term)

    def _chain_crc_at(self, index: int) -> int:
        state = self._state
        state.check_index(index)
        begin, tip = state.begin, state.tip  # each read once: another thread may replace them
        if index == begin.index:
            return begin.chain_crc
        return tip.chain_crc if index == tip.index else self._headers.proven(index, self._hot_from).chain_crc

    def mark_at(self, index: LogIndex) -> Mark:
        """An entry (or the boundary) with its end and chain CRC, all verified."""

        def find() -> Mark:
            begin = self._state.begin
            if index == begin.index:
                return Mark(begin.index, begin.position, begin.chain_crc)
            header = self._headers.proven(index, self._hot_from)
            return Mark(index, header.position + header.size, header.chain_crc)

        return self._stable(find)

    def first_index_of_term(self, term: Term) -> LogIndex:
        state, headers = self._state, self._headers
        return self._stable(
            lambda: LogIndex(headers.first_index_of_term(term, state.begin.index + 1, state.last.index))
        )

    def _known_run(self, first: LogIndex, last: LogIndex) -> EntryRun | None:
        """The run of these entries if it was read or written last, and nothing was dropped since."""
        for latest in (self._latest_written, self._latest_read):
            if latest is not None and latest[0] == self._state.generation and not self._state.closed:
                run = latest[1]
                if run.first_index == first and run.last_index == last:
                    return run
        return None

    def slice_run(self, first_index: LogIndex, max_bytes: int) -> LogIndex:
        last = self._state.last.index
        run = self._known_run(first_index, last)
        if run is not None and len(run.data) <= max_bytes:
            return last
        return self._stable(lambda: self._slice_run(first_index, self._state.last.index, max_bytes))

    def _slice_run(self, first: LogIndex, last: LogIndex, max_bytes: int) -> LogIndex:
        self._check_entry(first)
        if first == last:
            return last
        return LogIndex(self._files.longest_run(first, last, max_bytes, self._hot_from)[1].index)

    def _check_entry(self, index: int) -> None:
        self._state.check_index(index)
        if index == self._state.begin.index:
            raise IndexBeforeBeginError(f"entry {index} is no longer kept here: the first entry kept is {index + 1}")

    def read_run(self, first_index: LogIndex, last_index: LogIndex, *, verified: bool = False) -> EntryRun:
        known = None if verified else self._known_run(first_index, last_index)
        if known is not None:
            return known
        generation = self._state.generation
        run = self._stable(lambda: self._read_run(first_index, last_index, verified=verified))
        self._latest_read = (generation, run)
        return run

    def _read_run(
        self, first: LogIndex, last: LogIndex, *, verified: bool = False, hot_from: int | None = None
    ) -> EntryRun:
        self._check_entry(first)
        self._check_entry(last)
        hot_from = self._hot_from if hot_from is None else hot_from
        start = self._files.located(first, hot_from)
        run = self._run(start, start if first == last else self._files.located(last, hot_from), hot_from)
        if verified:
            self._verify(run)
        return run

    def _run(self, start: EntryHeader, stop: EntryHeader, hot_from: int) -> EntryRun:
        """The entries from one located header to another."""
        files, begin, previous = self._files, self._state.begin, LogIndex(start.index - 1)
        if previous == begin.index:
            term, chain_crc = begin.term, begin.chain_crc
        else:
            self._state.check_index(previous)
            header = files.located(previous, hot_from)
            term, chain_crc = Term(header.term), header.chain_crc
        self._headers.require_continuing(start, chain_crc)
        if stop.index < start.index or files.data.base_of(start.position) != files.data.base_of(stop.position):
            raise InvalidRequestError(f"entries {start.index} to {stop.index} are not within one segment")
        return EntryRun(
            previous=EntryId(term, previous),
            previous_chain_crc=chain_crc,
            first_index=LogIndex(start.index),
            last_index=LogIndex(stop.index),
            position=Position(start.position),
            data=files.read(start.position, stop.position + stop.size - start.position, hot_from),
        )

    def _verify(self, run: EntryRun) -> None:
        scan = scan_run(run, unchecked=self._unchecked)
        if scan.follow.index != run.last_index or scan.end_offset != len(run.data):
            self._blame(run, scan)

    def _blame(self, run: EntryRun, scan: Scan) -> NoReturn:
        """Raise for the first bad entry of a run: for its header, or else for its body."""
        index = scan.follow.index + 1
        if index > run.last_index:
            raise self._files.suspect(run.last_index)
        header = self._headers.proven(index)
        raise self._corrupt(header.position, scan.reason or f"entry {index} is not whole", index)

    def read_range(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        if last_index < first_index:
            raise IndexOutOfRangeError(f"no entry between {first_index} and {last_index}")
        entries = self._read_slice(first_index, last_index, max_bytes)
        used = sum(len(entry.body) + HEADER.size for entry in entries)
        while entries[-1].index < min(last_index, self._state.last.index) and used < max_bytes:
            # The next entry starts another segment, does not fit or is damaged; only in the first case continue.
            following = LogIndex(entries[-1].index + 1)
            try:
                if self._stable(lambda index=following: self._size_of(index)) > max_bytes - used:  # type: ignore[misc]
                    break
                more = self._read_slice(following, last_index, max_bytes - used)
            except CorruptLogError:  # a read that starts there reports it; everything before it is intact
                break
            used += sum(len(entry.body) + HEADER.size for entry in more)
            entries += more
        return entries

    def _size_of(self, index: LogIndex) -> int:
        self._check_entry(index)
        return self._files.located(index, self._hot_from).size

    def _read_slice(self, first: LogIndex, last: LogIndex, max_bytes: int) -> list[Entry]:
        """Entries from ``first`` on, up to the first damaged one. Raises ``CorruptLogError`` if that is ``first``."""

        def read() -> list[Entry]:
            self._check_entry(first)
            hot_from = self._hot_from
            bounds = self._files.longest_run(first, min(last, self._state.last.index), max_bytes, hot_from)
            run = self._run(*bounds, hot_from)
            entries, scan = decode_run(run, unchecked=self._unchecked)
            if not entries:
                self._blame(run, scan)
            return entries

        return self._stable(read)

    def read_columns(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> EntryColumns:
        """Entries from ``first_index`` to at most ``last_index``, of one segment: at least one, then as many as fit.

        It ends before a damaged entry. Raises like ``read_range``.
        """

        def read() -> EntryColumns:
            self._check_entry(first_index)
            hot_from = self._hot_from
            bounds = self._files.longest_run(first_index, min(last_index, self._state.last.index), max_bytes, hot_from)
            run = self._run(*bounds, hot_from)
            if run.last_index - run.first_index >= _COLUMNS_MIN:
                with suppress(CorruptLogError):
                    return self._columns(run)
            entries, scan = decode_run(run, unchecked=self._unchecked)
            if not entries:
                self._blame(run, scan)
            return columns_of(entries)

        return self._stable(read)

    def _columns(self, run: EntryRun) -> EntryColumns:
        headers = self._files.headers_in(run.data, run.position, run.first_index, run.last_index)
        self._headers.require_chained(headers, run.previous_chain_crc)
        return EntryColumns(
            first_index=run.first_index,
            terms=headers["term"].tolist(),
            bodies=self._headers.bodies(headers, run.data),
            channel_runs=channel_runs_of(headers, run.first_index),
            end_position=Position(run.position + len(run.data)),
            chain_crc=int(headers["chain_crc"][-1]),
        )

    def _corrupt(self, position: int, reason: str, index: int | None = None) -> CorruptLogError:
        file = self._files.data.find(position)
        if file is None:
            raise IndexBeforeBeginError(f"position {position} is no longer kept here")
        return CorruptLogError(file.path, position - file.base, reason, REPAIR_ADVICE, index)

    @property
    def committed_position(self) -> Position:
        """The end of the last committed entry's record, or the log's begin. It only grows while the store is open."""
        index, position = self._committed_end
        # Committed entries stay where they are, so the pair stays valid.
        if index != self._state.committed and not self._state.closed:
            index, position = self._stable(self._locate_committed_end)
            self._committed_end = (index, position)
        return position

    def _locate_committed_end(self) -> tuple[LogIndex, Position]:
        state = self._state
        begin, tip, index = state.begin, state.tip, state.committed
        if index <= begin.index:
            return index, begin.position
        return index, Position(tip.position if index == tip.index else self._end_at(index))

    def _end_at(self, index: int) -> int:
        header = self._files.located(index, self._hot_from)
        return header.position + header.size

    def end_of(self, index: LogIndex) -> Position:
        """The end of an entry's record: the log's begin for one no longer kept, the log's end for one beyond it."""

        def locate() -> Position:
            begin, last = self._state.begin, self._state.last
            if index <= begin.index:
                return begin.position
            return Position(self._end_at(min(index, last.index)))

        return self._stable(locate)

    def last_index_before(self, position: int) -> LogIndex:
        """The last entry that starts before ``position``; the index before the first kept one if none does."""

        def search() -> LogIndex:
            begin, last = self._state.begin, self._state.last
            return LogIndex(self._files.first_index_at(position, begin.index + 1, last.index) - 1)

        return self._stable(search)

    def read_committed(self, position: Position, max_bytes: int) -> LogBytes:
        """Raw committed bytes from the entry or blank at ``position`` on: of one segment, within ``max_bytes``.

        At least one whole record if there is one, however large. A position below the log's begin means the begin; a
        blank is skipped. Headers are in their places and bodies match their CRCs; the bytes end before the first bad
        entry, or within one. Raises ``CorruptLogError`` if the first one is bad, and ``IndexOutOfRangeError`` if
        neither an entry nor a blank starts there.
        """
        return self._stable(lambda: self._read_committed(position, max_bytes))

    def _read_committed(self, position: int, max_bytes: int) -> LogBytes:
        end, files = self.committed_position, self._files
        start = max(position, self._state.begin.position)
        if start < end and self._is_blank(start):
            start = files.data.base_of(start) + files.segment_bytes
        if start >= end:
            return LogBytes(Position(start), b"")
        stop = min(end, files.data.base_of(start) + files.segment_bytes)
        size = self._record_size_at(start, stop)
        data = self._readable(start, min(stop - start, max(max_bytes, size)), size)
        sound = self._sound_bytes(data, start, self._sound_many(data, start) if len(data) >= _MANY_BYTES else 0)
        if not sound:
            self._blame_at(start)
        return LogBytes(Position(start), data[:sound] if sound < len(data) else data)

    def _readable(self, position: int, length: int, length_min: int) -> bytes:
        """The readable part of about ``length`` bytes: everything before a bad sector."""
        while True:
            try:
                return self._files.read(position, length, self._hot_from)
            except UnreadableError:
                if length <= length_min:
                    raise
                length = max(length // 2, length_min)

    def _sound_many(self, data: bytes, position: int) -> int:
        """The length of the whole entries in ``data`` if the index knows them and all are valid at once; otherwise
        0.
        """
        first, files = EntryHeader(*HEADER.unpack_from(data)).index, self._files
        with suppress(CorruptLogError, IndexBeforeBeginError, UnreadableError):
            if self._state.begin.index < first <= self._state.committed:
                _, last = files.longest_run(first, self._state.committed, len(data), self._hot_from)
                headers = files.headers_in(data, position, first, last.index)
                self._headers.require_bodies(headers, data)
                return int(headers["size"].sum(dtype=np.int64))
        return 0

    def _sound_bytes(self, data: bytes, position: int, at: int) -> int:
        """The length of what precedes the first bad entry from ``at`` on: all of it if there is none."""
        view, stop = memoryview(data), len(data)
        unpack, crc, last = _PLACE_AND_CRC.unpack_from, crc32c, stop - ENTRY_HEADER_BYTES
        while at <= last:
            size, stored_at, chain_crc, body_crc = unpack(view, at)
            end = at + size
            if stored_at != position + at or size < ENTRY_HEADER_BYTES or end > stop:
                if BLANK.unpack_from(view, at)[0] == BLANK_MAGIC:
                    break
                return stop if end > stop and at else at
            if crc(view[at + ENTRY_HEADER_BYTES : end]) != body_crc and not self._may_lack_crc(body_crc, chain_crc):
                return at
            at = end
        return stop

    def _may_lack_crc(self, body_crc: int, chain_crc: int) -> bool:
        return self._unchecked and body_crc == 0 and chain_crc == 0

    def _blame_at(self, position: int) -> NoReturn:
        """Raise for whatever is in an entry's place."""
        index = self._index_at(position)
        header = self._headers.proven(index)
        raise self._corrupt(position, f"bodyCrc of entry {index} does not match its body", header.index)

    def read_body(self, position: int, length: int) -> bytes | None:
        """The body of a committed entry, ``length`` bytes from ``position`` on, verified by its CRC.

        None if no kept, committed entry has its body there. Raises ``CorruptLogError``.
        """
        files, start = self._files, position - HEADER.size

        def read() -> bytes | None:
            begin = self._state.begin.position
            if length < 0 or not begin <= start <= position + length <= self.committed_position:
                return None
            data = files.read(start, HEADER.size + length, self._hot_from)
            if len(data) == HEADER.size + length:
                size, stored_at, chain_crc, body_crc = _PLACE_AND_CRC.unpack_from(data)
                if size == len(data) and stored_at == start:
                    body = data[HEADER.size :]
                    if crc32c(body) == body_crc or self._may_lack_crc(body_crc, chain_crc):
                        return body
            return self._explain(start, length)

        try:
            return self._stable(read)
        except IndexBeforeBeginError:
            return None

    def read_bodies(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """The bodies at these positions, of these lengths, verified by their CRCs; adjacent ones at once.

        None where ``read_body`` must decide: anything but an intact entry, or one that cannot be read.
        """
        try:
            return self._stable(lambda: self._read_bodies(places, partial(self._files.read, hot_from=self._hot_from)))
        except (IndexBeforeBeginError, CorruptLogError):
            return [None] * len(places)

    def read_bodies_at_once(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """The same without a disk: None also for what is not in memory."""
        generation = self._state.generation
        try:
            found = self._read_bodies(places, self._files.read_at_once)
        except (IndexBeforeBeginError, CorruptLogError):
            return [None] * len(places)
        return found if generation == self._state.generation else [None] * len(places)

    def _read_bodies(self, places: Sequence[tuple[int, int]], read: Callable[[int, int], bytes]) -> list[bytes | None]:
        files = self._files
        begin, committed = self._state.begin.position, self.committed_position
        unpack, crc, header_bytes = _PLACE_AND_CRC.unpack_from, crc32c, HEADER.size
        found: list[bytes | None] = []
        while len(found) < len(places):
            start = places[len(found)][0] - header_bytes
            if begin <= start < committed:
                past, end = _together(
                    places, len(found), min(committed, files.data.base_of(start) + files.segment_bytes)
                )
                data = read(start, end - start)
            else:
                past, data = len(found) + 1, b""
            for position, length in places[len(found) : past]:
                at = position - start
                body = None
                if length >= 0 and at + length <= len(data):
                    size, stored_at, chain_crc, body_crc = unpack(data, at - header_bytes)
                    if stored_at == position - header_bytes and size == header_bytes + length:
                        body = data[at : at + length]
                        if crc(body) != body_crc and not self._may_lack_crc(body_crc, chain_crc):
                            body = None
                found.append(body)
        return found

    def _explain(self, start: int, length: int) -> bytes | None:
        """Examine what is not an intact entry: None if there is none by all other evidence. Raises for a damaged
        one.
        """
        try:
            index = self._index_at(start)
        except IndexOutOfRangeError:
            return None
        header = self._headers.proven(index)
        if header.size != HEADER.size + length:
            return None
        raise self._corrupt(start, f"bodyCrc of entry {index} does not match its body", index)

    def _is_blank(self, position: int) -> bool:
        head = self._files.read(position, BLANK.size, self._hot_from)
        return len(head) == BLANK.size and BLANK.unpack(head)[0] == BLANK_MAGIC

    def _record_size_at(self, position: int, stop: int) -> int:
        head = self._files.read(position, HEADER.size, self._hot_from)
        header = EntryHeader(*HEADER.unpack(head)) if len(head) == HEADER.size else None
        if header is None or header.position != position or not is_magic(header.magic):
            raise IndexOutOfRangeError(f"no entry starts at position {position}")
        return min(header.size, stop - position)

    def copy_committed(self, position: int, length: int) -> bytes | None:
        """Exactly these committed bytes, unverified; None if they are not all kept, committed and in one segment."""
        files = self._files

        def copy() -> bytes | None:
            begin = self._state.begin.position
            if length < 0 or not begin <= position <= position + length <= self.committed_position:
                return None
            data = files.read(position, length, self._hot_from)
            return data if len(data) == length else None

        try:
            return self._stable(copy)
        except IndexBeforeBeginError:
            return None

    def positions(self, first_index: LogIndex, last_index: LogIndex) -> tuple[int, ...]:
        def locate() -> tuple[int, ...]:
            self._check_entry(first_index)
            self._check_entry(last_index)
            headers = self._files.located_headers(first_index, last_index, self._hot_from)
            found: list[int] = headers["position"].tolist()
            return tuple(found)

        return self._stable(locate)

    def channel_runs(self, first_index: LogIndex, last_index: LogIndex) -> list[tuple[int, int, int]]:
        def read() -> list[tuple[int, int, int]]:
            self._check_entry(first_index)
            self._check_entry(last_index)
            return self._headers.channel_runs(first_index, last_index, self._hot_from)

        return self._stable(read)

    def read_at(self, position: Position) -> Entry:
        index = self._stable(lambda: self._index_at(position))
        return self._read_slice(index, index, 0)[0]

    def _index_at(self, position: int) -> LogIndex:
        state, files = self._state, self._files
        state.check_index(state.last.index)
        if 0 <= position < state.begin.position:
            raise IndexBeforeBeginError(
                f"position {position} is no longer kept here: the log begins at {state.begin.position}"
            )
        nothing = IndexOutOfRangeError(f"no entry starts at position {position}")
        file = files.data.find(position) if 0 <= position < state.end else None
        if file is None or position - file.base + HEADER.size > file.size:
            raise nothing
        begin, last = state.begin, state.last
        index = EntryHeader(*HEADER.unpack(files.read(position, HEADER.size, self._hot_from))).index
        if not begin.index < index <= last.index or files.located(index, self._hot_from).position != position:
            index = files.first_index_at(position, begin.index + 1, last.index)  # that header may be damaged
            if index > last.index or files.located(index, self._hot_from).position != position:
                raise nothing
        return LogIndex(index)


def _together(places: Sequence[tuple[int, int]], first: int, stop: int) -> tuple[int, int]:
    """The range of adjacent places from ``first`` on that end before ``stop``: its last place, and its end."""
    position, length = places[first]
    end, past = position + length, first + 1
    if length < 0 or end > stop:
        return past, position
    while past < len(places):
        position, length = places[past]
        if length < 0 or position + length > stop or not HEADER.size <= position - end <= _GAP_BYTES:
            break
        end = position + length
        past += 1
    return past, end
