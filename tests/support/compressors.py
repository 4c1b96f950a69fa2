"""Compressed bodies as RocketMQ 5's producers make them."""

from __future__ import annotations

from collections.abc import Callable

from tests.support import lacking


def rocketmq_5_compressors() -> list[tuple[int, Callable[[bytes], bytes]]]:
    """With their system flags, those that RocketMQ 5's clients have besides zlib."""
    lz4, zstandard = lacking.module("lz4.frame", "compression"), lacking.module("zstandard", "compression")

    def streamed(body: bytes) -> bytes:  # without the length in the header
        compressing = zstandard.ZstdCompressor().compressobj()
        packed: bytes = compressing.compress(body) + compressing.flush()
        return packed

    return [(0x101, lz4.compress), (0x201, zstandard.compress), (0x201, streamed)]
