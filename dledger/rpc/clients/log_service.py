"""The log service over gRPC: an adapter of ``LogRequests``; any number of appends may wait without a thread each.

Domain errors travel in the answer's ``Status``; a gRPC status other than OK means a malformed request, a limit, or a
node that is shutting down.

Of a client's ``AppendStream``, requests are submitted as they arrive, and answers are written as they complete.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Final

import grpc

from dledger.access.guard import Caller, quota_at
from dledger.access.quota import Quota
from dledger.errors import (
    DLedgerError,
    EarlierRequestFailedError,
    IdentityError,
    IndexOutOfRangeError,
    InvalidRequestError,
    InvariantError,
    PendingFullError,
    told,
)
from dledger.records import record
from dledger.rpc import options
from dledger.rpc.clients import bulk_codec, codec, group_codec, grpc_server
from dledger.rpc.clients.bulk_service import TooManyBulkReadsError
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.clients.connections import SMALL_BYTES, AnswerRoom, Connection, Connections, Leases
from dledger.rpc.clients.grpc_server import Methods
from dledger.rpc.clients.log_requests import READ_BYTES_DEFAULT, AppendOutcome, LogOperation, LogRequests
from dledger.rpc.loops import LoopBridge, LoopCallback
from dledger.rpc.ports import RoleEvent
from dledger.values import MIB

REQUESTS_PENDING_MAX: Final = 1024
"""The limit of a stream's requests waiting for a quorum; beyond it the stream is not read, which slows the client."""
_BYTES_PENDING_MAX: Final = 16 * MIB

Submit = Callable[[codec.Append, Callable[[AppendOutcome], None]], None]


class AppendStream:
    """Lives on the loop; ``submit`` checks a request and passes it to the node."""

    def __init__(
        self,
        call: Call,
        bridge: LoopBridge,
        submit: Submit,
        on_refusal: Callable[[DLedgerError], None],
        request_bytes_max: int,
    ) -> None:
        """``on_refusal`` is called for every failed append."""
        self._context = call.context
        self._quota = call.quota
        self._connection = call.connection
        self._on_refusal = on_refusal
        self._bridge = bridge
        self._submit = submit
        self._request_bytes_max = request_bytes_max
        self._answers: deque[tuple[bytes, int, int]] = deque()  # encoded answer, and its request's entries and bytes
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._requests_pending = 0
        self._bytes_pending = 0
        self._ended = False
        self._left = False
        self._failed = False

    async def run(self) -> None:
        """Serve until the client ends the stream and every request is answered. Raises ``InvalidRequestError``."""
        # Tells the client that the stream is accepted: requests that fail before that were certainly not sent.
        await self._context.send_initial_metadata(options.limit_metadata(self._request_bytes_max))
        writer = asyncio.create_task(self._write_answers())
        reader = asyncio.create_task(self._read_requests())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():  # no answers are written any more, so a reader waiting for room would never get any
                reader.cancel()
                await writer
                return
            reader.result()
            self._ended = True
            self._answer_ready.set()
            await writer
        finally:
            reader.cancel()
            writer.cancel()
            self._left = True
            while self._answers:
                _, entries, size = self._answers.popleft()
                self._quota.give(entries, size)

    async def _read_requests(self) -> None:
        while isinstance(data := await self._context.read(), bytes):
            self._take(codec.decode_append(data), len(data))
            while self._requests_pending >= REQUESTS_PENDING_MAX or self._bytes_pending >= _BYTES_PENDING_MAX:
                self._room.clear()
                await self._room.wait()
            while self._quota.is_full:  # including the client's other streams
                await self._quota.wait_room(self._room)

    def _take(self, request: codec.Append, size: int) -> None:
        self._requests_pending += 1
        self._bytes_pending += size
        request_id, entries = request.request_id, len(request.bodies)
        self._quota.take(entries, size)

        done = partial(self._answered, request_id, entries, size)
        if request.ordered and self._failed:
            done(EarlierRequestFailedError("an earlier append of this stream failed: open a new stream"))
        else:
            self._submit(request, done)

    def _answered(self, request_id: int, entries: int, size: int, outcome: AppendOutcome) -> None:  # on any thread
        self._bridge.post(partial(self._on_done, request_id, entries, size, outcome))

    def _on_done(self, request_id: int, entries: int, size: int, outcome: AppendOutcome) -> None:
        if isinstance(outcome, DLedgerError):
            self._failed = True
            self._on_refusal(outcome)
        if self._left:
            self._quota.give(entries, size)
            return
        self._answers.append((codec.encode_appended(request_id, outcome), entries, size))
        self._answer_ready.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                answer, entries, size = self._answers[0]
                with self._connection.writing():
                    await self._context.write(answer)
                # Only now: a client that reads no answers must not fill the memory with them.
                self._answers.popleft()
                self._requests_pending -= 1
                self._bytes_pending -= size
                self._quota.give(entries, size)
                self._room.set()
            if self._ended and not self._requests_pending:
                return
            self._answer_ready.clear()
            await self._answer_ready.wait()


