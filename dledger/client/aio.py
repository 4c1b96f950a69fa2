"""The client for asyncio: the same calls as ``DLedgerClient``, as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import grpc
import tenacity

from dledger.client.aio_appends import AsyncAppends, AsyncLinks
from dledger.client.appender import Appender, AppendFuture
from dledger.client.lanes import LanePool
from dledger.client.security import ChannelMaker, ClientSecurity
from dledger.client.shared import (
    DISCOVERY_TIMEOUT_S,
    LOOK_TIMEOUT_S,
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    AppendResult,
    Deadline,
    Directory,
    Search,
    is_elsewhere,
    is_retried,
    is_retried_read,
    members_by_id,
    parse_addresses,
    partly_appended,
    results_of,
    retry_options,
    rpc_failure,
    split,
)
from dledger.client.sync import DLedgerClient
from dledger.errors import DLedgerError, EmptyBatchError, LeaderHint, UnavailableError
from dledger.rpc import client_codec as codec
from dledger.rpc import options
from dledger.rpc.bridge import LoopBridge
from dledger.rpc.client_codec import ReadMode
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.types import Entry, LogIndex, NodeId, ProducerBatch, Role

_T = TypeVar("_T")


class AsyncDLedgerClient:
    """As ``DLedgerClient``. Belongs to the event loop it is first used on; not for several threads."""

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        group: str = "default",
        timeout_s: float = 5.0,
        security: ClientSecurity | None = None,
        enable_idempotence: bool = True,
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self._directory = Directory(parse_addresses(addresses))
        self._channel_maker = ChannelMaker(security, self._directory.addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._old_channels: list[grpc.aio.Channel] = []  # made with certificates that were replaced since
        self._tls_version = 0
        self._closed = False
        self._search: asyncio.Task[Search] | None = None
        self._idempotent = enable_idempotence
        links = AsyncLinks(group, self._directory, self._channel, self._leader, self._retry, self._is_led_by_another)
        self._appends = AsyncAppends(links, LanePool() if enable_idempotence else None)

    async def __aenter__(self) -> AsyncDLedgerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; calls under way fail. Idempotent."""
        self._closed = True
        channels = [*self._channels.values(), *self._old_channels]
        self._channels.clear()
        self._old_channels.clear()
        if self._search is not None:
            self._search.cancel()
        await self._appends.close()
        for channel in channels:
            await channel.close(None)

    # --- append -----------------------------------------------------------------------------------------------------

    async def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """See ``DLedgerClient.append``."""
        return results_of(await self._appends.append((body,), self._deadline(timeout_s)))[0]

    async def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """See ``DLedgerClient.append_many``."""
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        deadline = self._deadline(timeout_s)
        results: list[AppendResult] = []
        for part in split(bodies):
            try:
                results += results_of(await self._appends.append(part, deadline))
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    async def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """See ``DLedgerClient.append_as``."""
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        deadline = self._deadline(timeout_s)
        results: list[AppendResult] = []
        for part in split(bodies):
            batch = ProducerBatch(producer, sequence + len(results), len(part))
            try:
                results += results_of(await self._appends.append_as(batch, part, deadline))
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    async def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """See ``DLedgerClient.producer_sequence``."""
        deadline = self._deadline(timeout_s)
        request = codec.encode_producer_request(self.group, producer)

        async def ask(node: str) -> int:
            return codec.decode_producer_answer(await self._call("Producer", node, request, deadline))

        return await self._retry(deadline, lambda: self._ask_leader(deadline, ask), is_retried_read)

    def appender(self, **settings: Any) -> AsyncAppender:  # noqa: ANN401  # the arguments of DLedgerClient.appender
        """See ``DLedgerClient.appender``, whose arguments it takes. Use with ``async with``."""
        client = DLedgerClient(
            self._directory.addresses,
            group=self.group,
            timeout_s=self.timeout_s,
            security=self._channel_maker.security,
            enable_idempotence=self._idempotent,
        )
        return AsyncAppender(client, client.appender(**settings))

    # --- read -------------------------------------------------------------------------------------------------------

    async def read(
        self,
        first_index: int,
        *,
        count: int = 0,
        max_bytes: int = 0,
        mode: ReadMode = ReadMode.COMMITTED,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Entry]:
        """See ``DLedgerClient.read``."""
        deadline = self._deadline(timeout_s)
        request = codec.encode_read(codec.Read(self.group, LogIndex(first_index), count, max_bytes, mode))

        async def ask(node: str) -> list[Entry]:
            return codec.decode_read_answer(await self._call("Read", node, request, deadline)).entries

        if address is not None:
            return await self._retry(deadline, lambda: ask(address), is_retried_read)
        if mode is ReadMode.LINEARIZABLE:
            return await self._retry(deadline, lambda: self._ask_leader(deadline, ask), is_retried_read)
        return await self._retry(deadline, lambda: self._ask_any(ask), is_retried_read)

    async def follow(
        self, first_index: int, *, mode: ReadMode = ReadMode.COMMITTED, address: str | None = None
    ) -> AsyncGenerator[Entry, None]:
        """See ``DLedgerClient.follow``."""
        next_index = LogIndex(first_index)
        request = lambda: codec.encode_follow(codec.Read(self.group, next_index, mode=mode))  # noqa: E731
        async for data in self._stream("Follow", request, address):
            for entry in codec.decode_read_answer(data).entries:
                yield entry
                next_index = LogIndex(entry.index + 1)

    async def _ask_leader(self, deadline: Deadline, ask: Callable[[str], Awaitable[_T]]) -> _T:
        address = await self._leader(deadline)
        try:
            return await ask(address)
        except DLedgerError as error:
            self._directory.note_failure(address, error)
            raise

    async def _ask_any(self, ask: Callable[[str], Awaitable[_T]]) -> _T:
        failure: DLedgerError | None = None
        for address in self._directory.candidates():
            try:
                return await ask(address)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                if not is_elsewhere(error):
                    raise
                failure = error
        raise failure or UnavailableError("no node is known")

    # --- the group --------------------------------------------------------------------------------------------------

    async def metadata(self, address: str | None = None, *, timeout_s: float | None = None) -> NodeStatus:
        """See ``DLedgerClient.metadata``."""
        deadline = self._deadline(timeout_s)
        ask = partial(self._status_of, deadline=deadline)
        if address is not None:
            return await self._retry(deadline, lambda: ask(address), is_retried_read)
        return await self._retry(deadline, lambda: self._ask_any(ask), is_retried_read)

    async def members_status(
        self, *, timeout_s: float = DISCOVERY_TIMEOUT_S
    ) -> Mapping[NodeId, NodeStatus | DLedgerError]:
        """See ``DLedgerClient.members_status``."""
        deadline = self._deadline(timeout_s)
        asked: set[str] = set()
        statuses: list[NodeStatus] = []
        failures: dict[str, DLedgerError] = {}
        while addresses := [one for one in self._directory.addresses if one not in asked]:
            asked.update(addresses)
            async for address, answer in self._ask_all(addresses, deadline):
                if isinstance(answer, DLedgerError):
                    failures[address] = answer
                    self._directory.note_tried(address)
                else:
                    statuses.append(answer)
        if not statuses:
            raise next(iter(failures.values()))
        return members_by_id(statuses, failures)

    async def watch_role(self, address: str | None = None) -> AsyncGenerator[RoleEvent, None]:
        """See ``DLedgerClient.watch_role``."""
        request = codec.encode_watch_role(self.group)
        async for data in self._stream("WatchRole", lambda: request, address):
            yield codec.decode_role_event(data)

    async def transfer_leadership(self, target: NodeId | None = None, *, timeout_s: float | None = None) -> LeaderHint:
        """See ``DLedgerClient.transfer_leadership``."""
        deadline = self._deadline(timeout_s)
        request = codec.encode_transfer(self.group, target)

        async def ask(node: str) -> LeaderHint:
            answer = await self._call("TransferLeadership", node, request, deadline, changes=True)
            return codec.decode_transferred(answer)

        leader = await self._retry(deadline, lambda: self._ask_leader(deadline, ask))
        if (address := self._directory.resolve(leader)) is not None:
            self._directory.set_leader(address)
        return leader

    # --- machinery --------------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    async def _retry(
        self,
        deadline: Deadline,
        attempt: Callable[[], Awaitable[_T]],
        retried: Callable[[BaseException], bool] = is_retried,
    ) -> _T:
        try:
            return await attempt()  # the usual case pays nothing for the machinery below
        except DLedgerError as error:
            if self._closed or deadline.expired or not retried(error):
                raise
            followed_hint = error.leader is not None and self._directory.leader is not None
        if followed_hint:
            try:
                return await attempt()
            except DLedgerError as error:
                if self._closed or not retried(error):
                    raise
        policy = tenacity.AsyncRetrying(**retry_options(deadline, lambda e: not self._closed and retried(e)))

        async def again() -> _T:  # tenacity awaits coroutine functions only, not what a lambda returns
            return await attempt()

        return await policy(again)

    async def _is_led_by_another(self, address: str) -> bool:
        """As ``DLedgerClient._is_led_by_another``."""
        if not self._directory.may_look(address):
            return self._directory.is_elsewhere(address)
        async for other, answer in self._ask_all(self._directory.addresses, Deadline(LOOK_TIMEOUT_S)):
            if other != address and not isinstance(answer, DLedgerError) and answer.role is Role.LEADER:
                self._directory.learn(other, answer)
                return True
        return False

    async def _leader(self, deadline: Deadline) -> str:
        leader = self._directory.leader
        if leader is not None:
            return leader
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._searched())
        searching = self._search  # one for all who wait: thousands of appends may
        await asyncio.wait((searching,), timeout=deadline.remaining_s)
        if not searching.done() or searching.cancelled():
            raise UnavailableError(f"no leader found within {deadline.timeout_s} s")
        search = searching.result()
        return search.found or search.conclude()

    async def _searched(self) -> Search:
        search = Search(self._directory)
        async for address, answer in self._ask_all(self._directory.addresses, Deadline(DISCOVERY_TIMEOUT_S)):
            if search.take(address, answer) is not None:
                break
        return search

    async def _ask_all(
        self, addresses: Sequence[str], deadline: Deadline
    ) -> AsyncGenerator[tuple[str, NodeStatus | DLedgerError], None]:
        async def ask(address: str) -> tuple[str, NodeStatus | DLedgerError]:
            try:
                return address, await self._status_of(address, deadline)
            except DLedgerError as error:
                return address, error

        tasks = [asyncio.create_task(ask(address)) for address in addresses]
        try:
            for answered in asyncio.as_completed(tasks):
                yield await answered
        finally:
            for task in tasks:
                task.cancel()

    async def _status_of(self, address: str, deadline: Deadline) -> NodeStatus:
        request = codec.encode_metadata_request(self.group)
        status = codec.decode_metadata(await self._call("Metadata", address, request, deadline))
        self._directory.learn(address, status)
        return status

    async def _call(
        self, name: str, address: str, request: bytes, deadline: Deadline, *, changes: bool = False
    ) -> bytes:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel(address).unary_unary(
            options.method(options.LOG_SERVICE, name), request_serializer=None, response_deserializer=None
        )
        try:
            return await method(request, timeout=max(deadline.remaining_s, 0.001))
        except grpc.RpcError as error:
            failure = rpc_failure(error, address, sent=changes)
            raise await asyncio.to_thread(self._channel_maker.diagnose, failure, address) from error

    async def _stream(self, name: str, request: Callable[[], bytes], address: str | None) -> AsyncIterator[bytes]:
        """As ``DLedgerClient._stream``."""
        broken, backoff_s = Deadline(self.timeout_s), RETRY_WAIT_S_MIN
        while True:
            node = (await self.metadata(address, timeout_s=broken.remaining_s)).node_id
            chosen = address or self._directory.resolve(LeaderHint(node))
            if chosen is None:
                raise UnavailableError(f"the address of {node} is not known")
            stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel(chosen).unary_stream(
                options.method(options.LOG_SERVICE, name), request_serializer=None, response_deserializer=None
            )
            call = stream(request())
            try:
                async for data in call:
                    yield data
                    broken, backoff_s = Deadline(self.timeout_s), RETRY_WAIT_S_MIN
                failure: DLedgerError = UnavailableError(f"{chosen} ended the stream")
            except grpc.RpcError as error:
                failure = rpc_failure(error, chosen, sent=False)
            finally:
                call.cancel()
            self._directory.note_failure(chosen, failure)
            if self._closed or broken.expired or not is_retried_read(failure):
                raise failure
            await asyncio.sleep(min(backoff_s, broken.remaining_s))
            backoff_s = min(2 * backoff_s, RETRY_WAIT_S_MAX)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._closed:
            raise UnavailableError("the client is closed")
        tls_version = self._channel_maker.version
        if tls_version != self._tls_version:  # what runs on the old channels goes on
            self._tls_version = tls_version
            self._old_channels += self._channels.values()
            self._channels.clear()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channel_maker.open_async(address)
            self._channels[address] = channel
        return channel


