"""``apache.rocketmq.v2.MessagingService``: the methods by name, and what is the same for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from grpc._cython import cygrpc

from dledger.access.addresses import place_of
from dledger.access.quota import TooManyWaitsError
from dledger.remoting.client import RemotingClient
from dledger.remoting.codes import RequestError
from dledger.remoting.server import Handler
from dledger.rpc.clients.connections import Connection, Connections, Leases
from dledger.rpc.clients.grpc_server import AnswerStream, Methods, open_stream
from dledger.rpc.fields import parse
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import Need, Operation, has, needs
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.statistics import ServiceCounters
from rocketstore.grpc.calls import (
    ANSWERED,
    SPARE_S,
    CallHeaders,
    CallPlace,
    GatewayAccess,
    GatewayCall,
    Method,
    RejectedError,
    is_limit,
    status_of,
)
from rocketstore.grpc.receives import Receives, consuming, receive_needs, returned
from rocketstore.grpc.registry import Registry
from rocketstore.grpc.relay import LOOK_INTERVAL_S, MovedError, PassedCall, Relay
from rocketstore.grpc.routes import AccessPoints, OtherGroups, Presence, RouteCalls
from rocketstore.grpc.sends import Recalls, Sends, TransactionCalls
from rocketstore.grpc.telemetry import Telemetry
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.remoting.codes import MemberCode

_LOG: Final = logging.getLogger("rocketstore")
SERVICE: Final = "apache.rocketmq.v2.MessagingService"
TELEMETRY: Final = "Telemetry"
SETTINGS: Final = "Settings"
"""Between members only: a client's settings have come in."""
UNDELIVERED: Final = "Undelivered"
"""Between members only: messages did not reach the client that was to have them."""
RETURNS_MAX: Final = 1024
"""Such calls at a time; messages of others come again when their leases end."""
TELL_S_MAX: Final = 1.0
"""How long the leader may take to hear of a client."""
CALL_S_MAX: Final = 30.0
"""Of a call without a deadline."""
COMMAND_BYTES_MAX: Final = 1024 * 1024
"""The longest command of a client: a thousand subscriptions take a fifth of it."""

_Context = grpc.aio.ServicerContext[Any, Any]  # Any: bytes, or the messages of one method