@record(frozen=True, slots=True)
class Call:
    """The context of a request, for its handler. ``caller`` is None without access control."""

    context: grpc.aio.ServicerContext[Any, Any]  # Any: of any messages
    connection: Connection
    quota: Quota
    caller: Caller | None
    room: AnswerRoom

    def leases(self) -> Leases:
        """Room for this call's answers, one at a time."""
        return Leases(self.room, self.quota, self.connection)

    def until_done(self, leases: Leases) -> Leases:
        """Keep the room of the call's only answer until gRPC has finished the call."""
        self.context.add_done_callback(lambda _: leases.end())  # type: ignore[arg-type]  # grpc-stubs: of their own type
        return leases

    def check_answer(self, size: int) -> None:
        """Take room for an answer made without it. Raises ``TooManyWaitsError``: the answer must then be dropped."""
        if size > SMALL_BYTES:
            self.until_done(self.leases()).take_now(size)


Context = grpc.aio.ServicerContext[bytes, bytes]

_APPEND_STREAM: Final = "AppendStream"
_WITH_ROOM: Final = ("Append", "Read", "Command")
"""Unary methods whose answers already have room, or must be sent because the entries are appended."""
_TRANSFER: Final = "TransferLeadership"


def _operation(method: str) -> LogOperation:
    return LogOperation.APPEND if method == _APPEND_STREAM else LogOperation(method)


