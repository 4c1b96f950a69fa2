"""``BrokerService``: every method of the broker on an event loop.

Nothing here blocks: the store answers puts through callbacks, and whatever may wait for a disk runs on a few threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from secrets import token_hex
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import grpc

from dledger.access.guard import Caller, Guard
from dledger.access.quota import Limits, Quotas
from dledger.clock import Clock
from dledger.errors import CorruptLogError, DiskError, DLedgerError
from dledger.rpc import access_gate
from dledger.rpc import options as rpc_options
from dledger.rpc.bridge import LoopBridge, Outcome
from rocketstore.broker import codec
from rocketstore.broker.access import BrokerAccess
from rocketstore.broker.admin import AdminService, State
from rocketstore.broker.hosts import peer_host
from rocketstore.broker.long_polling import WaitingPulls
from rocketstore.broker.measurements import ServiceCounters
from rocketstore.broker.ports import GroupView, Store, TopicLike
from rocketstore.broker.positions import LogPositions, no_indexes
from rocketstore.broker.pull import PullService
from rocketstore.broker.refusals import REFUSALS, CallTooLongError, Context, NotStoredError, TooManyStreamsError, abort
from rocketstore.broker.send import Sender, SendStream
from rocketstore.broker.status import ObservedStore, StatusReport
from rocketstore.broker.topics import TopicAccess
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.replicated import status_of
from rocketstore.message.message import HostAddress
from rocketstore.message.producer_names import check_producer_name
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import PutMessageStatus, PutResult

DRAIN_TIMEOUT_S: Final = 1.0

_log = logging.getLogger("rocketstore")
UnaryHandler = Callable[[bytes, Context, Caller | None], Awaitable[bytes]]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ServedStore(Store, ObservedStore, Protocol):
    """The message store as the service needs it."""


class ServedState(State, Protocol):
    """The broker state as the service needs it."""

    def topic(self, name: str) -> TopicLike | None:
        """A topic by name."""

    def begin_offset(self, topic: str, queue_id: int) -> int:
        """The first queue offset that is not of a deleted topic of this name."""

    def runtime_info(self) -> dict[str, str]:
        """Names and values for the status."""


class BrokerService:
    """Create it on the loop's thread; ``stop_waiting`` before the server stops, ``close`` after it.

    ``view`` is what this broker knows of its group; ``store_host`` goes into records and message ids; ``guard`` says
    who may do what (None: everybody everything); ``position_of`` where the entry of an index of the log begins.
    """

    def __init__(  # noqa: PLR0913  # one parameter per part of the broker
        self,
        config: BrokerConfig,
        store: ServedStore,
        state: ServedState,
        bridge: LoopBridge,
        *,
        clock: Clock,
        view: Callable[[], GroupView],
        store_host: HostAddress,
        has_caught_up: Callable[[], bool] = lambda: True,
        guard: Guard | None = None,
        position_of: Callable[[int], int] = no_indexes,
    ) -> None:
        self._config = config
        self._store = store
        self._access = None if guard is None else BrokerAccess(guard)
        limits = Limits(
            entries_max=config.send_pending_messages_max,
            bytes_max=config.send_pending_bytes_max,
            streams_max=config.streams_max,
            waits_max=config.pulls_waiting_max,
        )
        self._quotas = Quotas(limits.share(config.access.account_share_percent))
        self._has_caught_up = has_caught_up
        self._bridge = bridge
        self._clock = clock
        self._store_host = store_host
        self._readers = ThreadPoolExecutor(config.read_threads, thread_name_prefix="rocketstore-read")
        self._stop = asyncio.Event()
        self._streams = 0
        self._handling: set[asyncio.Task[Any]] = set()
        self._waiting = WaitingPulls(bridge, waiting_max=config.pulls_waiting_max)
        store.add_arrival_listener(self._waiting.arrived)
        topics = TopicAccess(state.topic, state.begin_offset, broker_permission=config.broker_permission)
        self._admin = AdminService(config, store, state, topics, self._run, bridge, clock)
        self._admin.positions = LogPositions(store, topics, position_of)
        self._admin.leader_address = lambda: view().leader_address
        self._pulls = PullService(config, store, topics, self._waiting, self._run, clock)
        self._sender = Sender(
            config,
            store,
            topics,
            bridge,
            create_topic=self._admin.create_default_topic,
            leader_address=self._admin.leader_address,
        )
        self._encoder = codec.ResultEncoder(store_host)
        self._memory = "" if store.log.is_replicated else token_hex(8)
        self._report = StatusReport(config, store, view, lambda: state.runtime_info() | self._counters())

    def handlers(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        """What a server needs to serve this."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Send": unary(self._refusing("Send", self._send)),
            "SendStream": stream(self._streaming("SendStream", self._send_stream)),
            "Producer": unary(self._refusing("Producer", self._producer)),
            "Pull": unary(self._refusing("Pull", self._pull)),
            "PullStream": stream(self._streaming("PullStream", self._pull_stream)),
            "Status": unary(self._refusing("Status", self._checked("Status", self._status))),
        }
        for name, handler in self._admin.handlers().items():
            methods[name] = unary(self._refusing(name, self._checked(name, self._once_caught_up(handler))))
        return grpc.method_handlers_generic_handler(codec.SERVICE, methods)

    def stop_waiting(self) -> None:
        """Answer waiting pulls, take no more from streams and end each once it is answered. On the loop."""
        self._stop.set()
        self._waiting.close()

    async def drain(self) -> None:
        """Wait for the handlers that the stopped server is cancelling: a loop that ends under them logs errors."""
        if self._handling:
            await asyncio.wait(tuple(self._handling), timeout=DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """Join the read threads."""
        self._readers.shutdown(wait=True)

    # -- handlers --------------------------------------------------------------------------------------------------

    async def _send(self, data: bytes, context: Context, caller: Caller | None) -> bytes:
        request = self._decoder(context, caller)(data)
        return self._encoder.encode(request.request_id, await self._sender.send(request))

    async def _send_stream(self, context: Context, caller: Caller | None) -> None:
        decode = self._decoder(context, caller)
        stream = SendStream(context, self._bridge, self._sender, decode, self._encoder, self._memory)
        await stream.run(self._stop)

    async def _producer(self, data: bytes, _context: Context, caller: Caller | None) -> bytes:
        name = codec.parse(pb.ProducerRequest, data).producer
        check_producer_name(name)
        if self._access is not None and caller is not None:
            name = self._access.own_producer(caller, name)
        outcome: Outcome[int | DLedgerError] = Outcome(self._bridge)
        self._store.submit_producer(name, outcome.done)
        found = await outcome.future
        if isinstance(found, DLedgerError):
            found.outcome = "not_applied"  # whatever became of it: asking changes nothing
            refusal = PutResult(status_of(found), outcome="not_applied", reason=str(found))
            raise NotStoredError(refusal, self._admin.leader_address())
        return pb.ProducerResponse(next_sequence=found).SerializeToString()

    async def _pull(self, data: bytes, _context: Context, caller: Caller | None) -> bytes:
        if self._access is not None and caller is not None:
            return await self._pull_for(data, self._access, caller)
        self._check_caught_up()
        return codec.encode_pulled(await self._pulls.pull(codec.decode_pull(data)))

    async def _pull_for(self, data: bytes, access: BrokerAccess, caller: Caller) -> bytes:
        pull = codec.decode_pull(data)
        access.check_pull(caller, pull)
        self._check_caught_up()
        if not pull.wait_ms:
            return codec.encode_pulled(await self._pulls.pull(pull))
        with caller.quota.wait():
            result = await self._pulls.pull(pull)
        access.check_after_wait(caller, pull)
        return codec.encode_pulled(result)

    async def _pull_stream(self, context: Context, caller: Caller | None) -> None:
        await context.send_initial_metadata(())
        while not self._stop.is_set() and isinstance(data := await context.read(), bytes):
            await context.write(await self._pull(data, context, caller))

    async def _status(self, data: bytes) -> bytes:
        codec.parse(pb.StatusRequest, data)
        return await self._run(self._report.encode)

    def _decoder(self, context: Context, caller: Caller | None) -> Callable[[bytes], codec.Send]:
        born_host = peer_host(context.peer())
        access = self._access
        if access is None or caller is None:
            return lambda data: codec.decode_send(data, born_host, self._store_host, self._clock.wall_ms())

        def decode(data: bytes) -> codec.Send:
            request = codec.decode_send(data, born_host, self._store_host, self._clock.wall_ms())
            producer = request.producer
            if producer is not None:
                producer = replace(producer, producer=access.own_producer(caller, producer.producer))
            denied = access.denied_topics(caller, request.messages)
            return request._replace(denied=denied, quota=caller.quota, producer=producer)

        return decode

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_caught_up(self) -> None:
        """Raises ``NotStoredError``: it is not known yet what is committed, so nothing can be said."""
        if not self._has_caught_up():
            reason = "this broker has just started and does not know yet what is committed"
            refusal = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason)
            raise NotStoredError(refusal, self._admin.leader_address())

    def _once_caught_up(self, handler: Callable[[bytes], Awaitable[bytes]]) -> Callable[[bytes], Awaitable[bytes]]:
        @wraps(handler)
        async def answer(data: bytes) -> bytes:
            self._check_caught_up()
            return await handler(data)

        return answer

    def _checked(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> UnaryHandler:
        """A request whose bytes say all that matters for access."""
        access = self._access

        async def answer(data: bytes, _context: Context, caller: Caller | None) -> bytes:
            if access is None or caller is None:
                return await handler(data)
            access.check(name, caller, data)
            return access.filtered(name, caller, await handler(data))

        return answer

    def _admit(self, name: str, context: Context, body: bytes | None) -> Caller | None:
        if self._access is None:
            return None
        method = rpc_options.method(codec.SERVICE, name)
        return access_gate.admit(self._access.guard, self._quotas, method, context, body)

    async def _run(self, read: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(read, *args, **kwargs))

    def counters(self) -> ServiceCounters:
        """What is under way; from any thread."""
        return ServiceCounters(
            messages_pending=self._sender.messages_pending,
            bytes_pending=self._sender.bytes_pending,
            pulls_waiting=len(self._waiting),
            streams=self._streams,
        )

    def _counters(self) -> dict[str, str]:
        now = self.counters()
        return {
            "sendPendingMessages": str(now.messages_pending),
            "sendPendingBytes": str(now.bytes_pending),
            "pullsWaiting": str(now.pulls_waiting),
            "streams": str(now.streams),
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

    def _open_stream(self, caller: Caller | None) -> AbstractContextManager[None]:
        """Around a stream: ended when the caller's key is revoked; what it asks for is checked request by request."""
        if self._access is None or caller is None:
            return nullcontext()
        return access_gate.open_stream(self._access.guard, caller)

    def _refusing(self, name: str, handler: UnaryHandler) -> Callable[[bytes, Context], Awaitable[bytes]]:
        limits = self._config.limits
        limit_s = (limits.call_ms_max + (self._config.pull_wait_ms_max if name == "Pull" else 0)) / 1000

        async def in_time(data: bytes, context: Context) -> bytes:
            limit = asyncio.timeout(limit_s)
            try:
                caller = self._admit(name, context, data)
                async with limit:
                    return await handler(data, context, caller)
            except TimeoutError:
                if limit.expired():
                    raise CallTooLongError(rpc_options.too_long(limits)) from None
                raise

        async def answer(data: bytes, context: Context) -> bytes:
            with self._handled():
                try:
                    return await in_time(data, context)
                except REFUSALS as error:
                    _note(error)
                    await abort(context, error, self._guard)

        return answer

    @property
    def _guard(self) -> Guard | None:
        return None if self._access is None else self._access.guard

    def _streaming(
        self, name: str, handler: Callable[[Context, Caller | None], Awaitable[None]]
    ) -> Callable[[object, Context], Awaitable[None]]:
        @wraps(handler)
        async def serve(_requests: object, context: Context) -> None:
            with self._handled():
                try:
                    caller = self._admit(name, context, None)
                    if self._streams >= self._config.streams_max:
                        limit = self._config.streams_max
                        raise TooManyStreamsError(f"too many open streams: at most {limit} are allowed (streams_max)")
                    self._streams += 1
                    try:
                        with self._open_stream(caller):
                            await handler(context, caller)
                    finally:
                        self._streams -= 1
                except REFUSALS as error:
                    _note(error)
                    await abort(context, error, self._guard)

        return serve


def _note(error: Exception) -> None:
    """Refusals are the client's affair; anything else is ours."""
    if isinstance(error, CorruptLogError | DiskError):
        _log.error("a request failed: %s", error)
