"""The protocol between a master and a slave. Pure: bytes in, bytes out.

RocketMQ's part (4.9): the slave sends bare numbers of 8 bytes, first the offset from which it wants the log, then how
far it has it. The master sends frames: an offset of 8 bytes, a length of 4, and so many bytes of the log from there on;
a frame without bytes is a sign of life.

Ours goes before it, if both sides are ours. The slave's first number is -1, which makes RocketMQ's master wait for the
next one; ours answers with a frame at offset -1 that says who it is. The slave introduces itself in the same form, and
the master says, at offset -2, from where it sends, or why it does not. From then on it says at offset -3, once a
second, where its log ends, as long as the slave does not get everything at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from struct import Struct
from typing import Final, Self

from dledger.errors import DLedgerError

REPORT: Final = Struct(">q")
FRAME: Final = Struct(">qi")
GREETING: Final = -1
"""The slave's first number, and the offset of both introductions."""
VERDICT: Final = -2
"""The offset of the master's answer to a slave's introduction."""
STANDING: Final = -3
"""The offset of what a master says of its own log, while a slave that has introduced itself is behind."""
WORDS_BYTES_MAX: Final = 16 * 1024
"""The limit of an introduction."""
FRAME_BYTES_MAX: Final = 4 * 1024 * 1024 - FRAME.size
"""The limit of a frame's bytes: RocketMQ's slave has a buffer of 4 MiB."""
TAIL_BYTES: Final = 64 * 1024
"""How much of the end of a slave's log is compared with the master's."""


class HaProtocolError(DLedgerError):
    """Raised for what the other side must not send; says what it was."""


@dataclass(frozen=True, slots=True)
class Words:
    """JSON with a flat object of numbers and texts, whose fields all exist."""

    def encode(self, offset: int) -> bytes:
        """As a frame at ``offset``."""
        body = json.dumps(asdict(self)).encode()
        return FRAME.pack(offset, len(body)) + body

    @classmethod
    def decode(cls, body: bytes | memoryview) -> Self:
        """Raises ``HaProtocolError``. Unknown fields, of later versions, are ignored."""
        try:
            found = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise HaProtocolError(f"an introduction is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise HaProtocolError("an introduction is not a JSON object")
        values = {}
        for one in fields(cls):
            value = found.get(one.name)
            wanted = {"int": int, "str": str}[str(one.type)]
            if type(value) is not wanted:
                raise HaProtocolError(f"an introduction has no {one.name}, or not as {wanted.__name__}")
            values[one.name] = value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class MasterWords(Words):
    """A master's identity. ``epoch`` counts the starts of masters of this log; offsets are those of its log."""

    cluster: str
    broker: str
    epoch: int
    segment_bytes: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class SlaveWords(Words):
    """A slave's identity, and its log: ``end``, and the CRC-32 of the ``tail_bytes`` before it.

    ``epoch``: the latest that it has followed. ``broker_id``: as the name servers know it.
    """

    cluster: str
    broker: str
    broker_id: int
    epoch: int
    segment_bytes: int
    end: int
    tail_bytes: int
    tail_crc: int


@dataclass(frozen=True, slots=True)
class SlaveVerdict(Words):
    """The master's answer: from where it sends, or why not; ``refusal`` is empty if it does."""

    begin: int
    refusal: str


@dataclass(frozen=True, slots=True)
class MasterStanding(Words):
    """Where the master's log ends."""

    max_offset: int


class FrameReader:
    """Cuts the master's bytes into pieces: (offset, bytes). Frames of the log come as they arrive, in parts.

    A frame at a negative offset comes whole. An empty piece is a sign of life.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._offset = 0
        self._left = 0

    def feed(self, data: bytes | memoryview) -> list[tuple[int, bytes]]:
        """The pieces that ``data`` adds, copied out of it. Raises ``HaProtocolError``."""
        found: list[tuple[int, bytes]] = []
        at, end = 0, len(data)
        if self._pending:
            data, self._pending = self._pending + bytes(data), b""
            end = len(data)
        while at < end:
            if self._left:
                part = bytes(data[at : at + self._left])
                found.append((self._offset, part))
                self._offset += len(part)
                self._left -= len(part)
                at += len(part)
                continue
            if end - at < FRAME.size:
                break
            offset, size = FRAME.unpack_from(data, at)
            _check(offset, size)
            if offset < 0:
                if end - at < FRAME.size + size:
                    break
                at += FRAME.size
                found.append((offset, bytes(data[at : at + size])))
                at += size
                continue
            at += FRAME.size
            if not size:
                found.append((offset, b""))
            self._offset, self._left = offset, size
        self._pending = bytes(data[at:])
        return found


def _check(offset: int, size: int) -> None:
    most = FRAME_BYTES_MAX if offset >= 0 else WORDS_BYTES_MAX
    if not 0 <= size <= most or offset < STANDING:
        raise HaProtocolError(f"a frame of {size} bytes at offset {offset}: at most {most} are expected")
