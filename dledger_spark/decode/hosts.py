"""Hosts as text: ``10.1.2.3:4567`` and ``[fe80::1]:4567``. Each distinct one is formatted once per batch."""

from __future__ import annotations

import ipaddress
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dledger_spark.decode.layout import Ints
from rocketstore.message.record import HEAD_V4, IPV6_BYTES

_PORT: Final = HEAD_V4.part("store_port")


def ipv4_texts(addresses: NDArray[np.void], ports: Ints) -> pa.Array:
    """The texts of 4-byte addresses with their ports."""
    numbers = np.ascontiguousarray(addresses).view(">u4").astype(np.int64)
    encoded = pc.dictionary_encode(pa.array(numbers << 32 | (ports & 0xFFFF_FFFF)))
    return pa.array([_ipv4(key) for key in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


def _ipv4(key: int) -> str:
    port = (key & 0xFFFF_FFFF) - ((key & 0x8000_0000) << 1)
    return f"{key >> 56 & 255}.{key >> 48 & 255}.{key >> 40 & 255}.{key >> 32 & 255}:{port}"


def ipv6_texts(addresses: NDArray[np.void], ports: Ints) -> pa.Array:
    """The texts of 16-byte addresses with their ports."""
    both = np.empty((len(ports), IPV6_BYTES + _PORT.size), np.uint8)
    both[:, :IPV6_BYTES] = np.ascontiguousarray(addresses).view(np.uint8).reshape(len(ports), -1)
    both[:, IPV6_BYTES:] = ports.astype(">i4").view(np.uint8).reshape(len(ports), -1)
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(both.shape[1]), len(ports), [None, pa.py_buffer(np.ascontiguousarray(both))]
    )
    encoded = pc.dictionary_encode(fixed)
    return pa.array([_ipv6(key) for key in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


def _ipv6(key: bytes) -> str:
    port = _PORT.unpack_from(key, IPV6_BYTES)[0]
    return f"[{ipaddress.IPv6Address(key[:IPV6_BYTES])}]:{port}"