class GatewayService:
    """Create it on the loop's thread."""

    def __init__(
        self,
        broker: Broker,
        connections: Connections,
        client: RemotingClient,
        others: OtherGroups | None = None,
    ) -> None:
        """``client`` asks other members. ``others``: None without name servers."""
        self._broker = broker
        self._connections = connections
        self._calls = 0
        self._refusals = 0
        self._access = GatewayAccess(broker)
        self._transactions = TransactionCalls(broker)
        self.registry: Final = Registry(
            broker.groups,
            broker.shares.guard,
            broker.config.access.account_share_percent,
            lambda *command: self.relay.tell_member(*command),
            self._transactions.question,
            broker.loop.clock.wall_ms,
            lambda: broker.mastership.is_master,
        )
        self.relay: Final = Relay(broker, client, self._serve_passed, self.registry.tell)
        self._others = others
        self.presence: Final = Presence(broker, client)
        self.routes: Final = RouteCalls(broker, AccessPoints(self.presence.serving, self.presence.down), others)
        self.sends: Final = Sends(broker, self.registry)
        self.receives: Final = Receives(broker, self.registry, self.routes)
        self._recalls = Recalls(broker.timed.recall)
        self._telemetry = Telemetry(broker, self.registry, self._announce, self._access.require)
        self._table = self._methods()
        self._returns: set[asyncio.Task[None]] = set()

    def _methods(self) -> dict[str, Method]:
        telemetry = self._telemetry
        return {
            "QueryRoute": Method(pbs.QueryRouteRequest, pbs.QueryRouteResponse, self.routes.query, CallPlace.HERE),
            "Heartbeat": Method(
                pbs.HeartbeatRequest,
                pbs.HeartbeatResponse,
                telemetry.heartbeat,
                CallPlace.BOTH,
                lambda asked: needs(Operation.JOIN, groups=[asked.group.name] if asked.group.name else []),
            ),
            "NotifyClientTermination": Method(
                pbs.NotifyClientTerminationRequest,
                pbs.NotifyClientTerminationResponse,
                telemetry.terminated,
                CallPlace.BOTH,
            ),
            "SendMessage": Method(
                pbs.SendMessageRequest,
                pbs.SendMessageResponse,
                self.sends.send,
                needs=lambda asked: needs(Operation.SEND, topics={one.topic.name for one in asked.messages}),
            ),
            "EndTransaction": Method(
                pbs.EndTransactionRequest,
                pbs.EndTransactionResponse,
                self._transactions.end,
                needs=lambda asked: needs(Operation.SEND, topics=[asked.topic.name]),
            ),
            "QueryAssignment": Method(
                pbs.QueryAssignmentRequest,
                pbs.QueryAssignmentResponse,
                self.receives.assignment,
                CallPlace.HERE,
                consuming,
            ),
            "ReceiveMessage": Method(
                pbs.ReceiveMessageRequest,
                pbs.ReceiveMessageResponse,
                self.receives.receive,
                needs=receive_needs,
                streams=True,
            ),
            "AckMessage": Method(pbs.AckMessageRequest, pbs.AckMessageResponse, self.receives.ack, needs=consuming),
            "ChangeInvisibleDuration": Method(
                pbs.ChangeInvisibleDurationRequest,
                pbs.ChangeInvisibleDurationResponse,
                self.receives.change_invisible,
                needs=consuming,
            ),
            "ForwardMessageToDeadLetterQueue": Method(
                pbs.ForwardMessageToDeadLetterQueueRequest,
                pbs.ForwardMessageToDeadLetterQueueResponse,
                self.receives.dead_letter,
                needs=consuming,
            ),
            "RecallMessage": Method(
                pbs.RecallMessageRequest,
                pbs.RecallMessageResponse,
                self._recalls.recall,
                needs=lambda asked: needs(Operation.SEND, topics=[asked.topic.name]),
            ),
            UNDELIVERED: Method(
                pbs.AckMessageRequest, pbs.AckMessageResponse, self.receives.undelivered, CallPlace.PASSED, consuming
            ),
            SETTINGS: Method(
                pb.Settings,
                pbs.TelemetryCommand,
                telemetry.settings_told,
                CallPlace.PASSED,
                telemetry.needs_of,
            ),
        }

    def grpc_methods(self) -> Methods:
        """For a server of gRPC."""
        found: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            TELEMETRY: grpc.stream_stream_rpc_method_handler(self._stream)
        }
        for name, method in self._table.items():
            if method.place is CallPlace.PASSED:
                continue
            if method.streams:
                found[name] = grpc.unary_stream_rpc_method_handler(self._streaming(name, method))
            else:
                found[name] = grpc.unary_unary_rpc_method_handler(self._unary(name, method))
        return found

    def member_calls(self) -> Mapping[int, Handler]:
        """For the broker's remoting, by request code: they check for themselves who may do what."""
        return {**self.relay.handlers(), MemberCode.GATEWAY_WHERE: self.presence.answer}

    def counted(self, counters: ServiceCounters) -> ServiceCounters:
        """With the gateway's; for any thread."""
        return replace(
            counters,
            grpc_clients=len(self.registry),
            grpc_calls=self._calls,
            grpc_refused=self._refusals,
            grpc_passed_on=self.relay.under_way,
            grpc_repeated=self.sends.window.recognized,
        )

    def announce_end(self) -> None:
        """Have clients that obey such a command open their connections anew: this member is about to stop."""
        self.registry.tell_all(pbs.TelemetryCommand(reconnect_endpoints_command=pbs.ReconnectEndpointsCommand()))

    def role_changed(self) -> None:
        """This broker leads now, or does not any more."""
        if self._broker.mastership.is_master:
            self.sends.leads()

    async def close(self) -> None:
        """Nothing is asked of clients any more, and nothing of the leader."""
        await asyncio.gather(*self._returns, return_exceptions=True)
        await self.presence.close()
        if self._others is not None:
            await self._others.close()
        await self.relay.close()
        await self.sends.close()
        await self.registry.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _unary(self, name: str, method: Method) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def answer(data: bytes, context: _Context) -> bytes:
            try:
                with self._connections.call(context) as connection:
                    call = self._call(name, context, connection)
                    return (await self._carry_out(name, method, call, data))[0]
            except ANSWERED as error:
                return self._refused(method, error)

        return answer

    def _streaming(self, name: str, method: Method) -> Callable[[bytes, AnswerStream], Awaitable[None]]:
        async def stream(data: bytes, context: AnswerStream) -> None:
            try:
                with self._connections.call(context) as connection:
                    call = self._call(name, context, connection)
                    answers = await self._carry_out(name, method, call, data)
                    try:
                        with Leases(self._broker.shares.room, call.quota) as unsent:
                            left = sum(map(len, answers))
                            for one in answers[:-1]:
                                unsent.resize(left)
                                with connection.writing():
                                    await context.write_more(one)
                                left -= len(one)
                            with connection.writing():
                                await context.write(answers[-1])
                    except BaseException:  # the client is gone
                        self._give_back(call, data, answers)
                        raise
            except ANSWERED as error:
                await context.write(self._refused(method, error))

        return stream

    def _call(self, name: str, context: _Context, connection: Connection) -> GatewayCall:
        """Admit a call. Raises ``ANSWERED``."""
        self._calls += 1
        headers = CallHeaders.of(context.invocation_metadata() or ())
        admitted = self._access.admit(name, headers, (connection.peer,))
        remaining = context.time_remaining()
        most = CALL_S_MAX if remaining is None else min(remaining, 2 * CALL_S_MAX)
        deadline = asyncio.get_running_loop().time() + most
        return GatewayCall(name, headers, _place_of(connection.peer), admitted, deadline)

    async def _carry_out(self, name: str, method: Method, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        """The encoded answers. Raises ``ANSWERED``."""
        if method.place is CallPlace.LEADER:
            return await self._at_leader(name, method, call, data)
        try:
            answers = await self._here(name, method, call, data)
        except RejectedError as error:
            if (
                error.code != pb.TOPIC_NOT_FOUND
                or method.place is not CallPlace.HERE
                or self._broker.mastership.is_master
            ):
                raise
            return await self._at_leader(name, method, call, data)  # this member may not have the new topic yet
        if method.place is CallPlace.BOTH:
            await self._tell_leader(call, data)
        return answers

    async def _at_leader(self, name: str, method: Method, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        """Have the leader carry out a call, whichever member that is while the call lasts. Raises ``ANSWERED``."""
        reason, is_begun = "no leader is known", False
        try:
            async with asyncio.timeout(max(0.0, call.remaining_s())):
                while True:
                    try:
                        if self._broker.mastership.is_master:
                            is_begun = True
                            return await self._here(name, method, call, data)
                        if leader := self.relay.leader():
                            is_begun = True
                            return await self._passed_on(leader, call, data)
                    except MovedError as error:
                        reason, is_begun = str(error), False
                        call.may_be_repeated |= error.may_be_done
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            code = pb.SLAVE_PERSISTENCE_TIMEOUT if call.may_be_repeated or is_begun else pb.HA_NOT_AVAILABLE
            reason = "the leader has not done it yet, and still may" if is_begun else reason
            raise RejectedError(code, f"the call could not be carried out in time: {reason}") from None

    async def _passed_on(self, leader: str, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        """Let it count for its sender while it is here. Raises ``ANSWERED``, ``MovedError``."""
        if call.quota.is_full:
            raise call.quota.full_error()
        call.quota.take(1, len(data))
        try:
            streams, has_stream = self._table[call.method].streams, self._has_stream(call)
            unwanted = partial(self._give_back, call, data) if streams else None
            answers = await self.relay.ask(leader, call, data, has_stream=has_stream, unwanted=unwanted)
            if streams:
                self._require_room(call, data, answers)
            return answers
        finally:
            call.quota.give(1, len(data))

    def _require_room(self, call: GatewayCall, data: bytes, answers: Sequence[bytes]) -> None:
        """For messages from the leader, where only its own room was taken. Raises ``TooManyWaitsError``."""
        try:
            with Leases(self._broker.shares.room, call.quota) as leases:
                leases.take_now(sum(map(len, answers)))
        except TooManyWaitsError:
            self._give_back(call, data, answers)
            raise

    async def _tell_leader(self, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        """The leader, if that is another member, hears of a client; if it cannot, it will at the next heartbeat.

        Returns its answers; none if it did not answer in time.
        """
        leader = "" if self._broker.mastership.is_master else self.relay.leader()
        if leader:
            with suppress(MovedError, RejectedError, TimeoutError):
                async with asyncio.timeout(min(TELL_S_MAX, max(0.0, call.remaining_s()))):
                    return await self.relay.ask(leader, call, data, has_stream=self._has_stream(call))
        return ()

    def _give_back(self, call: GatewayCall, data: bytes, answers: Sequence[bytes]) -> None:
        """The client of a receive was gone before it got these answers."""
        request = returned(data, answers)
        if request is None or len(self._returns) >= RETURNS_MAX:
            return
        told = GatewayCall(UNDELIVERED, call.headers, (call.host, call.port), (call.caller, call.quota), _soon())
        task = asyncio.get_running_loop().create_task(self._tell_undelivered(told, request.SerializeToString()))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _tell_undelivered(self, call: GatewayCall, data: bytes) -> None:
        if not self._broker.mastership.is_master:
            await self._tell_leader(call, data)
            return
        with suppress(*ANSWERED):
            await self._here(UNDELIVERED, self._table[UNDELIVERED], call, data)

    def _has_stream(self, call: GatewayCall) -> bool:
        client = self.registry.find(call.client_id)
        return client is not None and client.stream is not None

    async def _here(self, name: str, method: Method, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        """Raises ``ANSWERED``, and ``MovedError`` if it is the leader's and this broker is none."""
        request = parse(method.request, data)
        needed = () if call.caller is None else tuple(method.needs(request))
        self._access.require(call.caller, name, needed)
        try:
            with self._while_allowed(call, needed) if method.streams else nullcontext():  # which may wait
                answer = await method.handle(call, request)
        except Refusal as error:
            if method.place is CallPlace.LEADER and self._is_moved(error):
                raise MovedError(str(error), may_be_done=error.outcome == "unknown") from None
            raise
        except (MovedError, *ANSWERED):
            raise
        except Exception as error:  # noqa: BLE001  # a client must not be told of a defect in gRPC's words
            _LOG.error("broker %s: %s of %s failed", self._broker.config.name, name, call.host, exc_info=error)
            why = f"{name} failed: see the log of broker {self._broker.config.name}"
            raise RejectedError(pb.INTERNAL_SERVER_ERROR, why) from None
        answers: Sequence[Message] = answer if method.streams else (answer,)
        return [one.SerializeToString() for one in answers]

    def _is_moved(self, error: Refusal) -> bool:
        """Whether another member may do what this one refuses, now or soon."""
        if not self._broker.store.log.is_replicated:
            return False
        return error.kind is RefusalKind.UNAVAILABLE or error.outcome == "unknown"

    async def _serve_passed(self, passed: PassedCall, data: bytes) -> Sequence[bytes]:
        """A call that another member has passed on."""
        name, origin = passed.method, passed.origin
        method = self._table.get(name)
        if method is None:
            raise RequestError(f"no member passes on {name[:64]!r}")
        try:
            admitted = self._access.admit(name, passed.headers, passed.peers)
            deadline = asyncio.get_running_loop().time() + min(passed.remaining_s, 2 * CALL_S_MAX) + SPARE_S
            call = GatewayCall(name, passed.headers, (origin.host, origin.port), admitted, deadline, passed.via)
            call.may_be_repeated = passed.may_be_repeated
            if method.place in (CallPlace.LEADER, CallPlace.HERE) and not self._broker.mastership.is_master:
                raise MovedError("this member does not lead", may_be_done=False)
            return await self._here(name, method, call, data)
        except ANSWERED as error:
            return [self._refused(method, error)]

    def _refused(self, method: Method, error: Exception) -> bytes:
        self._refusals += 1
        if is_limit(error):
            self._broker.loop.conditions.limit(str(error))
        return method.answer(status=status_of(error)).SerializeToString()

    # -- the stream of commands ----------------------------------------------------------------------------------------

    async def _stream(self, requests: AsyncIterable[bytes], context: _Context) -> None:
        try:
            with self._connections.call(context) as connection:
                call = self._call(TELEMETRY, context, connection)
                limit = self._broker.config.grpc_clients_max
                with call.quota.stream("telemetry", "grpc_clients_max", number_max=limit), self._until_revoked(call):

                    async def write(command: bytes) -> None:
                        with connection.writing():
                            await context.write(command)

                    await self._telemetry.serve(call, _commands(requests), write)
        except ANSWERED as error:
            refused = status_of(error)
            with suppress(cygrpc.BaseError):  # abort raises one; so does a client that reads nothing, or is gone
                await context.write(pbs.TelemetryCommand(status=refused).SerializeToString())
                await context.abort(_grpc_status(refused.code), refused.message)

    def _until_revoked(self, call: GatewayCall) -> AbstractContextManager[None]:
        """Wraps a stream: ends it when the caller's key is revoked, or may no longer do what its settings say."""
        guard, caller = self._broker.shares.guard, call.caller
        if guard is None or caller is None:
            return nullcontext()

        def is_still_allowed() -> bool:
            client = self.registry.find(call.client_id)
            settings = None if client is None else client.settings
            return settings is None or all(has(caller, one) for one in self._telemetry.needs_of(settings))

        return open_stream(guard, caller, is_still_allowed)

    def _while_allowed(self, call: GatewayCall, needed: Sequence[Need]) -> AbstractContextManager[None]:
        """Wraps a call that waits: ends it when the caller's key is revoked, or has these permissions no longer."""
        guard, caller = self._broker.shares.guard, call.caller
        if guard is None or caller is None:
            return nullcontext()
        return open_stream(guard, caller, lambda: all(has(caller, one) for one in needed))

    async def _announce(self, call: GatewayCall, given: pb.Settings) -> pb.Settings | None:
        """Tell the leader of a client's settings; returns those it shall use, unless the leader cannot be asked."""
        told = GatewayCall(SETTINGS, call.headers, (call.host, call.port), (call.caller, call.quota), _soon())
        for answer in await self._tell_leader(told, given.SerializeToString()):
            command = parse(pbs.TelemetryCommand, answer)
            if command.status.code == pb.OK and command.HasField("settings"):
                return command.settings
        return None


@lru_cache(maxsize=4096)
def _place_of(peer: str) -> tuple[str, int]:
    return place_of(peer)


def _soon() -> float:
    return asyncio.get_running_loop().time() + TELL_S_MAX + SPARE_S


async def _commands(requests: AsyncIterable[bytes]) -> AsyncIterator[pbs.TelemetryCommand]:
    async for data in requests:
        if len(data) > COMMAND_BYTES_MAX:
            raise RejectedError(pb.PAYLOAD_TOO_LARGE, f"a command has at most {COMMAND_BYTES_MAX} bytes")
        yield parse(pbs.TelemetryCommand, data)


def _grpc_status(code: pb.Code) -> grpc.StatusCode:
    """Of a stream that ends: the only place where clients look at gRPC's own status."""
    return {
        pb.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
        pb.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
        pb.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
        pb.NOT_IMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    }.get(code, grpc.StatusCode.INVALID_ARGUMENT)
