"""``apache.rocketmq.v2.MessagingService``: the methods by name, and what is the same for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from dledger.access.addresses import place_of
from dledger.rpc.clients.aio_server import Methods
from dledger.rpc.clients.connections import Connection, Connections
from dledger.rpc.fields import parse
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import Operation, needs
from rocketstore.grpc.access import GatewayAccess
from rocketstore.grpc.calls import GatewayCall, Headers
from rocketstore.grpc.codes import ANSWERED, RejectedError, is_limit, status_of
from rocketstore.grpc.endpoints import AccessPoints
from rocketstore.grpc.methods import Method, Place
from rocketstore.grpc.registry import Registry
from rocketstore.grpc.routes import Routes
from rocketstore.grpc.telemetry import Telemetry
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs

_LOG: Final = logging.getLogger("rocketstore")
SERVICE: Final = "apache.rocketmq.v2.MessagingService"
TELEMETRY: Final = "Telemetry"
CALL_S_MAX: Final = 30.0
"""Of a call without a deadline."""
COMMAND_BYTES_MAX: Final = 1024 * 1024
"""The longest command of a client: a thousand subscriptions take a fifth of it."""

_Context = grpc.aio.ServicerContext[Any, Any]  # Any: bytes, or the messages of one method


class GatewayService:
    """Create it on the loop's thread."""

    def __init__(self, broker: Broker, connections: Connections) -> None:
        self._broker = broker
        self._connections = connections
        self._access = GatewayAccess(broker)
        config = broker.config
        self.registry: Final = Registry(
            broker.groups,
            broker.shares.guard,
            config.access.account_share_percent,
            _tell_nobody,
            lambda _: pbs.TelemetryCommand(),
        )
        points = AccessPoints(dict, frozenset)
        self.routes: Final = Routes(broker, points)
        self._telemetry = Telemetry(broker, self.registry, self._announce)
        self._table = self._methods()

    def _methods(self) -> dict[str, Method]:
        telemetry = self._telemetry
        return {
            "QueryRoute": Method(pbs.QueryRouteRequest, pbs.QueryRouteResponse, self.routes.query, Place.HERE),
            "Heartbeat": Method(
                pbs.HeartbeatRequest,
                pbs.HeartbeatResponse,
                telemetry.heartbeat,
                Place.BOTH,
                lambda asked: needs(Operation.JOIN, groups=[asked.group.name] if asked.group.name else []),
            ),
            "NotifyClientTermination": Method(
                pbs.NotifyClientTerminationRequest,
                pbs.NotifyClientTerminationResponse,
                telemetry.terminated,
                Place.BOTH,
            ),
        }

    def grpc_methods(self) -> Methods:
        """For a server of gRPC."""
        found: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            TELEMETRY: grpc.stream_stream_rpc_method_handler(self._stream)
        }
        for name, method in self._table.items():
            if method.streams:
                found[name] = grpc.unary_stream_rpc_method_handler(self._streaming(name, method))
            else:
                found[name] = grpc.unary_unary_rpc_method_handler(self._unary(name, method))
        return found

    async def close(self) -> None:
        """Nothing is asked of clients any more."""
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

    def _streaming(self, name: str, method: Method) -> Callable[[bytes, _Context], Awaitable[None]]:
        async def stream(data: bytes, context: _Context) -> None:
            try:
                with self._connections.call(context) as connection:
                    call = self._call(name, context, connection)
                    for one in await self._carry_out(name, method, call, data):
                        with connection.writing():
                            await context.write(one)
            except ANSWERED as error:
                await context.write(self._refused(method, error))

        return stream

    def _call(self, name: str, context: _Context, connection: Connection) -> GatewayCall:
        """Admit a call. Raises ``ANSWERED``."""
        headers = Headers.of(context.invocation_metadata() or ())
        admitted = self._access.admit(name, headers, (connection.peer,))
        remaining = context.time_remaining()
        most = CALL_S_MAX if remaining is None else min(remaining, 2 * CALL_S_MAX)
        deadline = asyncio.get_running_loop().time() + most
        return GatewayCall(name, headers, place_of(connection.peer), admitted, deadline)

    async def _carry_out(self, name: str, method: Method, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        """The encoded answers. Raises ``ANSWERED``."""
        return await self._here(name, method, call, data)

    async def _here(self, name: str, method: Method, call: GatewayCall, data: bytes) -> Sequence[bytes]:
        request = parse(method.request, data)
        self._access.require(call.caller, name, method.needs(request))
        if method.place is Place.LEADER:
            self._broker.mastership.require()
        answer = await method.handle(call, request)
        answers: Sequence[Message] = answer if method.streams else (answer,)
        return [one.SerializeToString() for one in answers]

    def _refused(self, method: Method, error: Exception) -> bytes:
        if is_limit(error):
            self._broker.loop.conditions.limit(str(error))
        return method.answer(status=status_of(error)).SerializeToString()

    # -- the stream of commands ----------------------------------------------------------------------------------------

    async def _stream(self, requests: AsyncIterable[bytes], context: _Context) -> None:
        try:
            with self._connections.call(context) as connection:
                call = self._call(TELEMETRY, context, connection)
                with call.quota.stream(
                    "telemetry", "grpc_clients_max", number_max=self._broker.config.grpc_clients_max
                ):

                    async def write(command: bytes) -> None:
                        with connection.writing():
                            await context.write(command)

                    await self._telemetry.serve(call, _commands(requests), write)
        except ANSWERED as error:
            refused = status_of(error)
            await context.write(pbs.TelemetryCommand(status=refused).SerializeToString())
            await context.abort(_grpc_status(refused.code), refused.message)

    async def _announce(self, call: GatewayCall, given: pb.Settings) -> None:
        """Tell the leader of a client's settings."""


async def _tell_nobody(_member: str, _client_id: str, _command: bytes) -> bool:
    return False


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