class LogService:
    """The handlers. Create it on the event loop's thread."""

    def __init__(self, requests: LogRequests, connections: Connections) -> None:
        self._requests = requests
        self._bulk = requests.bulk
        self._config = config = requests.config
        self._connections = connections
        self._call_s = config.limits.call_ms_max / 1000

    def methods(self) -> Methods:
        """The methods to register as ``options.LOG_SERVICE``."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        answers, streams = self._answers, self._streaming
        return {
            "Append": unary(answers("Append", self._append)),
            _APPEND_STREAM: grpc.stream_stream_rpc_method_handler(self._append_stream),
            "Producer": unary(answers("Producer", self._producer)),
            "Read": unary(answers("Read", self._read)),
            "Follow": stream(streams("Follow", self._follow)),
            "Metadata": unary(answers("Metadata", self._metadata)),
            "WatchRole": stream(streams("WatchRole", self._watch_role)),
            _TRANSFER: unary(answers(_TRANSFER, self._transfer)),
            "ChangeMembers": unary(answers("ChangeMembers", self._change_members)),
            "Command": unary(answers("Command", self._command)),
            "Query": unary(answers("Query", self._query)),
            "Snapshot": unary(answers("Snapshot", self._snapshot)),
            "FetchLog": stream(self._bulk_streaming("FetchLog", self._bulk.fetch)),
            "Locate": unary(answers("Locate", self._locate)),
            "BlockDigests": stream(self._bulk_streaming("BlockDigests", self._bulk.digests)),
        }

    # Each handler below decodes first (raising InvalidRequestError: gRPC status), then answers (Status in the answer).

    async def _append(self, data: bytes, call: Call) -> bytes:
        request = codec.decode_append(data)
        self._requests.note_waiting()
        quota, entries, size = call.quota, len(request.bodies), len(data)
        if quota.is_full:
            error = quota.full_error()
            self._requests.note_refusal(error)
            return codec.encode_appended(request.request_id, error)
        quota.take(entries, size)
        answered: LoopCallback[AppendOutcome] = LoopCallback(self._requests.bridge, partial(quota.give, entries, size))
        self._submit_for(call.caller, request, answered.done)
        outcome = await answered.future
        if isinstance(outcome, DLedgerError):
            self._requests.note_refusal(outcome)
        return codec.encode_appended(request.request_id, outcome)

    async def _append_stream(self, _requests: object, context: Context) -> None:
        try:
            with self._connections.call(context) as connection:
                call = self._admit(_APPEND_STREAM, context, connection, None)
                with self._requests.long_lived("append", call.quota), self._stream_of(_APPEND_STREAM, call):
                    submit = partial(self._submit_for, call.caller)
                    request_bytes_max = options.request_bytes_max(self._config)
                    requests = self._requests
                    await AppendStream(call, requests.bridge, submit, requests.note_refusal, request_bytes_max).run()
        except _GRPC_ERRORS as error:
            await self._abort(context, error)

    def _submit_for(self, caller: Caller | None, request: codec.Append, done: Callable[[AppendOutcome], None]) -> None:
        self._requests.submit_append(caller, request.group, request.bodies, request.producer, done)

    async def _producer(self, data: bytes, call: Call) -> bytes:
        group, producer = codec.decode_producer_request(data)
        try:
            return codec.encode_producer_answer(await self._requests.producer_sequence(call.caller, group, producer))
        except DLedgerError as error:
            return codec.encode_producer_answer(error)

    async def _read(self, data: bytes, call: Call) -> bytes:
        request = codec.decode_read(data)
        try:
            return await self._requests.read(request, call.until_done(call.leases()), codec.encode_read_answer)
        except DLedgerError as error:
            return codec.encode_read_answer(error)

    async def _follow(self, data: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        request = codec.decode_follow(data)
        if request.mode is ReadMode.LOCAL:
            raise InvalidRequestError("follow delivers committed entries only: LOCAL is for single reads")
        follower = self._requests.hub.follow()
        try:
            with self._requests.long_lived("follow", call.quota):
                self._requests.check_group(request.group)
                if request.first_index < 0:
                    raise IndexOutOfRangeError(f"cannot follow from index {request.first_index}")
                if request.mode is ReadMode.LINEARIZABLE:
                    await self._requests.readable_index(request.mode)
                next_index = request.first_index
                while True:
                    follower.clear()
                    last_index = self._requests.hub.committed_index
                    while next_index <= last_index:
                        with call.leases() as leases:
                            await leases.take(READ_BYTES_DEFAULT)
                            answer, next_index = await self._requests.read_entries(
                                next_index, last_index, READ_BYTES_DEFAULT, codec.encode_read_answer
                            )
                            leases.resize(len(answer))
                            yield answer  # returns when the client has read it
                    await follower.wait()
        except DLedgerError as error:
            yield codec.encode_read_answer(error)
        finally:
            self._requests.hub.unfollow(follower)

    async def _metadata(self, data: bytes, _call: Call) -> bytes:
        group = codec.decode_metadata_request(data)
        try:
            return codec.encode_metadata(self._requests.status(group))
        except DLedgerError as error:
            return codec.encode_metadata(error)

    async def _watch_role(self, data: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        group = codec.decode_watch_role(data)
        try:
            self._requests.check_group(group)
        except IdentityError as error:
            raise InvalidRequestError(str(error)) from None
        watcher = self._requests.hub.watch()  # before the current state is read, so that no change is missed
        try:
            with self._requests.long_lived("watch", call.quota):
                status = self._requests.status()
                event = RoleEvent(status.node_id, status.role, status.term, status.leader)
                yield codec.encode_role_event(event)
                while True:
                    previous, event = event, await watcher.get()
                    if event != previous:
                        yield codec.encode_role_event(event)
        finally:
            self._requests.hub.unwatch(watcher)

    async def _transfer(self, data: bytes, _call: Call) -> bytes:
        group, target = codec.decode_transfer(data)
        try:
            return codec.encode_transferred(*await self._requests.transfer(group, target))
        except DLedgerError as error:
            return codec.encode_transferred(error, self._requests.status().term)

    async def _change_members(self, data: bytes, _call: Call) -> bytes:
        group, change = group_codec.decode_change(data)
        try:
            return group_codec.encode_changed(await self._requests.change_members(group, change))
        except DLedgerError as error:
            return group_codec.encode_changed(error)

    async def _command(self, data: bytes, call: Call) -> bytes:
        request = group_codec.decode_commands(data)
        is_applied = False
        try:
            results = await self._requests.command(call.caller, call.quota, request, len(data))
            is_applied = True
            answer = group_codec.encode_results(results)
            call.check_answer(len(answer))
        except DLedgerError as error:
            if is_applied:  # only the results found no room
                error.outcome = "unknown"
            self._requests.note_refusal(error)
            return group_codec.encode_results(error)
        return answer

    async def _query(self, data: bytes, call: Call) -> bytes:
        request = group_codec.decode_query(data)
        with self._stream_of("Query", call) if request.wait_ms else nullcontext():
            try:
                return group_codec.encode_answer(await self._requests.query(request, call.quota))
            except DLedgerError as error:
                return group_codec.encode_answer(error)

    async def _snapshot(self, data: bytes, _call: Call) -> bytes:
        group = group_codec.decode_snapshot_request(data)
        try:
            return group_codec.encode_snapshot_state(await self._requests.snapshot(group))
        except DLedgerError as error:
            return group_codec.encode_snapshot_state(error)

    async def _locate(self, data: bytes, _call: Call) -> bytes:
        request = bulk_codec.decode_locate(data)
        try:
            return bulk_codec.encode_located(await self._bulk.locate(request))
        except DLedgerError as error:
            return bulk_codec.encode_located(error)

    # --- access and lifetime ----------------------------------------------------------------------------------------

    def _admit(self, name: str, context: Context, connection: Connection, body: bytes | None) -> Call:
        """Authenticate and authorize a call, with access control; raises a refusal of ``access_gate``."""
        requests, guard = self._requests, self._requests.guard
        if guard is None:
            quota = quota_at(connection.host, connection.peer, requests.quotas)
            return Call(context, connection, quota, None, requests.room)
        method, peer = options.method(options.LOG_SERVICE, name), connection.peer
        caller = grpc_server.admit(guard, requests.quotas, method, context, peer, body)
        requests.require(guard, caller, _operation(name), name)
        return Call(context, connection, caller.quota, caller, requests.room)

    @contextmanager
    def _stream_of(self, name: str, call: Call) -> Iterator[None]:
        """Wraps a stream, or a call that waits: ends it when the caller loses permission."""
        caller, guard = call.caller, self._requests.guard
        if guard is None or caller is None:
            yield
            return
        with grpc_server.open_stream(guard, caller, partial(self._requests.may, caller, _operation(name))):
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
                        self._requests.note_waiting()
                        async with limit, aclosing(handler(data)) as answers:
                            async for answer in answers:
                                limit.reschedule(None)
                                await write(context, connection, answer)
                                limit.reschedule(min(now() + self._call_s, ends_at))
            except TimeoutError:
                why = (
                    f"the stream exceeded {bulk.bulk_stream_ms_max} ms"
                    if now() >= ends_at
                    else f"no data read from the log, or by the client, for {limits.call_ms_max} ms (call_ms_max)"
                )
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
            except _GRPC_ERRORS as error:
                await self._abort(context, error)

        return stream

    async def _abort(self, context: Context, error: Exception) -> None:
        if isinstance(error, PendingFullError | TooManyBulkReadsError):
            self._requests.conditions.limit(str(error))
        if isinstance(error, InvalidRequestError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told(error))
        if isinstance(error, grpc_server.REFUSALS):
            code, metadata = grpc_server.refusal_of(self._requests.guard, error)
            await context.abort(code, told(error), metadata)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told(error))


_GRPC_ERRORS: Final = (InvalidRequestError, TooManyBulkReadsError, *grpc_server.REFUSALS)
"""Errors that end a call without an answer."""
