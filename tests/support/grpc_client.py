"""A client of a node's gRPC port as other languages have it: a channel with TLS files, whose calls are signed."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

from dledger.access import guard
from dledger.client.shared import ClientSecurity, TlsFiles
from dledger.rpc import tls

if TYPE_CHECKING:  # generic in the stubs only
    _Unary = grpc.UnaryUnaryClientInterceptor[Any, Any]
    _UnaryStream = grpc.UnaryStreamClientInterceptor[Any, Any]
    _Stream = grpc.StreamStreamClientInterceptor[Any, Any]
else:
    _Unary, _UnaryStream = grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor
    _Stream = grpc.StreamStreamClientInterceptor


CHANNEL_OPTIONS: Final = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
"""A connection of its own; an answer may be one entry of any size."""


def open_channel(address: str, security: ClientSecurity | None = None) -> grpc.Channel:
    """With the client's files and key; without them, plaintext and no signatures."""
    security = security or ClientSecurity()
    if security.tls is None:
        channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    else:
        channel = grpc.secure_channel(address, channel_credentials(security.tls), CHANNEL_OPTIONS)
    if not security.access_key:
        return channel
    return grpc.intercept_channel(channel, _Signing(Signer(security.access_key, security.secret_key), address))


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """What gRPC makes of a client's files."""
    material = tls.read(files)
    return grpc.ssl_channel_credentials(material.ca, material.key, material.chain)


def trailing_metadata(error: object) -> dict[str, str]:
    """The trailing metadata of a failed call."""
    pairs: Any = error.trailing_metadata() or () if hasattr(error, "trailing_metadata") else ()
    return {str(key): str(value) for key, value in pairs}


class _Details(NamedTuple):
    """``grpc.ClientCallDetails``; gRPC uses the attribute names only."""

    method: str
    timeout: float | None
    metadata: Any  # Any: gRPC's own shapes pass through
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _Signing(_Unary, _UnaryStream, _Stream):
    """Signs each call when it is made. A server refuses the first one and names itself (``dledger.access.guard``): a
    unary call is then repeated at once.
    """

    def __init__(self, signer: Signer, address: str) -> None:
        self._signer = signer
        self._address = address

    # Any below: what gRPC passes differs between blocking calls and futures, and its stubs describe neither well.

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:  # noqa: ANN401
        call = continuation(self._signed(details, request), request)
        if not call.done():
            call.add_done_callback(self._learn)
            return call
        if call.code() is not grpc.StatusCode.UNAUTHENTICATED or not self._learn(call):
            return call
        return continuation(self._signed(details, request), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:  # noqa: ANN401
        call = continuation(self._signed(details, request), request)
        call.add_done_callback(self._learn)
        return call

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:  # noqa: ANN401
        call = continuation(self._signed(details, None), requests)
        call.add_done_callback(self._learn)
        return call

    def _signed(self, details: Any, request: bytes | None) -> _Details:  # noqa: ANN401
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        return _Details(
            details.method,
            details.timeout,
            (*(details.metadata or ()), *self._signer.sign(method, self._address, request)),
            details.credentials,
            details.wait_for_ready,
            getattr(details, "compression", None),
        )

    def _learn(self, call: Any) -> bool:  # noqa: ANN401
        return self._signer.learn(self._address, trailing_metadata(call))


class Signer:
    """Signs one client's requests, repeated ones anew. Thread-safe."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        self._access_key = access_key
        self._secret = secret_key.encode()
        self._session = secrets.token_hex(8)
        self._numbers = itertools.count(1)  # next() is atomic
        self._lock = threading.Lock()  # guards changes of _audiences
        self._audiences: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Signer({self._access_key!r})"

    def sign(self, method: str, address: str, body: bytes | None) -> tuple[tuple[str, str], ...]:
        """Metadata for one call at ``address``; ``body`` None: a stream of requests."""
        timestamp = str(time.time_ns() // 1_000_000)
        nonce = f"{self._session}-{next(self._numbers)}"
        audience = self._audiences.get(address, "")
        key = self._access_key
        signature = guard._signature(self._secret, method, key, timestamp, nonce, audience, guard.digest_of(body))
        return (
            (guard.ACCESS_KEY, key),
            (guard.TIMESTAMP, timestamp),
            (guard.NONCE, nonce),
            (guard.AUDIENCE, audience),
            (guard.SIGNATURE, signature),
        )

    def learn(self, address: str, told: Mapping[str, str]) -> bool:
        """Take a refusal's trailing metadata; returns whether it asks to sign again, for the audience that it names."""
        if told.get(guard.REFUSAL) != guard.CHALLENGE or not told.get(guard.AUDIENCE):
            return False
        with self._lock:
            self._audiences[address] = told[guard.AUDIENCE]
        return True
