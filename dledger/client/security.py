"""How a client protects what it says, and shows who it is: the same record for every client of this project."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from dledger.access.signing import Signer
from dledger.client.signing import SigningInterceptor, async_interceptors
from dledger.errors import ConfigError
from dledger.rpc import options
from dledger.rpc.tls import TlsFiles, channel_credentials

__all__ = ["ChannelMaker", "ClientSecurity", "TlsFiles"]


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """What a client needs to be let in. The default is plaintext, which is for this machine's own addresses.

    ``tls``: speak TLS. ``insecure``: plaintext towards other machines is what is wanted. ``access_key`` and
    ``secret_key``: sign every request with them. Raises ``ConfigError`` if one of the two is missing.
    """

    tls: TlsFiles | None = None
    insecure: bool = False
    access_key: str = ""
    secret_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError(["an access key and its secret key are given together: one of the two is missing"])


class ChannelMaker:
    """Makes a client's channels; one per client. Thread-safe. Raises ``ConfigError`` for files that cannot be used."""

    def __init__(self, security: ClientSecurity | None, addresses: Iterable[str]) -> None:
        self.security = security or ClientSecurity()
        tls = self.security.tls
        self._credentials = None if tls is None else channel_credentials(tls)
        key = self.security.access_key
        self._signer = Signer(key, self.security.secret_key) if key else None
        del addresses

    def open(self, address: str) -> grpc.Channel:
        """A channel for threads."""
        if self._credentials is None:
            channel = grpc.insecure_channel(address, options.client_channel_options())
        else:
            channel = grpc.secure_channel(address, self._credentials, options.client_channel_options())
        if self._signer is None:
            return channel
        return grpc.intercept_channel(channel, SigningInterceptor(self._signer, address))

    def open_async(self, address: str) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        signing = None if self._signer is None else async_interceptors(self._signer, address)
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options.client_channel_options(), interceptors=signing)
        return grpc.aio.secure_channel(
            address, self._credentials, options.client_channel_options(), interceptors=signing
        )
