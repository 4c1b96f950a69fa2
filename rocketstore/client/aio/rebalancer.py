"""``Rebalancer``: which queues are this consumer's, found out again whenever members, routes or masters change.

Every member of a group divides the queues by the same rule, RocketMQ's clients included: the queues of all brokers that
have the topic, in Java's order, go to the members in Java's order, in equal runs. A consumer with an assignment of its
own takes what it was given, and looks only at the routes.

Brokers tell a consumer that members have changed, reset its offsets, and ask for its progress (``ConsumerRequests``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from dledger.access.rules import RETRY_PREFIX
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.client.aio.assignment import DeliveryQueue
from rocketstore.client.aio.broker_session import BrokerSession, SessionPlan, Subscriptions
from rocketstore.client.aio.cluster import Cluster, Heartbeats
from rocketstore.client.aio.connections import Deadline
from rocketstore.client.aio.errors import (
    BadAnswerError,
    ClientClosedError,
    ClientError,
    NotFoundError,
    RefusedError,
    TimedOutError,
)
from rocketstore.client.aio.offsets import OffsetStore, StartOffsets
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import (
    ConsumerIdList,
    ConsumerRunningInfo,
    ConsumerStatusBody,
    ProcessQueueInfo,
    ResetOffsetBody,
)
from rocketstore.remoting.headers import GroupHeader, ResetClientOffsetHeader, read_header
from rocketstore.remoting.topics import MessageQueue

_log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
"""How often it is looked whether something has changed; routes themselves are looked up every 30 s."""
MEMBERS_S: Final = 20.0
"""How often members are asked for without a notice of a change, as RocketMQ's clients do."""
RETIRE_S: Final = 60.0
"""How long a session stays without a queue: its brokers may have the topic again soon."""
SETTLE_LOOK_S: Final = 0.05

Assign = Literal["all"] | Sequence[MessageQueue | int]
"""A consumer's own assignment: all queues of its topics, or these; a number means that queue at every broker."""


