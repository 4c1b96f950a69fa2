"""Consumer groups over gRPC. Members are in the same tables as RocketMQ's clients, so that both share a group's queues.

A member is one for as long as its ``Membership`` stream lasts. Every node has its own tables, so members open a stream
to each; queues are locked, and messages sent back, on the master.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import NamedTuple

from dledger.access.permissions import RETRY_PREFIX
from dledger.access.quota import TooManyWaitsError
from dledger.errors import InvalidRequestError
from dledger.remoting.codes import AnswerCode, Language
from dledger.remoting.connection import Place
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from dledger.rpc.clients.calls import Call
from rocketstore.broker.codec import check_client_id, parse
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.producer_groups import VERSION, ProducerLink, ProducerStream
from rocketstore.broker.refusals import NotFoundRefusalError, NotStoredError
from rocketstore.broker.remoting.clients import StreamLink
from rocketstore.broker.remoting.members import Members
from rocketstore.broker.remoting.retries import NoSuchMessageError, Retries
from rocketstore.broker.tag_filter import TagFilter
from rocketstore.pb import broker_pb2 as pb
from rocketstore.remoting.bodies.clients import ConsumerData, HeartbeatData, MessageModel, SubscriptionData
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.changes import check_group, check_name
from rocketstore.types import PutMessageStatus, PutResult


class MemberLink(StreamLink):
    """A member's stream in the tables of clients. It passes on only that the group's members have changed."""

    def tell(self, request: Frame) -> bool:
        """Returns whether the member will hear of it."""
        if request.code != RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            return False
        self.news.set()
        return True


class _Served(NamedTuple):
    """A group, and what serves it."""

    members: Members
    retries: Retries


class Memberships:
    """On the loop. ``serve`` must have been called before the first request."""

    def __init__(self, parts: BrokerParts) -> None:
        self._parts = parts
        self._group: _Served | None = None

    def serve(self, members: Members, retries: Retries) -> None:
        """Use what serves RocketMQ's clients, too."""
        self._group = _Served(members, retries)

    def handlers(self) -> dict[str, Callable[[bytes, str], Awaitable[bytes]]]:
        """The unary methods; each gets a request and its owner."""
        return {"LockQueues": self._lock, "UnlockQueues": self._unlock, "SendBack": self._send_back}

    async def run(self, call: Call, check: Callable[[bytes], None], stop: asyncio.Event) -> None:
        """Serve one stream. ``check`` raises ``AccessDeniedError``. Raises ``NotStoredError`` after ``stop``."""
        link, members = MemberLink(Place(*call.connection.place)), self._served().members
        stream = _Stream(call, link, members, self._parts.clock.wall_ms)
        await self._serve(call, link, partial(stream.read, check), stream.write, stop)

    async def run_producer(self, call: Call, stop: asyncio.Event) -> None:
        """Serve the stream of a member of a producer group. Raises ``NotStoredError`` after ``stop``."""
        link, members = ProducerLink(call), self._served().members
        stream = ProducerStream(call, link, members)
        await self._serve(call, link, stream.read, stream.write, stop)

    async def _serve(
        self,
        call: Call,
        link: StreamLink,
        read: Callable[[], Coroutine[None, None, None]],
        write: Callable[[], Coroutine[None, None, None]],
        stop: asyncio.Event,
    ) -> None:
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
            self._served().members.closed(link)

    # -- unary methods -------------------------------------------------------------------------------------------------

    async def _lock(self, data: bytes, owner: str) -> bytes:
        request = parse(pb.LockQueuesRequest, data)
        queues = self._queues(request.group, request.client_id, request.queues)
        try:
            got = self._served().members.lock_queues(request.group, request.client_id, queues, owner)
        except RequestError as error:
            raise self._refusal(error) from None
        found = [pb.GroupQueue(topic=one.topic, queue_id=one.queue_id) for one in got]
        return pb.LockQueuesResponse(queues=found).SerializeToString()

    async def _unlock(self, data: bytes, _owner: str) -> bytes:
        request = parse(pb.UnlockQueuesRequest, data)
        queues = self._queues(request.group, request.client_id, request.queues)
        self._served().members.unlock_queues(request.group, request.client_id, queues)
        return pb.UnlockQueuesResponse().SerializeToString()

    async def _send_back(self, data: bytes, owner: str) -> bytes:
        request = parse(pb.SendBackRequest, data)
        check_name(request.topic, "topic")
        if request.delay_level < -1:
            raise InvalidRequestError(f"delay level {request.delay_level}: -1 is the lowest")
        try:
            await self._served().retries.put_back(
                request.group,
                request.offset,
                topic=request.topic,
                delay_level=request.delay_level,
                retries_max=request.retries_max if request.retries_max >= 0 else None,
                owner=owner,
            )
        except RequestError as error:
            raise self._refusal(error) from None
        return pb.SendBackResponse().SerializeToString()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _served(self) -> _Served:
        if self._group is None:
            raise self._unavailable("this broker serves no consumer groups yet")
        return self._group

    def _queues(self, group: str, client_id: str, queues: Iterable[pb.GroupQueue]) -> tuple[MessageQueue, ...]:
        check_name(group, "group")
        check_client_id(client_id)
        for topic in {one.topic for one in queues}:
            check_name(topic, "topic")
        name = self._parts.config.name
        return tuple(MessageQueue(one.topic, name, one.queue_id) for one in queues)

    def _refusal(self, error: RequestError) -> Exception:
        if isinstance(error, NoSuchMessageError) or error.code == AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            return NotFoundRefusalError(str(error))
        if error.code == AnswerCode.SYSTEM_BUSY:
            return TooManyWaitsError(str(error))
        return self._unavailable(str(error))

    def _unavailable(self, reason: str) -> NotStoredError:
        refusal = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason)
        return NotStoredError(refusal, self._parts.view().leader_address)


