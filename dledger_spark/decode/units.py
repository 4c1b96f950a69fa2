"""Finds records by units of the index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dledger.layout import ENTRY_HEADER_BYTES
from dledger_spark.decode.layout import Ints


def positions_of(units: NDArray[np.void], first_index: int, position: int) -> Ints | None:
    """The starts of the entries in these index units, and the end of the last one.

    None unless they start with entry ``first_index`` at ``position`` and are contiguous.
    """
    count = len(units)
    positions = np.empty(count + 1, np.int64)
    positions[:-1] = units["position"]
    sizes = units["size"].astype(np.int64)
    if not count or int(positions[0]) != position or int(sizes.min()) < ENTRY_HEADER_BYTES:
        return None
    positions[-1] = positions[-2] + sizes[-1]
    indexes = units["index"].astype(np.int64)
    if not np.array_equal(np.diff(positions), sizes) or not np.array_equal(
        indexes, np.arange(first_index, first_index + count)
    ):
        return None
    return positions
