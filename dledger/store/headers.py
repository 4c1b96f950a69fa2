"""Verified headers: values that decide (terms, chain CRCs, channels) are verified by the log's chain before use.

A header is verified if its own ``chainCrc`` results from its other fields, seeded with the ``chainCrc`` stored in the
entry before; a flipped bit in either is detected. That costs two index units, two headers and a CRC of 44 bytes, so
nothing is cached: the disk may decay at any time, and the newest entry is known in memory anyway.

Where index, header and chain disagree, ``SuspectEntryError`` is raised, and ``mend`` determines which of them is wrong:
it walks from the nearest verified entry, in data alone. Wrong units are rewritten, for they are derived; a header that
does not continue the chain is damage, reported with its file and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dledger.errors import CorruptLogError, IndexBeforeBeginError
from dledger.records import BLANK_MAGIC, MIN_BLANK_BYTES
from dledger.store.durable_state import REPAIR_ADVICE
from dledger.store.format import (
    CHAIN_CRC_END,
    CHAIN_CRC_OFFSET,
    CHAINED_HEADER,
    HEADER,
    HEADERS,
    UNIT,
    EntryHeader,
    Follow,
    after,
    header_chain_crc,
    header_problem,
    unit_of,
)
from dledger.store.log_files import LogFiles, LogState, SuspectEntryError
from dledger.types import NOOP_CHANNEL, Magic

_MENDED_AT_ONCE: Final = 4096
"""How many consecutive wrong index units are rewritten together."""
_SMALL_BYTES: Final = 1024
"""Records shorter than this on average are copied for checking, which is faster than a view of each."""


class Headers:
    """Lookups in an open log. Safe beside writers only under ``LogReader``'s check of the generation."""

    def __init__(self, files: LogFiles, state: LogState, *, unchecked: bool) -> None:
        self._files = files
        self._state = state
        self._unchecked = unchecked

    def proven(self, index: int, hot_from: int = 0) -> EntryHeader:
        """An entry's header. Raises ``IndexBeforeBeginError``, ``SuspectEntryError``, ``DiskError``."""
        header = self._files.located(index, hot_from)
        self.require_continuing(header, self.seed(index, hot_from))
        return header

    def require_continuing(self, header: EntryHeader, seed: int) -> None:
        """Raise ``SuspectEntryError`` unless a header continues the chain from ``seed``."""
        if not self._continues(header, seed):
            raise self._files.suspect(header.index)

    def seed(self, index: int, hot_from: int = 0) -> int:
        """The chain CRC that an entry continues, as stored in the entry before."""
        begin = self._state.begin
        if index == begin.index + 1:
            return begin.chain_crc
        return self._files.located(index - 1, hot_from).chain_crc

    def _continues(self, header: EntryHeader, seed: int) -> bool:
        if header_chain_crc(header, seed) == header.chain_crc:
            return True
        return self._unchecked and header.chain_crc == 0 and header.body_crc == 0

    def first_index_of_term(self, term: int, first: int, last: int) -> int:
        """The first index in ``[first, last]`` whose term is at least ``term``; ``last + 1`` if there is none.

        Terms never decrease, so the verified headers on both sides prove the answer.
        """
        found = self._files.first_unit_of_term(term, first, last)
        for neighbour in (found - 1, found):
            if first <= neighbour <= last:
                self.proven(neighbour)
        return found

    def channel_runs(self, first: int, last: int, hot_from: int) -> list[tuple[int, int, int]]:
        """See ``Log.channel_runs``."""
        headers = self._files.located_headers(first, last, hot_from)
        self.require_chained(headers, self.seed(first, hot_from))
        return channel_runs_of(headers, first)

    def require_chained(self, headers: npt.NDArray[np.void], seed: int) -> None:
        """Raise ``SuspectEntryError`` unless the headers of a range continue the chain from ``seed``."""
        seeds = np.empty(len(headers), np.uint32)
        seeds[0] = seed
        seeds[1:] = headers["chain_crc"][:-1]
        sound = chain_crcs(headers, seeds) == headers["chain_crc"]
        if self._unchecked:
            sound |= (headers["chain_crc"] == 0) & (headers["body_crc"] == 0)
        if not sound.all():
            raise self._files.suspect(int(headers["index"][int(np.argmin(sound))]))

    def require_bodies(self, headers: npt.NDArray[np.void], data: bytes) -> None:
        """Raise ``SuspectEntryError`` unless the bodies of adjacent records match their CRCs."""
        small = len(data) < _SMALL_BYTES * len(headers)
        cut: Callable[[slice], bytes | memoryview] = data.__getitem__ if small else memoryview(data).__getitem__
        self._require_body_crcs(headers, map(cut, _body_slices(headers)))

    def bodies(self, headers: npt.NDArray[np.void], data: bytes) -> list[bytes]:
        """The bodies of adjacent records. Raises ``SuspectEntryError`` unless they match their CRCs."""
        found = list(map(data.__getitem__, _body_slices(headers)))
        self._require_body_crcs(headers, found)
        return found

    def _require_body_crcs(self, headers: npt.NDArray[np.void], bodies: Iterable[bytes | memoryview]) -> None:
        found = list(map(crc32c, bodies))  # the loop runs entirely in C
        if found == headers["body_crc"].tolist():
            return
        sound = np.array(found, np.uint32) == headers["body_crc"]
        if self._unchecked:
            sound |= (headers["chain_crc"] == 0) & (headers["body_crc"] == 0)
        if not sound.all():
            raise self._files.suspect(int(headers["index"][int(np.argmin(sound))]))

    # -- when something is wrong ---------------------------------------------------------------------------------

    def mend(self, index: int) -> None:
        """Rewrite wrong index units at ``index``, or raise ``CorruptLogError`` naming the damage in data.

        Under ``shape_lock``: nothing at or below the log's end moves meanwhile, and appends write behind it.
        """
        with self._state.shape_lock:
            self._state.check_index(index)
            follow, end = self._nearest_proven(index)
            mended = 0
            while follow.index < index or (mended < _MENDED_AT_ONCE and follow.index < self._state.last.index):
                header = self._next(follow, end)
                if self._is_named_right(header):
                    if header.index > index:
                        break
                else:
                    self._write_unit(header)
                    mended += 1
                follow, end = Follow(header.index, header.term, header.chain_crc), header.position + header.size
            if not mended:
                header = self._next(*self._before(index))
                raise self._damaged(header.position, f"entry {index} is inconsistent with its neighbours", index)

    def _nearest_proven(self, index: int) -> tuple[Follow, int]:
        """The nearest verified entry below ``index``, and its end; the log's begin if there is none."""
        begin, step = self._state.begin, 1
        while index - step > begin.index:
            try:
                header = self.proven(index - step)
            except (SuspectEntryError, IndexBeforeBeginError):
                step *= 2
                continue
            return Follow(header.index, header.term, header.chain_crc), header.position + header.size
        return after(begin), begin.position

    def _before(self, index: int) -> tuple[Follow, int]:
        follow, end = self._nearest_proven(index)
        while follow.index < index - 1:
            header = self._next(follow, end)
            follow, end = Follow(header.index, header.term, header.chain_crc), header.position + header.size
        return follow, end

    def _next(self, follow: Follow, end: int) -> EntryHeader:
        """The header that continues ``follow``: at ``end``, or at the next segment's begin. ``CorruptLogError``."""
        first_problem = ""
        next_segment = self._files.data.base_of(end) + self._files.segment_bytes
        for position in (end, next_segment):
            header = self._files.header_at(position)
            problem = "the segment is missing" if header is None else self._problem(header, position, follow)
            if header is not None and not problem:
                return header
            if header is not None and header.magic == BLANK_MAGIC and position == end:
                end = next_segment  # the segment is full, so the problem is in the next one
                continue
            first_problem = first_problem or problem
        raise self._damaged(end, first_problem, follow.index + 1)

    def _problem(self, header: EntryHeader, position: int, follow: Follow) -> str:
        problem = header_problem(header, position, follow)
        if (
            not problem
            and position % self._files.segment_bytes + header.size > self._files.segment_bytes - MIN_BLANK_BYTES
        ):
            problem = f"a record of {header.size} bytes does not fit its segment"
        if not problem and not self._continues(header, follow.chain_crc):
            problem = f"chainCrc of entry {header.index} does not continue entry {follow.index}"
        return problem

    def _damaged(self, position: int, reason: str, index: int) -> CorruptLogError:
        file = self._files.data.find(position)
        if file is None:
            raise IndexBeforeBeginError(f"position {position} is no longer kept here")
        return CorruptLogError(file.path, position - file.base, reason, REPAIR_ADVICE, index)

    def _is_named_right(self, header: EntryHeader) -> bool:
        try:
            return self._files.unit(header.index) == unit_of(header)
        except (SuspectEntryError, IndexBeforeBeginError):
            return False

    def _write_unit(self, header: EntryHeader) -> None:
        unit = unit_of(header)
        packed = UNIT.pack(unit.magic, unit.position, unit.size, unit.index, unit.term)
        self._state.units_written(self._files.write_units(header.index, packed))