class _Stream:
    """One member's stream: reads heartbeats, writes who the members are."""

    def __init__(self, call: Call, link: MemberLink, members: Members, now_ms: Callable[[], int]) -> None:
        self._call = call
        self._link = link
        self._members = members
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
            try:
                await self._members.join(self._link, self._call.quota.owner, Language.PYTHON, VERSION, beat)
            except RequestError as error:
                if error.code == AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    raise NotFoundRefusalError(str(error)) from None
                raise TooManyWaitsError(str(error)) from None
            self._link.news.set()

    async def write(self) -> None:
        """Until the link is closed. However often the members change, only the latest list is kept."""
        link, call = self._link, self._call
        while not link.closed_because:
            await link.news.wait()
            link.news.clear()
            group = self._members.clients.consumers(self._identity[0])
            if link.closed_because or group is None:
                continue
            with call.connection.writing():
                await call.context.write(pb.MembershipResponse(client_ids=group.ids).SerializeToString())


def _heartbeat(request: pb.MembershipRequest, now_ms: int) -> HeartbeatData:
    check_group(request.group)
    check_client_id(request.client_id)
    subscriptions = tuple(_subscription(one, now_ms) for one in request.subscriptions)
    model = MessageModel.BROADCASTING if request.broadcast else MessageModel.CLUSTERING
    if not request.broadcast:  # RocketMQ's clients name it themselves, and members of a group must subscribe alike
        subscriptions += (SubscriptionData(f"{RETRY_PREFIX}{request.group}", sub_version=now_ms),)
    data = ConsumerData(request.group, message_model=model, subscription_data_set=subscriptions)
    return HeartbeatData(request.client_id, consumer_data_set=(data,))


def _subscription(one: pb.Subscription, now_ms: int) -> SubscriptionData:
    check_name(one.topic, "topic")
    wanted = TagFilter.parse(one.tag_expression)
    if wanted is None:
        return SubscriptionData(one.topic, sub_version=now_ms)
    tags = tuple(sorted(tag.decode() for tag in wanted.tags))
    return SubscriptionData(one.topic, one.tag_expression, tags, tuple(sorted(wanted.codes)), now_ms)
