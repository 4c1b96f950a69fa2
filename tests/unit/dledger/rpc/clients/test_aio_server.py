"""Requests for what is not there, of any bytes: each is refused, and the port serves on."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import grpc
import pytest
from grpc._cython import cygrpc

from dledger.config import ConnectionLimits
from dledger.rpc import loops, options
from dledger.rpc.clients import codec
from dledger.rpc.clients.grpc_server import AnswerStream, add_methods, aio_server
from dledger.types import LogIndex
from tests.support import grpc_log
from tests.support.http2 import HEADERS, Http2Link, call_frames, frame
from tests.unit.dledger.rpc.clients.test_connections import APPEND, READ, ask, serving

RST_STREAM = 3
PATH = "/dledger.v1.LogService/Nothing"


def refusal(link: Http2Link) -> bytes:
    """The headers with which a call ends."""
    while (found := link.recv()) is not None and found.kind != HEADERS:
        pass
    assert found is not None, "the connection was closed"
    return found.payload


@pytest.mark.parametrize(
    "path", [PATH.encode(), b"/\xf2\x83b,\xad" + PATH.encode()[6:], b"\xff" * len(PATH), b"\0" * len(PATH)]
)
def test_a_request_for_anything_ends_itself_alone(path: bytes) -> None:
    """gRPC's own server ends, with all calls of everybody, at a path that is no UTF-8."""
    with serving(ConnectionLimits()) as (node, server), grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as held:
        append = held.unary_unary(APPEND, request_serializer=None, response_deserializer=None)
        append(grpc_log.encode_append(codec.Append("default", [b"before"])), timeout=30)
        for _ in range(10):
            with Http2Link("127.0.0.1", server.grpc_port) as link:
                link.begin()
                link.send(call_frames(1, PATH, b"").replace(PATH.encode(), path))
                assert b"there is no such method" in refusal(link)

        append(grpc_log.encode_append(codec.Append("default", [b"after"])), timeout=30)
        read = grpc_log.encode_read(codec.Read("default", LogIndex(0), 2))
        assert len(grpc_log.decode_read_answer(ask(server, READ, read)).entries) == 2
    assert node.bodies() == [b"before", b"after"]


def test_requests_for_nothing_that_are_given_up_at_once_end_themselves_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Before they are answered, and while the server stops; nobody logs an error for them."""
    cancel = (8).to_bytes(4, "big")
    with serving(ConnectionLimits()) as (_, server):
        for _ in range(20):
            with Http2Link("127.0.0.1", server.grpc_port) as link:
                link.begin()
                for stream in range(1, 41, 2):
                    link.send(call_frames(stream, PATH, b"") + frame(RST_STREAM, cancel, stream=stream))
        ask(server, APPEND, grpc_log.encode_append(codec.Append("default", [b"after"])))
        with Http2Link("127.0.0.1", server.grpc_port) as link:
            link.begin()
            for stream in range(1, 201, 2):
                link.send(call_frames(stream, PATH, b""))
            server.close()
    assert [one for one in caplog.records if one.levelname in {"ERROR", "CRITICAL"}] == []


def test_a_server_takes_as_many_calls_at_a_time_as_it_was_told() -> None:
    """Whoever they come from: an address has its share of that (``Connections``), and there are many addresses."""

    async def main() -> None:
        begun, held = asyncio.Event(), asyncio.Event()

        async def answer(request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            if request == b"first":
                begun.set()
                await held.wait()
            return request

        server = aio_server(maximum_concurrent_rpcs=1)
        add_methods(server, "test.Service", {"Ask": grpc.unary_unary_rpc_method_handler(answer)})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_unary("/test.Service/Ask", request_serializer=None, response_deserializer=None)
                first = ask(b"first")
                await begun.wait()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ask(b"second")
                held.set()
                assert await first == b"first"
        finally:
            await server.stop(None)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    loops.run(main())


def test_taking_a_call_costs_the_same_with_many_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own server waits for calls of every method anew after each call; nothing is left when ours has stopped."""
    wait = Mock(wraps=asyncio.wait)
    monkeypatch.setattr(asyncio, "wait", wait)

    async def main() -> None:
        async def answer(request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return request

        server = aio_server()
        methods = [f"Ask{number}" for number in range(20)]
        add_methods(server, "test.Service", {one: grpc.unary_unary_rpc_method_handler(answer) for one in methods})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                asks = [channel.unary_unary(f"/test.Service/{one}", None, None) for one in methods]
                for _ in range(3):
                    answers = await asyncio.gather(*(ask(b"%d" % number) for ask in asks for number in range(50)))
                    assert answers == [b"%d" % number for _ in asks for number in range(50)]
        finally:
            await server.stop(None)
        assert wait.call_count <= 1, "the server waits for its end, and not after each call"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loops.run(main())


def test_messages_that_others_follow_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrive, in order, also if they are more than gRPC keeps back; only the first and the last go at once."""
    send = Mock(wraps=cygrpc._send_message)
    monkeypatch.setattr(cygrpc, "_send_message", send)
    sent = [b"%d" % number * (1 + number % 1000) for number in range(3000)]

    async def main() -> None:
        async def answer(_request: bytes, stream: AnswerStream) -> None:
            for one in sent[:-1]:
                await stream.write_more(one)
            await stream.write(sent[-1])

        server = aio_server()
        add_methods(server, "test.Service", {"Ask": grpc.unary_stream_rpc_method_handler(answer)})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_stream("/test.Service/Ask", request_serializer=None, response_deserializer=None)
                assert [one async for one in ask(b"")] == sent
        finally:
            await server.stop(None)

    loops.run(main())
    assert [call.args[1] for call in send.call_args_list] == sent
    flags = [call.args[3] for call in send.call_args_list]
    assert flags == [0, *[cygrpc.WriteFlag.buffer_hint] * (len(sent) - 2), 0]


def test_headers_that_are_no_text_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever can connect may send hundreds of them with each request."""
    metadata = options.method(options.LOG_SERVICE, "Metadata")
    with serving(ConnectionLimits()) as (_, server), Http2Link("127.0.0.1", server.grpc_port) as link:
        link.begin()
        odd = [(f"x-{number}", b"\xff" * 8) for number in range(20)]
        link.send(call_frames(1, metadata, codec.encode_metadata_request("default"), *odd))
        assert refusal(link), "it is answered"
    assert caplog.records == []
