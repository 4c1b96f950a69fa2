"""One remoting connection: incoming and outgoing frames and requests. Everything runs on the loop's thread.

Either side may send requests at any time, responses arrive in any order, and an ``opaque`` is scoped to the requester.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, cast

from dledger.access.addresses import counted_host, plain_host
from dledger.access.quota import HostQuota
from dledger.log_output import BoundedLog
from dledger.records import record
from dledger.remoting.codes import PROTOCOL_FIELD, AnswerCode, FrameError
from dledger.remoting.frame import (
    ANSWER_HEADER_BYTES_MAX,
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    Frame,
    LargeFields,
    cut,
    decode,
    encode,
    frame_length,
)

_LOG = logging.getLogger(__name__)

REQUESTS_MAX: Final = 1024
"""Maximum requests in progress per connection; then nothing more is read from it until some are answered."""
REQUEST_BYTES_MAX: Final = 32 * 1024 * 1024
"""Maximum bytes of their bodies, likewise."""
CALLS_MAX: Final = 4096
"""Maximum number of our requests waiting for a response from one peer."""
FRAMES_PER_TURN: Final = 128
"""Maximum frames of one connection dispatched in one turn of the loop: 256 KiB may contain twenty thousand."""
CROWD_FRAMES_PER_TURN: Final = 1024
"""About the maximum of all connections with more than they can dispatch; each gets its share, and at least
``FRAMES_LEAST``.
"""
FRAMES_LEAST: Final = 4
READ_BYTES: Final = 128 * 1024
"""After so many bytes at once, nothing more is read from a connection in that turn: uvloop would read 8 MB of it."""
_UNSENT_BYTES_HIGH: Final = 256 * 1024
"""With this many bytes not yet read by the peer, nothing more is read from it."""
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""With this many, the connection is closed: responses to earlier requests still add to them."""
_OPAQUE_MASK: Final = (1 << 31) - 1
NOTHING_ANNOUNCED: Final[Mapping[str, str]] = {}
_RESET: Final = (1).to_bytes(4, sys.byteorder) + bytes(4)
"""``struct linger``: on, 0 s, so that a close discards what is unsent and resets the connection."""
_CLOSE: Final = bytes(8)


class DisconnectedError(Exception):
    """Raised when the connection ended before the response: whether the request was carried out is unknown."""


class TooManyCallsError(Exception):
    """Raised when too many of our requests are already waiting: the request was not sent."""


@record(frozen=True, slots=True)
class Place:
    """A client's address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if ":" not in self.host else f"[{self.host}]:{self.port}"


class ByteRoom(HostQuota):
    """Bytes of all connections together and by host: received and not yet processed, or unsent."""

    crowd = 0
    """Connections with complete frames that wait for their turn."""


class Owner(NamedTuple):
    """The callbacks of a connection to its owner."""

    opened: Callable[[RemotingConnection], None]
    request: Callable[[RemotingConnection, Frame], None]
    """Called with a request; when it is done, the connection's ``done`` or ``let_go`` must be called once."""
    closed: Callable[[RemotingConnection], None]
    log: BoundedLog | logging.Logger = _LOG
    """Of the connections that are closed for a reason."""