def _body_slices(headers: npt.NDArray[np.void]) -> Iterator[slice]:
    """Where the bodies of adjacent records are, in their bytes."""
    ends = np.cumsum(headers["size"].astype(np.int64))
    starts = ends - headers["size"] + HEADER.size
    return map(slice, starts.tolist(), ends.tolist())


def channel_runs_of(headers: npt.NDArray[np.void], first: int) -> list[tuple[int, int, int]]:
    """See ``Log.channel_runs``; of verified headers, from entry ``first`` on."""
    channels = headers["channel"].astype(np.int64)
    channels[headers["magic"] == int(Magic.NOOP)] = NOOP_CHANNEL
    starts = np.flatnonzero(np.concatenate(([True], channels[1:] != channels[:-1])))
    counts = np.diff(np.append(starts, len(channels)))
    return list(zip(channels[starts].tolist(), (starts + first).tolist(), counts.tolist(), strict=True))


_CHAINED_BYTES: Final = CHAINED_HEADER.size


@cache
def _tables() -> tuple[npt.NDArray[np.uint32], int]:
    """The CRC that each value of each byte covered by the chain adds, and the CRC of zeros: CRCs are linear."""
    zeros = crc32c(bytes(_CHAINED_BYTES))
    found = np.zeros((_CHAINED_BYTES, 256), np.uint32)
    for at in range(_CHAINED_BYTES):
        for bit in range(8):
            message = bytearray(_CHAINED_BYTES)
            message[at] = 1 << bit
            found[at, 1 << bit : 2 << bit] = found[at, : 1 << bit] ^ np.uint32(crc32c(message) ^ zeros)
    return found, zeros


def chain_crcs(headers: npt.NDArray[np.void], seeds: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """``header_chain_crc`` of many headers at once, each with its own seed."""
    tables, zeros = _tables()
    raw = np.ascontiguousarray(headers).view(np.uint8).reshape(-1, HEADERS.itemsize)
    columns = np.concatenate((raw[:, :CHAIN_CRC_OFFSET].T, raw[:, CHAIN_CRC_END:].T))
    # A seed is equivalent to different first four bytes: CRC32C combines it with them, lowest byte first.
    columns[:4] ^= seeds.astype("<u4").view(np.uint8).reshape(-1, 4).T
    same = (columns == columns[:, :1]).all(axis=1)
    constant = np.bitwise_xor.reduce(tables[same, columns[same, 0]], initial=zeros)
    found = np.full(len(headers), constant, np.uint32)
    for at in np.flatnonzero(~same).tolist():
        found ^= tables[at].take(columns[at])
    return found
