"""A port of remoting on real sockets: plaintext or TLS as it was told, and what strangers hear."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import cast

import grpc
import pytest

from dledger.client.shared import TlsFiles
from dledger.config import ClientAuth, SecurityConfig
from dledger.remoting.acceptor import REASONS_MAX, RemotingAcceptor
from dledger.remoting.codes import TLS_REQUIRED, AnswerCode
from dledger.remoting.frame import Frame, HeaderForm, cut, encode
from dledger.remoting.server import Handlers, RemotingServer, ServerLimits
from dledger.rpc import loops, tls
from dledger.rpc.listening import Arrival, listen
from dledger.rpc.loops import LoopThread
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import TlsServerMode
from dledger_cli import certs
from tests.support.certificates import files
from tests.support.waiting import wait_until

TIMEOUT_S = 120.0
TURNS_MAX = 5
"""From an accepted socket to a connection, and some more."""
FRAME = b"\0\0\0\x0etwelve bytes!!"
GRPC_PORT = 10913


class Echo(asyncio.Protocol):
    """Gives back what comes, and notes from whom."""

    def __init__(self, seen: list[tuple[str, int]]) -> None:
        self._seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        self._seen.append(transport.get_extra_info("peername")[:2])

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Served:
    """A port, and the clients whose connections were taken."""

    def __init__(self, directory: Path, keeper: TlsKeeper | None, mode: TlsServerMode | None, timeout_s: float) -> None:
        self.seen: list[tuple[str, int]] = []
        self._directory = directory
        self._loop = LoopThread("remoting-acceptor-test")
        self._bridge = self._loop.start()
        listening = listen("127.0.0.1", 0, "test's")
        self.port: int = listening[0].getsockname()[1]
        self.acceptor = RemotingAcceptor("broker", lambda: Echo(self.seen), keeper, mode, timeout_s)
        self._bridge.post(lambda: self.acceptor.open(listening, GRPC_PORT))

    def close(self) -> None:
        self._bridge.run(self.acceptor.close())
        self._loop.stop()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def plain(self) -> bool:
        """Whether a plaintext connection is served, rather than hung up on."""
        with self.connect() as link:
            return echoes(link)

    def sealed(self, *protocols: str, name: str = "client") -> bool:
        """The same with TLS."""
        try:
            with self.connect() as link, self.context(*protocols, name=name).wrap_socket(link) as stream:
                return echoes(stream)
        except (ssl.SSLError, ConnectionError):
            return False

    def context(self, *protocols: str, name: str = "client") -> ssl.SSLContext:
        """A client's TLS."""
        context = ssl.create_default_context(cafile=str(self._directory / "ca.crt"))
        context.check_hostname = False
        if name:
            pair = files(self._directory, name)
            context.load_cert_chain(str(pair.cert), str(pair.key))
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


def echoes(link: socket.socket) -> bool:
    """Whether a frame comes back."""
    received = b""
    with suppress(ConnectionError):
        link.sendall(FRAME)
        while len(received) < len(FRAME) and (part := link.recv(100)):
            received += part
    assert received in (b"", FRAME)
    return received == FRAME


def whole(link: socket.socket) -> bytes:
    """All that comes until the end."""
    return b"".join(iter(lambda: link.recv(65536), b""))


@contextmanager
def serving(
    directory: Path,
    *,
    secured: bool = False,
    mode: TlsServerMode | None = None,
    auth: ClientAuth = ClientAuth.REQUIRE,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Served]:
    """A port, with certificates if ``secured``."""
    keeper = None
    if secured:
        certs.make_authority(directory)
        certs.make_node(directory, "n0")
        certs.make_client(directory, "client")
        pair = files(directory, "n0")
        keeper = TlsKeeper(
            SecurityConfig(
                tls_cert_path=pair.cert, tls_key_path=pair.key, tls_trust_cert_path=pair.ca, tls_client_auth=auth
            ),
            name="test",
            member=None,
        )
    with closing(Served(directory, keeper, mode, timeout_s)) as served:
        yield served


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


# --- plaintext and TLS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "plain", "sealed"),
    [
        (None, False, True),
        (TlsServerMode.ENFORCING, False, True),
        (TlsServerMode.PERMISSIVE, True, True),
        (TlsServerMode.DISABLED, True, False),
    ],
)
def test_tls_is_used_as_it_was_told(tmp_path: Path, mode: TlsServerMode | None, plain: bool, sealed: bool) -> None:
    """RocketMQ's ``tls.server.mode``; with certificates and without a word, TLS it is, and with a certificate."""
    with serving(tmp_path, secured=True, mode=mode) as served:
        assert served.plain() is plain
        assert served.sealed() is sealed
        assert not served.sealed(name=""), "clients must show a certificate"
        assert len(served.seen) == plain + sealed


