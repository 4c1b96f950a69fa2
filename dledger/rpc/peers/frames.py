"""Frames: how members' messages travel on a TCP or TLS connection, and the encoding of the most frequent ones, pushes.

A frame is its kind (1 byte), the payload's length (4 bytes, big-endian), and the payload, a protobuf message of
``raft.proto``. It costs a Python process a tenth of what a gRPC call does, with several thread switches on either side.

A connection serves one purpose, which its handshake names. It begins with the first byte of a frame, or with TLS, whose
first byte is another one (``TLS_RECORD``):

    dialling   -> HANDSHAKE                      then what the purpose allows
    accepting  -> HANDSHAKE_ANSWER, or REFUSAL   then the answers, REFUSAL last of all

The payload of a ``REFUSAL`` is a sentence (UTF-8) for people: why the connection ends.

``PeerConnection`` is a connection between two members on a blocking socket, through TLS or not: one thread receives,
any number send. The accepting side uses it once a peer has shaken hands, and the exchange of logs on both sides. Links,
which send to a peer all the time, do so on an event loop instead (``dledger.rpc.peers.link``).

Every append needs a push and its answer, so these are fixed structures, not protobuf messages. An append's structure is
followed by raw log bytes: whole entry records as stored, verified by ``Log.check_run`` alone. Otherwise decoding is as
strict as in ``dledger.rpc.peers.codec``.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from operator import itemgetter
from struct import Struct
from typing import Final, Self

from dledger.core.membership import CONFIGURATION_BYTES_MAX, decode_configuration, encode_configuration
from dledger.core.messages import (
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushKind,
    PushRequest,
    PushResponse,
    PushTruncate,
)
from dledger.core.noop_payload import UnreadablePayloadError
from dledger.errors import InvalidRequestError, ResponseCode, TlsError
from dledger.records import RecordLayout
from dledger.rpc import tls
from dledger.rpc.fields import NUMBER_LIMIT
from dledger.rpc.tls import READ_BYTES, SEAL_BYTES, TlsStream
from dledger.types import MEMBERS_MAX, Configuration, EntryId, EntryRun, LogIndex, NodeId, Position, Standing, Term

TLS_RECORD: Final = 0x16
"""The first byte of a TLS handshake (RFC 8446 §5.1); no frame begins with it."""
HANDSHAKE_BYTES_MAX: Final = 64 * 1024
"""The longest frame accepted before the handshake is done, and the longest answer to a push or a control message."""
_HEADER: Final = Struct(">BI")
HEADER_BYTES: Final = _HEADER.size

# A peer behind a dead link answers no probe: the connection ends after about idle + count * interval, or when bytes
# sent were not acknowledged for the user timeout.
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 2),
    (socket.TCP_USER_TIMEOUT, 3500),
)


class Purpose(IntEnum):
    """The purpose of a connection. Each has its own connection, so that a megabyte of log never delays a vote."""

    CONTROL = 1
    """Votes, heartbeats, take-leadership."""
    PUSH = 2
    LOG = 3
    """One question about the log: its bytes, or chain CRCs."""
    SNAPSHOT = 4
    """A snapshot of a state machine."""


class FrameKind(IntEnum):
    """The content of a frame."""

    HANDSHAKE = 1
    HANDSHAKE_ANSWER = 2
    REFUSAL = 3
    VOTE = 4
    VOTE_ANSWER = 5
    HEARTBEAT = 6
    HEARTBEAT_ANSWER = 7
    TAKE_LEADERSHIP = 8
    TAKE_LEADERSHIP_ANSWER = 9
    PUSH = 10
    PUSH_ANSWER = 11
    READ_LOG = 12
    READ_LOG_ANSWER = 13
    CHAIN_CRCS = 14
    CHAIN_CRCS_ANSWER = 15
    SNAPSHOT = 16
    SNAPSHOT_ANSWER = 17
    SNAPSHOT_PIECE = 18
    SNAPSHOT_PIECE_ANSWER = 19
    HEARTBEATS = 20
    HEARTBEATS_ANSWER = 21


_KINDS: Final = {kind.value: kind for kind in FrameKind}
Frame = tuple[FrameKind, bytes | memoryview]


def tune(link: socket.socket) -> None:
    """Send without delay, and detect a dead peer."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def pack(kind: FrameKind, *payload: bytes) -> bytes:
    """A frame of a payload in pieces."""
    return b"".join((_HEADER.pack(kind, sum(map(len, payload))), *payload))


