"""``BrokerService``: every method of the broker, on an event loop.

Nothing here blocks: the store answers puts through callbacks, and anything that may wait for a disk runs on a few
threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from secrets import token_hex
from typing import Any, Final, TypeVar

import grpc

from dledger.access.guard import AccessGuard, quota_at
from dledger.errors import CorruptLogError, DiskError, DLedgerError, PendingFullError
from dledger.rpc import options as rpc_options
from dledger.rpc.bridge import LoopCallback
from dledger.rpc.clients import access_gate
from dledger.rpc.clients.aio_server import Methods
from dledger.rpc.clients.answers import Leases
from dledger.rpc.clients.calls import Call
from dledger.rpc.clients.connections import Connection, Connections
from rocketstore.broker.broker import Broker
from rocketstore.broker.hosts import peer_host
from rocketstore.broker.positions import LogPositions, no_indexes
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.sending import MessageSource
from rocketstore.broker_grpc import codec
from rocketstore.broker_grpc.access import BrokerAccess
from rocketstore.broker_grpc.admin import AdminHandler, AdminService
from rocketstore.broker_grpc.memberships import Memberships
from rocketstore.broker_grpc.producer_groups import ProducerLink, ProducerStream, end_transaction
from rocketstore.broker_grpc.refusals import REFUSALS, Context, abort
from rocketstore.broker_grpc.send import SendStream
from rocketstore.broker_grpc.status import StatusReport
from rocketstore.commit_log.replicated import status_of
from rocketstore.message.producer_names import check_producer_name
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import PutResult

DRAIN_TIMEOUT_S: Final = 1.0
STREAM_KINDS: Final = 5
"""Send, pull, memberships of both kinds, and health and reflection: ``streams_max`` applies to each."""

_log = logging.getLogger("rocketstore")
_KIND_OF: Final = {
    "SendStream": "send",
    "PullStream": "pull",
    "Membership": "membership",
    "ProducerMembership": "producer membership",
}
UnaryHandler = Callable[[bytes, Call], Awaitable[bytes]]
_T = TypeVar("_T")


class BrokerService:
    """Create it on the loop's thread; call ``stop_waiting`` before the server stops.

    ``position_of`` returns the start of an entry by index; ``replication`` what is told of classic replication.
    """

    def __init__(
        self,
        broker: Broker,
        connections: Connections,
        position_of: Callable[[int], int] = no_indexes,
        replication: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._broker = broker
        self._connections = connections
        self._replication = replication
        guard = broker.shares.guard
        self._access = None if guard is None else BrokerAccess(guard)
        self._stop = asyncio.Event()
        self._handling: set[asyncio.Task[Any]] = set()
        self._admin = AdminService(broker, LogPositions(broker.store, broker.topics, position_of))
        self._memberships = Memberships(broker)
        self._encoder = codec.ResultEncoder(broker.store_host)
        self._memory = "" if broker.store.log.is_replicated else token_hex(8)
        self._report = StatusReport(broker, lambda: broker.state.runtime_info() | self._counters())

    def methods(self) -> Methods:
        """The methods for a server, as in ``codec.SERVICE``."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Send": unary(self._refusing("Send", self._send)),
            "SendStream": stream(self._streaming("SendStream", self._send_stream)),
            "Producer": unary(self._refusing("Producer", self._producer)),
            "Pull": unary(self._refusing("Pull", self._pull)),
            "PullStream": stream(self._streaming("PullStream", self._pull_stream)),
            "Membership": stream(self._streaming("Membership", self._membership)),
            "ProducerMembership": stream(self._streaming("ProducerMembership", self._producer_membership)),
            "EndTransaction": unary(self._refusing("EndTransaction", self._end_transaction)),
            "Status": unary(self._refusing("Status", self._checked("Status", self._status))),
        }
        for name, handler in (self._admin.handlers() | self._memberships.handlers()).items():
            methods[name] = unary(self._refusing(name, self._checked(name, self._once_caught_up(handler))))
        return methods

    def stop_waiting(self) -> None:
        """Answer waiting pulls, accept nothing more from streams and end each once answered. Called on the loop."""
        self._stop.set()
        self._broker.stop_waiting()

    async def drain(self) -> None:
        """Wait for the handlers that the stopped server is cancelling: if the loop ended first, it would log errors."""
        if self._handling:
            await asyncio.wait(tuple(self._handling), timeout=DRAIN_TIMEOUT_S)

    # -- handlers --------------------------------------------------------------------------------------------------

    async def _send(self, data: bytes, call: Call) -> bytes:
        request = self._decoder(call)(data)
        await self._broker.sending.ensure_topics(request.caller, request.batch.messages)
        return self._encoder.encode(request.request_id, await self._broker.sending.send(request.caller, request.batch))

    async def _send_stream(self, call: Call) -> None:
        request_bytes_max = rpc_options.request_bytes_for(self._broker.config.store.max_message_size)
        stream = SendStream(
            call, self._broker.sending, self._decoder(call), self._encoder, request_bytes_max, self._memory
        )
        await stream.run(self._stop)

    async def _producer(self, data: bytes, call: Call) -> bytes:
        name = codec.parse(pb.ProducerRequest, data).producer
        check_producer_name(name)
        if self._access is not None and call.caller is not None:
            name = self._access.own_producer(call.caller, name)
        outcome: LoopCallback[int | DLedgerError] = LoopCallback(self._broker.loop.bridge)
        self._broker.store.submit_producer(name, outcome.done)
        found = await outcome.future
        if isinstance(found, DLedgerError):
            found.outcome = "not_applied"  # whatever the error: a read changes nothing
            refusal = PutResult(status_of(found), outcome="not_applied", reason=str(found))
            raise Refusal.of(refusal, self._broker.mastership.leader_address)
        return pb.ProducerResponse(next_sequence=found).SerializeToString()

    async def _pull(self, data: bytes, call: Call) -> bytes:
        return await self._pulled(data, call, call.until_done(call.leases()))

    async def _pull_stream(self, call: Call) -> None:
        context = call.context
        await context.send_initial_metadata(())
        with call.leases() as leases:
            while not self._stop.is_set() and isinstance(data := await context.read(), bytes):
                answer = await self._pulled(data, call, leases)
                with call.connection.writing():
                    await context.write(answer)
                leases.end()

    async def _pulled(self, data: bytes, call: Call, leases: Leases) -> bytes:
        access, caller, pull = self._access, call.caller, codec.decode_pull(data)
        if access is not None and caller is not None:
            access.check_pull(caller, pull)
        self._broker.mastership.require_caught_up()
        with call.quota.wait("pulls_waiting_max") if pull.wait_ms else nullcontext():
            result = await self._broker.pulling.pull(pull, leases)
        if access is not None and caller is not None and pull.wait_ms:
            access.check_after_wait(caller, pull)
        return codec.encode_pulled(result, self._broker.store.incarnation)

    async def _membership(self, call: Call) -> None:
        access, caller = self._access, call.caller

        def check(data: bytes) -> None:
            if access is not None and caller is not None:
                access.check("Membership", caller, data)

        await self._memberships.run(call, check, self._stop)

    async def _producer_membership(self, call: Call) -> None:
        link = ProducerLink(call)
        stream = ProducerStream(call, link, self._broker.groups)
        await self._memberships.serve(call, link, stream.read, stream.write, self._stop)

    async def _end_transaction(self, data: bytes, call: Call) -> bytes:
        access, caller = self._access, call.caller
        check = None if access is None or caller is None else partial(access.check_end, caller)
        return await end_transaction(self._broker, data, check)

    async def _status(self, data: bytes, _owner: str) -> bytes:
        codec.parse(pb.StatusRequest, data)
        return await self._broker.loop.readers.run(self._report.encode)

    def _decoder(self, call: Call) -> Callable[[bytes], codec.SendCall]:
        born_host = peer_host(call.connection.peer)
        access, caller, quota = self._access, call.caller, call.quota

        def decode(data: bytes) -> codec.SendCall:
            request = codec.decode_send(
                data, born_host, self._broker.store_host, self._broker.loop.clock.wall_ms(), quota
            )
            if access is None or caller is None:
                return request
            batch = request.batch
            if (producer := batch.producer) is not None:
                own = replace(producer, producer=access.own_producer(caller, producer.producer))
                batch = batch._replace(producer=own)
            denied = access.denied_topics(caller, batch.messages)
            return request._replace(caller=MessageSource(quota, denied), batch=batch)

        return decode

    # -- inside ----------------------------------------------------------------------------------------------------

    def _once_caught_up(self, handler: AdminHandler) -> AdminHandler:
        async def answer(data: bytes, owner: str) -> bytes:
            self._broker.mastership.require_caught_up()
            return await handler(data, owner)

        return answer

    def _checked(self, name: str, handler: AdminHandler) -> UnaryHandler:
        """A handler whose access check needs only the request's bytes."""
        access = self._access

        async def answer(data: bytes, call: Call) -> bytes:
            caller = call.caller
            if access is None or caller is None:
                found = await handler(data, call.quota.owner)
            else:
                access.check(name, caller, data)
                answer = await handler(access.narrowed(name, caller, data), call.quota.owner)
                found = access.filtered(name, caller, answer)
            call.check_answer(len(found))
            return found

        return answer

    def _admit(self, name: str, context: Context, connection: Connection, body: bytes | None) -> Call:
        shares = self._broker.shares
        if self._access is None:
            quota = quota_at(connection.host, connection.peer, shares.quotas)
            return Call(context, connection, quota, None, shares.room)
        method = rpc_options.method(codec.SERVICE, name)
        caller = access_gate.admit(self._access.guard, shares.quotas, method, context, body)
        return Call(context, connection, caller.quota, caller, shares.room)

    def _counters(self) -> dict[str, str]:
        now = self._broker.counters()
        return {
            "sendPendingMessages": str(now.messages_pending),
            "sendPendingBytes": str(now.bytes_pending),
            "pullsWaiting": str(now.pulls_waiting),
            "streams": str(now.streams),
            **self._broker.storage.transactions.runtime_info(),
            **self._replication(),
        }

    @contextmanager
    def _handled(self) -> Iterator[None]:
        task = asyncio.current_task()
        if task is not None:
            self._handling.add(task)
        try:
            yield
        finally:
            if task is not None:
                self._handling.discard(task)

    def _open_stream(self, call: Call) -> AbstractContextManager[None]:
        """Wraps a stream: ended when the caller's key is revoked; access is checked request by request."""
        if self._access is None or call.caller is None:
            return nullcontext()
        return access_gate.open_stream(self._access.guard, call.caller)

    def _refusing(self, name: str, handler: UnaryHandler) -> Callable[[bytes, Context], Awaitable[bytes]]:
        limits = self._broker.config.limits
        limit_s = (limits.call_ms_max + (self._broker.config.pull_wait_ms_max if name == "Pull" else 0)) / 1000

        async def in_time(data: bytes, context: Context) -> bytes:
            limit = asyncio.timeout(limit_s)
            try:
                with self._connections.call(context) as connection:
                    call = self._admit(name, context, connection, data)
                    async with limit:
                        return await handler(data, call)
            except TimeoutError:
                if limit.expired():
                    raise Refusal(RefusalKind.TOO_LATE, rpc_options.too_long(limits), outcome="unknown") from None
                raise

        async def answer(data: bytes, context: Context) -> bytes:
            with self._handled():
                try:
                    return await in_time(data, context)
                except REFUSALS as error:
                    self._note(error)
                    await abort(context, error, self._guard)

        return answer

    @property
    def _guard(self) -> AccessGuard | None:
        return None if self._access is None else self._access.guard

    def _streaming(
        self, name: str, handler: Callable[[Call], Awaitable[None]]
    ) -> Callable[[object, Context], Awaitable[None]]:
        @wraps(handler)
        async def serve(_requests: object, context: Context) -> None:
            with self._handled():
                try:
                    with self._connections.call(context) as connection:
                        call = self._admit(name, context, connection, None)
                        with call.quota.stream(_KIND_OF[name], "streams_max"), self._open_stream(call):
                            await handler(call)
                except REFUSALS as error:
                    self._note(error)
                    await abort(context, error, self._guard)

        return serve

    def _note(self, error: Exception) -> None:
        """Refusals are the client's problem, except reaching a limit; anything else is ours."""
        if isinstance(error, CorruptLogError | DiskError):
            _log.error("a request failed: %s", error)
        elif isinstance(error, PendingFullError) or (isinstance(error, Refusal) and error.kind is RefusalKind.TOO_MANY):
            self._broker.loop.conditions.limit(str(error))
