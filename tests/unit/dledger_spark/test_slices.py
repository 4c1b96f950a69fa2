"""Slices of a buffer as an Arrow array, against Python's own slicing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dledger_spark.decode.layout import slices

SLICES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=20)
"""What lies before each slice, and how long it is."""


@given(parts=SLICES, behind=st.integers(0, 3))
def test_slices_are_what_python_slices(parts: list[tuple[int, int]], behind: int) -> None:
    """Empty, short and long ones, with and without gaps, up to the buffer's very end."""
    begins = np.cumsum([gap for gap, _ in parts], dtype=np.int64)
    lengths = np.array([length for _, length in parts], np.int64)
    begins[1:] += np.cumsum(lengths)[:-1]
    ends = begins + lengths
    data = bytes(number % 251 for number in range((int(ends[-1]) if parts else 0) + behind))
    wanted = [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    whole = slices(pa.py_buffer(data), begins, ends)

    whole.validate(full=True)
    assert whole.type == pa.binary()
    assert whole.to_pylist() == wanted


def test_slices_are_copies_of_just_their_size() -> None:
    """What a batch holds outlives the mapping that it was made from, and is no larger than what was wanted of it."""
    data = bytearray(b"-" * 1000 + b"a" * 500 + b"-" * 10_000 + b"b" * 20)

    array = slices(pa.py_buffer(data), np.array([1000, 11_500]), np.array([1500, 11_520]))
    data[:] = b"!" * len(data)

    assert array.to_pylist() == [b"a" * 500, b"b" * 20]
    assert array.get_total_buffer_size() < 1000
