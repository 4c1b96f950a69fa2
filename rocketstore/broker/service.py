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
from ipaddress import ip_address
from secrets import token_hex
from typing import Any, Final, TypeVar

import grpc

from dledger.access.guard import AccessGuard, quota_at
from dledger.access.quota import Limits, Quotas
from dledger.clock import Clock
from dledger.conditions import Conditions
from dledger.errors import CorruptLogError, DiskError, DLedgerError, PendingFullError
from dledger.rpc import options as rpc_options
from dledger.rpc.bridge import LoopBridge, LoopCallback
from dledger.rpc.clients import access_gate
from dledger.rpc.clients.aio_server import Methods
from dledger.rpc.clients.answers import AnswerRoom, Leases
from dledger.rpc.clients.calls import Call
from dledger.rpc.clients.connections import Connection, Connections
from dledger.values import parse_address
from rocketstore.broker import codec
from rocketstore.broker.access import BrokerAccess
from rocketstore.broker.admin import AdminHandler, AdminService
from rocketstore.broker.groups import Groups
from rocketstore.broker.hosts import peer_host
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.long_polling import WaitingPulls
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.measurements import ServiceCounters
from rocketstore.broker.memberships import Memberships
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.ports import GroupView
from rocketstore.broker.positions import LogPositions, no_indexes
from rocketstore.broker.producer_groups import ProducerLink, ProducerStream, end_transaction
from rocketstore.broker.pull import PullService
from rocketstore.broker.readers import ReadThreads, RecordReader
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.refusals import REFUSALS, Context, abort
from rocketstore.broker.retries import Retries
from rocketstore.broker.send import SendStream
from rocketstore.broker.sending import Caller, Sending
from rocketstore.broker.state_changes import StateChanges
from rocketstore.broker.status import StatusReport
from rocketstore.broker.topics import Topics
from rocketstore.broker.transactions.asking import ProducerChecks
from rocketstore.broker.transactions.begins import HalfMessages
from rocketstore.broker.transactions.ends import TransactionEnds
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.replicated import status_of
from rocketstore.message.message import HostAddress
from rocketstore.message.producer_names import check_producer_name
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
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
    """Create it on the loop's thread; call ``stop_waiting`` before the server stops, and ``close`` after it.

    ``view`` is this broker's view of its group; ``store_host`` is used in records and message ids; ``guard`` controls
    access (None: everybody may do everything); ``position_of`` returns the start of an entry by index; ``conditions``
    records the broker's conditions.
    """

    def __init__(  # noqa: PLR0913  # one parameter per part of the broker
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        bridge: LoopBridge,
        connections: Connections,
        *,
        clock: Clock,
        view: Callable[[], GroupView],
        store_host: HostAddress,
        has_caught_up: Callable[[], bool] = lambda: True,
        guard: AccessGuard | None = None,
        position_of: Callable[[int], int] = no_indexes,
        conditions: Conditions | None = None,
        transactions: TransactionService | None = None,
        replication: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._config = config
        self._store = store
        self._access = None if guard is None else BrokerAccess(guard)
        limits = Limits(
            entries_max=config.send_pending_messages_max,
            bytes_max=config.send_pending_bytes_max,
            streams_max=config.streams_max,
            waits_max=config.pulls_waiting_max,
            answer_bytes_max=config.limits.answer_bytes_max,
        )
        self._quotas = Quotas(limits, owner_percent=config.access.account_share_percent)
        self._room = AnswerRoom()
        self._connections = connections
        self._bridge = bridge
        self._clock = clock
        self._store_host = store_host
        self._conditions = conditions or Conditions(config.node_id, clock)
        self._readers = ReadThreads(config.read_threads)
        self._stop = asyncio.Event()
        self._handling: set[asyncio.Task[Any]] = set()
        self._waiting = WaitingPulls(bridge, waiting_max=config.pulls_waiting_max)
        store.add_arrival_listener(self._waiting.arrived)
        store.let_messages_gather(unless=lambda: len(self._waiting) > 0)
        transactions = transactions or TransactionService(config, store, state, clock)
        live = LiveConfig(config)
        halves = HalfMessages(live, transactions)
        self._mastership = mastership = Mastership(store, view, has_caught_up)
        changes = StateChanges(bridge, mastership)
        topics = Topics(live, state, mastership, changes)
        self._admin = AdminService(
            live,
            store,
            state,
            topics,
            self._readers,
            mastership=mastership,
            changes=changes,
            positions=LogPositions(store, topics, position_of),
            hosts=self._hosts,
        )
        self._pulls = PullService(live, store, topics, self._waiting, self._readers, clock)
        self._sending = Sending(live, store, topics, halves, mastership, bridge, self._conditions)
        records = RecordReader(store, self._readers)
        retries = Retries(live, state, mastership, topics, self._sending, records, store_host)
        groups = Groups(live, state, mastership, retries, self._conditions)
        self.parts: Final = BrokerParts(
            live,
            store,
            state,
            topics,
            changes,
            self._sending,
            self._pulls,
            self._readers,
            records,
            bridge,
            clock,
            self._quotas,
            self._room,
            transactions,
            TransactionEnds(transactions, self._readers, bridge, mastership),
            mastership,
            groups,
            store_host,
            guard,
            self._conditions,
            replication,
        )
        """What other protocols serve, too."""
        self.memberships: Final = Memberships(self.parts)
        self._producer_checks = ProducerChecks(store, transactions, groups.clients, self._readers, bridge, store_host)
        self._encoder = codec.ResultEncoder(store_host)
        self._memory = "" if store.log.is_replicated else token_hex(8)
        self._report = StatusReport(
            config, store, view, lambda: state.runtime_info() | self._counters(), self._conditions
        )

    def _hosts(self) -> frozenset[HostAddress] | None:
        """As records name them: this broker's and its group's; None if one has a name instead of an address."""
        try:
            places = [parse_address(one) for one in self._mastership.view().members.values() if one]
            return frozenset({self._store_host, *(HostAddress(ip_address(host).packed, port) for host, port in places)})
        except ValueError:
            return None

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
        for name, handler in (self._admin.handlers() | self.memberships.handlers()).items():
            methods[name] = unary(self._refusing(name, self._checked(name, self._once_caught_up(handler))))
        return methods

    def stop_waiting(self) -> None:
        """Answer waiting pulls, accept nothing more from streams and end each once answered. Called on the loop."""
        self._stop.set()
        self._waiting.close()

    async def drain(self) -> None:
        """Wait for the handlers that the stopped server is cancelling: if the loop ended first, it would log errors."""
        self.parts.groups.close()
        await self._producer_checks.close()
        if self._handling:
            await asyncio.wait(tuple(self._handling), timeout=DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """Join the read threads."""
        self._readers.close()

    # -- handlers --------------------------------------------------------------------------------------------------

    async def _send(self, data: bytes, call: Call) -> bytes:
        request = self._decoder(call)(data)
        await self._sending.ensure_topics(request.caller, request.batch.messages)
        return self._encoder.encode(request.request_id, await self._sending.send(request.caller, request.batch))

    async def _send_stream(self, call: Call) -> None:
        request_bytes_max = rpc_options.request_bytes_for(self._config.store.max_message_size)
        stream = SendStream(call, self._sending, self._decoder(call), self._encoder, request_bytes_max, self._memory)
        await stream.run(self._stop)

    async def _producer(self, data: bytes, call: Call) -> bytes:
        name = codec.parse(pb.ProducerRequest, data).producer
        check_producer_name(name)
        if self._access is not None and call.caller is not None:
            name = self._access.own_producer(call.caller, name)
        outcome: LoopCallback[int | DLedgerError] = LoopCallback(self._bridge)
        self._store.submit_producer(name, outcome.done)
        found = await outcome.future
        if isinstance(found, DLedgerError):
            found.outcome = "not_applied"  # whatever the error: a read changes nothing
            refusal = PutResult(status_of(found), outcome="not_applied", reason=str(found))
            raise Refusal.of(refusal, self._mastership.leader_address)
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
        self._mastership.require_caught_up()
        with call.quota.wait("pulls_waiting_max") if pull.wait_ms else nullcontext():
            result = await self._pulls.pull(pull, leases)
        if access is not None and caller is not None and pull.wait_ms:
            access.check_after_wait(caller, pull)
        return codec.encode_pulled(result, self._store.incarnation)

    async def _membership(self, call: Call) -> None:
        access, caller = self._access, call.caller

        def check(data: bytes) -> None:
            if access is not None and caller is not None:
                access.check("Membership", caller, data)

        await self.memberships.run(call, check, self._stop)

    async def _producer_membership(self, call: Call) -> None:
        link = ProducerLink(call)
        stream = ProducerStream(call, link, self.parts.groups)
        await self.memberships.serve(call, link, stream.read, stream.write, self._stop)

    async def _end_transaction(self, data: bytes, call: Call) -> bytes:
        access, caller = self._access, call.caller
        check = None if access is None or caller is None else partial(access.check_end, caller)
        return await end_transaction(self.parts, data, check)

    async def _status(self, data: bytes, _owner: str) -> bytes:
        codec.parse(pb.StatusRequest, data)
        return await self._readers.run(self._report.encode)

    def _decoder(self, call: Call) -> Callable[[bytes], codec.SendCall]:
        born_host = peer_host(call.connection.peer)
        access, caller, quota = self._access, call.caller, call.quota

        def decode(data: bytes) -> codec.SendCall:
            request = codec.decode_send(data, born_host, self._store_host, self._clock.wall_ms(), quota)
            if access is None or caller is None:
                return request
            batch = request.batch
            if (producer := batch.producer) is not None:
                own = replace(producer, producer=access.own_producer(caller, producer.producer))
                batch = batch._replace(producer=own)
            denied = access.denied_topics(caller, batch.messages)
            return request._replace(caller=Caller(quota, denied), batch=batch)

        return decode

    # -- inside ----------------------------------------------------------------------------------------------------

    def _once_caught_up(self, handler: AdminHandler) -> AdminHandler:
        async def answer(data: bytes, owner: str) -> bytes:
            self._mastership.require_caught_up()
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
        if self._access is None:
            return Call(context, connection, quota_at(connection.host, connection.peer, self._quotas), None, self._room)
        method = rpc_options.method(codec.SERVICE, name)
        caller = access_gate.admit(self._access.guard, self._quotas, method, context, body)
        return Call(context, connection, caller.quota, caller, self._room)

    def counters(self) -> ServiceCounters:
        """Requests in progress; callable from any thread."""
        return ServiceCounters(
            messages_pending=self._sending.messages_pending,
            bytes_pending=self._sending.bytes_pending,
            pulls_waiting=len(self._waiting),
            streams=sum(self._quotas.root.streams.values()),
            transactions_open=self.parts.transactions.open_count,
            transactions_given_up=self.parts.transactions.given_up_count,
            dropped_messages=self.parts.transactions.dropped_count,
        )

    def _counters(self) -> dict[str, str]:
        now = self.counters()
        return {
            "sendPendingMessages": str(now.messages_pending),
            "sendPendingBytes": str(now.bytes_pending),
            "pullsWaiting": str(now.pulls_waiting),
            "streams": str(now.streams),
            **self.parts.transactions.runtime_info(),
            **self.parts.replication(),
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
        limits = self._config.limits
        limit_s = (limits.call_ms_max + (self._config.pull_wait_ms_max if name == "Pull" else 0)) / 1000

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
            self._conditions.limit(str(error))
