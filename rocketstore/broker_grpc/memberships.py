"""Consumer groups over gRPC. Members are in the same tables as RocketMQ's clients, so that both share a group's queues.

A member is one for as long as its ``Membership`` stream lasts. Every node has its own tables, so members open a stream
to each; queues are locked, and messages sent back, on the master.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Final

from dledger.access.permissions import RETRY_PREFIX
from dledger.errors import InvalidRequestError
from dledger.rpc.clients.calls import Call
from dledger.values import address_text
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ConsumingClient, HalfCheck, Heartbeat, Subscription
from rocketstore.broker.groups import Groups
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.tag_filter import TagFilter
from rocketstore.broker_grpc.codec import check_client_id, parse
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import check_group, check_name
from rocketstore.types import MessageModel, QueueKey

PYTHON: Final = 3
"""RocketMQ's number of the language, reported to administrators."""
VERSION: Final = 1
"""Reported to administrators as the version of members that use gRPC."""


class StreamLink:
    """A stream of ours in the tables of clients. What it is told is noted until ``news`` is awaited."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.host, port = place
        self.address = address_text(self.host, port)
        self.news = asyncio.Event()
        self.closed_because = ""

    def may_send(self, topic: str) -> bool:  # noqa: ARG002  # as for every client
        """Whether its account may send to a topic, and so be asked about transactions there."""
        return False

    def members_changed(self, group: str) -> bool:  # noqa: ARG002  # a stream is of one group
        """Returns whether the member will hear of it."""
        self.news.set()
        return True

    def check_half(self, check: HalfCheck) -> bool:  # noqa: ARG002  # as for every client
        """Returns whether the member will hear of it."""
        return False

    def close(self, reason: str) -> None:
        """End the stream."""
        self.closed_because = reason
        self.news.set()


class Memberships:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._groups = broker.groups
        self._mastership = broker.mastership
        self._wall_ms = broker.loop.clock.wall_ms

    def handlers(self) -> dict[str, Callable[[bytes, str], Awaitable[bytes]]]:
        """The unary methods; each gets a request and its owner."""
        return {"LockQueues": self._lock, "UnlockQueues": self._unlock, "SendBack": self._send_back}

    async def run(self, call: Call, check: Callable[[bytes], None], stop: asyncio.Event) -> None:
        """Serve one stream. ``check`` raises ``AccessDeniedError``. Raises ``Refusal`` after ``stop``."""
        link = StreamLink(call.connection.place)
        stream = _Stream(call, link, self._groups, self._wall_ms)
        await self.serve(call, link, partial(stream.read, check), stream.write, stop)

    async def serve(
        self,
        call: Call,
        link: StreamLink,
        read: Callable[[], Coroutine[None, None, None]],
        write: Callable[[], Coroutine[None, None, None]],
        stop: asyncio.Event,
    ) -> None:
        """Read and write one stream until either ends, or ``stop``: then raises ``Refusal``."""
        await call.context.send_initial_metadata(())
        reader, writer = asyncio.create_task(read()), asyncio.create_task(write())
        stopping = asyncio.create_task(stop.wait())
        tasks = (reader, writer, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            if writer.done():
                writer.result()
            if stop.is_set():
                raise self._unavailable("this broker is stopping")
            if link.closed_because:
                raise self._unavailable(link.closed_because)
        finally:
            for task in tasks:
                task.cancel()
            self._groups.clients.closed(link)

    # -- unary methods -------------------------------------------------------------------------------------------------

    async def _lock(self, data: bytes, owner: str) -> bytes:
        request = parse(pb.LockQueuesRequest, data)
        queues = _queues(request.group, request.client_id, request.queues)
        got = await self._groups.lock(request.group, request.client_id, queues, owner)
        found = [pb.GroupQueue(topic=topic, queue_id=queue_id) for topic, queue_id in got]
        return pb.LockQueuesResponse(queues=found).SerializeToString()

    async def _unlock(self, data: bytes, _owner: str) -> bytes:
        request = parse(pb.UnlockQueuesRequest, data)
        queues = _queues(request.group, request.client_id, request.queues)
        await self._groups.unlock(request.group, request.client_id, queues)
        return pb.UnlockQueuesResponse().SerializeToString()

    async def _send_back(self, data: bytes, owner: str) -> bytes:
        request = parse(pb.SendBackRequest, data)
        check_name(request.topic, "topic")
        if request.delay_level < -1:
            raise InvalidRequestError(f"delay level {request.delay_level}: -1 is the lowest")
        await self._groups.retries.put_back(
            request.group,
            request.offset,
            topic=request.topic,
            delay_level=request.delay_level,
            retries_max=request.retries_max if request.retries_max >= 0 else None,
            owner=owner,
        )
        return pb.SendBackResponse().SerializeToString()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _unavailable(self, reason: str) -> Refusal:
        return Refusal(RefusalKind.UNAVAILABLE, reason, leader=self._mastership.leader_address)


class _Stream:
    """One member's stream: reads heartbeats, writes who the members are."""

    def __init__(self, call: Call, link: StreamLink, groups: Groups, now_ms: Callable[[], int]) -> None:
        self._call = call
        self._link = link
        self._groups = groups
        self._now_ms = now_ms
        self._identity = ("", "")

    async def read(self, check: Callable[[bytes], None]) -> None:
        """Until the client ends the stream."""
        while isinstance(data := await self._call.context.read(), bytes):
            check(data)
            request = parse(pb.MembershipRequest, data)
            beat = _heartbeat(request, self._now_ms())
            identity = (request.group, request.client_id)
            if self._identity not in (("", ""), identity):
                raise InvalidRequestError(f"a stream is of one member of one group, {' '.join(self._identity)}")
            self._identity = identity
            await self._groups.join(self._link, self._call.quota.owner, beat)
            self._link.news.set()

    async def write(self) -> None:
        """Until the link is closed. However often the members change, only the latest list is kept."""
        link, call = self._link, self._call
        while not link.closed_because:
            await link.news.wait()
            link.news.clear()
            name, clients = self._identity[0], self._groups.clients
            group, warning = clients.consumers(name), clients.difference(name, link)
            if link.closed_because or group is None:
                continue
            with call.connection.writing():
                answer = pb.MembershipResponse(client_ids=group.ids, warning=warning)
                await call.context.write(answer.SerializeToString())


