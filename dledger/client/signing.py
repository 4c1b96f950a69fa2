"""Signs every request of a client that has keys, by interceptors around its channels.

Each call is signed when it is made, so repeated calls and reopened streams are signed anew. A server process unknown to
the client refuses the first call and names itself (``access.signing``): a blocking call is then repeated at once;
others fail with ``UnavailableError`` and are repeated by their callers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

from dledger.access.signing import CHALLENGE, REFUSAL, Signer

if TYPE_CHECKING:  # generic in the stubs only
    _Unary = grpc.UnaryUnaryClientInterceptor[Any, Any]
    _UnaryStream = grpc.UnaryStreamClientInterceptor[Any, Any]
    _Stream = grpc.StreamStreamClientInterceptor[Any, Any]
    _AioUnary = grpc.aio.UnaryUnaryClientInterceptor[Any, Any]
    _AioUnaryStream = grpc.aio.UnaryStreamClientInterceptor[Any, Any]
    _AioStream = grpc.aio.StreamStreamClientInterceptor[Any, Any]
else:
    _Unary, _UnaryStream = grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor
    _Stream = grpc.StreamStreamClientInterceptor
    _AioUnary, _AioUnaryStream = grpc.aio.UnaryUnaryClientInterceptor, grpc.aio.UnaryStreamClientInterceptor
    _AioStream = grpc.aio.StreamStreamClientInterceptor

_UNAUTHENTICATED: Final = grpc.StatusCode.UNAUTHENTICATED


class _Details(NamedTuple):
    """``grpc.ClientCallDetails``; gRPC uses the attribute names only."""

    method: str
    timeout: float | None
    metadata: Any  # Any: gRPC's own shapes pass through
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


def trailing_metadata(error: object) -> dict[str, str]:
    """The trailing metadata of a failed call."""
    pairs: Any = error.trailing_metadata() or () if hasattr(error, "trailing_metadata") else ()
    return {str(key): str(value) for key, value in pairs}


def is_challenge(call: object) -> bool:
    """Whether a call failed because it was signed for another server process; a repeated one will not."""
    return trailing_metadata(call).get(REFUSAL) == CHALLENGE


class SigningInterceptor(_Unary, _UnaryStream, _Stream):
    """Signs the calls on the channel to one address."""

    def __init__(self, signer: Signer, address: str) -> None:
        self._signer = signer
        self._address = address

    # Any below: what gRPC passes differs between blocking calls and futures, and its stubs describe neither well.

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:  # noqa: ANN401
        began = time.monotonic()
        call = continuation(self._signed(details, request), request)
        if not call.done():  # a future: its caller repeats it
            call.add_done_callback(self._learn)
            return call
        if call.code() is not _UNAUTHENTICATED or not self._learn(call):
            return call
        left_s = None if details.timeout is None else max(0.001, details.timeout - (time.monotonic() - began))
        return continuation(self._signed(details, request)._replace(timeout=left_s), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:  # noqa: ANN401
        call = continuation(self._signed(details, request), request)
        call.add_done_callback(self._learn)
        return call

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:  # noqa: ANN401
        call = continuation(self._signed(details, None), requests)
        call.add_done_callback(self._learn)
        return call

    def _signed(self, details: Any, request: bytes | None) -> _Details:  # noqa: ANN401
        return _signed(self._signer, self._address, details, request)

    def _learn(self, call: Any) -> bool:  # noqa: ANN401
        return self._signer.learn(self._address, trailing_metadata(call))


def async_interceptors(signer: Signer, address: str) -> list[Any]:
    """The same for asyncio, which needs one object per kind of call (Any: the stubs accept one kind only)."""
    return [kind(signer, address) for kind in (_AsyncUnary, _AsyncUnaryStream, _AsyncStream)]


class _Async:
    def __init__(self, signer: Signer, address: str) -> None:
        self._signer = signer
        self._address = address

    def _signed(self, details: Any, request: bytes | None) -> _Details:  # noqa: ANN401
        return _signed(self._signer, self._address, details, request)


class _AsyncUnary(_Async, _AioUnary):
    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:  # noqa: ANN401
        began = time.monotonic()
        call = await continuation(self._signed(details, request), request)
        if await call.code() is not _UNAUTHENTICATED:
            return call
        pairs = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        if not self._signer.learn(self._address, pairs):
            return call
        left_s = None if details.timeout is None else max(0.001, details.timeout - (time.monotonic() - began))
        return await continuation(self._signed(details, request)._replace(timeout=left_s), request)


class _AsyncUnaryStream(_Async, _AioUnaryStream):
    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:  # noqa: ANN401
        return await continuation(self._signed(details, request), request)


class _AsyncStream(_Async, _AioStream):
    async def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:  # noqa: ANN401
        return await continuation(self._signed(details, None), requests)


def _signed(signer: Signer, address: str, details: Any, request: bytes | None) -> _Details:  # noqa: ANN401
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    return _Details(
        details.method,
        details.timeout,
        (*(details.metadata or ()), *signer.sign(method, address, request)),
        details.credentials,
        details.wait_for_ready,
        getattr(details, "compression", None),
    )