def sealed(stream: TlsStream | None, kind: FrameKind, *payload: bytes) -> Iterable[bytes]:
    """A frame as it is sent: through TLS, if there is any, a large payload in several pieces.

    The pieces must be sent in the order in which they are made.
    """
    return (pack(kind, *payload),) if stream is None else _sealed(stream, kind, *payload)


def _sealed(stream: TlsStream, kind: FrameKind, *payload: bytes) -> Iterator[bytes]:
    *small, large = payload
    if len(large) <= SEAL_BYTES:
        yield stream.seal(pack(kind, *payload))
    else:
        yield stream.seal(b"".join((_HEADER.pack(kind, sum(map(len, payload))), *small)))
        view = memoryview(large)
        for start in range(0, len(large), SEAL_BYTES):
            yield stream.seal(view[start : start + SEAL_BYTES])


class FrameBuffer:
    """Splits received bytes into frames."""

    def __init__(self, bytes_max: int = HANDSHAKE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        """The longest payload accepted."""
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes. Raises ``InvalidRequestError``."""
        self._received += data
        frames: list[Frame] = []
        while self._received and (frame := self.take()) is not None:
            frames.append(frame)
        return frames

    def add(self, data: bytes | memoryview) -> None:
        self._received += data

    def begin(self) -> tuple[FrameKind, memoryview, int] | None:
        """For a partly received frame: a buffer for its whole payload, and how much of it is filled.

        The caller must fill the rest before anything else is taken. None if not even the header is complete.
        """
        received = self._received
        if len(received) < HEADER_BYTES:
            return None
        kind, length = parse_header(received, self.bytes_max)
        have = len(received) - HEADER_BYTES
        room = memoryview(bytearray(length))
        room[:have] = received[HEADER_BYTES:]
        received.clear()
        return kind, room, have

    def take(self) -> Frame | None:
        """The next frame, if it is complete. Raises ``InvalidRequestError``."""
        received = self._received
        if len(received) < HEADER_BYTES:
            return None
        kind, length = parse_header(received, self.bytes_max)
        end = HEADER_BYTES + length
        if len(received) < end:
            return None
        with memoryview(received) as view:
            payload = bytes(view[HEADER_BYTES:end])
        del received[:end]
        return kind, payload


def refusal_in(received: bytes | bytearray) -> str:
    """The sentence of the refusal with which an answer to a TLS handshake begins; empty if it does not.

    A member without TLS refuses anyone who begins with it, and says so in the clear.
    """
    try:
        frame = next(iter(FrameBuffer().feed(bytes(received))), None)
    except InvalidRequestError:
        return ""
    return bytes(frame[1]).decode(errors="replace") if frame is not None and frame[0] is FrameKind.REFUSAL else ""


def parse_header(header: bytes | bytearray, bytes_max: int) -> tuple[FrameKind, int]:
    """A frame's kind and the length of its payload. Raises ``InvalidRequestError``."""
    code, length = _HEADER.unpack_from(header)
    kind = _KINDS.get(code)
    if kind is None:
        raise InvalidRequestError(
            f"a frame of kind {code} is unknown: only members of the group connect to this port, clients to another one"
        )
    if length > bytes_max:
        raise InvalidRequestError(f"{kind.name} frame of {length} bytes: at most {bytes_max} are allowed")
    return kind, length


_SMALL_BYTES: Final = 16 * 1024
"""How much is read at a time without TLS; the rest of a large frame is received into its place."""


class PeerConnection:
    """One connection. ``frames``: what was received already. With ``deadline``, no call waits longer than until then.

    Waiting calls raise ``OSError`` (``TimeoutError`` at the deadline), and ``EOFError`` if the other side closed TLS.
    """

    def __init__(
        self,
        link: socket.socket,
        stream: TlsStream | None = None,
        received: FrameBuffer | None = None,
        names: tuple[str, ...] | None = None,
    ) -> None:
        self.names: Final = names
        """Of the other side's certificate, if that was asked for one; None: plaintext."""
        self.deadline: float | None = None
        """As a time of ``time.monotonic``; None: wait as long as it takes."""
        self._link = link
        self._tls = stream
        self._frames = received or FrameBuffer()
        self._has_decrypted = False  # TLS may hold the bytes behind a large frame: the socket would not tell of them
        self._room = memoryview(bytearray(_SMALL_BYTES if stream is None else READ_BYTES))
        self._sending = threading.Lock()  # held while a frame is sealed and sent

    @classmethod
    def dial(cls, host: str, port: int, peer: NodeId, context: ssl.SSLContext | None, deadline: float) -> Self:
        """Connect to ``peer``, with TLS if ``context`` is given. Raises ``OSError`` and ``TlsError``."""
        link = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
        try:
            tune(link)
            made = cls(link, None if context is None else TlsStream(context))
            made.deadline = deadline
            made._begin_tls(f"{peer} at {host}:{port}", peer)
        except BaseException:
            link.close()
            raise
        return made

    def _begin_tls(self, whom: str, peer: NodeId) -> None:
        stream = self._tls
        if stream is None:
            return
        data, said = b"", b""
        try:
            while True:
                self._link.sendall(stream.shake_hands(data))
                if stream.agreed:
                    break
                self._hurry()
                data = self._link.recv(READ_BYTES)
                said += data
                if not data:
                    raise ConnectionError(f"{whom} hung up during the TLS handshake")
        except ssl.SSLError as error:
            refused = refusal_in(said)
            raise TlsError(f"{whom}: {refused}" if refused else tls.explain(error, whom)) from error
        tls.check_name(tls.names_of(stream.certificate), peer, f"of {whom}")
        self._frames.add(stream.read())

    def receive(self, bytes_max: int) -> Frame | None:
        """The next frame, None at the end. Raises ``InvalidRequestError`` for one of more than ``bytes_max`` bytes."""
        received = self._frames
        received.bytes_max = bytes_max
        while (frame := received.take()) is None:
            if (begun := received.begin()) is not None:
                kind, room, have = begun
                return (kind, room) if self._fill(room[have:]) else None
            if not self._receive():
                return None
        return frame

    def _receive(self) -> bool:
        """Receive some bytes; False at the end."""
        stream = self._tls
        if stream is not None and self._has_decrypted:
            self._has_decrypted = False
            self._frames.add(stream.read())
            return True
        count = self._wait(self._room)
        if count:
            self._frames.add(self._room[:count] if stream is None else stream.read())
        return count > 0

    def _fill(self, room: memoryview) -> bool:
        """Receive the rest of a frame into its place; False at the end."""
        stream = self._tls
        if stream is None:
            while room:
                count = self._wait(room, socket.MSG_WAITALL)
                if not count:
                    return False
                room = room[count:]
            return True
        while len(room := room[stream.read_into(room) :]):
            if not self._wait(self._room):
                return False
        self._has_decrypted = True
        return True

    def _wait(self, room: memoryview, flags: int = 0) -> int:
        """Receive into ``room``, and give TLS what is its; returns the number of bytes from the socket."""
        self._hurry()
        count = self._link.recv_into(room, 0, flags)
        if self._tls is not None:
            self._tls.feed(room[:count])
            if self._tls.has_due:
                with self._sending:
                    self._link.send(self._tls.due(), socket.MSG_DONTWAIT)
        return count

    def _hurry(self) -> None:
        """Give the next wait the time that is left, however slowly bytes arrive."""
        if self.deadline is not None:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it took too long")
            self._link.settimeout(left_s)

    def send(self, kind: FrameKind, payload: bytes) -> bool:
        """Send a frame; if the peer does not accept it at once, returns False and ends the connection.

        A peer that leaves some megabytes of answers unread is dead or broken; waiting for it would stop the flusher.
        """
        with self._sending:
            try:
                for piece in sealed(self._tls, kind, payload):
                    if self._link.send(piece, socket.MSG_DONTWAIT) != len(piece):
                        break
                else:
                    return True
            except OSError:
                pass
        self.end()
        return False

    def send_whole(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame, and wait until the peer has accepted it. Raises ``OSError``."""
        with self._sending:
            for piece in sealed(self._tls, kind, payload):
                self._hurry()
                self._link.sendall(piece)

    def end(self) -> None:
        """Make the reading thread stop."""
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed, or no longer connected
            return

    def close(self) -> None:
        """Close the socket; no other thread is sending."""
        with self._sending:
            self._link.close()


_HEAD: Final = (("kind", "u1"), ("term", "i8"), ("epoch", "i8"))
_PREVIOUS: Final = (("previous_term", "i8"), ("previous_index", "i8"), ("previous_chain_crc", "u4"))
LAYOUTS: Final = {
    PushKind.COMPARE: RecordLayout((*_HEAD, *_PREVIOUS, ("flushed_only", "u1"))),
    PushKind.TRUNCATE: RecordLayout(
        (*_HEAD, ("conflict_term", "i8"), ("conflict_index", "i8"), ("conflict_chain_crc", "u4"))
    ),
    PushKind.APPEND: RecordLayout(
        (*_HEAD, *_PREVIOUS, ("commit_index", "i8"), ("first_index", "i8"), ("last_index", "i8"), ("position", "i8"))
    ),
    PushKind.COMMIT: RecordLayout((*_HEAD, ("commit_index", "i8"))),
    PushKind.INSTALL: RecordLayout((*_HEAD, *_PREVIOUS, ("position", "i8"))),
}
ANSWER_LAYOUT: Final = RecordLayout(
    (
        *_HEAD,
        ("code", "i2"),
        ("standing", "u1"),
        ("verified_index", "i8"),
        ("flushed_index", "i8"),
        ("end_index", "i8"),
        ("conflict_term", "i8"),
        ("conflict_index", "i8"),
        ("boot_id", "i8"),
    )
)
_NEVER_NONE: Final = frozenset({"kind", "term", "epoch", "position", "boot_id"})
"""Numbers that are not -1; other signed ones may be, for "none"."""
_ENTRY: Final = Struct(">qq")
BYTES_MAX: Final = _ENTRY.size + CONFIGURATION_BYTES_MAX


class _Form:
    """Reads and writes one structure."""

    def __init__(self, layout: RecordLayout) -> None:
        struct = layout.struct()
        self.size: Final = struct.size
        self.pack: Final = struct.pack
        self._unpack = struct.unpack_from
        self._names = tuple(name for name, _ in layout.fields)
        self._never_none = itemgetter(*(at for at, name in enumerate(self._names) if name in _NEVER_NONE))

    def read(self, data: bytes | memoryview, *, is_whole: bool = True) -> tuple[int, ...]:
        """The numbers that ``data`` begins with, or is. Raises ``InvalidRequestError``."""
        if len(data) < self.size or (is_whole and len(data) > self.size):
            raise InvalidRequestError(f"a push or an answer of {len(data)} bytes: its kind has {self.size}")
        numbers = self._unpack(data)
        if min(numbers) < -1 or max(numbers) >= NUMBER_LIMIT or min(self._never_none(numbers)) < 0:
            said = ", ".join(f"{name}={number}" for name, number in zip(self._names, numbers, strict=True))
            raise InvalidRequestError(f"a push or an answer with a number out of range: {said}")
        return numbers


_FORMS: Final = {kind: _Form(layout) for kind, layout in LAYOUTS.items()}
_APPEND: Final = _FORMS[PushKind.APPEND]
_WITH_MORE: Final = frozenset({PushKind.APPEND, PushKind.COMPARE, PushKind.INSTALL})
"""Their numbers are followed by a part of the log, or perhaps by a configuration."""
_ANSWER: Final = _Form(ANSWER_LAYOUT)
_PUSH_KINDS: Final = {kind.value: kind for kind in PushKind}
_CODES: Final = {code.value: code for code in ResponseCode}
_STANDINGS: Final = {standing.value: standing for standing in Standing}


def encode_push(push: PushRequest) -> tuple[bytes, ...]:
    """A push, in pieces: the log bytes of an append are not copied."""
    term, epoch = push.term, push.epoch
    numbers: tuple[int, ...]
    match push:
        case PushAppend(commit_index=commit_index, run=run):
            head = _APPEND.pack(
                PushKind.APPEND,
                term,
                epoch,
                run.previous.term,
                run.previous.index,
                run.previous_chain_crc,
                commit_index,
                run.first_index,
                run.last_index,
                run.position,
            )
            return head, run.data
        case PushCommit():
            numbers = (PushKind.COMMIT, term, epoch, push.commit_index)
        case PushCompare(previous=previous):
            known = (previous.term, previous.index, push.previous_chain_crc)
            numbers = (PushKind.COMPARE, term, epoch, *known, push.flushed_only)
            return _FORMS[PushKind.COMPARE].pack(*numbers), encode_configuration_entry(push.configuration)
        case PushTruncate(conflict=conflict):
            numbers = (PushKind.TRUNCATE, term, epoch, conflict.term, conflict.index, push.chain_crc)
        case PushInstall(before_begin=before):
            numbers = (PushKind.INSTALL, term, epoch, before.term, before.index, push.chain_crc, push.position)
            return _FORMS[PushKind.INSTALL].pack(*numbers), encode_configuration_entry(push.configuration)
    return (_FORMS[numbers[0]].pack(*numbers),)


def decode_push(data: bytes | memoryview) -> PushRequest:
    """A push. Raises ``InvalidRequestError``."""
    kind = _PUSH_KINDS.get(data[0]) if data else None
    if kind is None:
        raise InvalidRequestError(f"a push of {len(data)} bytes and of no known kind")
    _, term, epoch, *numbers = _FORMS[kind].read(data, is_whole=kind not in _WITH_MORE)
    attempt = Term(term), epoch
    match kind:
        case PushKind.APPEND:
            *known, commit_index, first, last, position = numbers
            run = _run(known, first, last, position, bytes(data[_APPEND.size :]))
            return PushAppend(*attempt, LogIndex(commit_index), run)
        case PushKind.COMMIT:
            return PushCommit(*attempt, LogIndex(numbers[0]))
        case PushKind.COMPARE:
            known_term, known_index, crc, flushed_only = numbers
            before = EntryId(Term(known_term), LogIndex(known_index))
            members = decode_configuration_entry(data[_FORMS[kind].size :])
            return PushCompare(*attempt, before, crc, bool(flushed_only), members)
        case PushKind.TRUNCATE:
            known_term, known_index, crc = numbers
            return PushTruncate(*attempt, EntryId(Term(known_term), LogIndex(known_index)), crc)
        case PushKind.INSTALL:
            known_term, known_index, crc, position = numbers
            before = EntryId(Term(known_term), LogIndex(known_index))
            members = decode_configuration_entry(data[_FORMS[kind].size :])
            return PushInstall(*attempt, before, crc, Position(position), members)


def _run(known: list[int], first: int, last: int, position: int, data: bytes) -> EntryRun:
    term, index, crc = known
    if first < 0 or last < first or index != first - 1:
        raise InvalidRequestError(f"append of entries {first}..{last} after {index} is not contiguous")
    if not data:
        raise InvalidRequestError(f"append of entries {first}..{last} carries no data")
    previous = EntryId(Term(term), LogIndex(index))
    return EntryRun(previous, crc, LogIndex(first), LogIndex(last), Position(position), data)


def encode_answer(answer: PushResponse) -> bytes:
    """The answer to pushes."""
    return _ANSWER.pack(
        answer.kind,
        answer.term,
        answer.epoch,
        answer.code,
        answer.standing,
        answer.verified_index,
        answer.flushed_index,
        answer.end_index,
        answer.conflict.term,
        answer.conflict.index,
        answer.boot_id,
    )


def decode_answer(data: bytes | memoryview) -> PushResponse:
    """The answer to pushes. Raises ``InvalidRequestError``."""
    numbers = _ANSWER.read(data)
    kind, term, epoch, code, standing, verified, flushed, end, conflict_term, conflict_index, boot_id = numbers
    if kind not in _PUSH_KINDS or standing not in _STANDINGS:
        raise InvalidRequestError(f"push kind {kind} or standing {standing} is unknown")
    return PushResponse(
        Term(term),
        epoch,
        _PUSH_KINDS[kind],
        _CODES.get(code, ResponseCode.UNKNOWN),
        LogIndex(verified),
        LogIndex(flushed),
        LogIndex(end),
        EntryId(Term(conflict_term), LogIndex(conflict_index)),
        boot_id,
        _STANDINGS[standing],
    )


def encode_configuration_entry(configuration: Configuration | None) -> bytes:
    """A configuration between members: its entry's index, term and payload; empty for None."""
    if configuration is None:
        return b""
    return _ENTRY.pack(configuration.index, configuration.term) + encode_configuration(configuration)


def decode_configuration_entry(data: bytes | memoryview) -> Configuration | None:
    """The reverse. Raises ``InvalidRequestError``."""
    if not data:
        return None
    if not _ENTRY.size < len(data) <= BYTES_MAX:
        raise InvalidRequestError(f"a configuration of {len(data)} bytes")
    index, term = _ENTRY.unpack_from(data)
    payload = bytes(data[_ENTRY.size :])
    try:
        found = decode_configuration(payload)
    except UnreadablePayloadError as error:
        raise InvalidRequestError(str(error)) from error
    if found is None or encode_configuration(found) != payload:
        raise InvalidRequestError(f"malformed configuration of {len(payload)} bytes")
    if len(found.members) > MEMBERS_MAX:
        raise InvalidRequestError(f"a configuration of {len(found.members)} members; the limit is {MEMBERS_MAX}")
    if not (0 <= index < NUMBER_LIMIT and 0 <= term < NUMBER_LIMIT):
        raise InvalidRequestError(f"a configuration at entry {index} of term {term} is impossible")
    return replace(found, index=LogIndex(index), term=Term(term))
