"""What a client makes of a server that hangs up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from dledger.client import AsyncDLedgerClient, DLedgerClient
from dledger.client.channel_maker import ChannelMaker
from dledger.client.security import ClientSecurity
from dledger.client_server import ClientServer
from dledger.config import SecurityConfig, ServerConfig
from dledger.errors import TlsError, UnavailableError
from tests.support.fake_node import FakeNode

PATIENCE_S = 20
SILENT_REFUSAL = UnavailableError("127.0.0.1:1 is unreachable: failed to connect to all addresses: Socket closed")


@contextmanager
def server(treat: Callable[[socket.socket], object]) -> Iterator[str]:
    """Treats every connection so, then hangs up; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    treat(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_proxy_without_its_server_is_not_taken_for_tls() -> None:
    """A container's published port accepts and hangs up while the broker inside starts: that passes, and is retried."""
    with server(lambda _connection: None) as address:
        assert ChannelMaker(None, [address]).diagnose(SILENT_REFUSAL, address) is SILENT_REFUSAL


def test_a_server_that_hangs_up_on_plaintext_wants_tls() -> None:
    """It heard the greeting first."""
    with server(lambda connection: connection.recv(1024)) as address:
        found = ChannelMaker(None, [address]).diagnose(SILENT_REFUSAL, address)

    assert isinstance(found, TlsError)
    with pytest.raises(TlsError, match="requires TLS"):
        raise found


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, address: client.metadata(address),
        lambda client, address: client.read(0, address=address),
        lambda client, address: next(client.fetch_log(0, address=address)),
    ],
    ids=["metadata", "read", "fetch-log"],
)
def test_whoever_asks_a_node_that_wants_tls_hears_so(ask: Callable[[DLedgerClient, str], object]) -> None:
    """Whatever is asked, and long before the time is over that an unreachable node has."""
    with (
        server(lambda connection: connection.recv(1024)) as address,
        DLedgerClient(address, timeout_s=PATIENCE_S) as client,
        pytest.raises(TlsError, match="requires TLS"),
    ):
        ask(client, address)


def test_whoever_asks_from_a_loop_hears_so_too() -> None:
    """The loop goes on meanwhile: looking for the reason may take a moment."""

    async def ask(address: str) -> None:
        async with AsyncDLedgerClient(address, timeout_s=PATIENCE_S) as client:
            await client.metadata()

    with server(lambda connection: connection.recv(1024)) as address, pytest.raises(TlsError, match="requires TLS"):
        asyncio.run(ask(address))


def connects(maker: ChannelMaker, address: str) -> bool:
    """Whether a channel to the address comes about."""
    with maker.open(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=1)
        except grpc.FutureTimeoutError:
            return False
        return True


def test_plaintext_stays_here_also_where_a_server_names_another() -> None:
    """An address that was not the user's own: it is dialled if he said ``insecure``, and else it is said why not."""
    config = ServerConfig(client_host="0.0.0.0", client_port=0, security=SecurityConfig(insecure=True))
    node = ClientServer(config, FakeNode())
    node.start()
    try:
        elsewhere = f"{socket.gethostname()}:{node.port}"  # this machine, but a name may lead anywhere
        assert connects(ChannelMaker(ClientSecurity(insecure=True), []), elsewhere)
        careful = ChannelMaker(None, [f"127.0.0.1:{node.port}"])
        assert connects(careful, f"127.0.0.1:{node.port}")
        assert not connects(careful, elsewhere)
    finally:
        node.close()
    with pytest.raises(
        TlsError, match=r"a server named .* as another server, but plaintext is for loopback.*--insecure"
    ):
        raise careful.diagnose(UnavailableError("it is unreachable"), elsewhere)
