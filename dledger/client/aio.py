"""The client for asyncio: the same calls as ``DLedgerClient``, as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TypeVar

import grpc
import tenacity

from dledger.client.appender import AppenderOptions, AsyncAppender
from dledger.client.appends import DIRECT, RULES, wire_of
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
    retry_options,
    rpc_failure,
    split,
)
from dledger.config import MIB
from dledger.errors import DLedgerError, EmptyBatchError, LeaderHint, UnavailableError
from dledger.rpc import client_codec as codec
from dledger.rpc import options
from dledger.rpc.client_codec import ReadMode
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.sending.aio import (
    AsyncLinks,
    AsyncSender,
    AsyncSentItem,
    AsyncStream,
    OnAnswer,
    OnEnd,
    wait_for_batch,
)
from dledger.sending.numbering import Numbering
from dledger.sending.window import Window
from dledger.types import Entry, LogIndex, NodeId, Role

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
        self._wire = wire_of(group)
        self._links = AsyncLinks(self._open_stream, self._find_leader, self._directory.note_failure)
        self._direct: AsyncSender[None, AppendResult] | None = None

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
        if self._direct is not None:
            await self._direct.abandon(UnavailableError("the client is closed"))
        for channel in channels:
            await channel.close(None)

    # --- append -----------------------------------------------------------------------------------------------------

    async def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """See ``DLedgerClient.append``."""
        return await AsyncSentItem(*await self._direct_sender().add(body, timeout_s=self._timeout_s(timeout_s)))

    async def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """See ``DLedgerClient.append_many``."""
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        return await self._append_parts(self._direct_sender(), bodies, self._deadline(timeout_s))

    async def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """See ``DLedgerClient.append_as``."""
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        deadline = self._deadline(timeout_s)
        sender = self._sender(Numbering(producer))
        try:
            return await self._append_parts(sender, bodies, deadline, sequence)
        finally:  # whoever is cancelled does not wait until the deadline of what is under way
            await sender.abandon(UnavailableError("nobody waits for it any more"))

    async def _append_parts(
        self,
        sender: AsyncSender[None, AppendResult],
        bodies: Sequence[bytes],
        deadline: Deadline,
        sequence: int | None = None,
    ) -> list[AppendResult]:
        results: list[AppendResult] = []
        for part in split(bodies):
            number = None if sequence is None else sequence + len(results)
            try:
                batch = await sender.add_whole(part, sequence=number, timeout_s=deadline.remaining_s)
                await wait_for_batch(batch)
                results += [AsyncSentItem(batch, place).result() for place in range(len(part))]
            except DLedgerError as error:
                raise partly_appended(error, len(results)) from None
        return results

    def _direct_sender(self) -> AsyncSender[None, AppendResult]:
        if self._closed:
            raise UnavailableError("the client is closed")
        if self._direct is None:
            self._direct = self._sender(Numbering() if self._idempotent else None)
        return self._direct

    def _sender(self, numbering: Numbering | None) -> AsyncSender[None, AppendResult]:
        options = replace(DIRECT, timeout_ms=self.timeout_s * 1000.0)
        return AsyncSender(self._links, Window(options, RULES, numbering))

    async def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """See ``DLedgerClient.producer_sequence``."""
        deadline = self._deadline(timeout_s)
        request = codec.encode_producer_request(self.group, producer)

        async def ask(node: str) -> int:
            return codec.decode_producer_answer(await self._call("Producer", node, request, deadline))

        return await self._retry(deadline, lambda: self._ask_leader(deadline, ask), is_retried_read)

    def appender(
        self,
        *,
        linger_ms: float = 2,
        batch_bytes: int = MIB // 2,
        batch_entries: int = 1024,
        pending_bytes_max: int = 8 * MIB,
        inflight_entries_max: int = 4096,
        timeout_s: float | None = None,
        retry_unknown: bool = False,
    ) -> AsyncAppender:
        """See ``DLedgerClient.appender``. Use with ``async with``."""
        settings = AppenderOptions(
            linger_s=linger_ms / 1000,
            batch_bytes=batch_bytes,
            batch_entries=batch_entries,
            pending_bytes_max=pending_bytes_max,
            inflight_entries_max=inflight_entries_max,
            timeout_s=self._timeout_s(timeout_s),
            retry_unknown=retry_unknown,
            idempotent=self._idempotent,
        )
        return AsyncAppender(self._links, settings)

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

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s(timeout_s))

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

    async def _find_leader(self) -> str | None:
        """As ``DLedgerClient._find_leader``."""
        present = self._directory.leader
        async for address, answer in self._ask_all(self._directory.addresses, Deadline(LOOK_TIMEOUT_S)):
            if address != present and not isinstance(answer, DLedgerError) and answer.role is Role.LEADER:
                self._directory.learn(address, answer)
                break
        return self._directory.leader

    async def _open_stream(
        self, timeout_s: float, on_answer: OnAnswer[None, AppendResult], on_end: OnEnd[None, AppendResult]
    ) -> AsyncStream[None, AppendResult]:
        deadline = Deadline(timeout_s)

        async def attempt() -> AsyncStream[None, AppendResult]:
            address = await self._leader(deadline)
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel(address).stream_stream(
                options.method(options.LOG_SERVICE, "AppendStream"), request_serializer=None, response_deserializer=None
            )
            stream = AsyncStream(method, address, self._wire, on_answer, on_end)
            try:
                await stream.open(deadline.remaining_s)
            except DLedgerError as error:
                self._directory.note_failure(address, error)
                raise
            return stream

        return await self._retry(deadline, attempt)

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
