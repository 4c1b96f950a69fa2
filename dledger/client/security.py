"""How a client protects what it says, and shows who it is: the same record for every client of this project."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from dledger.rpc import options
from dledger.rpc.tls import TlsFiles, channel_credentials

__all__ = ["ChannelMaker", "ClientSecurity", "TlsFiles"]


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """What a client needs to be let in. The default is plaintext, which is for this machine's own addresses.

    ``tls``: speak TLS. ``insecure``: plaintext towards other machines is what is wanted.
    """

    tls: TlsFiles | None = None
    insecure: bool = False


class ChannelMaker:
    """Makes a client's channels; one per client. Thread-safe. Raises ``ConfigError`` for files that cannot be used."""

    def __init__(self, security: ClientSecurity | None, addresses: Iterable[str]) -> None:
        self.security = security or ClientSecurity()
        tls = self.security.tls
        self._credentials = None if tls is None else channel_credentials(tls)
        del addresses

    def open(self, address: str) -> grpc.Channel:
        """A channel for threads."""
        if self._credentials is None:
            return grpc.insecure_channel(address, options.client_channel_options())
        return grpc.secure_channel(address, self._credentials, options.client_channel_options())

    def open_async(self, address: str) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options.client_channel_options())
        return grpc.aio.secure_channel(address, self._credentials, options.client_channel_options())