class Rebalancer:
    """Owns the sessions, one for each broker name. ``heartbeats``: None for a consumer that is no member of a group."""

    def __init__(
        self,
        cluster: Cluster,
        subscriptions: Subscriptions,
        deliveries: DeliveryQueue,
        store: OffsetStore | None,
        *,
        assign: Assign | None,
        heartbeats: Heartbeats | None,
    ) -> None:
        self._cluster = cluster
        self._subscriptions = subscriptions
        self._deliveries = deliveries
        self._starts: Final = StartOffsets(cluster, store, subscriptions.options.start)
        self._store = store
        self._assign = "all" if subscriptions.options.broadcast else assign
        self._heartbeats = heartbeats
        self.sessions: dict[str, BrokerSession] = {}
        """By broker name."""
        self._retired: list[BrokerSession] = []
        self._used_at: dict[str, float] = {}
        self._members: dict[str, frozenset[str]] = {}  # by broker name, as last answered
        self._members_at = float("-inf")
        self._has_begun = False
        self._is_divided = False
        self._reported = ""
        self._failure: ClientError | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- for the consumer ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="rebalance")

    def members_changed(self) -> None:
        """A broker said so."""
        self._members_at = float("-inf")
        self._wake.set()

    async def wait_settled(self, deadline: Deadline) -> None:
        """Until this consumer has its queues; for brokers that do not answer, not longer than the deadline.

        Raises what keeps it from joining.
        """
        while True:
            sessions = list(self.sessions.values())
            for refusal in self._refusals():
                raise refusal
            tried = [one for one in sessions if one.is_settled or one.failure is not None]
            settled = [one for one in sessions if one.is_settled]
            if self._is_divided and (settled or not sessions) and (len(tried) == len(sessions) or deadline.expired):
                return
            if deadline.expired:
                raise self._why_late(deadline)
            await asyncio.sleep(SETTLE_LOOK_S)

    def _refusals(self) -> Iterable[ClientError]:
        """Why brokers do not take this member, where that is final."""
        if self._heartbeats is None:
            return
        for name in self.sessions:
            broker = self._cluster.routes.broker(name)
            error = self._heartbeats.error(broker.master) if broker is not None else None
            if isinstance(error, RefusedError) and not isinstance(error, NotFoundError):
                yield error

    def _why_late(self, deadline: Deadline) -> ClientError:
        failures = [one.failure for one in self.sessions.values()]
        known = next((one for one in (*failures, self._failure) if isinstance(one, ClientError)), None)
        return known or TimedOutError(
            f"group {self._subscriptions.group}: no queues were assigned within {deadline.timeout_s:g} s",
            outcome="not_applied",
        )

    def session_of(self, queue: MessageQueue) -> BrokerSession | None:
        """Where this queue is; None if it is not consumed any more."""
        return self.sessions.get(queue.broker_name)

    async def commit(self) -> None:
        """Commit what is done now, at all brokers; then raise the first error, if there was one."""
        found = await asyncio.gather(*(one.commit() for one in self.sessions.values()), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one

    async def close(self) -> None:
        """Commit, and leave every broker. Raises the first error, after all have had their turn. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        sessions = [*self.sessions.values(), *self._retired]
        await asyncio.gather(*(one.stop() for one in sessions))
        for one in self.sessions.values():
            if one.failure is not None:
                raise one.failure

    # -- the task ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._divide()
                self._failure, self._reported = None, ""
            except ClientClosedError:
                return
            except ClientError as error:
                self._failure = error
                if str(error) != self._reported:
                    self._reported = str(error)
                    _log.warning("group %s: cannot divide the queues: %s; retrying", self._subscriptions.group, error)
            except Exception as error:  # noqa: BLE001  # else nothing would ever be divided again
                self._failure = ClientError(f"cannot divide the queues: unexpected {error!r}")
                _log.exception("group %s: cannot divide the queues, unexpectedly", self._subscriptions.group)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _divide(self) -> None:
        topics = {topic: await self._readable(topic) for topic in self._subscriptions.expressions}
        names = {queue.broker_name for queues in topics.values() for queue in queues}
        self._open(names)
        is_member = self._heartbeats is not None
        members: frozenset[str] = frozenset()
        if is_member:
            members = await self._ask_members(names)
            if self._subscriptions.client_id not in members and not self._subscriptions.options.broadcast:
                self._members_at = float("-inf")
                return  # brokers have not had our heartbeat yet
        if not self._has_begun:
            await self._starts.begin(topics)
            self._has_begun = True
        if self._assign is None:
            retry = f"{RETRY_PREFIX}{self._subscriptions.group}"  # made when a member joins
            topics[retry] = await self._readable(retry, expected_at=names)
        wanted = self._ours(topics, members)
        for name, session in self.sessions.items():
            mine = frozenset(queue for queue in wanted if queue.broker_name == name)
            session.assign(SessionPlan(mine, is_alone=self._assign is not None or len(members) == 1))
        self._retire(names)
        self._is_divided = True

    async def _readable(self, topic: str, *, expected_at: Iterable[str] = ()) -> list[MessageQueue]:
        """The queues of a topic that may be read; none if it does not exist. Raises ``ClientError``."""
        routes = self._cluster.routes
        route = await routes.find(topic)
        found = [] if route is None else list(route.readable)
        gone = routes.missing(topic) - self._members.keys()
        if expected_at and not {one.broker_name for one in found} >= set(expected_at):
            routes.doubt(topic)
        return [one for one in found if one.broker_name not in gone]

    def _open(self, names: Iterable[str]) -> None:
        self._retired = [one for one in self._retired if not one.has_ended]
        leaving = {one.name for one in self._retired}
        now = asyncio.get_running_loop().time()
        for name in names:
            self._used_at[name] = now
            if name not in self.sessions and name not in leaving:
                self.sessions[name] = BrokerSession(
                    name, self._cluster, self._subscriptions, self._deliveries, self._starts, self._store
                )

    def _retire(self, names: Iterable[str]) -> None:
        """Leave brokers that have had no topic of ours for a while."""
        now = asyncio.get_running_loop().time()
        for name in self.sessions.keys() - set(names):
            session = self.sessions[name]
            if now > self._used_at[name] + RETIRE_S and not session.is_handling:
                self._retired.append(self.sessions.pop(name))
                self._stopping = asyncio.ensure_future(session.stop())

    async def _ask_members(self, names: Iterable[str]) -> frozenset[str]:
        """All that any master knows: one that has just started knows few, and a member that left is soon unknown."""
        now = asyncio.get_running_loop().time()
        if now >= self._members_at + MEMBERS_S:
            self._members_at = now
            asked = list(names)
            answers = await asyncio.gather(*map(self._members_at_broker, asked))
            self._members = {name: found for name, found in zip(asked, answers, strict=True) if found is not None}
            if len(self._members) < len(asked):
                self._members_at = now + LOOK_S - MEMBERS_S
        return frozenset(member for found in self._members.values() for member in found)

    async def _members_at_broker(self, name: str) -> frozenset[str] | None:
        """Those that the master of this name knows; None if it does not answer."""
        header = GroupHeader(self._subscriptions.group)
        try:
            answer = await self._cluster.ask_master(
                name, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header, deadline=self._cluster.deadline(LOOK_S)
            )
            return frozenset(ConsumerIdList.decode(answer.body or b"{}").consumer_id_list)
        except RequestError as error:
            raise BadAnswerError(f"the list of members cannot be read: {error}") from error
        except RefusedError:
            return frozenset()  # it knows none of this group
        except ClientError:
            return None

    def _ours(self, topics: Mapping[str, Sequence[MessageQueue]], members: frozenset[str]) -> frozenset[MessageQueue]:
        wanted: set[MessageQueue] = set()
        for queues in topics.values():
            if self._assign is None:
                wanted.update(allocate(in_java_order_of_queues(queues), members, self._subscriptions.client_id))
            elif self._assign == "all":
                wanted.update(queues)
            else:
                given = set(self._assign)
                wanted.update(one for one in queues if one in given or one.queue_id in given)
        return frozenset(wanted)


def in_java_order_of_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Sorted as Java sorts a ``MessageQueue``: by topic, broker name, number."""
    return sorted(set(queues), key=lambda one: (_java_text(one.topic), _java_text(one.broker_name), one.queue_id))


def allocate(queues: Sequence[MessageQueue], client_ids: Iterable[str], me: str) -> Sequence[MessageQueue]:
    """RocketMQ's ``AllocateMessageQueueAveragely``: each member gets a run of queues, the first ones one more.

    ``queues`` must be in the same order for all members. A client that is no member gets none.
    """
    members = sorted(set(client_ids), key=_java_text)
    return _run(queues, members.index(me), len(members)) if me in members else []


def owners(queues: Sequence[MessageQueue], client_ids: Iterable[str]) -> dict[MessageQueue, str]:
    """Every queue's member by the same rule; empty without members."""
    members = sorted(set(client_ids), key=_java_text)
    return {one: member for place, member in enumerate(members) for one in _run(queues, place, len(members))}


def _run(queues: Sequence[MessageQueue], place: int, members: int) -> Sequence[MessageQueue]:
    least, larger = divmod(len(queues), members)
    begin = place * least + min(place, larger)
    return queues[begin : begin + least + (place < larger)]


def _java_text(text: str) -> bytes:
    """Java compares strings by UTF-16 code units: RocketMQ's clients must see the same order."""
    return text.encode("utf-16-be", "surrogatepass")


BYTES_PER_MIB: Final = 1 << 20


class ConsumerRequests:
    """Answers them on the loop, at once."""

    def __init__(self, subscriptions: Subscriptions, deliveries: DeliveryQueue, rebalancer: Rebalancer) -> None:
        self._subscriptions = subscriptions
        self._deliveries = deliveries
        self._rebalancer = rebalancer

    def take(self, connection: RemotingConnection, request: Frame) -> None:
        """Carry out a request, and answer it if an answer is expected."""
        try:
            answer = self._answer(request)
        except RequestError as error:
            answer = request.answer(error.code, str(error))
        except Exception as error:  # noqa: BLE001  # whatever a server sends must not end the connection's reading
            _log.exception("request %d of %s failed, unexpectedly", request.code, connection.place)
            answer = request.answer(AnswerCode.SYSTEM_ERROR, repr(error))
        connection.done(request, answer)

    def _answer(self, request: Frame) -> Frame:
        match request.code:
            case RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                self._rebalancer.members_changed()
                return request.answer()
            case RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                self._reset(read_header(ResetClientOffsetHeader, request.fields), request.body)
                return request.answer()
            case RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
                positions = {queue: one.in_flight.done for queue, one in self._deliveries.assignments.items()}
                topic = request.fields.get("topic", "")
                table = {queue: offset for queue, offset in positions.items() if topic in ("", queue.topic)}
                return request.answer(body=ConsumerStatusBody(table, {}).encode())
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                return request.answer(body=self._running_info().encode())
        reason = f"this Python client does not answer requests of code {request.code}"
        return request.answer(AnswerCode.REQUEST_CODE_NOT_SUPPORTED, reason)

    def _reset(self, header: ResetClientOffsetHeader, body: bytes) -> None:
        if header.group != self._subscriptions.group:
            return
        table: Mapping[MessageQueue, int] = ResetOffsetBody.decode(body).offset_table
        held = self._deliveries.assignments
        for queue, offset in table.items():
            assignment = held.get(queue)
            if assignment is None or queue.topic != header.topic or offset < 0:
                continue
            _log.warning(
                "group %s: its offset in queue %d of %s is reset to %d",
                header.group,
                queue.queue_id,
                queue.topic,
                offset,
            )
            self._deliveries.go_to(assignment, offset)
            assignment.may_rewind = True

    def _running_info(self) -> ConsumerRunningInfo:
        subscriptions, held = self._subscriptions, self._deliveries.assignments
        return ConsumerRunningInfo(
            {
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_CONSUMEORDERLY": str(subscriptions.options.ordered).lower(),
            },
            tuple(subscriptions.wanted(topic).subscription(topic) for topic in subscriptions.expressions),
            {
                queue: ProcessQueueInfo(
                    commit_offset=max(one.committed or 0, 0),
                    cached_msg_count=len(one.rest) + one.out,
                    cached_msg_size_in_mi_b=one.in_flight.size // BYTES_PER_MIB,
                    locked=one.usable_until != float("inf"),
                )
                for queue, one in held.items()
            },
        )
