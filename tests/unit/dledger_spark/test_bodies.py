"""Bodies that producers have compressed."""

from __future__ import annotations

import zlib

import numpy as np
import pyarrow as pa
import pytest

from dledger_spark.decode import typed_bodies
from dledger_spark.decode.typed_bodies import BodiesTooLargeError, decompressed

PLAIN = b"x" * 5000
ZLIB, ZLIB_5, LZ4, ZSTD = 0x1, 0x301, 0x101, 0x201


def packed(codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(PLAIN)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def read(*rows: tuple[bytes, int]) -> list[bytes | None]:
    flags = np.array([flag for _, flag in rows], np.int64)
    found: list[bytes | None] = decompressed(pa.array([body for body, _ in rows], pa.binary()), flags).to_pylist()
    return found


def test_bodies_of_all_methods_are_decompressed_beside_plain_ones() -> None:
    """Those of RocketMQ 4, which sets no method, and of 5; other bits of the flag mean nothing here."""
    rows = [
        (zlib.compress(PLAIN), ZLIB),
        (b"as it is", 0),
        (zlib.compress(PLAIN), ZLIB_5 | 0x30),
        (packed("lz4"), LZ4),
        (packed("zstd"), ZSTD),
        (b"", 0x300),
    ]
    assert read(*rows) == [PLAIN, b"as it is", PLAIN, PLAIN, PLAIN, b""]


@pytest.mark.parametrize("flag", [ZLIB, LZ4, ZSTD, 0x701])
def test_a_damaged_body_is_null_and_the_others_are_there(flag: int) -> None:
    """Cut, empty, other bytes, or by a method that nobody knows: never a part of it."""
    whole = {ZLIB: zlib.compress(PLAIN), LZ4: packed("lz4"), ZSTD: packed("zstd")}.get(flag, b"?")
    for wrong in (whole[:-5], whole[:3], b"none of it", b""):
        assert read((b"plain", 0), (wrong, flag)) == [b"plain", None]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long body is null, and of many together nothing is kept; one alone is not too many."""
    monkeypatch.setattr(typed_bodies, "BODY_BYTES_MAX", 4999)
    assert read((zlib.compress(PLAIN), ZLIB), (packed("zstd"), ZSTD)) == [None, None]
    monkeypatch.setattr(typed_bodies, "BODY_BYTES_MAX", 5000)
    monkeypatch.setattr(typed_bodies, "BATCH_BYTES_MAX", 9000)
    with pytest.raises(BodiesTooLargeError):
        read((zlib.compress(PLAIN), ZLIB), (zlib.compress(PLAIN), ZLIB))
