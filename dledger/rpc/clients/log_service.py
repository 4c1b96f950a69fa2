"""The log service, on an event loop: any number of appends may wait without a thread each.

Domain errors travel in the answer's ``Status``; a gRPC status other than OK means a malformed request, a limit, or a
node that is shutting down. Only ``LogNode.read`` may wait for a disk, so only it runs elsewhere, on a few threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Final

import grpc

from dledger.access.guard import AccessGuard, Caller, ResourceKind, quota_at
from dledger.access.permissions import Permission
from dledger.access.quota import Limits, Quotas
from dledger.conditions import Conditions
from dledger.config import ServerConfig
from dledger.core.producer_names import own_name
from dledger.errors import (
    AppendsNotServedError,
    DLedgerError,
    EmptyBatchError,
    EntryTooLargeError,
    IdentityError,
    IndexOutOfRangeError,
    InvalidRequestError,
    InvariantError,
    LeaderHint,
    PendingFullError,
    TooManyProducersError,
    told,
)
from dledger.layout import ENTRY_HEADER_BYTES
from dledger.rpc import options
from dledger.rpc.bridge import EventHub, LoopBridge, LoopCallback
from dledger.rpc.clients import access_gate, codec
from dledger.rpc.clients.aio_server import Methods
from dledger.rpc.clients.answers import AnswerRoom
from dledger.rpc.clients.append_stream import AppendOutcome, AppendStream
from dledger.rpc.clients.bulk_service import BulkService, TooManyBulkReadsError
from dledger.rpc.clients.calls import Call
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.clients.connections import Connection, Connections
from dledger.rpc.ports import LogNode, RoleEvent
from dledger.types import Entry, LogIndex
from dledger.values import MIB

READ_THREADS_MAX: Final = 4
READ_BYTES_DEFAULT: Final = MIB
READ_BYTES_MAX: Final = 8 * MIB
DRAIN_TIMEOUT_S: Final = 1.0

Context = grpc.aio.ServicerContext[bytes, bytes]


_NEEDED: Final = {
    "Append": Permission.PUB,
    "AppendStream": Permission.PUB,
    "Producer": Permission.PUB,
    "Read": Permission.SUB,
    "Follow": Permission.SUB,
    "FetchLog": Permission.SUB,
    "Locate": Permission.SUB,
    "BlockDigests": Permission.SUB,
}
"""Permissions on the topic named like the group; other methods need an account, but no permission."""
_WITH_ROOM: Final = ("Append", "Read")
"""Unary methods whose answers already have room, or must be sent because the entries are appended."""
_TRANSFER: Final = "TransferLeadership"


class LogService:
    """The handlers. Create it on the event loop's thread; ``close`` after the server has stopped.

    ``guard``: access control; None: everything is allowed.
    """

    def __init__(
        self,
        config: ServerConfig,
        node: LogNode,
        bridge: LoopBridge,
        connections: Connections,
        guard: AccessGuard | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self._config = config
        self._conditions = conditions or Conditions(config.node_id)
        self._connections = connections
        self._guard = guard
        limits = Limits(
            entries_max=config.replication.pending_entries_max,
            bytes_max=config.replication.pending_bytes_max,
            streams_max=config.client_streams_max,
            answer_bytes_max=config.limits.answer_bytes_max,
        )
        self._quotas = Quotas(limits, owner_percent=config.access.account_share_percent)
        self._room = AnswerRoom()
        self._call_s = config.limits.call_ms_max / 1000
        self._node = node
        self._bridge = bridge
        self._hub = EventHub(node, self._bridge)
        self._readers = ThreadPoolExecutor(READ_THREADS_MAX, thread_name_prefix=f"dledger-read-{config.node_id}")
        self._body_bytes_max = config.store.entry_bytes_limit - ENTRY_HEADER_BYTES
        self._bulk = BulkService(config, node.bulk)
        self._waiting: set[asyncio.Task[Any]] = set()  # handlers that a stopping server cancels

    def close(self) -> None:
        """Stop listening to the node and join the read threads."""
        self._hub.close()
        self._readers.shutdown(wait=True)
        self._bulk.close()

    async def drain(self) -> None:
        """Wait for the handlers that the stopped server is cancelling: a loop that ends before them logs errors."""
        if self._waiting:
            await asyncio.wait(tuple(self._waiting), timeout=DRAIN_TIMEOUT_S)

    def methods(self) -> Methods:
        """The methods to register as ``options.LOG_SERVICE``."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        answers, streams = self._answers, self._streaming
        return {
            "Append": unary(answers("Append", self._append)),
            "AppendStream": grpc.stream_stream_rpc_method_handler(self._append_stream),
            "Producer": unary(answers("Producer", self._producer)),
            "Read": unary(answers("Read", self._read)),
            "Follow": stream(streams("Follow", self._follow)),
            "Metadata": unary(answers("Metadata", self._metadata)),
            "WatchRole": stream(streams("WatchRole", self._watch_role)),
            _TRANSFER: unary(answers(_TRANSFER, self._transfer)),
            "FetchLog": stream(self._bulk_streaming("FetchLog", self._bulk.fetch)),
            "Locate": unary(answers("Locate", self._locate)),
            "BlockDigests": stream(self._bulk_streaming("BlockDigests", self._bulk.digests)),
        }

    # Each handler below decodes first (raising InvalidRequestError: gRPC status), then answers (Status in the answer).

    async def _append(self, data: bytes, call: Call) -> bytes:
        request = codec.decode_append(data)
        self._note_waiting()
        quota, entries, size = call.quota, len(request.bodies), len(data)
        if quota.is_full:
            error = quota.full_error()
            self._conditions.limit(str(error))
            return codec.encode_appended(request.request_id, error)
        quota.take(entries, size)
        answered: LoopCallback[AppendOutcome] = LoopCallback(self._bridge, partial(quota.give, entries, size))
        self._submit_for(call.caller, request, answered.done)
        outcome = await answered.future
        if isinstance(outcome, DLedgerError):
            self._note_refusal(outcome)
        return codec.encode_appended(request.request_id, outcome)

    async def _append_stream(self, _requests: object, context: Context) -> None:
        try:
            with self._connections.call(context) as connection:
                call = self._admit("AppendStream", context, connection, None)
                with self._long_lived("append", call), self._stream_of("AppendStream", call):
                    submit = partial(self._submit_for, call.caller)
                    request_bytes_max = options.request_bytes_max(self._config)
                    await AppendStream(call, self._bridge, submit, self._note_refusal, request_bytes_max).run()
        except _GRPC_ERRORS as error:
            await self._abort(context, error)

    def _submit_for(self, caller: Caller | None, request: codec.Append, done: Callable[[AppendOutcome], None]) -> None:
        producer = request.producer
        try:
            self._check_group(request.group)
            self._check_appends_served()
            self._check_bodies(request)
            if producer is not None and caller is not None:
                producer = replace(producer, producer=own_name(caller.name, producer.producer))
        except DLedgerError as error:
            done(error)
        else:
            self._node.submit_append(request.bodies, done, producer)

    def _note_refusal(self, error: DLedgerError) -> None:
        if isinstance(error, PendingFullError | TooManyProducersError):
            self._conditions.limit(str(error))

    async def _producer(self, data: bytes, call: Call) -> bytes:
        group, producer = codec.decode_producer_request(data)
        try:
            self._check_group(group)
            if call.caller is not None:
                producer = own_name(call.caller.name, producer)
            outcome: LoopCallback[int | DLedgerError] = LoopCallback(self._bridge)
            self._node.submit_producer(producer, outcome.done)
            return codec.encode_producer_answer(await outcome.future)
        except DLedgerError as error:
            return codec.encode_producer_answer(error)

    async def _read(self, data: bytes, call: Call) -> bytes:
        request = codec.decode_read(data)
        try:
            self._check_group(request.group)
            last_index = await self._readable_index(request.mode)
            first_index = request.first_index
            if first_index == last_index + 1:  # the next index to be written: no entry yet, but no error either
                return self._read_answer([])
            if not 0 <= first_index <= last_index:
                raise IndexOutOfRangeError(
                    f"index {first_index} is not readable yet: the last readable index is {last_index}"
                )
            if request.count:
                last_index = LogIndex(min(last_index, first_index + request.count - 1))
            max_bytes = min(request.max_bytes or READ_BYTES_DEFAULT, READ_BYTES_MAX)
            leases = call.until_done(call.leases())
            await leases.take(max_bytes)
            answer, _ = await self._read_entries(first_index, last_index, max_bytes)
            leases.resize(len(answer))
        except DLedgerError as error:
            return codec.encode_read_answer(error)
        else:
            return answer

    async def _readable_index(self, mode: ReadMode) -> LogIndex:
        if mode is ReadMode.LOCAL:
            return self._node.status().end_index
        if mode is ReadMode.LINEARIZABLE:
            outcome: LoopCallback[LogIndex | DLedgerError] = LoopCallback(self._bridge)
            self._node.submit_read_index(outcome.done)
            confirmed = await outcome.future
            if isinstance(confirmed, DLedgerError):
                raise confirmed
            return LogIndex(max(confirmed, self._node.status().committed_index))
        return self._node.status().committed_index

    async def _read_entries(
        self, first_index: LogIndex, last_index: LogIndex, max_bytes: int
    ) -> tuple[bytes, LogIndex]:
        """The answer, and the index of the entry after it."""
        work = partial(self._read_and_encode, first_index, last_index, max_bytes)
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _read_and_encode(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> tuple[bytes, LogIndex]:
        """On a thread: encoding many small entries takes too long for the event loop."""
        entries = self._node.read(first_index, last_index, max_bytes)
        return self._read_answer(entries), LogIndex(entries[-1].index + 1)

    def _read_answer(self, entries: list[Entry]) -> bytes:
        status = self._node.status()
        answer = codec.ReadAnswer(entries, status.committed_index, status.begin_index, status.end_index)
        return codec.encode_read_answer(answer)

    async def _follow(self, data: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        request = codec.decode_follow(data)
        if request.mode is ReadMode.LOCAL:
            raise InvalidRequestError("follow delivers committed entries only: LOCAL is for single reads")
        follower = self._hub.follow()
        try:
            with self._long_lived("follow", call):
                self._check_group(request.group)
                if request.first_index < 0:
                    raise IndexOutOfRangeError(f"cannot follow from index {request.first_index}")
                if request.mode is ReadMode.LINEARIZABLE:
                    await self._readable_index(request.mode)
                next_index = request.first_index
                while True:
                    follower.clear()
                    last_index = self._hub.committed_index
                    while next_index <= last_index:
                        with call.leases() as leases:
                            await leases.take(READ_BYTES_DEFAULT)
                            answer, next_index = await self._read_entries(next_index, last_index, READ_BYTES_DEFAULT)
                            leases.resize(len(answer))
                            yield answer  # returns when the client has read it
                    await follower.wait()
        except DLedgerError as error:
            yield codec.encode_read_answer(error)
        finally:
            self._hub.unfollow(follower)

    async def _metadata(self, data: bytes, _call: Call) -> bytes:
        group = codec.decode_metadata_request(data)
        try:
            self._check_group(group or self._config.group)
            return codec.encode_metadata(self._node.status())
        except DLedgerError as error:
            return codec.encode_metadata(error)

    async def _watch_role(self, data: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        group = codec.decode_watch_role(data)
        if group and group != self._config.group:
            raise InvalidRequestError(f"this node serves group {self._config.group!r}, not {group!r}")
        watcher = self._hub.watch()  # before the current state is read, so that no change is missed
        try:
            with self._long_lived("watch", call):
                status = self._node.status()
                event = RoleEvent(status.node_id, status.role, status.term, status.leader)
                yield codec.encode_role_event(event)
                while True:
                    previous, event = event, await watcher.get()
                    if event != previous:
                        yield codec.encode_role_event(event)
        finally:
            self._hub.unwatch(watcher)

    async def _transfer(self, data: bytes, _call: Call) -> bytes:
        group, target = codec.decode_transfer(data)
        try:
            self._check_group(group)
            outcome: LoopCallback[LeaderHint | DLedgerError] = LoopCallback(self._bridge)
            self._node.submit_transfer(target, outcome.done)
            return codec.encode_transferred(await outcome.future, self._node.status().term)
        except DLedgerError as error:
            return codec.encode_transferred(error, self._node.status().term)

    async def _locate(self, data: bytes, _call: Call) -> bytes:
        return await self._bulk.locate(data)

    def _check_group(self, group: str) -> None:
        if group != self._config.group:
            raise IdentityError(f"this node serves group {self._config.group!r}, not {group!r}")

    def _check_appends_served(self) -> None:
        if not self._config.client_appends:
            raise AppendsNotServedError(
                f"the log of group {self._config.group!r} belongs to an application (client_appends=false) and "
                "takes reads only: send to the application, for example as a producer to its broker"
            )

    def _check_bodies(self, request: codec.Append) -> None:
        if not request.bodies:
            raise EmptyBatchError("an append needs at least one entry")
        largest = max(map(len, request.bodies))
        if largest > self._body_bytes_max:
            store = self._config.store
            setting = "max_entry_bytes" if store.entry_bytes_limit == store.max_entry_bytes else "segment_bytes"
            raise EntryTooLargeError(
                f"an entry of {largest} bytes is too large: the limit is {self._body_bytes_max} bytes, because of "
                f"{setting}={getattr(store, setting)}"
            )

    def _note_waiting(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    @contextmanager
    def _long_lived(self, kind: str, call: Call) -> Iterator[None]:
        with call.quota.stream(kind, "client_streams_max"):
            self._note_waiting()
            yield

    # --- access and lifetime ----------------------------------------------------------------------------------------

    def _admit(self, name: str, context: Context, connection: Connection, body: bytes | None) -> Call:
        """Authenticate and authorize a call, with access control; raises a refusal of ``access_gate``."""
        guard = self._guard
        if guard is None:
            return Call(context, connection, quota_at(connection.host, connection.peer, self._quotas), None, self._room)
        caller = access_gate.admit(guard, self._quotas, options.method(options.LOG_SERVICE, name), context, body)
        group = self._config.group
        if self._needs_admin(name):
            guard.require_admin(caller, name, f"log:{group}", changes=name == _TRANSFER)
        elif name in _NEEDED:
            guard.require(caller, name, ResourceKind.TOPIC, group, _NEEDED[name])
        return Call(context, connection, caller.quota, caller, self._room)

    def _needs_admin(self, name: str) -> bool:
        """Whether only administrators may call it: transfers, and reads of an application's log, which mixes all its
        users' entries.
        """
        application = not self._config.client_appends
        return name == _TRANSFER or (application and _NEEDED.get(name) is Permission.SUB)

    @contextmanager
    def _stream_of(self, name: str, call: Call) -> Iterator[None]:
        """Wraps a stream: ends it when the caller loses permission."""
        caller = call.caller
        if self._guard is None or caller is None:
            yield
            return

        def still_allowed() -> bool:
            if self._needs_admin(name):
                return caller.account.admin
            return name not in _NEEDED or caller.may(ResourceKind.TOPIC, self._config.group, _NEEDED[name])

        with access_gate.open_stream(self._guard, caller, still_allowed):
            yield

    def _answers(
        self, name: str, handler: Callable[[bytes, Call], Awaitable[bytes]]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        @wraps(handler)
        async def answer(data: bytes, context: Context) -> bytes:
            limit = asyncio.timeout(self._call_s)
            try:
                with self._connections.call(context) as connection:
                    call = self._admit(name, context, connection, data)
                    async with limit:
                        answer = await handler(data, call)
                    if name not in _WITH_ROOM:
                        call.check_answer(len(answer))
                    return answer
            except TimeoutError:
                if not limit.expired():
                    raise
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, options.too_long(self._config.limits))
            except _GRPC_ERRORS as error:
                await self._abort(context, error)
            raise InvariantError("abort raises")

        return answer

    def _streaming(
        self, name: str, handler: Callable[[bytes, Call], AsyncGenerator[bytes, None]]
    ) -> Callable[[bytes, Context], Awaitable[None]]:
        async def stream(data: bytes, context: Context) -> None:
            try:
                with self._connections.call(context) as connection:
                    call = self._admit(name, context, connection, data)
                    with self._stream_of(name, call):
                        async with aclosing(handler(data, call)) as answers:
                            async for answer in answers:
                                with connection.writing():
                                    await context.write(answer)
            except _GRPC_ERRORS as error:
                await self._abort(context, error)

        return stream

    def _bulk_streaming(
        self, name: str, handler: Callable[[bytes], AsyncGenerator[bytes, None]]
    ) -> Callable[[bytes, Context], Awaitable[None]]:
        """``_streaming`` with limits on its duration and on the time without progress."""
        limits, bulk = self._config.limits, self._config.bulk

        async def write(context: Context, connection: Connection, answer: bytes) -> None:
            try:
                async with asyncio.timeout(self._call_s):
                    with connection.writing():
                        await context.write(answer)
            except TimeoutError:  # cancelling the call would leave its last chunk in memory until the client reads it
                self._connections.hang_up(connection)
                raise

        async def stream(data: bytes, context: Context) -> None:
            now = asyncio.get_running_loop().time
            ends_at = now() + bulk.bulk_stream_ms_max / 1000
            limit = asyncio.timeout(min(self._call_s, bulk.bulk_stream_ms_max / 1000))
            try:
                with self._connections.call(context) as connection:
                    call = self._admit(name, context, connection, data)
                    with self._stream_of(name, call), self._bulk.one_of_few(call.quota):
                        self._note_waiting()
                        async with limit, aclosing(handler(data)) as answers:
                            async for answer in answers:
                                limit.reschedule(None)
                                await write(context, connection, answer)
                                limit.reschedule(min(now() + self._call_s, ends_at))
            except TimeoutError:
                why = (
                    f"the stream exceeded {bulk.bulk_stream_ms_max} ms (bulk_stream_ms_max)"
                    if now() >= ends_at
                    else f"no data read from the log, or by the client, for {limits.call_ms_max} ms (call_ms_max)"
                )
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
            except _GRPC_ERRORS as error:
                await self._abort(context, error)

        return stream

    async def _abort(self, context: Context, error: Exception) -> None:
        if isinstance(error, PendingFullError | TooManyBulkReadsError):
            self._conditions.limit(str(error))
        if isinstance(error, InvalidRequestError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told(error))
        if isinstance(error, access_gate.REFUSALS):
            code, metadata = access_gate.refusal_of(self._guard, error)
            await context.abort(code, told(error), metadata)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told(error))


_GRPC_ERRORS: Final = (InvalidRequestError, TooManyBulkReadsError, *access_gate.REFUSALS)
"""Errors that end a call without an answer."""
