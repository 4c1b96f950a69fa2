"""A client that speaks RocketMQ 5's protocol over gRPC, message by message."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
from google.protobuf.message import Message

from rocketstore.grpc.service import SERVICE
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs

_Metadata = tuple[tuple[str, str | bytes], ...]
_Answer = TypeVar("_Answer", bound=Message)
WAIT_S: Final = 60.0
STREAM_S: Final = 30.0
"""How long a stream of commands lasts: who waits for a command in vain does not hang."""


class GatewayClient:
    """One connection; answers are the protocol's messages. ``target``: gRPC's name of one or several addresses."""

    def __init__(self, target: str, client_id: str, headers: Mapping[str, str]) -> None:
        self._channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        given = {"x-mq-client-id": client_id} if client_id else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        self._metadata: _Metadata = tuple(given.items())
        self._streams: list[CommandsOfServer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._streams:
            one.close()
        self._channel.close()

    def call(self, method: str, request: Message | bytes, answer: type[_Answer], timeout_s: float = WAIT_S) -> _Answer:
        """A unary call."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
        )
        return answer.FromString(call(data, timeout=timeout_s, metadata=self._metadata))

    def calls(self, method: str, request: Message, answer: type[_Answer], timeout_s: float = WAIT_S) -> list[_Answer]:
        """A call with several answers."""
        return [answer.FromString(one) for one in self.begin(method, request, timeout_s)]

    def begin(self, method: str, request: Message, timeout_s: float = WAIT_S) -> grpc.CallIterator[bytes]:
        """The same, under way: its encoded answers."""
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
        )
        return call(request.SerializeToString(), timeout=timeout_s, metadata=self._metadata)

    def telemetry(self, settings: pb.Settings | None = None) -> CommandsOfServer:
        """A stream of commands; sends these settings first."""
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/{SERVICE}/Telemetry", request_serializer=None, response_deserializer=None
        )
        found = CommandsOfServer(call, self._metadata)
        self._streams.append(found)
        if settings is not None:
            found.send(pbs.TelemetryCommand(settings=settings))
        return found

    def route(self, topic: str, *addresses: str) -> pbs.QueryRouteResponse:
        """QueryRoute."""
        request = pbs.QueryRouteRequest(topic=pb.Resource(name=topic), endpoints=endpoints(*addresses))
        return self.call("QueryRoute", request, pbs.QueryRouteResponse)

    def heartbeat(self, kind: pb.ClientType = pb.PRODUCER, group: str = "") -> pb.Status:
        """Heartbeat."""
        request = pbs.HeartbeatRequest(client_type=kind, group=pb.Resource(name=group) if group else None)
        return self.call("Heartbeat", request, pbs.HeartbeatResponse).status

    def send(self, *messages: pb.Message, timeout_s: float = WAIT_S) -> pbs.SendMessageResponse:
        """SendMessage."""
        request = pbs.SendMessageRequest(messages=messages)
        return self.call("SendMessage", request, pbs.SendMessageResponse, timeout_s)


def message(
    body: bytes = b"body", topic: str = "T", message_id: str = "01", kind: pb.MessageType = pb.NORMAL, **system: object
) -> pb.Message:
    """A message as a client sends it; ``system``: further properties of the protocol's."""
    properties = pb.SystemProperties(message_id=message_id, message_type=kind, body_encoding=pb.IDENTITY)
    properties.born_timestamp.seconds = 1_700_000_000
    properties.MergeFrom(pb.SystemProperties(**system))  # type: ignore[arg-type]  # whatever its fields are
    return pb.Message(topic=pb.Resource(name=topic), body=body, system_properties=properties)


class CommandsOfServer:
    """A stream of commands."""

    def __init__(self, call: grpc.StreamStreamMultiCallable[bytes, bytes], metadata: _Metadata) -> None:
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = call(iter(self._sent.get, None), timeout=STREAM_S, metadata=metadata)
        self._received: Iterator[bytes] = iter(self._call)

    def send(self, command: pbs.TelemetryCommand) -> None:
        """Write a command."""
        self._sent.put(command.SerializeToString())

    def next(self) -> pbs.TelemetryCommand:
        """Wait for the next command. Raises ``grpc.RpcError`` if the stream has ended with an error."""
        return pbs.TelemetryCommand.FromString(next(self._received))

    def close(self) -> None:
        """End it."""
        self._sent.put(None)
        self._call.cancel()  # type: ignore[no-untyped-call]  # as grpc-stubs have it
        with suppress(grpc.RpcError):
            for _ in self._received:
                pass


def endpoints(*addresses: str) -> pb.Endpoints:
    """An access point with these addresses, ``host:port``."""
    found = pb.Endpoints(scheme=pb.IPv4)
    for address in addresses:
        host, port = address.rsplit(":", 1)
        found.addresses.add(host=host, port=int(port))
    return found


def producer_settings(*topics: str, language: pb.Language = pb.PYTHON) -> pb.Settings:
    """As a producer sends them."""
    return pb.Settings(
        client_type=pb.PRODUCER,
        publishing=pb.Publishing(topics=[pb.Resource(name=one) for one in topics]),
        user_agent=pb.UA(language=language),
    )


def consumer_settings(
    group: str, topic: str, kind: pb.ClientType = pb.PUSH_CONSUMER, language: pb.Language = pb.PYTHON
) -> pb.Settings:
    """As a consumer of one topic sends them."""
    entry = pb.SubscriptionEntry(
        topic=pb.Resource(name=topic), expression=pb.FilterExpression(type=pb.TAG, expression="*")
    )
    return pb.Settings(
        client_type=kind,
        subscription=pb.Subscription(group=pb.Resource(name=group), subscriptions=[entry]),
        user_agent=pb.UA(language=language),
    )
