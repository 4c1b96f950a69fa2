"""One connection: what it may occupy, and whose turn it is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest

from dledger.remoting import connection as module
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import ByteRoom, DisconnectedError, Owner, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame, cut, encode
from dledger.remoting.server import Handlers, RemotingServer, ServerLimits
from dledger.rpc import loops

MIB = 1 << 20
AT_ONCE_BYTES = 256 * 1024
"""What loops read at once."""


class Transport:
    """Takes nothing to send, and remembers whether it is read from. Once it has ended, it refuses, as uvloop's do."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.has_ended = False
        self._reads = True
        self.unsent = 0
        self.written = bytearray()
        self.high = 0
        self.protocol: RemotingConnection | None = None

    def is_read(self) -> bool:
        return self._reads

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self.host, 1) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.has_ended

    def write(self, data: bytes) -> None:
        if self.has_ended:
            raise RuntimeError("the handler is closed")
        self.unsent += len(data)
        if len(self.written) < MIB:
            self.written += data
        if self.unsent > self.high and self.protocol is not None:
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True

    def abort(self) -> None:
        """The connection is gone."""

    def close(self) -> None:
        """Everything written is read."""


class _Side:
    """Makes connections, and keeps what they ask."""

    def __init__(self, *, bytes_max: int = 256 * MIB, host_bytes_max: int = 256 * MIB) -> None:
        self.asked: list[Frame] = []
        self.room = ByteRoom(bytes_max, host_bytes_max)
        self.unsent = ByteRoom(bytes_max, host_bytes_max)
        self.owner = Owner(lambda _: None, lambda _, frame: self.asked.append(frame), lambda _: None)

    def accept(self, host: str = "192.0.2.1") -> tuple[RemotingConnection, Transport]:
        connection, transport = RemotingConnection(self.owner, self.room, self.unsent), Transport(host)
        transport.protocol = connection
        connection.connection_made(cast("asyncio.Transport", transport))
        return connection, transport


def _on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loops.run(asyncio.wait_for(test(), 30))


def test_answers_to_a_connection_that_has_just_ended_are_dropped() -> None:
    """Its end is known to the loop, but not to us yet: an error would end what else is done in that turn."""

    async def test() -> None:
        side = _Side()
        connection, transport = side.accept()
        connection.data_received(encode(Frame(1, 7)))
        transport.has_ended = True

        connection.done(side.asked[0], side.asked[0].answer())

        assert not transport.written
        connection.connection_lost(None)
        assert connection.is_closed

    _on_a_loop(test)


def test_a_request_whose_sending_ends_the_connection_has_an_outcome() -> None:
    """The other side has read nothing for long, and this request is too much: nobody would ever answer it."""

    async def test() -> None:
        side = _Side(bytes_max=MIB, host_bytes_max=MIB)
        connection, _ = side.accept()
        connection.is_full = True
        answered = connection.ask(Frame(1, 0, body=bytes(2 * MIB)))
        assert connection.is_closed
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(answered, 5)
        assert not connection._calls

    _on_a_loop(test)


def test_a_killed_server_resets_its_connections_and_one_that_stops_ends_them() -> None:
    """After a mere end Java's clients wait for their answers until they time out; after a reset they try again."""

    async def test() -> None:
        def answer(connection: RemotingConnection, frame: Frame) -> None:
            connection.done(frame, frame.answer(body=bytes(4 * MIB)))

        handlers = Handlers(direct={1: answer}, awaited={}, closed=lambda _: None, refusal_of=lambda _: None)
        server = RemotingServer("test", handlers, ServerLimits(9, 9, 9, 9, 9.0, *[256 * MIB] * 4))
        listening = await asyncio.get_running_loop().create_server(server.protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(encode(Frame(1, 7)))
        head = await reader.readexactly(4)
        (accepted,) = server._connections
        assert accepted._transport is not None
        link = accepted._transport.get_extra_info("socket")
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)[:4] != bytes(4)  # so the kernel does
        await server.close(0)
        rest = await reader.read(-1)  # and nothing of the answer is lost for that
        assert len(rest) == int.from_bytes(head, "big")
        writer.close()
        listening.close()

    _on_a_loop(test)


