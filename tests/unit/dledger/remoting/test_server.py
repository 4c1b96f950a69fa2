"""What the clients of a server may occupy of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from dledger.log_output import LINES_MAX
from dledger.remoting import server as module
from dledger.remoting.codes import ANNOUNCED, AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame, HeaderForm, cut, encode, head_of
from dledger.remoting.server import SILENCE_S, TURN_S, Handler, Handlers, RemotingServer, ServerLimits
from dledger.rpc import loops
from tests.unit.dledger.remoting.test_connection import Transport

MIB = 1 << 20
SLOW = 7
"""The code of requests that wait until they are let go."""


class _Server:
    """A server whose requests wait until ``free``; some are refused with ``SYSTEM_BUSY`` before."""

    def __init__(self, requests_max: int, host_requests_max: int) -> None:
        self.free = asyncio.Event()
        limits = ServerLimits(99, 99, requests_max, host_requests_max, 30.0, *[256 * MIB] * 4)
        handlers = Handlers({}, {SLOW: self._wait}, lambda _: None, lambda _: None)
        self.server = RemotingServer("test", handlers, limits)
        self._opaques = itertools.count(1)

    async def _wait(self, _: RemotingConnection, frame: Frame) -> Frame:
        await self.free.wait()
        return frame.answer()

    def accept(self, host: str) -> tuple[RemotingConnection, Transport]:
        connection, transport = self.server.protocol(), Transport(host)
        transport.protocol = connection
        connection.connection_made(cast("asyncio.Transport", transport))
        return connection, transport

    async def ask(self, client: tuple[RemotingConnection, Transport], number: int = 1) -> int:
        """How many of these requests were refused."""
        connection, transport = client
        before = len(cut(bytes(transport.written))[0])
        connection.data_received(b"".join(encode(Frame(SLOW, next(self._opaques))) for _ in range(number)))
        for _ in range(10):
            await asyncio.sleep(0)
        answers = cut(bytes(transport.written))[0][before:]
        assert {one.code for one in answers} <= {AnswerCode.SYSTEM_BUSY}
        return len(answers)


def _on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loops.run(asyncio.wait_for(test(), 30))


def _with_server(test: Callable[[_Server], Awaitable[None]], requests_max: int, host_requests_max: int) -> None:
    async def run() -> None:
        server = _Server(requests_max, host_requests_max)
        try:
            await test(server)
        finally:
            server.free.set()
            await server.server.close(1)

    _on_a_loop(run)


def test_requests_that_were_on_their_way_are_refused_while_it_stops() -> None:
    """Closed at once, their connection would leave their senders in doubt about what became of them."""

    async def test(server: _Server) -> None:
        connection, transport = server.accept("10.0.0.1")
        closing = asyncio.create_task(server.server.close(30))
        for _ in range(10):
            await asyncio.sleep(0)
        connection.data_received(encode(Frame(SLOW, 1)))
        await closing
        (answer,) = cut(bytes(transport.written))[0]
        assert answer.code == AnswerCode.SERVICE_NOT_AVAILABLE
        assert connection.is_closed

    _with_server(test, 99, 99)


def test_a_client_that_asks_on_and_on_does_not_keep_it_from_stopping() -> None:
    async def test(server: _Server) -> None:
        connection, _ = server.accept("10.0.0.1")
        closing = asyncio.create_task(server.server.close(2 * SILENCE_S))
        while not connection.is_closed:
            connection.data_received(encode(Frame(SLOW, 1)))
            await asyncio.sleep(0)
        await closing

    _with_server(test, 99, 99)


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nor the disk that it is on: not with connections beyond the limit, nor with bytes that are no frames."""
    caplog.set_level(logging.INFO)

    async def test(server: _Server) -> None:
        for number in range(300):
            connection, _ = server.accept("192.0.2.1")
            if number % 2:
                connection.data_received(bytes(64))

    _with_server(test, 4, 4)

    hung_up = [one for one in caplog.messages if "hung up" in one]
    assert 0 < len(hung_up) <= LINES_MAX


def test_who_has_asked_for_nothing_makes_room_for_newcomers() -> None:
    """Half frames and silence shut no client out, of the same host or another; who is known to ask stays."""

    async def test() -> None:
        limits = ServerLimits(5, 3, 99, 99, 30.0, *[256 * MIB] * 4)
        answer_all = Handlers({}, {}, lambda _: None, lambda _: None)
        holder = _Server(99, 99)
        holder.server = server = RemotingServer("test", answer_all, limits)
        whole = encode(Frame(SLOW, 1))

        def accept(host: str, data: bytes = b"") -> RemotingConnection:
            connection, _ = holder.accept(host)
            if data:
                connection.data_received(data)
            return connection

        first, half, silent = accept("10.0.0.1", whole), accept("10.0.0.1", whole[:9]), accept("10.0.0.1")
        newcomer = accept("10.0.0.1", whole)
        assert [one.is_closed for one in (first, half, silent, newcomer)] == [False, True, False, False]
        another = accept("10.0.0.1", whole)
        assert [one.is_closed for one in (first, silent, newcomer, another)] == [False, True, False, False]
        assert accept("10.0.0.1", whole).is_closed, "all others ask for something"
        others = [accept(f"10.0.0.{number}", whole) for number in (2, 3)]
        assert accept("10.0.0.4", whole).is_closed, "there is no room, and nobody mute at the host with most"
        assert not any(one.is_closed for one in (first, newcomer, another, *others))
        await server.close(0)

    _on_a_loop(test)


