"""The protocol between a master and a slave, and what both must know of a log for it.

RocketMQ's part (4.9): the slave sends bare numbers of 8 bytes, first the offset from which it wants the log, then how
far it has it. The master sends frames: an offset of 8 bytes, a length of 4, and so many bytes of the log from there on;
a frame without bytes is a sign of life.

Ours goes before it, if both sides are ours. The slave's first number is -1, which makes RocketMQ's master wait for the
next one; ours answers with a frame at offset -1 that says who it is. The slave introduces itself in the same form, and
the master says, at offset -2, from where it sends, or why it does not. From then on it says at offset -3, once a
second, where its log ends, as long as the slave does not get everything at once.

``tail_of``: the end of a log in one number, to notice that two logs of the same length are not the same.

``challenge``: a broker shows that it continues a log, without showing the log, by the digest of a block that the other
side chose. An old master that comes back hears of its successor from name servers, where anybody may register, and from
that broker itself. It stops only for one that knows its log: a block at a place that nobody could foresee, hashed with
a number that was never used before. Blocks have fixed places and much in them, so that nobody can ask for bytes one by
one; and they are answered only where access control is off, and who asks could as well read the messages.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from random import Random
from struct import Struct
from typing import Final, NamedTuple, Protocol, Self
from zlib import crc32

from dledger.errors import DLedgerError
from dledger.records import record
from rocketstore.commit_log.flush import FlushDone

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


class HaLog(Protocol):
    """A plain commit log. There are two sides: the store's, and that of tests."""

    @property
    def segment_bytes(self) -> int:
        """The size of each file."""

    @property
    def min_offset(self) -> int:
        """The begin of the first file."""

    @property
    def max_offset(self) -> int:
        """The end of what may be read, and so of what is sent."""

    @property
    def end_offset(self) -> int:
        """The end of everything written."""

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        """See ``PlainCommitLog.stretch``."""

    def append_received(self, offset: int, data: bytes, store_timestamp: int) -> None:
        """See ``PlainCommitLog.append_received``."""

    def when_flushed(self, end: int, done: FlushDone) -> None:
        """See ``PlainCommitLog.when_flushed``."""


@record(frozen=True, slots=True)
class HaIdentity:
    """Which broker this is. ``epoch`` and ``begin_offset``: see ``rocketstore.ha.promotion``."""

    cluster: str
    broker: str
    broker_id: int
    epoch: Callable[[], int]
    begin_offset: Callable[[], int] = lambda: -1
    further_names: frozenset[str] = frozenset()
    """Further DNS names that may stand in the certificates of its masters and slaves."""

    @property
    def certificate_names(self) -> frozenset[str]:
        """With TLS, the other side's certificate must have one of these."""
        return self.further_names | {self.broker}


@record(frozen=True, slots=True)
class HaPace:
    """Times in seconds, sizes in bytes."""

    heartbeat_s: float = 5.0
    """How often both sides give a sign of life."""
    silence_s_max: float = 20.0
    """A connection is given up after so long without one."""
    batch_bytes: int = 32 * 1024
    """The most of the log in one frame to a slave of RocketMQ; ours takes ``CHUNK_BYTES``."""
    slaves_max: int = 16
    introduction_required: bool = False
    """Whether the other side must be one of ours, and say who it is."""
    introduces: bool = True
    """Whether a slave introduces itself."""
    retry_s: float = 1.0
    """When a slave tries again after a connection that failed or ended."""
    refused_retry_s: float = 5.0
    """The same after one that one of the two sides had a reason to end."""

    @property
    def living_ms(self) -> int:
        """A slave that has said something since so long ago is alive: nobody else is that slave."""
        return int(self.silence_s_max * 1000 / 2)


ZEROS_BYTES_MAX: Final = 16 * 1024 * 1024
"""How much of the blank at a file's end is passed over, to compare records instead of zeros."""


def tail_of(log: HaLog, end: int, length: int = TAIL_BYTES) -> tuple[int, int]:
    """How many bytes before ``end``, at most ``length``, are compared, and their CRC-32; (0, 0) if there are none.

    Zeros at the end do not count: all blanks look alike. Not more than one file has: the file before may have been
    removed at one side. Raises ``CorruptLogError``, ``DiskError``.
    """
    if end <= log.min_offset:
        return 0, 0
    file_begin = (end - 1) - (end - 1) % log.segment_bytes
    end = _without_zeros(log, file_begin, end)
    begin = max(end - length, file_begin)
    crc, at = 0, begin
    while at < end:
        data = log.stretch(at, end - at)
        if not data:
            return 0, 0
        crc = crc32(data, crc)
        at += len(data)
    return end - begin, crc


