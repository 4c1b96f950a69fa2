"""Telemetry, Heartbeat and NotifyClientTermination: settings, and the commands that the server gives its clients.

A client's settings are its own, with those that the server decides put in their place. Clients of some languages
understand only one of the two kinds of back-off, so it is chosen by language.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from google.protobuf.duration_pb2 import Duration

from dledger.access.guard import Caller
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import Need, Operation, needs
from rocketstore.config import KIB
from rocketstore.grpc.calls import OK, GatewayCall, RejectedError, name_of
from rocketstore.grpc.registry import CommandStream, GatewayClient, Registry
from rocketstore.message.message import DelayLevels
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.attributes import DELAYS_MAX, ExponentialRetryDelays, FixedRetryDelays, RetryPolicy
from rocketstore.state.changes import GroupConfig

BODY_BYTES_SPARE: Final = 64 * KIB
"""Some clients receive no more than 4 MiB at once, properties and all."""
SEND_ATTEMPTS: Final = 3
SEND_BACKOFF_S: Final = (0.01, 1.0, 2.0)
"""The first pause between attempts to send, the longest, and by how much each is longer."""
RECEIVE_BATCH: Final = 32
LONG_POLLING_S: Final = 20
"""A whole number: some clients take no fraction."""
FIRST_RETRY_LEVEL: Final = 3
"""RocketMQ's: the delay level after which a message is delivered for the second time."""
EXPONENTIAL: Final = frozenset({pb.NODE_JS})
"""Languages whose clients understand no list of pauses."""


def of_producer(given: pb.Settings, body_bytes_max: int) -> pb.Settings:
    """A producer's settings as they are from now on."""
    found = _copied(given)
    found.publishing.max_body_size = body_bytes_max
    found.publishing.validate_message_type = True
    found.backoff_policy.CopyFrom(exponential(SEND_ATTEMPTS, *SEND_BACKOFF_S))
    return found


def of_consumer(given: pb.Settings, group: GroupConfig, delays: DelayLevels) -> pb.Settings:
    """A consumer's settings as they are from now on; ``delays``: for a group without delays of its own."""
    found = _copied(given)
    found.subscription.fifo = group.ordered
    found.subscription.receive_batch_size = RECEIVE_BATCH
    found.subscription.long_polling_timeout.seconds = LONG_POLLING_S
    found.subscription.long_polling_timeout.nanos = 0
    attempts = group.retry_times_max + 1
    policy = group.retry_policy or FixedRetryDelays(delays.delays_ms[FIRST_RETRY_LEVEL - 1 :] or delays.delays_ms[-1:])
    found.backoff_policy.CopyFrom(_retries(attempts, policy, given.user_agent.language))
    return found


def decided(settings: pb.Settings) -> pb.Settings:
    """The part of a consumer's settings that a server decides."""
    found = pb.Settings(backoff_policy=settings.backoff_policy)
    if settings.HasField("subscription"):
        found.subscription.group.CopyFrom(settings.subscription.group)
        found.subscription.fifo = settings.subscription.fifo
    return found


def kept(settings: pb.Settings, before: pb.Settings | None) -> pb.Settings:
    """A consumer's settings with what was decided before of the same group, if anything was."""
    if before is None or not settings.HasField("subscription") or not before.HasField("subscription"):
        return settings
    if before.subscription.group == settings.subscription.group:
        settings.subscription.fifo = before.subscription.fifo
        settings.backoff_policy.CopyFrom(before.backoff_policy)
    return settings


def _copied(given: pb.Settings) -> pb.Settings:
    found = pb.Settings()
    found.CopyFrom(given)
    found.metric.CopyFrom(pb.Metric(on=False))
    return found


def exponential(attempts: int, first_s: float, most_s: float, factor: float) -> pb.RetryPolicy:
    """Pauses that become longer each time."""
    policy = pb.RetryPolicy(max_attempts=attempts)
    set_duration(policy.exponential_backoff.initial, first_s)
    set_duration(policy.exponential_backoff.max, most_s)
    policy.exponential_backoff.multiplier = factor
    return policy