def test_the_last_answer_goes_at_once_and_others_together() -> None:
    """Nothing could join the last one, and the next turn of the loop may come late."""

    async def test() -> None:
        side = _Side()
        connection, transport = side.accept()
        connection.data_received(b"".join(encode(Frame(1, number)) for number in range(3)))
        first, second, last = side.asked
        connection.done(first, first.answer())
        connection.done(second, second.answer())
        assert not transport.written, "they wait for each other until the end of the turn"
        connection.done(last, last.answer())
        frames, _ = cut(transport.written)
        assert [frame.opaque for frame in frames] == [0, 1, 2]

    _on_a_loop(test)


def test_answers_to_what_was_received_together_go_together() -> None:
    """Also if each is given before the next request is looked at."""

    async def test() -> None:
        side = _Side()
        side.owner = side.owner._replace(request=lambda its, frame: its.done(frame, frame.answer()))
        connection, transport = side.accept()
        connection.data_received(b"".join(encode(Frame(1, number)) for number in range(3)))
        assert not transport.written
        await asyncio.sleep(0)
        assert len(cut(transport.written)[0]) == 3

    _on_a_loop(test)


def test_a_flood_of_small_frames_leaves_others_their_turn() -> None:
    """What is received at once may be twenty thousand requests."""

    async def test() -> None:
        side = _Side()
        connection, transport = side.accept()
        count = 3 * module.REQUESTS_MAX
        connection.data_received(b"".join(encode(Frame(1, number)) for number in range(count)))
        assert len(side.asked) == module.FRAMES_PER_TURN
        assert not transport.is_read()
        while len(side.asked) < module.REQUESTS_MAX:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(side.asked) == module.REQUESTS_MAX, "and no more until some are done"
        done = 0
        while done < count:
            connection.done(side.asked[done], None)
            done += 1
            await asyncio.sleep(0)
            assert len(side.asked) - done <= module.REQUESTS_MAX
        assert [one.opaque for one in side.asked] == list(range(count))
        assert transport.is_read()

    _on_a_loop(test)


def test_a_flood_of_large_frames_leaves_others_their_turn() -> None:
    """However much of it has arrived: others wait for no more than was read at once."""

    async def test() -> None:
        side = _Side()
        loop = asyncio.get_running_loop()
        taken: list[int] = []  # by turn of the loop

        def turn() -> None:
            taken.append(len(side.asked))
            loop.call_soon(turn)

        def done(connection: RemotingConnection, frame: Frame) -> None:
            side.asked.append(frame)
            connection.let_go(frame)

        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * MIB)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
            client.connect(listening.getsockname())
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            client.setblocking(False)
            data, sent_bytes = encode(Frame(1, 7, body=bytes(2000))), 0
            with suppress(BlockingIOError):
                while True:
                    sent_bytes += client.send(data)
            turn()
            await loop.connect_accepted_socket(
                lambda: RemotingConnection(side.owner._replace(request=done), side.room, side.unsent), accepted
            )
            while len(side.asked) < sent_bytes // len(data):
                await asyncio.sleep(0)

        most = max(after - before for before, after in pairwise(taken))
        assert sent_bytes > 8 * AT_ONCE_BYTES
        assert most <= 2 * AT_ONCE_BYTES // len(data)

    _on_a_loop(test)


def test_who_reads_nothing_is_not_read_again_after_the_turn() -> None:
    """Much was received at once; only the end of what is unsent lets the connection be read."""

    async def test() -> None:
        connection, transport = _Side().accept()
        connection.data_received(encode(Frame(1, 1, body=bytes(module.READ_BYTES))))
        connection.pause_writing()
        for _ in range(3):
            await asyncio.sleep(0)
        read = [transport.is_read()]
        connection.resume_writing()
        assert [*read, transport.is_read()] == [False, True]

    _on_a_loop(test)


def test_a_connection_rests_for_the_whole_turn_whatever_else_ends_in_it() -> None:
    """Else uvloop would go on reading from it while others wait."""

    async def test() -> None:
        connection, transport = _Side().accept()
        connection.data_received(encode(Frame(1, 1, body=bytes(module.READ_BYTES))))
        connection.pause_writing()
        connection.resume_writing()
        read = [transport.is_read()]
        await asyncio.sleep(0)
        assert [*read, transport.is_read()] == [False, True]

    _on_a_loop(test)


