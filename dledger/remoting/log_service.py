"""The log service over remoting: an adapter of ``LogRequests``, with DLedger's request codes and ours.

A node has a server of its own for it; a broker with a replicated log takes the handlers into its server.

A request with one of our codes is answered with a body, or with an error that the client raises again. An answer has
room of its client's quota before the log is read for it, and keeps it until the client has read it.

DLedger's own requests, as its Java client sends them, are JSON in remoting frames. An answer's frame has code 200
whatever happened; its body has the real code, and the leader as a hint. Where ours differs from Java: a ``remoteId``
may be missing; ``get`` is linearizable, so it returns no entry that may still be lost; ``peers`` are the members'
addresses for clients. Bodies are answered as fastjson2 writes them (DLedger 0.4), as arrays of signed numbers, which
fastjson reads, too (older lines): up to five bytes for each, which takes time.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Protocol

from dledger.errors import (
    DLedgerError,
    EntryTooLargeError,
    IndexOutOfRangeError,
    InvalidRequestError,
    NotLeaderError,
    PendingFullError,
    ResponseCode,
    UnknownMemberError,
)
from dledger.records import ENTRY_HEADER_BYTES
from dledger.remoting import log_codec
from dledger.remoting.codes import ANNOUNCED, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.fastjson import dumps_plain, loads
from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, FRAME_BYTES_MAX, Frame, head_of
from dledger.remoting.log_appends import Admitted, Appends, LogAccess
from dledger.remoting.log_codec import REQUEST_BYTES_MAX_FIELD, JavaCode, LogCode, error_answer
from dledger.remoting.server import Answer, Direct, Handler, Handlers, RemotingServer, ServerLimits
from dledger.rpc import options
from dledger.rpc.clients import bulk_codec, group_codec
from dledger.rpc.clients import codec as messages
from dledger.rpc.clients.bulk_service import TooManyBulkReadsError
from dledger.rpc.clients.codec import Read, ReadAnswer, ReadMode
from dledger.rpc.clients.connections import SMALL_BYTES, Leases
from dledger.rpc.clients.log_requests import AppendOutcome, LogOperation, LogRequests
from dledger.rpc.loops import LoopCallback, RoleWatch
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.types import Entry, LogIndex, NodeId, Term

_Json = dict[str, Any]
"""An object of JSON."""
TOLERANT_BYTES_MAX: Final = 64 * 1024
"""Of a request that may be fastjson's variant of JSON, whose parser takes half a second for the largest frame."""
_AT_ONCE: Final = 64 * 1024
"""Bytes of a body that are written at once: a thread that writes JSON holds up all others meanwhile."""
_NUMBERS: Final = [str(byte - 256 if byte > 127 else byte) for byte in range(256)]
_INT32_SIGN: Final = 1 << 31
_NONE: Final = -1


def request_of(frame: Frame) -> _Json:
    """The object in a request's body. Raises ``InvalidRequestError``."""
    try:
        found = loads(frame.body, tolerant=len(frame.body) <= TOLERANT_BYTES_MAX)
    except RequestError as error:
        raise InvalidRequestError(str(error)) from error
    if not isinstance(found, dict):
        raise InvalidRequestError("malformed body: not an object")
    return found


def _check_addressee(request: _Json, node_id: NodeId) -> None:
    """Raise ``UnknownMemberError`` for a request to another member; one that names none is for whom it reaches."""
    wanted = request.get("remoteId")
    if wanted is not None and wanted != node_id:
        raise UnknownMemberError(f"this is {node_id}, not {str(wanted)[:64]}")


def text_of(request: _Json, name: str) -> str:
    """A member that is a text; empty if it is missing."""
    value = request.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is not a text")
    return value


def number_of(request: _Json, name: str, missing: int = _NONE) -> int:
    """A member that is a whole number."""
    value = request.get(name)
    if value is None:
        return missing
    if type(value) is not int:
        raise InvalidRequestError(f"{name} is not a whole number")
    return value