def test_clients_need_no_certificate_if_that_was_said(tmp_path: Path) -> None:
    """One setting for gRPC and remoting."""
    with serving(tmp_path, secured=True, auth=ClientAuth.NONE) as served:
        assert served.sealed(name="")


def test_tls_is_not_taken_where_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is hung up on, and the log says what to set."""
    hello = b"\x16\x03\x01\0\x2d\x01\0\0\x29\x03\x03" + bytes(32) + b"\0\0\2\x13\x01\1\0"
    with serving(tmp_path) as served, served.connect() as link:
        link.sendall(hello)
        assert link.recv(1) == b""
    (line,) = warnings_of(caplog)
    assert line.endswith("it uses TLS, and this broker does not: set tls_cert_path and the others")


def test_plaintext_on_a_port_of_tls_is_told_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line per reason, however many come."""
    with serving(tmp_path, secured=True) as served:
        assert not any(served.plain() for _ in range(3))
    (line,) = warnings_of(caplog)
    assert line.endswith("is refused: this broker accepts only TLS (tls.server.mode=enforcing)")


@pytest.mark.parametrize("form", HeaderForm)
def test_a_request_in_plaintext_is_answered_that_it_must_use_tls(tmp_path: Path, form: HeaderForm) -> None:
    """Its program, whichever, can say so at once; then the connection ends."""
    with serving(tmp_path, secured=True) as served, served.connect() as link:
        link.sendall(encode(Frame(105, 77, {"topic": "T"}, b"body", form=form)))
        ((answer,), _) = cut(whole(link))
    assert (answer.code, answer.opaque, answer.fields) == (AnswerCode.NO_PERMISSION, 77, TLS_REQUIRED)
    assert answer.remark == "this broker accepts only TLS (tls.server.mode=enforcing)"


@pytest.mark.parametrize(
    "sent", [encode(Frame(105, 1, flag=2)), encode(Frame(0, 1).answer()), b"\0\0\0\x09\0\0\0\x01x", b"\0\0\0\0\0\0\0\0"]
)
def test_what_expects_no_answer_in_plaintext_gets_none(tmp_path: Path, sent: bytes) -> None:
    """Oneway, an answer, or no frame: it is hung up on."""
    with serving(tmp_path, secured=True) as served, served.connect() as link, suppress(ConnectionError):
        link.sendall(sent)
        assert whole(link) == b""


def test_new_certificates_count_for_new_connections(tmp_path: Path) -> None:
    """Nothing is restarted; whoever is connected stays."""
    with serving(tmp_path, secured=True) as served:
        context = served.context()

        def shown(link: ssl.SSLSocket) -> bytes:
            return link.getpeercert(binary_form=True) or b""

        with context.wrap_socket(served.connect()) as before:
            certs.renew(tmp_path, "n0", days=30, new_key=True)
            with context.wrap_socket(served.connect()) as after:
                assert shown(before) != shown(after)
                assert echoes(before)
                assert echoes(after)


def test_a_hello_in_pieces_is_waited_for(tmp_path: Path) -> None:
    """A byte at a time, and whatever is sent is read by the one who takes the connection."""
    with serving(tmp_path, secured=True) as served, served.connect() as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = served.context().wrap_bio(incoming, outgoing, server_side=False)
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        for byte in outgoing.read():
            link.sendall(bytes([byte]))
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                incoming.write(link.recv(65536))
        client.write(FRAME)
        link.sendall(outgoing.read())
        received = b""
        while len(received) < len(FRAME):
            with suppress(ssl.SSLWantReadError):
                received += client.read(100)
                continue
            incoming.write(link.recv(65536))
        assert received == FRAME


@pytest.mark.parametrize(
    "said",
    [b"", b"\x16", b"\x16\x03", b"\x16\x03\x01\x02\0" + b"\x01\0\1\xfc" + bytes(100), b"PRI", b"GET /"],
    ids=["nothing", "a byte", "two bytes", "half a hello", "half a preface", "half a request"],
)
def test_what_stops_half_way_is_ended(tmp_path: Path, said: bytes) -> None:
    """Within the time that a handshake has; it holds no place for longer."""
    with serving(tmp_path, secured=True, timeout_s=0.2) as served, served.connect() as link:
        link.sendall(said)
        assert link.recv(1) == b""
        assert not served.seen


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x16\x03\x01\0\0" + bytes(100), b"PRI * HTTP/1.0\r\n\r\n"])
def test_garbage_is_hung_up_on(tmp_path: Path, garbage: bytes) -> None:
    """And the next client is served."""
    with serving(tmp_path, secured=True, mode=TlsServerMode.PERMISSIVE, timeout_s=2) as served:
        with served.connect() as link:
            link.sendall(garbage)
            with suppress(ConnectionResetError):
                answer = whole(link)
                assert not answer or answer[0] in (0x15, ord("H")), "at most an alert of TLS, or HTTP's refusal"
        assert not served.seen
        assert served.plain()