def _queues(group: str, client_id: str, queues: Iterable[pb.GroupQueue]) -> list[QueueKey]:
    check_name(group, "group")
    check_client_id(client_id)
    for topic in {one.topic for one in queues}:
        check_name(topic, "topic")
    return [(one.topic, one.queue_id) for one in queues]


def _heartbeat(request: pb.MembershipRequest, now_ms: int) -> Heartbeat:
    check_group(request.group)
    check_client_id(request.client_id)
    subscriptions = tuple(_subscription(one, now_ms) for one in request.subscriptions)
    model = MessageModel.BROADCASTING if request.broadcast else MessageModel.CLUSTERING
    if not request.broadcast:  # RocketMQ's clients name it themselves, and members of a group must subscribe alike
        subscriptions += (Subscription(f"{RETRY_PREFIX}{request.group}", version=now_ms),)
    consumer = ConsumingClient(request.group, message_model=model, subscriptions=subscriptions)
    return Heartbeat(request.client_id, (), (consumer,), PYTHON, VERSION)


def _subscription(one: pb.Subscription, now_ms: int) -> Subscription:
    check_name(one.topic, "topic")
    wanted = TagFilter.parse(one.tag_expression)
    if wanted is None:
        return Subscription(one.topic, version=now_ms)
    tags = tuple(sorted(tag.decode() for tag in wanted.tags))
    return Subscription(one.topic, one.tag_expression, tags, tuple(sorted(wanted.codes)), now_ms)