def test_fields_count_like_bodies() -> None:
    """Else a connection could keep a thousand headers of a megabyte in memory."""

    async def test() -> None:
        side = _Side(bytes_max=64 * MIB, host_bytes_max=8 * MIB)
        connection, transport = side.accept()
        frame = Frame(1, 1, {"properties": "x" * 200_000})
        sent = 0
        while transport.is_read():
            connection.data_received(encode(frame))
            sent += 1
            assert sent < 100
            await asyncio.sleep(0)  # after so much, it is read again only in the next turn
        assert sent > 1
        for one in side.asked:
            connection.done(one, None)
        assert transport.is_read()
        assert not side.room.is_over("192.0.2.1")

    _on_a_loop(test)


def test_a_whole_request_does_not_suffer_for_others_of_its_host() -> None:
    """Only frames that cannot be finished are hung up on."""

    async def test() -> None:
        side = _Side(host_bytes_max=MIB)
        busy, _ = side.accept()
        busy.data_received(encode(Frame(1, 1, body=bytes(2 * MIB))))
        other, _ = side.accept()
        other._owner = other._owner._replace(request=lambda one, frame: one.done(frame, frame.answer()))
        other.data_received(encode(Frame(1, 1)))
        closed = [other.is_closed]
        other.data_received(b"\0\0")
        assert [*closed, other.is_closed] == [False, True]

    _on_a_loop(test)


def test_what_nobody_reads_is_limited_over_all_connections() -> None:
    """Each may have little enough."""

    async def test() -> None:
        side = _Side(host_bytes_max=32 * MIB)
        open_ones = [side.accept()[0] for _ in range(100)]
        for one in open_ones:
            one.send(bytes(MIB))
        await asyncio.sleep(0)
        assert sum(not one.is_closed for one in open_ones) == 32
        stranger, _ = side.accept("192.0.2.2")
        stranger.send(bytes(MIB))
        await asyncio.sleep(0)
        assert not stranger.is_closed

    _on_a_loop(test)


def test_what_was_read_no_longer_counts() -> None:
    async def test() -> None:
        side = _Side(host_bytes_max=2 * MIB)
        connection, transport = side.accept()
        for _ in range(10):
            connection.send(bytes(MIB))
            await asyncio.sleep(0)
            transport.unsent = 0
            connection.resume_writing()
        assert not connection.is_closed

    _on_a_loop(test)


def test_a_frame_may_take_its_time_while_its_connection_is_not_read() -> None:
    """It is not the client that lets it wait."""

    async def test() -> None:
        side = _Side(host_bytes_max=MIB)
        connection, transport = side.accept()
        whole = encode(Frame(1, 2, body=bytes(MIB)))
        connection.data_received(encode(Frame(1, 1, body=bytes(2 * MIB))) + whole[:100])
        assert not transport.is_read()
        began, paused = connection.partial_since, [connection.is_paused]
        await asyncio.sleep(0.01)
        connection.done(side.asked[0], None)
        assert transport.is_read()
        assert [*paused, connection.is_paused] == [True, False]
        assert connection.partial_since is not None
        assert began is not None
        assert connection.partial_since > began

    _on_a_loop(test)


def test_each_frame_has_its_own_time_on_a_connection_that_always_has_part_of_one() -> None:
    """Who sends without a pause is not taken for one whose frame never ends."""

    async def test() -> None:
        connection, _ = _Side().accept()
        frame = encode(Frame(1, 1, body=bytes(10_000)))
        connection.data_received(frame[:50])
        first = connection.partial_since
        while connection.heard_at == first:
            await asyncio.sleep(0)
            connection.data_received(frame[50:] + frame[:50])
        assert connection.partial_since == connection.heard_at
        since = connection.partial_since
        while connection.heard_at == since:
            await asyncio.sleep(0)
            connection.data_received(frame[50:51])
        assert connection.partial_since == since

    _on_a_loop(test)