def test_one_host_cannot_use_up_the_requests_of_all() -> None:
    """Whoever asks from another one is answered as before."""

    async def test(server: _Server) -> None:
        greedy = [server.accept("192.0.2.1") for _ in range(8)]
        refused = [await server.ask(one, 50) for one in greedy]
        assert sum(refused) == 400 - 300
        assert await server.ask(server.accept("192.0.2.2"), 50) == 0

    _with_server(test, 400, 300)


def test_a_client_beside_a_greedy_one_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may share an address: of a container host, or of a gateway."""
    monkeypatch.setattr(module, "LITTLE", 4)

    async def test(server: _Server) -> None:
        refused = await server.ask(server.accept("192.0.2.1"), 100)
        assert refused == 100 - 70
        assert await server.ask(server.accept("192.0.2.1"), 4) == 0, "from what is reserved"
        assert await server.ask(server.accept("192.0.2.2"), 4) == 0

    _with_server(test, 100, 80)


def test_what_is_done_makes_room_again() -> None:
    """Else a host would be refused for ever once it was busy."""

    async def test(server: _Server) -> None:
        client = server.accept("192.0.2.1")
        assert await server.ask(client, 12) == 2
        server.free.set()
        while server.server.requests_under_way:
            await asyncio.sleep(0)
        server.free.clear()
        assert await server.ask(server.accept("192.0.2.1"), 10) == 0

    _with_server(test, 20, 10)


def test_the_addresses_of_one_ipv6_network_are_one_host() -> None:
    """A machine usually has a /64, and could use an address per connection."""

    async def test(server: _Server) -> None:
        machines = [server.accept(f"2001:db8::{number}") for number in range(1, 5)]
        assert sum([await server.ask(one, 5) for one in machines]) == 10
        assert await server.ask(server.accept("2001:db8:0:1::1"), 5) == 0
        assert str(machines[0][0].place) == "[2001:db8::1]:1", "which names are still complete"

    _with_server(test, 20, 10)


def test_what_can_be_answered_at_once_needs_no_task() -> None:
    """The rest gets one, and counts until it is done; an error is an answer."""

    async def test() -> None:
        async def later(connection: RemotingConnection, frame: Frame) -> Frame:
            await asyncio.sleep(0)
            return frame.answer(2)

        def prompt(connection: RemotingConnection, frame: Frame) -> Handler | None:
            if frame.body == b"refused":
                raise RequestError("refused", AnswerCode.NO_PERMISSION)
            if frame.body == b"later":
                return later
            connection.send(encode(frame.answer(1)))
            return None

        handlers = Handlers({}, {}, lambda _: None, lambda _: None, prompt={5: prompt})
        server = RemotingServer("server", handlers, ServerLimits(9, 9, 1, 1, 9, *[MIB] * 4))
        connection, transport = server.protocol(), Transport("192.0.2.1")
        connection.connection_made(cast("asyncio.Transport", transport))

        for opaque, body in enumerate((b"now", b"refused", b"later", b"now")):
            connection.data_received(encode(Frame(5, opaque, body=body)))

        assert server.codes == {5}
        assert server.requests_under_way == connection.under_way == 1
        await connection.quiet()
        await server.close(0)
        frames, _ = cut(bytes(transport.written))
        codes = {one.opaque: one.code for one in frames}
        assert codes == {0: 1, 1: AnswerCode.NO_PERMISSION, 2: 2, 3: AnswerCode.SYSTEM_BUSY}

    _on_a_loop(test)


def test_what_is_answered_at_once_does_not_make_a_turn_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls of messages in memory: a thousand of them may arrive together."""
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])

    async def test() -> None:
        async def later(_: RemotingConnection, frame: Frame) -> Frame:
            return frame.answer(2)

        def prompt(connection: RemotingConnection, frame: Frame) -> Handler | None:
            clock[0] += TURN_S / 4
            if frame.opaque == 60:
                raise RequestError("refused", AnswerCode.NO_PERMISSION)
            if frame.opaque == 50:
                return later
            connection.send(encode(frame.answer(1)))
            return None

        handlers = Handlers({}, {}, lambda _: None, lambda _: None, prompt={5: prompt})
        server = RemotingServer("server", handlers, ServerLimits(9, 9, 200, 200, 9, *[MIB] * 4))
        connection, transport = server.protocol(), Transport("192.0.2.1")
        connection.connection_made(cast("asyncio.Transport", transport))
        most, before = 0.0, clock[0]
        connection.data_received(b"".join(encode(Frame(5, opaque)) for opaque in range(100)))
        while connection.under_way:
            most, before = max(most, clock[0] - before), clock[0]
            await asyncio.sleep(0)
        assert most <= 3 * TURN_S, "what is done at once, and what waited for its turn"
        await asyncio.sleep(0)
        frames, _ = cut(bytes(transport.written))
        codes = {one.opaque: one.code for one in frames}
        assert codes == dict.fromkeys(range(100), 1) | {50: 2, 60: AnswerCode.NO_PERMISSION}
        assert server.requests_under_way == 0
        assert server._quota.is_empty
        await server.close(0)

    _on_a_loop(test)


