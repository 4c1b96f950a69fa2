"""``Channels`` for asyncio: the same calls, as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from typing import TypeAlias, TypeVar

import grpc
import tenacity

from dledger.client.aio.leader_finder import AsyncSeeker as AsyncSeeker
from dledger.client.channel_maker import ChannelMaker
from dledger.client.channels import Service, retry_options
from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.rpc import options
from dledger.sending.aio_stream import is_being_cancelled

_T = TypeVar("_T")
Answer: TypeAlias = Awaitable[_T]


async def retry(
    deadline: Deadline, attempt: Callable[[], Awaitable[_T]], goes_on: Callable[[BaseException], bool]
) -> _T:
    """See ``channels.retry``."""

    async def again() -> _T:  # tenacity awaits coroutine functions only
        return await attempt()

    return await tenacity.AsyncRetrying(**retry_options(deadline, goes_on))(again)


class AsyncChannels:
    """Not thread-safe. Every call raises ``UnavailableError`` after closing."""

    def __init__(self, maker: ChannelMaker, service: Service) -> None:
        self._maker = maker
        self._service = service
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._old: list[grpc.aio.Channel] = []  # made with certificates that have since been replaced
        self._tls_version = 0
        self.closed = False

    def stop(self) -> None:
        """Start no new calls: the first step of closing."""
        self.closed = True

    async def close(self) -> None:
        """Close every channel; calls in progress fail. Idempotent."""
        self.stop()
        channels = [*self._channels.values(), *self._old]
        self._channels.clear()
        self._old.clear()
        for channel in channels:
            await channel.close(None)

    async def pause(self, seconds: float) -> None:
        """Pause between attempts."""
        await asyncio.sleep(seconds)

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel to a server."""
        if self.closed:
            raise UnavailableError("the client is closed")
        if self._maker.version != self._tls_version:  # calls on the old channels continue
            self._tls_version = self._maker.version
            self._old += self._channels.values()
            self._channels.clear()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._maker.open_async(address)
        return channel

    def open_stream(
        self, name: str, address: str, requests: AsyncIterator[bytes]
    ) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """Open a bidirectional stream to one server."""
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self.channel(address).stream_stream(
            options.method(self._service.name, name), request_serializer=None, response_deserializer=None
        )
        return method(requests)

    async def stream(self, name: str, address: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """The answers of one server to one request. Raises the error that broke the stream (nothing was changed)."""
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel(address).unary_stream(
            options.method(self._service.name, name), request_serializer=None, response_deserializer=None
        )
        call = method(request)
        try:
            async for data in call:
                yield data
        except grpc.RpcError as error:
            raise self._service.failure_of(error, address, sent=False) from error
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise UnavailableError(f"the connection to {address} was closed") from error
        finally:
            call.cancel()

    async def call(
        self, name: str, address: str, request: bytes, deadline: Deadline, *, changes: bool = False
    ) -> bytes:
        """Make one attempt at one server. ``changes``: whether the request changes anything there."""
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel(address).unary_unary(
            options.method(self._service.name, name), request_serializer=None, response_deserializer=None
        )
        try:
            return await method(request, timeout=max(deadline.remaining_s, 0.001))
        except grpc.RpcError as error:
            failure = self._service.failure_of(error, address, sent=changes)
            raise await asyncio.to_thread(self._maker.diagnose, failure, address) from error
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            kind = RequestTimeoutError if changes else UnavailableError
            raise kind(f"the connection to {address} was closed before the answer came") from error

    async def ask_all(
        self,
        name: str,
        request: bytes,
        decode: Callable[[bytes, str], _T],
        addresses: Collection[str],
        deadline: Deadline,
    ) -> AsyncGenerator[tuple[str, _T | DLedgerError], None]:
        """Ask several servers at once; yields answers as they arrive. Late ones are cancelled when the caller stops."""

        async def ask(address: str) -> tuple[str, _T | DLedgerError]:
            try:
                return address, decode(await self.call(name, address, request, deadline), address)
            except DLedgerError as error:
                return address, error

        tasks = [asyncio.create_task(ask(address)) for address in addresses]
        try:
            for answered in asyncio.as_completed(tasks):
                yield await answered
        finally:
            for task in tasks:
                task.cancel()