def test_one_may_wait_until_everything_is_answered() -> None:
    async def test() -> None:
        side = _Side()
        connection, _ = side.accept()
        await connection.quiet()
        connection.data_received(encode(Frame(1, 1)) + encode(Frame(1, 2)))
        quiet = asyncio.create_task(connection.quiet())
        connection.done(side.asked[0], None)
        await asyncio.sleep(0)
        assert not quiet.done()
        connection.done(side.asked[1], None)
        await quiet

    _on_a_loop(test)


def test_a_frame_that_never_ends_takes_no_more_than_a_frame() -> None:
    async def test() -> None:
        side = _Side()
        connection, _ = side.accept()
        connection.data_received((FRAME_BYTES_MAX - 8).to_bytes(4, "big") + bytes(MIB))
        assert connection.partial_since is not None
        connection.data_received(bytes(MIB))
        assert not side.asked
        connection.connection_lost(None)
        assert side.room.is_empty

    _on_a_loop(test)


def test_a_server_that_stops_answers_what_it_has_taken() -> None:
    """A producer would send a stored message again. Requests that come later are refused."""

    async def test() -> None:
        taken: list[Frame] = []
        handlers = Handlers({1: lambda _, frame: taken.append(frame)}, {}, lambda _: None, lambda _: None)
        server = RemotingServer("server", handlers, ServerLimits(9, 9, 9, 9, 9, *[MIB] * 4))
        connection, transport = server.protocol(), Transport("192.0.2.1")
        connection.connection_made(cast("asyncio.Transport", transport))
        connection.data_received(encode(Frame(1, 7)))
        stopping = asyncio.create_task(server.close(grace_s=30))
        for _ in range(10):
            await asyncio.sleep(0)
        connection.data_received(encode(Frame(1, 8)))
        assert not stopping.done()
        assert not connection.is_closed
        connection.done(taken[0], taken[0].answer())
        await stopping
        frames, _ = cut(bytes(transport.written))
        assert [(one.opaque, one.code) for one in frames] == [(8, AnswerCode.SERVICE_NOT_AVAILABLE), (7, 0)]

    _on_a_loop(test)


def test_a_host_has_one_name_whatever_the_socket_says() -> None:
    """Members know each other by it, and limits count by it."""

    async def test() -> None:
        connection, _ = _Side().accept("::ffff:192.0.2.1")
        assert str(connection.place) == "192.0.2.1:1"

    _on_a_loop(test)


def test_nothing_more_is_asked_of_who_does_not_read() -> None:
    """Else the connection would end, and with it everything that was asked before."""

    async def test() -> None:
        connection, transport = _Side().accept()
        with suppress(TimeoutError):
            await connection.call(Frame(1, 0, body=bytes(15 * MIB)), 0.001)
        with suppress(TimeoutError):
            await connection.call(Frame(1, 0, body=bytes(15 * MIB)), 0.001)
        with suppress(TimeoutError):
            await connection.call(Frame(1, 0, body=bytes(15 * MIB)), 0.001)
        with pytest.raises(TooManyCallsError):
            await connection.call(Frame(1, 0, body=bytes(15 * MIB)), 0.001)
        assert not connection.is_closed
        transport.unsent = 0
        connection.resume_writing()
        with pytest.raises(TimeoutError):
            await connection.call(Frame(1, 0), 0.001)

    _on_a_loop(test)


def test_a_crowd_shares_the_turns() -> None:
    """Two hundred connections with a hundred requests each would make a turn of seconds."""

    async def test() -> None:
        side = _Side()
        data = b"".join(encode(Frame(1, number)) for number in range(500))
        crowd = [side.accept()[0] for _ in range(200)]
        for one in crowd:
            one.data_received(data)
        first = len(side.asked)
        await asyncio.sleep(0)
        assert 0 < len(side.asked) - first <= 2 * module.CROWD_FRAMES_PER_TURN
        while len(side.asked) < 200 * 500:
            await asyncio.sleep(0)
        assert side.room.crowd == 0
        crowd[0].data_received(data)
        crowd[0].close("it leaves")
        assert side.room.crowd == 0

    _on_a_loop(test)
