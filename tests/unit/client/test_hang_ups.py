"""What a client makes of a server that hangs up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dledger.client.security import ChannelMaker
from dledger.errors import TlsError, UnavailableError

SILENT_REFUSAL = UnavailableError("127.0.0.1:1 cannot be reached: failed to connect to all addresses: Socket closed")


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
    with pytest.raises(TlsError, match="wants TLS"):
        raise found