@pytest.mark.parametrize("form", HeaderForm)
def test_the_first_answer_announces_our_codes_and_no_other_does(form: HeaderForm) -> None:
    """However it is sent: in parts, together with the next one, and after a request of the server's own."""

    async def test() -> None:
        def answer(connection: RemotingConnection, frame: Frame) -> None:
            connection.tell(Frame(9, 0))
            body = b"body"
            answers = [frame.answer(fields={"own": "1"}, body=body), frame.answer(AnswerCode.SYSTEM_BUSY)]
            connection.let_go(frame)
            connection.send(head_of(answers[0], len(body)), body, encode(answers[1]))

        handlers = Handlers(direct={1: answer}, awaited={}, closed=lambda _: None, refusal_of=lambda _: None)
        server = RemotingServer("test", handlers, ServerLimits(9, 9, 9, 9, 9.0, *[256 * MIB] * 4), ANNOUNCED)
        for _ in range(2):
            connection, transport = server.protocol(), Transport("192.0.2.1")
            transport.protocol = connection
            connection.connection_made(cast("asyncio.Transport", transport))

            connection.data_received(encode(Frame(1, 7, form=form)) + encode(Frame(1, 8, form=form)))
            connection.flush()

            frames = cut(bytes(transport.written))[0]
            answers = [one for one in frames if one.is_response]
            assert [one.fields for one in answers] == [{"own": "1", **ANNOUNCED}, {}, {"own": "1"}, {}]
            assert [one.body for one in answers] == [b"body", b"", b"body", b""]
            assert [one.code for one in frames if not one.is_response] == [9, 9]
        await server.close(0)

    _on_a_loop(test)


def test_an_answer_without_room_leaves_the_announcement_to_the_next() -> None:
    """It goes as it is: an answer counts for more than what is announced."""

    async def test() -> None:
        def ignore(connection: RemotingConnection, frame: Frame) -> None:
            """It is answered below."""

        handlers = Handlers(direct={1: ignore}, awaited={}, closed=lambda _: None, refusal_of=lambda _: None)
        server = RemotingServer("test", handlers, ServerLimits(9, 9, 9, 9, 9.0, *[256 * MIB] * 4), ANNOUNCED)
        connection, transport = server.protocol(), Transport("192.0.2.1")
        transport.protocol = connection
        connection.connection_made(cast("asyncio.Transport", transport))
        request = Frame(1, 7)
        full = request.answer(body=bytes(FRAME_BYTES_MAX - 8 - len(encode(request.answer()))))
        answers = list[Frame]()

        for answer in (full, request.answer(), request.answer()):
            connection.data_received(encode(request))
            connection.done(request, answer)
            answers += cut(bytes(transport.written))[0]
            transport.written.clear()
            transport.unsent = 0
            connection.resume_writing()  # all of it was read

        assert [one.fields for one in answers] == [{}, ANNOUNCED, {}]
        assert answers[0].body == full.body
        await server.close(0)

    _on_a_loop(test)


def test_nothing_for_a_one_way_request_leaves_the_announcement_to_the_next_answer() -> None:
    """A client whose first message wants no answer must not end the broker."""

    async def test() -> None:
        handlers = Handlers(direct={}, awaited={}, closed=lambda _: None, refusal_of=lambda _: None)
        server = RemotingServer("test", handlers, ServerLimits(9, 9, 9, 9, 9.0, *[256 * MIB] * 4), ANNOUNCED)
        connection, transport = server.protocol(), Transport("192.0.2.1")
        connection.connection_made(cast("asyncio.Transport", transport))

        connection.send()
        connection.send(b"")
        connection.send(encode(Frame(1, 7).answer()))
        connection.flush()

        assert [one.fields for one in cut(bytes(transport.written))[0]] == [ANNOUNCED]
        await server.close(0)

    _on_a_loop(test)
