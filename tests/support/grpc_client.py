"""A client of a node's gRPC port as other languages have it: a channel with TLS files, whose calls are signed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from dledger.access.signing import Signer
from dledger.client.security import ClientSecurity, TlsFiles
from dledger.rpc import tls

if TYPE_CHECKING:  # generic in the stubs only
    _Unary = grpc.UnaryUnaryClientInterceptor[Any, Any]
    _UnaryStream = grpc.UnaryStreamClientInterceptor[Any, Any]
    _Stream = grpc.StreamStreamClientInterceptor[Any, Any]
else:
    _Unary, _UnaryStream = grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor
    _Stream = grpc.StreamStreamClientInterceptor


def open_channel(address: str, security: ClientSecurity | None = None) -> grpc.Channel:
    """With the client's files and key; without them, plaintext and no signatures."""
    security = security or ClientSecurity()
    if security.tls is None:
        channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    else:
        channel = grpc.secure_channel(address, channel_credentials(security.tls))
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
    """Signs each call when it is made. A server refuses the first one and names itself (``dledger.access.signing``): a
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
