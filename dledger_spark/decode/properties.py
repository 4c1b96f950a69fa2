"""Parses the property strings of a whole batch at once: ``name 0x01 value 0x02 name 0x01 value``.

The rules are those of ``rocketstore.message.properties``: malformed properties (no name, no 0x01, no value) are
skipped; of two with the same name, the later one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dledger_spark.decode.layout import Bytes, Ints
from dledger_spark.decode.slices import as_text, interleaved, slices
from dledger_spark.schema import MAP
from rocketstore.message.tags import tags_code_of

TAGS: Final = b"TAGS"
KEYS: Final = b"KEYS"
_NAME_BYTES: Final = 4
_NAME_END: Final = 1
_PROPERTY_END: Final = 2
_PAIRS_PER_ROW_MAX: Final = 64
"""Limit for the cells per row of the table that finds repeated names."""


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a batch of records: all names and values as offsets into their concatenated bytes, in order."""

    count: int
    joined: Bytes
    names_begin: Ints
    names_end: Ints
    ends: Ints
    """The ends of values; they start one byte after their names end."""
    rows: Ints
    """Each property's record."""

    def named(self, name: bytes) -> pa.Array:
        """The value of the property with this name of 4 bytes, per record, as binary; null where there is none."""
        found = self._with_name(name)
        last = np.full(self.count, -1, np.int64)
        last[self.rows[found]] = found  # of repeated indices, numpy keeps the last one
        absent = last < 0
        at = np.maximum(last, 0)
        begins, ends = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        if len(self.ends):
            begins = np.where(absent, 0, self.names_end[at] + 1)
            ends = np.where(absent, 0, self.ends[at])
            np.maximum.accumulate(begins, out=begins)  # an absent value is empty and starts where the previous one does
            ends = np.maximum(begins, ends)
            begins = np.where(absent, np.maximum.accumulate(ends), begins)
            ends = np.maximum(begins, ends)
        return slices(pa.py_buffer(self.joined), begins, ends, absent)

    def _with_name(self, name: bytes) -> Ints:
        candidates = np.flatnonzero(self.names_end - self.names_begin == _NAME_BYTES)
        if not len(candidates):
            return candidates
        words = np.ndarray((len(self.joined) - _NAME_BYTES + 1,), "<u4", self.joined.data, strides=(1,))
        wanted = int.from_bytes(name, "little")
        found: Ints = candidates[words[self.names_begin[candidates]] == wanted]
        return found

    def as_maps(self) -> pa.Array:
        """All properties of each record, as ``map<string, string>``."""
        per_row = np.bincount(self.rows, minlength=self.count)
        offsets = np.zeros(self.count + 1, np.int32)
        np.cumsum(per_row, out=offsets[1:])
        if not len(self.rows):
            empty = pa.array([], pa.string())
            return _maps(offsets, empty, empty)
        bounds = (self.names_begin, self.names_end, self.names_end + 1, self.ends)
        every = interleaved(pa.py_buffer(self.joined), int(self.names_begin[0]), bounds)
        places = np.arange(0, 4 * len(self.rows), 4, dtype=np.int64)
        names, values = as_text(every.take(pa.array(places))), as_text(every.take(pa.array(places + 2)))
        maps = _maps(offsets, names, values)
        return _without_repeats(maps) if self._has_repeats(names) else maps

    def _has_repeats(self, names: pa.Array) -> bool:
        """Whether any record has two properties with the same name."""
        encoded = pc.dictionary_encode(names)
        kinds = len(encoded.dictionary)
        cells = self.rows * kinds + np.asarray(encoded.indices)
        if kinds > _PAIRS_PER_ROW_MAX:
            return len(np.unique(cells)) < len(cells)
        seen = np.zeros(self.count * kinds, np.bool_)
        seen[cells] = True
        return int(np.count_nonzero(seen)) < len(cells)


def parse_properties(encoded: pa.Array) -> Properties:
    """Parse property strings, given as a binary array without nulls."""
    count = len(encoded)
    _, offsets_buffer, values = encoded.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[encoded.offset : encoded.offset + count + 1].astype(np.int64)
    joined = np.frombuffer(values, np.uint8)[: int(offsets[-1])] if values is not None else np.empty(0, np.uint8)
    name_ends = np.flatnonzero(joined == _NAME_END)
    if not len(name_ends):
        nothing = np.empty(0, np.int64)
        return Properties(count, joined, nothing, nothing, nothing, nothing)
    begins, ends, rows = _pieces(np.flatnonzero(joined == _PROPERTY_END), offsets)
    if len(name_ends) == len(begins) and (name_ends > begins).all() and (name_ends + 1 < ends).all():
        return Properties(count, joined, begins, name_ends, ends, rows)
    following = np.searchsorted(name_ends, begins)
    splits = name_ends[np.minimum(following, len(name_ends) - 1)]
    valid = (following < len(name_ends)) & (splits > begins) & (splits + 1 < ends)
    return Properties(count, joined, begins[valid], splits[valid], ends[valid], rows[valid])


def _pieces(property_ends: Ints, offsets: Ints) -> tuple[Ints, Ints, Ints]:
    """The pieces between separators and ends of records: their starts, ends and records."""
    count = len(offsets) - 1
    is_last = np.zeros(len(property_ends) + count, np.bool_)
    lasts = np.searchsorted(property_ends, offsets[1:]) + np.arange(count)
    is_last[lasts] = True
    ends = np.empty(len(is_last), np.int64)
    ends[lasts] = offsets[1:]
    ends[~is_last] = property_ends
    begins = np.empty(len(is_last), np.int64)
    begins[0] = offsets[0]
    np.add(ends[:-1], ~is_last[:-1], out=begins[1:])
    return begins, ends, np.cumsum(is_last) - is_last


def _maps(offsets: NDArray[np.int32], names: pa.Array, values: pa.Array) -> pa.Array:
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values, type=MAP)


def _without_repeats(maps: pa.Array) -> pa.Array:
    return pa.array([list(dict(pairs).items()) for pairs in maps.to_pylist()], MAP)


def tags_codes(tags: pa.Array) -> pa.Array:
    """The tags codes in consume queues, from a binary array of tags: Java's ``hashCode``; 0 without a tag."""
    encoded = pc.dictionary_encode(tags)
    codes = pa.array([tags_code_of(tag) for tag in encoded.dictionary.to_pylist()], pa.int64())
    return codes.take(encoded.indices).fill_null(0)
