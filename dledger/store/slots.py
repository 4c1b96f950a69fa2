"""A small file of fixed slots, each with a sequence number and a CRC: the newest readable slot counts.

Each slot has a page of its own:

    0        4         8            16     20
    +--------+---------+------------+------+---------+
    | "DLS1" | length  | sequence   | crc  | payload |
    +--------+---------+------------+------+---------+

``crc`` is the CRC32C of the other header bytes and the payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from crc32c import crc32c

from dledger.errors import invariant
from dledger.store.fs import FileSystem, create_durably

SLOT_BYTES: Final = 4096
_HEAD: Final = Struct(">4sIQ")
_CRC: Final = Struct(">I")
_MAGIC: Final = b"DLS1"
PAYLOAD_BYTES_MAX: Final = 512 - _HEAD.size - _CRC.size
"""A slot stays within one 512 byte sector."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A readable slot."""

    number: int
    sequence: int
    payload: bytes


def encode_slot(sequence: int, payload: bytes) -> bytes:
    invariant(len(payload) <= PAYLOAD_BYTES_MAX, "slot payload too long", length=len(payload))
    head = _HEAD.pack(_MAGIC, len(payload), sequence)
    return head + _CRC.pack(crc32c(payload, crc32c(head))) + payload


def decode_slot(number: int, raw: bytes) -> Slot | None:
    """The slot in ``raw``, or ``None`` if it is invalid."""
    start = _HEAD.size + _CRC.size
    if len(raw) < start:
        return None
    magic, length, sequence = _HEAD.unpack_from(raw)
    payload = raw[start : start + length]
    if magic != _MAGIC or len(payload) != length:
        return None
    if crc32c(payload, crc32c(raw[: _HEAD.size])) != _CRC.unpack_from(raw, _HEAD.size)[0]:
        return None
    return Slot(number, sequence, payload)


def read_slots(path: Path, count: int) -> list[Slot]:
    """The readable slots, newest first."""
    with path.open("rb") as file:
        raw = file.read(count * SLOT_BYTES)
    slots = (decode_slot(number, raw[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]) for number in range(count))
    return sorted((slot for slot in slots if slot), key=lambda slot: slot.sequence, reverse=True)


def create_slots(fs: FileSystem, path: Path, count: int, payload: bytes) -> None:
    """Create or replace the file with every slot holding ``payload``, durably."""
    page = encode_slot(1, payload).ljust(SLOT_BYTES, b"\0")
    create_durably(fs, path, lambda fd: fs.write(fd, page * count, 0))


class SlotFile:
    """The open file. The caller serialises writers and decides what a failed write means."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self._fs = fs
        self._fd = fs.open(path)
        self._open = True

    def write(self, number: int, sequence: int, payload: bytes) -> None:
        """Write one slot; not yet durable. Raises ``OSError``."""
        self._fs.write(self._fd, encode_slot(sequence, payload), number * SLOT_BYTES)

    def sync(self) -> None:
        """Make what was written durable. Raises ``OSError``."""
        self._fs.sync(self._fd)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._open:
            self._open = False
            self._fs.close(self._fd)