def listed(attempts: int, pauses_s: Sequence[float]) -> pb.RetryPolicy:
    """One pause after the other; the last one counts for all further attempts."""
    policy = pb.RetryPolicy(max_attempts=attempts)
    for pause_s in pauses_s:
        set_duration(policy.customized_backoff.next.add(), pause_s)
    return policy


def _retries(attempts: int, policy: RetryPolicy, language: pb.Language) -> pb.RetryPolicy:
    if isinstance(policy, ExponentialRetryDelays):
        if language in EXPONENTIAL:
            return exponential(attempts, policy.initial_ms / 1000, policy.max_ms / 1000, policy.multiplier)
        count = min(max(attempts - 1, 1), DELAYS_MAX)
        return listed(attempts, [policy.delay_ms(number + 1) / 1000 for number in range(count)])
    delays_ms = policy.delays_ms
    if language in EXPONENTIAL:
        return exponential(attempts, delays_ms[0] / 1000, delays_ms[-1] / 1000, 2.0)
    return listed(attempts, [one / 1000 for one in delays_ms[: max(attempts - 1, 1)]])


def set_duration(duration: Duration, seconds: float) -> None:
    """Set a field to so many seconds."""
    duration.seconds, nanos = divmod(round(seconds * 1e9), 10**9)
    duration.nanos = nanos


def seconds_of(duration: Duration) -> float:
    """A field in seconds."""
    return duration.seconds + duration.nanos / 1e9


FINISH_S_MAX: Final = 1.0
"""How long a client may take to read its last commands."""
_LATE_LISTENERS: Final = frozenset({pb.NODE_JS})
SAID_GOODBYE: Final = "it said that it ends"
"""The reason for which a stream ends without an error."""
_CONSUMERS: Final = frozenset({pb.PUSH_CONSUMER, pb.SIMPLE_CONSUMER})
_KNOWN_TYPES: Final = _CONSUMERS | {pb.PRODUCER}

Write = Callable[[bytes], Awaitable[None]]
Announce = Callable[[GatewayCall, pb.Settings], Awaitable[pb.Settings | None]]
"""Tell the leader, which is another member, of a client's settings; returns those that the client shall use. None: the
leader cannot be asked now.
"""
Require = Callable[[Caller | None, str, Iterable[Need]], None]
"""Raises ``AccessDeniedError`` unless a caller has these permissions."""