class AsyncAppender:
    """``Appender`` for asyncio: ``future = await appender.append(body)``, then ``result = await future``."""

    def __init__(self, client: DLedgerClient, appender: Appender) -> None:
        self._client = client
        self._appender = appender
        self._bridge: LoopBridge | None = None

    async def __aenter__(self) -> AsyncAppender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def failed_entries(self) -> int:
        """How many entries have failed so far."""
        return self._appender.failed_entries

    async def append(self, body: bytes) -> asyncio.Future[AppendResult]:
        """Queue one entry; waits only while too much is pending (``PendingFullError`` if that takes too long)."""
        if self._bridge is None:
            self._bridge = LoopBridge()
        queued = await asyncio.to_thread(self._appender.append, body) if self._appender.full else None
        if queued is None:
            queued = self._appender.append(body)
        future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        post = self._bridge.post
        queued.add_done_callback(lambda done: post(partial(_settle, future, done)))
        return future

    async def flush(self) -> None:
        """See ``Appender.flush``."""
        await asyncio.to_thread(self._appender.flush)

    async def close(self) -> None:
        """See ``Appender.close``."""
        await asyncio.to_thread(self._appender.close)
        await asyncio.to_thread(self._client.close)


def _settle(future: asyncio.Future[AppendResult], done: AppendFuture) -> None:
    if future.done():
        return
    error = done.exception(0)
    if error is None:
        future.set_result(done.result(0))
    else:
        future.set_exception(error)