def body_of(request: _Json) -> bytes:
    """The body of an entry: base64, as fastjson writes it, or an array of signed numbers, as fastjson2 does."""
    body = request.get("body")
    try:
        if isinstance(body, list):
            return array("b", body).tobytes()
        return base64.b64decode(text_of(request, "body"), validate=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError("body is neither base64 nor an array of bytes") from error


def answer_to(frame: Frame, status: NodeStatus, members: _Json) -> Frame:
    """An answer with ``members`` besides those that all have."""
    return frame.answer(ResponseCode.SUCCESS, body=dumps_plain(_base(status) | members))


def _base(status: NodeStatus) -> _Json:
    base: _Json = {"code": int(ResponseCode.SUCCESS), "group": status.group, "localId": status.node_id}
    base["term"] = int(status.term)
    if status.leader is not None:
        base["leaderId"] = status.leader.node_id
    return base


def _java_error_answer(frame: Frame, status: NodeStatus, error: DLedgerError, members: _Json) -> Frame:
    """The answer for an error; who looks into the frame finds its text in the remark."""
    told = members | {"code": int(error.code)}
    if error.leader is not None:
        told["leaderId"] = error.leader.node_id
    return answer_to(frame, status, told)._replace(remark=str(error)[:1000])


def metadata(status: NodeStatus) -> _Json:
    """The members of an answer to METADATA; whose address is not known yet is missing."""
    return {"peers": {one.node_id: one.client_address for one in status.members if one.client_address}}


def appended(index: LogIndex, position: int, term: Term) -> _Json:
    """The members of an answer to APPEND."""
    return {"index": int(index), "pos": int(position), "term": int(term)}


_NOT_APPENDED: Final[_Json] = {"index": _NONE, "pos": _NONE}


def encode_entries(first_index: int, status: NodeStatus, answer: ReadAnswer) -> bytes:
    """The body of an answer to GET; not on the loop. Raises ``IndexOutOfRangeError``, as Java does, for the next index,
    too, and ``EntryTooLargeError``.
    """
    if not answer.entries:
        raise IndexOutOfRangeError(
            f"index {first_index} is not readable yet: the last readable index is {answer.committed_index}"
        )
    body = b"".join((b'{"entries":[', b",".join(map(_entry, answer.entries)), b"],", dumps_plain(_base(status))[1:]))
    if len(body) > FRAME_BYTES_MAX - ANSWER_HEADER_BYTES_MAX:
        raise EntryTooLargeError(
            f"entry {first_index} has {len(body)} bytes in JSON, too many for a frame: read it with request "
            f"{LogCode.READ.value}"
        )
    return body


_NO_ENTRIES: Final[_Json] = {"entries": []}


def _entry(entry: Entry) -> bytes:
    others = {
        "bodyCrc": _signed(entry.body_crc),
        "chainCrc": _signed(entry.chain_crc),
        "channel": _signed(entry.channel),
        "index": int(entry.index),
        "magic": int(entry.magic),
        "pos": int(entry.position),
        "size": ENTRY_HEADER_BYTES + len(entry.body),
        "term": int(entry.term),
    }
    body, number = entry.body, _NUMBERS.__getitem__
    pieces = [",".join(map(number, body[at : at + _AT_ONCE])).encode() for at in range(0, len(body), _AT_ONCE)]
    return b"".join((b'{"body":[', b",".join(pieces), b"],", dumps_plain(others)[1:]))


def _signed(number: int) -> int:
    """A number of 32 bits, as Java's ``int`` has it."""
    return number - 2 * _INT32_SIGN if number >= _INT32_SIGN else number


RECEIVE_BYTES_MAX: Final = 16 * FRAME_BYTES_MAX
"""Of all connections together: received, and not done with."""
UNSENT_BYTES_MAX: Final = 4 * FRAME_BYTES_MAX
ANSWER_BYTES_MAX: Final = FRAME_BYTES_MAX - options.FRAMING_BYTES
"""Of answers that slow readers leave, besides those that have room of their quota."""
_Own = Callable[[Admitted, RemotingConnection, Frame], Awaitable[bytes]]
"""Returns the body of the answer. Raises ``DLedgerError``."""
_Java = Callable[[Admitted, RemotingConnection, Frame, _Json], Awaitable[_Json | None]]
"""Returns the members of the answer's JSON; None: it is sent. Raises ``DLedgerError``."""


class LogHandlers:
    """The handlers, also for several servers. They check themselves who may do what. On the loop."""

    def __init__(self, requests: LogRequests) -> None:
        self._requests = requests
        self._access = LogAccess(requests)
        self._appends = Appends(requests, self._access)
        self._watches: dict[RemotingConnection, asyncio.Task[None]] = {}
        self._reading: dict[RemotingConnection, set[asyncio.Task[object]]] = {}
        self.direct: Final[Mapping[int, Direct]] = {LogCode.APPEND: self._appends.take}
        self.awaited: Final[Mapping[int, Handler]] = {**self._own_handlers(), **self._java_handlers()}

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""
        self._appends.closed(connection)
        self._access.closed(connection)
        if (watch := self._watches.pop(connection, None)) is not None:
            watch.cancel()
        for task in tuple(self._reading.get(connection, ())):
            task.cancel()

    def _own_handlers(self) -> dict[int, Handler]:
        own = self._own
        return {
            LogCode.READ: self._read,
            LogCode.METADATA: own(LogOperation.METADATA, self._metadata),
            LogCode.PRODUCER: own(LogOperation.PRODUCER, self._producer),
            LogCode.TRANSFER: own(LogOperation.TRANSFER, self._transfer),
            LogCode.CHANGE_MEMBERS: own(LogOperation.CHANGE_MEMBERS, self._change_members),
            LogCode.COMMAND: own(LogOperation.COMMAND, self._command),
            LogCode.QUERY: own(LogOperation.QUERY, self._query),
            LogCode.SNAPSHOT: own(LogOperation.SNAPSHOT, self._snapshot),
            LogCode.WATCH_ROLE: own(LogOperation.WATCH_ROLE, self._watch_role),
            LogCode.FETCH: self._fetch,
            LogCode.LOCATE: own(LogOperation.LOCATE, self._locate),
            LogCode.DIGESTS: own(LogOperation.DIGESTS, self._digests),
        }

    def _java_handlers(self) -> dict[int, Handler]:
        json = self._java
        return {
            JavaCode.METADATA: json(LogOperation.METADATA, self._java_metadata, {}),
            JavaCode.APPEND: json(LogOperation.APPEND, self._java_append, _NOT_APPENDED),
            JavaCode.GET: json(LogOperation.READ, self._java_get, _NO_ENTRIES),
            JavaCode.LEADERSHIP_TRANSFER: json(LogOperation.TRANSFER, self._java_transfer, {}),
        }

    # --- our codes ----------------------------------------------------------------------------------------------------

    def _own(self, operation: LogOperation, handler: _Own) -> Handler:
        """A handler whose answers are small, or must have room at once."""

        async def handle(connection: RemotingConnection, frame: Frame) -> Answer:
            is_applied = False
            try:
                admitted = self._access.admit(connection, frame, operation)
                body = await handler(admitted, connection, frame)
                is_applied = operation is LogOperation.COMMAND
                if len(body) > ANSWER_BYTES_MAX:
                    told = f"the answer has {len(body)} bytes, and one may have {ANSWER_BYTES_MAX}"
                    raise InvalidRequestError(f"{told}: ask for less at a time")
                if len(body) <= SMALL_BYTES:
                    return frame.answer(body=body)
                with Leases(self._requests.room, admitted.quota) as leases:
                    leases.take_now(len(body))
                    self._send(connection, frame, body)
                    del body
                    await connection.taken()
            except DLedgerError as error:
                if is_applied:  # only the results found no room, here or in an answer
                    error.outcome = "unknown"
                return self._refusal(frame, error)
            return None

        return handle

    async def _read(self, connection: RemotingConnection, frame: Frame) -> Answer:
        requests = self._requests
        try:
            admitted = self._access.admit(connection, frame, LogOperation.READ)
            read, wait_ms = log_codec.decode_read(frame.body)
            with self._ends_with(connection), Leases(requests.room, admitted.quota) as leases:
                if wait_ms and read.first_index > requests.hub.committed_index:
                    requests.check_group(read.group)
                    await requests.wait_for(read.first_index, wait_ms / 1000, admitted.quota)
                    self._access.admit_again(admitted, LogOperation.READ)
                self._send(connection, frame, await requests.read(read, leases, log_codec.encode_read_answer))
                await connection.taken()
        except DLedgerError as error:
            return self._refusal(frame, error)
        return None

    async def _fetch(self, connection: RemotingConnection, frame: Frame) -> Answer:
        requests = self._requests
        try:
            admitted = self._access.admit(connection, frame, LogOperation.FETCH)
            request = bulk_codec.decode_fetch(frame.body)
            with (
                self._ends_with(connection),
                requests.bulk.one_of_few(admitted.quota),
                Leases(requests.room, admitted.quota) as leases,
            ):
                await leases.take(requests.bulk.chunk_bytes(request))
                body = await requests.bulk.one_chunk(request, bulk_codec.encode_chunk)
                leases.resize(len(body))
                self._send(connection, frame, body)
                del body
                await connection.taken()
        except TooManyBulkReadsError as error:
            requests.conditions.limit(str(error))
            return error_answer(frame, PendingFullError(str(error)))
        except DLedgerError as error:
            return self._refusal(frame, error)
        return None

    async def _metadata(self, _admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        return messages.encode_metadata(self._requests.status(messages.decode_metadata_request(frame.body)))

    async def _producer(self, admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        group, producer = messages.decode_producer_request(frame.body)
        return messages.encode_producer_answer(await self._requests.producer_sequence(admitted.caller, group, producer))

    async def _transfer(self, _admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        return messages.encode_transferred(*await self._requests.transfer(*messages.decode_transfer(frame.body)))

    async def _change_members(self, _admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        changed = await self._requests.change_members(*group_codec.decode_change(frame.body))
        return group_codec.encode_changed(changed)

    async def _command(self, admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        request = group_codec.decode_commands(frame.body)
        results = await self._requests.command(admitted.caller, admitted.quota, request, len(frame.body))
        return group_codec.encode_results(results)

    async def _query(self, admitted: Admitted, connection: RemotingConnection, frame: Frame) -> bytes:
        request = group_codec.decode_query(frame.body)
        with self._ends_with(connection):
            answer = await self._requests.query(request, admitted.quota)
        if request.wait_ms:
            self._access.admit_again(admitted, LogOperation.QUERY)
        return group_codec.encode_answer(answer)

    async def _snapshot(self, _admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        group = group_codec.decode_snapshot_request(frame.body)
        return group_codec.encode_snapshot_state(await self._requests.snapshot(group))

    async def _locate(self, _admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        return bulk_codec.encode_located(await self._requests.bulk.locate(bulk_codec.decode_locate(frame.body)))

    async def _digests(self, admitted: Admitted, _connection: RemotingConnection, frame: Frame) -> bytes:
        bulk = self._requests.bulk
        request = bulk_codec.decode_digests_request(frame.body)
        try:
            with bulk.one_of_few(admitted.quota):
                return bulk_codec.encode_digests(await bulk.some_digests(request))
        except TooManyBulkReadsError as error:
            raise PendingFullError(str(error)) from None

    async def _watch_role(self, admitted: Admitted, connection: RemotingConnection, frame: Frame) -> bytes:
        """A connection has one watch, however often it asks."""
        requests = self._requests
        status = requests.status(messages.decode_watch_role(frame.body))
        event = RoleEvent(status.node_id, status.role, status.term, status.leader)
        if connection not in self._watches and not connection.is_closed:  # its end would end no watch any more
            held = ExitStack()
            held.enter_context(admitted.quota.stream("watch", "client_streams_max"))
            watch = requests.hub.watch()
            held.callback(requests.hub.unwatch, watch)
            # Its first step comes after the answer, which is sent in this turn.
            telling = asyncio.get_running_loop().create_task(self._tell_roles(connection, watch, event, held))
            self._watches[connection] = telling
            telling.add_done_callback(partial(self._untold, held))
        return messages.encode_role_event(event)

    async def _tell_roles(
        self, connection: RemotingConnection, watch: RoleWatch, event: RoleEvent, _held: ExitStack
    ) -> None:
        self._requests.note_waiting()
        while not connection.is_closed:
            previous, event = event, await watch.get()
            if event != previous:
                await connection.drained()
                connection.tell(Frame(LogCode.ROLE_CHANGED, 0, body=messages.encode_role_event(event)))

    @staticmethod
    def _untold(held: ExitStack, _task: asyncio.Task[None]) -> None:
        held.close()

    # --- DLedger's codes ----------------------------------------------------------------------------------------------

    def _java(self, operation: LogOperation, handler: _Java, failed: _Json) -> Handler:
        """A handler of JSON; ``failed``: members that an answer with an error has, too."""

        async def handle(connection: RemotingConnection, frame: Frame) -> Answer:
            requests = self._requests
            try:
                admitted = self._access.admit(connection, frame, operation)
                request = request_of(frame)
                _check_addressee(request, requests.config.node_id)
                requests.check_group(text_of(request, "group"))
                members = await handler(admitted, connection, frame, request)
            except DLedgerError as error:
                self._note_limit(error)
                return _java_error_answer(frame, requests.status(), error, failed)
            if members is None:
                return None
            answer = answer_to(frame, requests.status(), members)
            if operation is not LogOperation.METADATA:
                return answer
            return answer._replace(fields={REQUEST_BYTES_MAX_FIELD: str(request_bytes_max(requests))})

        return handle

    async def _java_metadata(
        self, _admitted: Admitted, _connection: RemotingConnection, _frame: Frame, _request: _Json
    ) -> _Json:
        return metadata(self._requests.status())

    async def _java_append(
        self, admitted: Admitted, _connection: RemotingConnection, frame: Frame, request: _Json
    ) -> _Json:
        requests, quota, size = self._requests, admitted.quota, len(frame.body)
        body = body_of(request)
        if quota.is_full:
            raise quota.full_error()
        requests.note_waiting()
        quota.take(1, size)
        answered: LoopCallback[AppendOutcome] = LoopCallback(requests.bridge, partial(quota.give, 1, size))
        requests.submit_append(admitted.caller, requests.config.group, (body,), None, answered.done)
        outcome = await answered.future
        if isinstance(outcome, DLedgerError):
            raise outcome
        return appended(outcome.first_index, outcome.positions[0], outcome.term)

    async def _java_get(self, admitted: Admitted, connection: RemotingConnection, frame: Frame, request: _Json) -> None:
        requests = self._requests
        first_index = LogIndex(number_of(request, "beginIndex"))
        read = Read(requests.config.group, first_index, count=1, mode=ReadMode.LINEARIZABLE)
        encode = partial(encode_entries, first_index, requests.status())
        with self._ends_with(connection), Leases(requests.room, admitted.quota) as leases:
            answer = frame.answer(ResponseCode.SUCCESS)
            self._send(connection, frame, await requests.read(read, leases, encode), answer)
            await connection.taken()

    async def _java_transfer(
        self, _admitted: Admitted, _connection: RemotingConnection, _frame: Frame, request: _Json
    ) -> _Json:
        requests = self._requests
        term, target = number_of(request, "term"), text_of(request, "transfereeId")
        if not target:
            raise InvalidRequestError("transfereeId is missing: name the member that is to lead")
        present = requests.status()
        if term >= 0 and term != present.term:
            raise NotLeaderError(f"the term is {present.term}, not {term}", leader=present.leader)
        _, term = await requests.transfer(requests.config.group, NodeId(target))
        return {"term": int(term)}

    # --- around them --------------------------------------------------------------------------------------------------

    def _refusal(self, frame: Frame, error: DLedgerError) -> Frame:
        self._note_limit(error)
        return error_answer(frame, error)

    def _note_limit(self, error: DLedgerError) -> None:
        if isinstance(error, PendingFullError):
            self._requests.note_refusal(error)

    @staticmethod
    def _send(connection: RemotingConnection, frame: Frame, body: bytes, answer: Frame | None = None) -> None:
        """Send a large answer. Keep no reference to it while the client reads: the connection has a copy, and there is
        room for one.
        """
        if not frame.is_oneway:
            connection.send(head_of(answer or frame.answer(), len(body)), body)

    def _ends_with(self, connection: RemotingConnection) -> ExitStack:
        """While this is entered, the end of the connection cancels the current task."""
        task = asyncio.current_task()
        held = ExitStack()
        if task is not None:
            self._reading.setdefault(connection, set()).add(task)
            held.callback(self._read_ended, connection, task)
            self._requests.note_waiting()
        return held

    def _read_ended(self, connection: RemotingConnection, task: asyncio.Task[object]) -> None:
        reading = self._reading[connection]
        reading.discard(task)
        if not reading:
            del self._reading[connection]


class _LogsHandlers(Protocol):
    """The handlers of one log's requests, or of several logs'."""

    @property
    def direct(self) -> Mapping[int, Direct]:
        """Those that handle a request at once, by its code."""

    @property
    def awaited(self) -> Mapping[int, Handler]:
        """The others."""

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""


def log_server(requests: LogRequests, handlers: _LogsHandlers) -> RemotingServer:
    """A node's server of its logs alone; ``requests``: any log's, for the limits. Call it on the loop."""
    return RemotingServer(
        f"node {requests.config.node_id}",
        Handlers(
            direct=handlers.direct,
            awaited=handlers.awaited,
            closed=handlers.closed,
            refusal_of=_refusal_of,
        ),
        _limits(requests),
        ANNOUNCED,
    )


def request_bytes_max(requests: LogRequests) -> int:
    """How many bytes the body of an append may have: what gRPC takes, if a frame can hold it."""
    return min(options.request_bytes_max(requests.config), FRAME_BYTES_MAX - options.FRAMING_BYTES)


def _limits(requests: LogRequests) -> ServerLimits:
    config, percent = requests.config, requests.config.access.account_share_percent
    requests_max = options.calls_max(config)
    unsent = UNSENT_BYTES_MAX + config.limits.answer_bytes_max
    return ServerLimits(
        connections_max=config.limits.connections_max,
        host_connections_max=max(1, config.limits.connections_max * percent // 100),
        requests_max=requests_max,
        host_requests_max=max(1, requests_max * percent // 100),
        request_s_max=(config.limits.call_ms_max + log_codec.WAIT_MS_MAX) / 1000,
        receive_bytes_max=RECEIVE_BYTES_MAX,
        host_receive_bytes_max=RECEIVE_BYTES_MAX * percent // 100,
        unsent_bytes_max=unsent,
        host_unsent_bytes_max=unsent * percent // 100,
    )


def _refusal_of(_error: Exception) -> None:
    """All errors of ours are answered by the handlers themselves."""
