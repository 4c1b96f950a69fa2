"""Arrow columns of properties; ``rocketstore.message.columns`` finds their names and values."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dledger_spark.decode.layout import Ints
from dledger_spark.decode.slices import as_text, interleaved, slices
from dledger_spark.schema import MAP
from rocketstore.message.columns import PropertyTexts

TAGS: Final = b"TAGS\x01"
KEYS: Final = b"KEYS\x01"
_PAIRS_PER_ROW_MAX: Final = 64
"""Limit for the cells per row of the table that finds repeated names."""


def named(texts: PropertyTexts, name: bytes) -> pa.Array:
    """Each record's value of the property ``name``, which ends with 0x01, as binary; null if it is absent."""
    values = texts.named(name)
    found = slices(pa.py_buffer(texts.text), values.begins, values.ends)
    if len(found) in (0, len(texts)):
        return found if len(found) else pa.nulls(len(texts), pa.binary())
    present = np.zeros(len(texts), np.bool_)
    present[values.owners] = True
    _, offsets, data = found.buffers()
    before = np.cumsum(np.append(False, present))
    spread = np.frombuffer(offsets, np.int32)[before]  # an absent value begins where it ends
    bits = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(texts), [bits, pa.py_buffer(spread), data])


def as_maps(texts: PropertyTexts) -> pa.Array:
    """All properties of each record, as ``map<string, string>``."""
    names, name_ends, ends, owners = texts.bounds
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.bincount(owners, minlength=len(texts)), out=offsets[1:])
    if not len(owners):
        empty = pa.array([], pa.string())
        return _maps(offsets, empty, empty)
    every = interleaved(pa.py_buffer(texts.text), int(names[0]), (names, name_ends, name_ends + 1, ends))
    places = np.arange(0, 4 * len(owners), 4, dtype=np.int64)
    keys, values = as_text(every.take(pa.array(places))), as_text(every.take(pa.array(places + 2)))
    maps = _maps(offsets, keys, values)
    return _without_repeats(maps) if _has_repeats(keys, owners, len(texts)) else maps


def _has_repeats(names: pa.Array, owners: Ints, count: int) -> bool:
    """Whether any of ``count`` records has two properties with the same name."""
    encoded = pc.dictionary_encode(names)
    kinds = len(encoded.dictionary)
    cells = owners * kinds + np.asarray(encoded.indices)
    if kinds > _PAIRS_PER_ROW_MAX:
        return len(np.unique(cells)) < len(cells)
    seen = np.zeros(count * kinds, np.bool_)
    seen[cells] = True
    return int(np.count_nonzero(seen)) < len(cells)


def _maps(offsets: NDArray[np.int32], names: pa.Array, values: pa.Array) -> pa.Array:
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values, type=MAP)


def _without_repeats(maps: pa.Array) -> pa.Array:
    return pa.array([list(dict(pairs).items()) for pairs in maps.to_pylist()], MAP)