class Telemetry:
    """On the loop."""

    def __init__(self, broker: Broker, registry: Registry, announce: Announce, require: Require) -> None:
        self._broker = broker
        self._require = require
        self._registry = registry
        self._announce = announce
        self._delays = DelayLevels.parse(broker.config.store.message_delay_level)

    # -- the stream ----------------------------------------------------------------------------------------------------

    async def serve(self, call: GatewayCall, requests: AsyncIterable[pbs.TelemetryCommand], write: Write) -> None:
        """Serve one stream until the client, or we, end it. Raises ``ANSWERED``."""
        task = asyncio.current_task()
        client = self._registry.heard(call)
        reasons: list[str] = []

        def end(reason: str) -> None:
            reasons.append(reason)
            if task is not None:
                task.cancel()

        stream = CommandStream(end)
        if client.stream is not None:  # its connection is lost, and the old stream has not noticed
            client.stream.end("the client has opened another stream")
        client.stream, client.member = stream, ""
        writer = asyncio.ensure_future(stream.write_all(write))
        try:
            async for command in requests:
                if command.HasField("settings"):
                    await self._settle(call, client, stream, command.settings)
        except asyncio.CancelledError:
            if not reasons or task is None:
                raise
            task.uncancel()
            if reasons[0] == SAID_GOODBYE:  # an error would end a process of Node.js, whose client listens no more
                return
            raise RejectedError(pb.FORBIDDEN, f"the stream was closed: {reasons[0]}") from None
        finally:
            if client.stream is stream:
                client.stream = None
            self._registry.let_go(client)
            stream.finish()
            await _finished(writer)

    async def _settle(
        self, call: GatewayCall, client: GatewayClient, stream: CommandStream, given: pb.Settings
    ) -> None:
        """Take a client's settings, and answer with those that it shall use."""
        if given.client_type not in _KNOWN_TYPES:
            raise RejectedError(pb.UNRECOGNIZED_CLIENT_TYPE, "a client is a producer, a push or a simple consumer")
        self._require(call.caller, call.method, self.needs_of(given))
        self._registry.give_settings(client, given)
        await self._registry.join(client)
        command = _command_of(await self._decided(call, client, given))
        if given.user_agent.language in _LATE_LISTENERS:
            stream.put_late(command)
        else:
            stream.put(command)

    async def _decided(self, call: GatewayCall, client: GatewayClient, given: pb.Settings) -> pb.Settings:
        """The settings that a client shall use: the leader's, as this member's state may be old. While there is no
        leader, those that the client had, or else this member's; the leader's follow with one of its heartbeats.
        """
        found = await self._leaders(call, client, given)
        return kept(self.settings_of(given), client.decided) if found is None else found

    async def _leaders(self, call: GatewayCall, client: GatewayClient, given: pb.Settings) -> pb.Settings | None:
        found = self.settings_of(given) if self._broker.mastership.is_master else await self._announce(call, given)
        client.is_settled = found is not None
        if found is not None:
            client.decided = decided(found)
        return found

    @staticmethod
    def needs_of(given: pb.Settings) -> tuple[Need, ...]:
        """The permissions for what a client wants to do. Raises ``Refusal`` for names that are too long."""
        if given.HasField("subscription"):
            topics = [one.topic.name for one in given.subscription.subscriptions]
            return needs(Operation.JOIN, topics, [given.subscription.group.name])
        return needs(Operation.SEND, [one.name for one in given.publishing.topics])

    def settings_of(self, given: pb.Settings) -> pb.Settings:
        """The settings that a client shall use."""
        config = self._broker.config
        if given.HasField("subscription"):
            group = self._broker.state.group(given.subscription.group.name)
            return of_consumer(given, group, self._delays)
        body_bytes_max = config.store.max_message_size
        body_bytes_max -= min(BODY_BYTES_SPARE, body_bytes_max // 64)
        return of_producer(given, body_bytes_max)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def heartbeat(self, call: GatewayCall, request: pbs.HeartbeatRequest) -> pbs.HeartbeatResponse:
        """Heartbeat, also of a client whose settings are not known here: it need not open its stream again."""
        with self._heard(call) as client:
            if request.client_type in _CONSUMERS and request.HasField("group"):
                client.group = name_of(request.group)
            await self._registry.join(client)
            if client.stream is not None and client.settings is not None and not client.is_settled:
                settings = await self._leaders(call, client, client.settings)
                if settings is not None and (stream := client.stream) is not None:
                    stream.put(_command_of(settings))
        return pbs.HeartbeatResponse(status=OK)

    async def settings_told(self, call: GatewayCall, given: pb.Settings) -> pbs.TelemetryCommand:
        """Another member has a client's settings; the answer has those that the client shall use."""
        with self._heard(call) as client:
            self._registry.give_settings(client, given)
            await self._registry.join(client)
        return pbs.TelemetryCommand(status=OK, settings=self.settings_of(given))

    @contextmanager
    def _heard(self, call: GatewayCall) -> Iterator[GatewayClient]:
        client = self._registry.heard(call)
        if call.via.has_stream:
            client.member = call.via.member
        try:
            yield client
        finally:
            self._registry.let_go(client)

    async def terminated(
        self, call: GatewayCall, _: pbs.NotifyClientTerminationRequest
    ) -> pbs.NotifyClientTerminationResponse:
        """NotifyClientTermination."""
        client = self._registry.find(call.client_id)
        if client is not None and client.owner == call.quota.owner:
            self._registry.forget(call.client_id, SAID_GOODBYE)
        return pbs.NotifyClientTerminationResponse(status=OK)


def _command_of(settings: pb.Settings) -> bytes:
    return pbs.TelemetryCommand(status=OK, settings=settings).SerializeToString()


async def _finished(writer: asyncio.Task[None]) -> None:
    """Let it write what is left: gRPC takes one message at a time, and one whose writing is given up is still there."""
    done, _ = await asyncio.wait({writer}, timeout=FINISH_S_MAX)
    if not done:
        writer.cancel()
        await asyncio.wait({writer})
    elif not writer.cancelled():
        writer.exception()  # looked at: the client is gone