class RemotingConnection(asyncio.Protocol):
    """One connection, accepted or opened.

    ``room`` limits what was received and is not done with. A host over its limit may continue once some of its requests
    are done; if none is in progress, its frame can never complete. ``unsent_room`` limits what slow readers leave.
    """

    def __init__(
        self,
        owner: Owner,
        room: ByteRoom,
        unsent_room: ByteRoom,
        header_bytes_max: int = HEADER_BYTES_MAX,
        announced: Mapping[str, str] = NOTHING_ANNOUNCED,
    ) -> None:
        """``header_bytes_max``: of what is received. ``announced``: fields added to the first answer."""
        self._header_bytes_max = header_bytes_max
        self._announced = announced  # nothing any more once it is sent
        self._owner = owner
        self._room = room
        self._unsent_room = unsent_room
        self._unsent_bytes = 0  # as counted there: only while too much is unsent
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._needed = LENGTH_BYTES
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flushing = False
        self._under_way = 0
        self._under_way_bytes = 0
        self._held_bytes = 0  # as counted in `room`: what is in the buffer or under way
        self._taken: asyncio.Future[None] | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[None] | None = None
        self._backlog = False  # whether complete frames wait in the buffer
        self._dispatching = False  # whether their dispatch is scheduled
        self._taking = False  # whether frames are being dispatched now
        self._resting = False  # whether nothing more is read in this turn
        self.is_full = False
        """Whether too much is unsent: the other side does not read."""
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._submitted: dict[int, Callable[[Frame | DisconnectedError], None]] = {}
        self._opaque = 0
        self.place = Place("", 0)
        """The address of the other side."""
        self.counted_as = ""
        """The host that limits count this connection for."""
        self.heard_at = self._loop.time()
        """When the last byte was received or sent, by the loop's clock."""
        self.partial_since: float | None = None
        """Since when a frame has been incomplete."""
        self.has_spoken = False
        """Whether a whole frame has come."""
        self.protocol: int | None = None
        """The version of our own requests that the other side has announced; 0: none; None: it has answered nothing."""
        self.is_paused = False
        """Whether nothing is read for now."""
        self.is_closed = False

    # -- asyncio's side ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.place = Place(plain_host(str(name[0])), int(name[1]))
            self.counted_as = counted_host(self.place.host)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        """Process received bytes: dispatch every complete frame."""
        self.heard_at = self._loop.time()
        self._buffer += data
        if self._backlog:
            self._count_held()
        else:
            self._dispatch()
        if len(data) >= READ_BYTES and not self._resting and not self.is_paused and self._transport is not None:
            self._resting = True
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._resting = False
        if self._transport is not None and not self.is_paused and not self.is_closed:
            self._transport.resume_reading()

    def _dispatch(self) -> None:
        """Dispatch complete frames, but not so many that others would have to wait."""
        self._dispatching = False
        try:
            share = max(FRAMES_LEAST, CROWD_FRAMES_PER_TURN // (1 + self._room.crowd))
            frames = self._frames(min(FRAMES_PER_TURN, share, REQUESTS_MAX - self._under_way))
        except FrameError as error:
            self.close(f"malformed frame: {error}")
            return
        sizes = [0 if frame.flag & FLAG_RESPONSE else _bytes_of(frame) for frame in frames]
        self._under_way_bytes += sum(sizes)
        self._count_held()
        self._taking = True
        request = self._owner.request
        for at, frame in enumerate(frames):
            if self.is_closed:
                self._under_way_bytes -= sum(sizes[at:])  # nobody will do them
                self._count_held()
                return
            if frame.flag & FLAG_RESPONSE:
                self._answered(frame)
            else:
                self._under_way += 1
                request(self, frame)
        self._taking = False
        self._set_backlog(len(self._buffer) >= self._needed)
        self._pause_or_resume()
        if self._buffer and not self._backlog and not self._under_way and self._room.is_over(self.counted_as):
            self.close(f"frames of {self.counted_as} that are not complete take too much memory")

    def _set_backlog(self, backlog: bool) -> None:  # its new value
        self._room.crowd += backlog - self._backlog
        self._backlog = backlog

    def _frames(self, most: int) -> list[Frame]:
        buffer = self._buffer
        if len(buffer) < self._needed:
            return []
        frames, end = cut(buffer, most=most, header_bytes_max=self._header_bytes_max)
        if end:
            self.has_spoken = True
            del buffer[:end]
        rest = len(buffer)
        self._needed = LENGTH_BYTES + frame_length(memoryview(buffer)) if rest >= LENGTH_BYTES else LENGTH_BYTES
        if not rest:
            self.partial_since = None
        elif end or self.partial_since is None:
            self.partial_since = self.heard_at
        return frames

    def eof_received(self) -> bool:
        """The other side sends nothing more; like RocketMQ's programs, it then reads no responses either."""
        self._linger(_CLOSE)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended, whichever side closed it."""
        self._end(str(error) if error is not None else "the other side hung up")
        self._transport = None
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    def pause_writing(self) -> None:
        """Too much is unsent."""
        self.is_full = True
        self._pause_or_resume()

    def resume_writing(self) -> None:
        """The other side has read some of it."""
        self.is_full = False
        self.heard_at = self._loop.time()
        self._count_unsent(0)
        self._tell_taken()
        self._pause_or_resume()

    # -- answers and requests ------------------------------------------------------------------------------------------

    def done(self, request: Frame, answer: Frame | None) -> None:
        """A request is done; send ``answer`` if it expects one, or an error if that does not fit into a frame."""
        data = b"" if answer is None or request.is_oneway else _encoded(request, answer)
        self.let_go(request)  # first: the last answer goes at once
        if data:
            self.send(data)

    def answer(self, request: Frame, answer: Frame) -> None:
        """Send the answer of a request that is let go later, in this turn."""
        if not request.is_oneway:
            self.send(_encoded(request, answer))

    def let_go(self, request: Frame) -> None:
        """A request is done; its response, if it expected one, was passed to ``send`` or will be in this turn."""
        self.let_all_go((request,))

    def let_all_go(self, requests: Sequence[Frame]) -> None:
        """``let_go`` for several, at the cost of one."""
        self._under_way -= len(requests)
        self._under_way_bytes -= sum(map(_bytes_of, requests))
        self._count_held()
        if self.is_paused:
            self._pause_or_resume()
        if not self._under_way and self._quiet is not None:
            self._quiet.set_result(None)
            self._quiet = None

    def _count_held(self) -> None:
        held = len(self._buffer) + self._under_way_bytes
        self._room.change(self.counted_as, held - self._held_bytes)
        self._held_bytes = held

    @property
    def under_way(self) -> int:
        """The number of its requests in progress."""
        return self._under_way

    async def quiet(self) -> None:
        """Wait until no request is in progress."""
        while self._under_way:
            if self._quiet is None:
                self._quiet = self._loop.create_future()
            await asyncio.shield(self._quiet)

    async def drained(self) -> None:
        """Wait until the other side has read nearly everything sent, or is gone."""
        self.flush()
        while self.is_full and not self.is_closed:
            if self._taken is None:
                self._taken = self._loop.create_future()
            await asyncio.shield(self._taken)

    async def taken(self) -> None:
        """Likewise after a large answer; who does not take it in time, when the waiting task is cancelled, is hung up
        on.
        """
        try:
            await self.drained()
        except asyncio.CancelledError:
            self.close("it does not take its answer")
            raise

    def send(self, *parts: bytes) -> None:
        """Send the bytes of a frame, together with everything else of this turn of the loop.

        At once if no request is in progress any more: others would hardly join it, and in the next turn a thread that
        waits for the interpreter might come first.
        """
        if self.is_closed or self._transport is None:
            return
        if self._announced and any(parts):  # nothing is sent to who asked for no answer
            parts = self._with_announcement(parts)
        self._out.extend(parts)
        self._out_bytes += sum(map(len, parts))
        if not self._under_way and not self._taking:
            self.flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)
        elif self._out_bytes > _UNSENT_BYTES_HIGH:
            self.flush()

    def _with_announcement(self, parts: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Add the announced fields if this is an answer that has room for them; else a later one gets them."""
        data = memoryview(b"".join(parts))
        end = LENGTH_BYTES + frame_length(data)
        frame = decode(data, 0, end, ANSWER_HEADER_BYTES_MAX)
        if not frame.is_response:
            return parts
        try:
            first = encode(frame._replace(fields={**frame.fields, **self._announced}))
        except FrameError:
            return parts
        self._announced = NOTHING_ANNOUNCED
        return first, bytes(data[end:])

    def flush(self) -> None:
        """Send now what was passed to ``send``."""
        self._flushing = False
        out, self._out, self._out_bytes = self._out, [], 0
        if self.is_closed or self._transport is None or self._transport.is_closing() or not out:
            return  # if it is closing, its end is on its way to us, and uvloop refuses to write
        self._transport.write(b"".join(out))
        self.heard_at = self._loop.time()
        if not self.is_full:
            return
        self._count_unsent(self._transport.get_write_buffer_size())
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self.close(f"it does not take its answers: {self._unsent_bytes} bytes wait")
        elif self._unsent_room.is_over(self.counted_as):
            self.close(f"{self.counted_as} does not take its answers, or too many others do not")

    def _count_unsent(self, size: int) -> None:
        more, self._unsent_bytes = size - self._unsent_bytes, size
        if more:
            self._unsent_room.change(self.counted_as, more)

    async def call(self, request: Frame, timeout_s: float) -> Frame:
        """Send a request and wait for its response. Raises ``TimeoutError``, and what ``ask`` does."""
        answered = self.ask(request)
        async with asyncio.timeout(timeout_s):
            return await answered

    def ask(self, request: Frame) -> asyncio.Future[Frame]:
        """Send a request to the other side, whose ``opaque`` we assign; its response, or ``DisconnectedError``.

        Raises ``DisconnectedError``, ``TooManyCallsError`` and ``FrameError``: nothing was sent.
        """
        opaque = self._new_opaque()
        data = encode(request._replace(opaque=opaque))
        answered: asyncio.Future[Frame] = self._loop.create_future()
        self._calls[opaque] = answered  # first: the connection may end while this is sent
        answered.add_done_callback(lambda _: self._calls.pop(opaque, None))
        self.send(data)
        return answered

    def submit(self, frame_of: Callable[[int], bytes], answered: Callable[[Frame | DisconnectedError], None]) -> None:
        """Send the frame that ``frame_of`` makes for an ``opaque``; ``answered`` gets the response in the turn in which
        it comes, or at the end of the connection the error. Raises what ``ask`` does.
        """
        opaque = self._new_opaque()
        self._submitted[opaque] = answered
        try:
            self.send(frame_of(opaque))
        except BaseException:
            self._submitted.pop(opaque, None)
            raise

    def _new_opaque(self) -> int:
        if self.is_closed:
            raise DisconnectedError(f"the connection to {self.place} has ended")
        if self._unsent_bytes > UNSENT_BYTES_MAX // 2:  # more would end the connection, and all calls with it
            raise TooManyCallsError(f"{self.place} has yet to read {self._unsent_bytes} bytes of earlier requests")
        if len(self._calls) + len(self._submitted) >= CALLS_MAX:
            raise TooManyCallsError(f"{CALLS_MAX} requests wait for an answer of {self.place} already")
        return self._next_opaque()

    def tell(self, request: Frame) -> bool:
        """Send a request without a response. False if the other side does not read what it was sent."""
        if self.is_closed or self.is_full:
            return False
        self.send(encode(request._replace(opaque=self._next_opaque(), flag=FLAG_ONEWAY)))
        return True

    def _next_opaque(self) -> int:
        while True:
            self._opaque = (self._opaque + 1) & _OPAQUE_MASK
            if self._opaque not in self._calls and self._opaque not in self._submitted:
                return self._opaque

    def _answered(self, frame: Frame) -> None:
        if self.protocol is None or PROTOCOL_FIELD in frame.fields:  # also of an answer that nobody waits for any more
            self.protocol = _version(frame.fields.get(PROTOCOL_FIELD, ""))
        submitted = self._submitted.pop(frame.opaque, None)
        if submitted is not None:
            submitted(frame)
            return
        waiting = self._calls.get(frame.opaque)
        if waiting is not None and not waiting.done():  # otherwise it came too late
            waiting.set_result(frame)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close the connection at once. Idempotent."""
        if not self.is_closed:
            self._owner.log.info("hung up on %s: %s", self.place, reason)
            self._end(reason)
            if self._transport is not None:
                self._transport.abort()

    def finish(self) -> None:
        """Close the connection once everything sent has been read. Idempotent."""
        if not self.is_closed:
            self.flush()
            self._end("closed")
            self._linger(_CLOSE)
            if self._transport is not None:
                self._transport.close()

    async def lost(self, timeout_s: float) -> None:
        """After ``finish``: wait until nothing of the connection is left, which over TLS takes the other side.

        One that is not gone by then is closed at once. A loop must not be closed before.
        """
        if self._transport is None:
            return
        self._lost = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._lost
        except TimeoutError:
            transport = self._transport
            if transport is not None:
                self._lost = self._loop.create_future()
                transport.abort()
                await self._lost

    def reset_if_killed(self) -> None:
        """Let the kernel reset the connection if this process is killed.

        At a mere end of the stream Java's clients wait for their answers until they time out, for 3 s; at a reset they
        try again at once. An orderly close stays one.
        """
        self._linger(_RESET)

    def _linger(self, how: bytes) -> None:
        link = self._transport.get_extra_info("socket") if self._transport is not None else None
        if link is not None:
            with suppress(OSError):  # it has ended already
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)

    def _end(self, reason: str) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._buffer.clear()
        self._count_held()
        self._set_backlog(False)
        self._count_unsent(0)
        self._out.clear()
        self._tell_taken()
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(DisconnectedError(f"the connection to {self.place} ended: {reason}"))
        self._owner.closed(self)
        submitted, self._submitted = self._submitted, {}
        for answered in submitted.values():  # last: they may open another connection
            answered(DisconnectedError(f"the connection to {self.place} ended: {reason}"))

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None and not taken.done():
            taken.set_result(None)

    def _pause_or_resume(self) -> None:
        if self._transport is None or self.is_closed:
            return
        blocked = self.is_full or (
            self._under_way > 0
            and (
                self._under_way >= REQUESTS_MAX
                or self._under_way_bytes >= REQUEST_BYTES_MAX
                or self._room.is_over(self.counted_as)
            )
        )
        if self._backlog and not blocked and not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)
        must = blocked or self._backlog
        if must == self.is_paused:
            return
        self.is_paused = must
        if must:
            self._transport.pause_reading()
            return
        if self.partial_since is not None:  # the client could not finish its frame before
            self.partial_since = self._loop.time()
        if not self._resting:
            self._transport.resume_reading()


def _encoded(request: Frame, answer: Frame) -> bytes:
    try:
        return encode(answer)
    except FrameError as error:
        return encode(request.answer(AnswerCode.SYSTEM_ERROR, f"the answer is too long: {error}"))


def _version(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _bytes_of(request: Frame) -> int:
    fields = request.fields
    return len(request.body) + (fields.header_bytes if type(fields) is LargeFields else 0)