# --- strangers -------------------------------------------------------------------------------------------------------


def call_with_grpc(port: int, security: TlsFiles | None = None) -> str:
    """What gRPC's own client says of a call."""
    address = f"127.0.0.1:{port}"
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "n0")]
    if security is None:
        channel = grpc.insecure_channel(address, options=options[:1])
    else:
        material = tls.read(security)
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.chain)
        channel = grpc.secure_channel(address, credentials, options=options)
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=None, response_deserializer=None
    )
    with channel, pytest.raises(grpc.RpcError) as refused:
        call(b"", timeout=TIMEOUT_S)
    return str(refused.value.details())


@pytest.mark.parametrize("secured", [False, True], ids=["plaintext", "tls"])
def test_a_client_of_grpc_is_told_its_port(tmp_path: Path, secured: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In the error that it shows, and in the log once."""
    with serving(tmp_path, secured=secured) as served:
        security = files(tmp_path, "client") if secured else None
        told = {call_with_grpc(served.port, security) for _ in range(2)}
        assert not served.seen
    reason = "this is the port of RocketMQ's remoting, not of gRPC: that is grpcServerPort, 10913 here"
    assert told == {reason}
    assert warnings_of(caplog) == [f"a connection to the broker's port is refused: {reason}"]


def test_a_browser_is_told_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In HTTP, also if the request comes in pieces; and the log says so once."""
    with serving(tmp_path) as served:
        for pieces in ((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",), (b"G", b"ET / HTTP", b"/1.1\r\nHost: x\r\n\r\n")):
            with served.connect() as link:
                for piece in pieces:
                    link.sendall(piece)
                answer = whole(link)
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert answer.endswith(b"\r\n\r\nthis is the port of RocketMQ's remoting\n")
        assert not served.seen
    assert len(warnings_of(caplog)) == 1


def test_strangers_cannot_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Anyone may connect, and say anything."""
    with serving(tmp_path) as served:
        for byte in range(1, 255, 3):
            with served.connect() as link:
                link.sendall(bytes([byte]) * 20)
                with suppress(ConnectionResetError):
                    whole(link)
    assert len(warnings_of(caplog)) <= REASONS_MAX


def test_two_thousand_connections_leave_nothing(tmp_path: Path) -> None:
    """Silent ones make room for each other, those that speak are served, and in the end all are gone."""
    with serving(tmp_path) as served, ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(300)]
        for _ in range(2000):
            assert served.plain()
        assert len(served.seen) == 2000
        wait_until(lambda: len(served.acceptor._acceptor._unknown) <= 256, "there is a limit", TIMEOUT_S)
        assert len(silent) == 300


# --- handing over ----------------------------------------------------------------------------------------------------


def a_server() -> RemotingServer:
    """It answers nothing."""
    limits = ServerLimits(9, 9, 9, 9, 9.0, 999, 999, unsent_bytes_max=999, host_unsent_bytes_max=999)
    return RemotingServer("test", Handlers({}, {}, lambda _: None, lambda _: None), limits)


@pytest.mark.parametrize("turns", range(1, TURNS_MAX))
def test_a_connection_given_up_while_it_is_made_is_forgotten(turns: int) -> None:
    """In whatever turn of the loop a time-out or a stop comes, it counts no longer, and the server can be closed."""

    async def main() -> None:
        server = a_server()
        acceptor = RemotingAcceptor("test", server.protocol, None, None, TIMEOUT_S)
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            arrival = Arrival(accepted, "127.0.0.1")
            taking = asyncio.create_task(acceptor._take(arrival, None))
            for _ in range(turns):
                await asyncio.sleep(0)
            taking.cancel()
            was_given_up = isinstance((await asyncio.gather(taking, return_exceptions=True))[0], BaseException)
            arrival.end()
            for _ in range(TURNS_MAX):
                await asyncio.sleep(0)

            assert server.connections == (0 if was_given_up else 1)
            await server.close(0)
            assert server.connections == 0

    loops.run(asyncio.wait_for(main(), TIMEOUT_S))