def _without_zeros(log: HaLog, begin: int, end: int) -> int:
    """Where the zeros before ``end`` begin; ``end`` if there are too many."""
    at = end
    while at > begin and end - at < ZEROS_BYTES_MAX:
        first = max(begin, at - TAIL_BYTES)
        left = log.stretch(first, at - first).rstrip(b"\0")
        if left:
            return first + len(left)
        at = first
    return end


BLOCK_BYTES: Final = 4096
LEAST_BYTES: Final = 100
"""A block that has fewer bytes that are not zero proves nothing: anybody could guess it."""
RECENT_BYTES: Final = 64 * 1024 * 1024
"""From how much of the end of the common log a block is chosen: older files may have expired at one side."""
TRIES_MAX: Final = 16
ENDS_MAX: Final = 16
"""So many places are tried where the common log may end."""
_NONCE_BYTES: Final = 16
PROVE: Final = "haProve"
"""The field of GET_BROKER_RUNTIME_INFO that asks, and"""
PROOF: Final = "haProof"
"""the value of the answer that is the digest."""


class ReadableLog(Protocol):
    """As much of a plain commit log as is needed."""

    @property
    def min_offset(self) -> int:
        """The begin of the first file."""

    @property
    def max_offset(self) -> int:
        """The end of what may be read."""

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        """See ``PlainCommitLog.stretch``."""


class Challenge(NamedTuple):
    """Which block, and the digest that proves it."""

    text: str
    digest: str


def challenge(log: ReadableLog, end: int, random: Random | None = None) -> Challenge | None:
    """Choose a block before ``end``; None if there is none that proves anything. Raises what ``stretch`` raises."""
    draw = random or secrets.SystemRandom()
    end = min(end, log.max_offset)
    first = max(log.min_offset, end - RECENT_BYTES) // BLOCK_BYTES
    blocks = range(max(first, -(-log.min_offset // BLOCK_BYTES)), -(-end // BLOCK_BYTES))
    for _ in range(TRIES_MAX if blocks else 0):
        begin = draw.choice(blocks) * BLOCK_BYTES
        length = min(BLOCK_BYTES, end - begin)
        data = _block(log, begin, length)
        if len(data) == length and length - data.count(0) >= LEAST_BYTES:
            nonce = secrets.token_hex(_NONCE_BYTES)
            return Challenge(f"{begin},{length},{nonce}", _digest(nonce, data))
    return None


def possible_ends(log: ReadableLog, end: int) -> Iterator[int]:
    """Where the log that both have may end, latest first; the other side says at ``end``.

    That is where it took over itself. Where its predecessors did, it does not say, and what this broker has behind the
    first of these places is in no other log. So each next place is half as far from the begin.
    """
    begin, end = log.min_offset, min(end, log.max_offset)
    for _ in range(ENDS_MAX):
        if end - begin < LEAST_BYTES:
            return
        yield end
        end = begin + (end - begin) // 2


def is_empty(log: ReadableLog) -> bool:
    """Whether it has too little to recognize it by."""
    return log.max_offset - log.min_offset < LEAST_BYTES


def answer_challenge(log: ReadableLog, asked: str) -> str:
    """The digest that a challenge asks for; empty if it is malformed, or the block is not all there."""
    parts = asked.split(",")
    if len(asked) > 128 or len(parts) != 3 or not all(one.isascii() and one.isdigit() for one in parts[:2]):
        return ""
    begin, length, nonce = int(parts[0]), int(parts[1]), parts[2]
    if begin % BLOCK_BYTES or not LEAST_BYTES <= length <= BLOCK_BYTES or len(nonce) != 2 * _NONCE_BYTES:
        return ""
    data = _block(log, begin, length)
    return _digest(nonce, data) if len(data) == length else ""


def _block(log: ReadableLog, begin: int, length: int) -> bytes:
    """Perhaps in two files; shorter if it is not all there."""
    data = b""
    while len(data) < length and (more := log.stretch(begin + len(data), length - len(data))):
        data += more
    return data


def _digest(nonce: str, data: bytes) -> str:
    return sha256(nonce.encode() + data).hexdigest()
