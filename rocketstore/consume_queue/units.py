"""Encodes and decodes consume queue units (``QUEUE_UNIT``)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import starmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rocketstore.message.columns import UnitColumns
from rocketstore.types import QUEUE_UNIT, QueueUnit, RecordHead

UNIT_BYTES: Final = QUEUE_UNIT.size
FILLER: Final = QueueUnit(0, 0x7FFF_FFFF, 0)
"""A place without a message."""
BROKEN: Final = QueueUnit(-1, 0, 0)
"""Stands for a unit that looks never written, between units that were."""
_UNIT: Final = QUEUE_UNIT.struct()
FILLER_BYTES: Final = _UNIT.pack(*FILLER)
UNIT: Final = QUEUE_UNIT.dtype()
"""The dtype of stored units."""
_of_head: Final = operator.itemgetter(2, 3, 4)


def pack_unit(unit: QueueUnit) -> bytes:
    return _UNIT.pack(*unit)


def pack_units(heads: Sequence[RecordHead]) -> bytes:
    """The units of records, in this order."""
    return b"".join(starmap(_UNIT.pack, map(_of_head, heads)))


def pack_columns(columns: UnitColumns) -> bytes:
    """Like ``pack_units``."""
    units = np.empty(len(columns.offsets), UNIT)
    units["offset"], units["size"], units["tags_code"] = columns.offsets, columns.sizes, columns.tags_codes
    return units.tobytes()


def parse_units(data: bytes) -> list[QueueUnit]:
    """Parse units, including fillers, up to the first one never written; ``data`` may end inside a unit."""
    units = list(map(QueueUnit._make, _UNIT.iter_unpack(data[: len(data) - len(data) % UNIT_BYTES])))
    sizes = [unit[1] for unit in units]
    if sizes and min(sizes) <= 0:
        return units[: next(number for number, unit in enumerate(units) if unit[1] <= 0)]
    return units


def unit_columns(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Offsets and sizes of the whole units in ``data``, and which of them are fillers."""
    units = np.frombuffer(data, UNIT, len(data) // UNIT_BYTES)
    offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
    fillers = (offsets == FILLER.offset) & (sizes == FILLER.size) & (units["tags_code"] == FILLER.tags_code)
    return offsets, sizes, fillers
