"""Bodies that RocketMQ's producers compress: with zlib, and since 5.0 also with LZ4 and Zstandard."""

from __future__ import annotations

import importlib
import zlib
from typing import Any, Final

from rocketstore.message.message import SYS_FLAG_COMPRESSED

METHOD_FLAGS: Final = 0x700
"""Which of them, in a message's system flag."""
COMPRESSION_FLAGS: Final = SYS_FLAG_COMPRESSED | METHOD_FLAGS
ZLIB: Final = (0, 0x300)
_LZ4: Final = 0x100
_ZSTD: Final = 0x200


class WrongBodyError(ValueError):
    """Raised for a body that is damaged, or too large when it is decompressed."""


class UnknownCompressionError(WrongBodyError):
    """Raised for a body that is compressed by a method that this installation cannot read."""


def decompress(body: bytes, sys_flag: int, bytes_max: int) -> bytes:
    """A compressed body of at most ``bytes_max`` bytes then. Raises ``WrongBodyError``, ``UnknownCompressionError``."""
    method = sys_flag & METHOD_FLAGS
    if method == _LZ4:
        return _lz4(body, bytes_max)
    if method == _ZSTD:
        return _zstd(body, bytes_max)
    if method not in ZLIB:
        raise UnknownCompressionError(f"the body is compressed by an unknown method (sysFlag {sys_flag:#x})")
    inflating = zlib.decompressobj()
    try:
        plain = inflating.decompress(body, max(bytes_max, 1))  # 0 would be no limit
    except zlib.error as error:
        raise _damaged("zlib", error) from None
    if not inflating.eof:
        raise _too_large(bytes_max)
    return plain


def _lz4(body: bytes, bytes_max: int) -> bytes:
    frame = _module("lz4.frame", "LZ4")
    inflating = frame.LZ4FrameDecompressor()
    try:
        plain: bytes = inflating.decompress(body, max(bytes_max, 1))
    except RuntimeError as error:
        raise _damaged("LZ4", error) from None
    if not inflating.eof:
        raise _too_large(bytes_max)
    return plain


def _zstd(body: bytes, bytes_max: int) -> bytes:
    zstandard = _module("zstandard", "Zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as stream:
            plain: bytes = stream.read(bytes_max + 1)
        is_bounded = len(plain) <= bytes_max
        whole = zstandard.ZstdDecompressor().decompressobj()  # which knows whether the frame ends, but no limit
        is_whole = is_bounded and len(whole.decompress(body)) == len(plain) and whole.eof
    except zstandard.ZstdError as error:
        raise _damaged("Zstandard", error) from None
    if not is_whole:
        raise _too_large(bytes_max)
    return plain


def _module(name: str, method: str) -> Any:  # noqa: ANN401  # a module that need not be installed
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnknownCompressionError(
            f"the body is compressed with {method}, and {name.partition('.')[0]} is not installed: install dledger "
            "with the extra 'compression'"
        ) from error


def _damaged(method: str, error: Exception) -> WrongBodyError:
    return WrongBodyError(f"the body is marked as compressed with {method}, but cannot be decompressed: {error}")


def _too_large(bytes_max: int) -> WrongBodyError:
    return WrongBodyError(f"the body is truncated, or larger than {bytes_max} bytes")
