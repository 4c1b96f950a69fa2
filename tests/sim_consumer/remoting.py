"""The model broker over RocketMQ's remoting, on real connections of this machine.

Each consumer has a port of its own; ``cut`` it, and the consumer is dead to the world, as a killed process is. As a
broker of this project it announces our requests and its incarnation; as ``rocketmq`` it knows nothing of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Final

from dledger.remoting.codes import ANNOUNCED, AnswerCode
from dledger.remoting.connection import ByteRoom, Owner, RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.client.aio.consumer_options import tags_of_expression
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import CommitGroupOffsets, FetchedOffsets, FetchOffsets, encode_committed
from rocketstore.remoting.groups import ConsumerIdList, HeartbeatData, LockedQueuesBody, LockQueuesBody
from rocketstore.remoting.headers import (
    GroupHeader,
    GroupQueueHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    PullAnswer,
    PullHeader,
    QueueHeader,
    SendBackHeader,
    UnregisterClientHeader,
    UpdateOffsetHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.topics import BrokerData, ClusterInfo, MessageQueue, QueueData, TopicRouteData
from tests.sim_consumer.broker import ModelBroker, Pulled, RefusedError

NAME: Final = "b"
LOOK_S: Final = 0.01
_BYTES_MAX: Final = 1 << 28
_CODES: Final = {
    "unavailable": AnswerCode.SERVICE_NOT_AVAILABLE,
    "not_found": AnswerCode.TOPIC_NOT_EXIST,
    "not_allowed": AnswerCode.NO_PERMISSION,
    "invalid": AnswerCode.SYSTEM_ERROR,
}
_STATUSES: Final = {
    "FOUND": AnswerCode.SUCCESS,
    "NO_MATCHED_MESSAGE": AnswerCode.PULL_RETRY_IMMEDIATELY,
    "OFFSET_OVERFLOW_ONE": AnswerCode.PULL_NOT_FOUND,
    "OFFSET_OVERFLOW_BADLY": AnswerCode.PULL_OFFSET_MOVED,
    "OFFSET_TOO_SMALL": AnswerCode.PULL_OFFSET_MOVED,
}


CLOSING_TURNS: Final = 10


def _is_wanted(record: bytes, expression: str) -> bool:
    tags = tags_of_expression(expression)
    return tags is None or decode_record(record).tags in tags


class ServerLoop:
    """A thread with a loop, for all ports of one world."""

    def __init__(self) -> None:
        self.ports: list[ModelPort] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, made: Coroutine[object, object, None]) -> None:
        """Carry it out there."""
        asyncio.run_coroutine_threadsafe(made, self.loop).result(30)

    def close(self) -> None:
        """End the thread, once what was connected to its ports is closed."""
        for port in self.ports:
            port.cut()
        self.run(_turns(self.loop))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _turns(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop close the sockets of connections that have ended: a turn for the end, one for the socket."""
    for _ in range(CLOSING_TURNS):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


class ModelPort:
    """One consumer's way to the broker. ``rocketmq``: as one of RocketMQ's own."""

    def __init__(self, broker: ModelBroker, loop: ServerLoop, pull_max: int, *, rocketmq: bool = False) -> None:
        self.broker = broker
        self.address = ""
        self._loop = loop
        self._pull_max = pull_max
        self._rocketmq = rocketmq
        self._room = ByteRoom(_BYTES_MAX, _BYTES_MAX)
        self._owner = Owner(self._opened, self._take, self._closed)
        self._starts: dict[RemotingConnection, int] = {}  # which start of the broker each has gone to
        self._members: dict[RemotingConnection, set[tuple[str, str]]] = {}
        self._told: dict[str, list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        code = RequestCode
        self._answers: dict[int, Callable[[RemotingConnection, Frame], Frame]] = {
            code.GET_ROUTEINFO_BY_TOPIC: self._route,
            code.GET_BROKER_CLUSTER_INFO: self._clusters,
            code.HEART_BEAT: self._heartbeat,
            code.UNREGISTER_CLIENT: self._unregister,
            code.GET_CONSUMER_LIST_BY_GROUP: self._member_ids,
            code.QUERY_CONSUMER_OFFSET: self._query_offset,
            code.UPDATE_CONSUMER_OFFSET: self._update_offset,
            code.GET_MAX_OFFSET: self._bound,
            code.GET_MIN_OFFSET: self._bound,
            code.SEARCH_OFFSET_BY_TIMESTAMP: self._offset_at,
            code.CONSUMER_SEND_MSG_BACK: self._send_back,
            code.LOCK_BATCH_MQ: self._lock,
            code.UNLOCK_BATCH_MQ: self._unlock,
        }
        if not rocketmq:
            self._answers |= {OwnCode.FETCH_OFFSETS: self._fetch_offsets, OwnCode.COMMIT_OFFSETS: self._commit_offsets}
        loop.ports.append(self)
        loop.run(self._listen())

    def cut(self) -> None:
        """From now on nothing gets through, in either direction."""
        self._loop.run(self._end())

    # --- connections --------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._protocol, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._begin(self._look())

    async def _end(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        loop = asyncio.get_running_loop()
        loop.remove_reader(server.sockets[0].fileno())
        await _turns(loop)  # one that was being accepted has been by now; asyncio would lose it with the server
        server.close()
        for one in tuple(self._starts):
            one.close("cut")
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, made: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(made)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _protocol(self) -> RemotingConnection:
        announced = {} if self._rocketmq else ANNOUNCED
        return RemotingConnection(self._owner, self._room, self._room, announced=announced)

    def _opened(self, connection: RemotingConnection) -> None:
        self._starts[connection] = self.broker.starts
        if self.broker.is_down:
            connection.close("the broker is down")

    def _closed(self, connection: RemotingConnection) -> None:
        self._starts.pop(connection, None)
        for group, client_id in self._members.pop(connection, ()):
            self.broker.leave(group, client_id)

    async def _look(self) -> None:
        """Hang up when the broker ends, and tell members of each other."""
        while True:
            for connection in tuple(self._starts):
                if not self._is_up(connection):
                    connection.close("the broker has ended")
                    continue
                for group, _ in self._members.get(connection, ()):
                    members = list(self.broker.members.get(group, []))
                    if self._told.get(group) != members:
                        self._told[group] = members
                        fields = write_header(GroupHeader(group))
                        connection.tell(Frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 0, fields))
            await asyncio.sleep(LOOK_S)

    def _is_up(self, connection: RemotingConnection) -> bool:
        return not self.broker.is_down and self._starts.get(connection) == self.broker.starts

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, connection: RemotingConnection, frame: Frame) -> None:
        if frame.code == RequestCode.PULL_MESSAGE:
            self._begin(self._pull(connection, frame))
            return
        answer = self._answers.get(frame.code)
        if answer is None:
            connection.done(frame, frame.answer(AnswerCode.REQUEST_CODE_NOT_SUPPORTED, "request type not supported"))
            return
        self._answer(connection, frame, lambda: answer(connection, frame))

    def _answer(self, connection: RemotingConnection, frame: Frame, make: Callable[[], Frame]) -> None:
        """A request reaches the process that it was sent to, or none; likewise its answer."""
        with self.broker.changed:
            made: Frame | None = None
            if self._is_up(connection):
                try:
                    made = make()
                except RefusedError as error:
                    made = frame.answer(_CODES[error.kind], str(error))
                if not self._is_up(connection):
                    made = None
        if made is None:
            connection.close("the broker has ended")
        connection.done(frame, made)

    async def _pull(self, connection: RemotingConnection, frame: Frame) -> None:
        header = read_header(PullHeader, frame.fields)
        until = time.monotonic() + header.suspend_timeout_millis / 1000
        found: Pulled | None = None

        def pull() -> Frame:
            nonlocal found
            count = min(header.max_msg_nums, self._pull_max)
            found = self.broker.pull((header.topic, header.queue_id), header.queue_offset, count=count, wait_s=0.0)
            incarnation = 0 if self._rocketmq else self.broker.starts
            answer = PullAnswer(0, found.next_offset, found.min_offset, found.max_offset, incarnation)
            status, at = found.status, header.queue_offset
            records = [one for one in found.records if _is_wanted(one, header.subscription)]
            if status == "NO_MESSAGE_IN_QUEUE":
                status = "OFFSET_OVERFLOW_ONE" if at == 0 else "OFFSET_OVERFLOW_BADLY"
            fields = write_header(answer)
            if found.records and not records:
                status = "NO_MATCHED_MESSAGE"
            return frame.answer(_STATUSES[status], found.status, fields, b"".join(records))

        while self._is_up(connection) and time.monotonic() < until:
            with self.broker.changed:
                try:
                    is_waiting = not self._has_news(header)
                except RefusedError:
                    is_waiting = False
            if not is_waiting:
                break
            await asyncio.sleep(LOOK_S)
        self._answer(connection, frame, pull)

    def _has_news(self, header: PullHeader) -> bool:
        found = self.broker.pull((header.topic, header.queue_id), header.queue_offset, count=1, wait_s=0.0)
        return found.status not in ("OFFSET_OVERFLOW_ONE", "NO_MESSAGE_IN_QUEUE")

    # --- topics -------------------------------------------------------------------------------------------------------

    def _broker_data(self) -> BrokerData:
        return BrokerData("C", NAME, {0: self.address})

    def _route(self, _: RemotingConnection, frame: Frame) -> Frame:
        name = frame.fields["topic"]
        topic = self.broker.topics.get(name)
        if topic is None:
            raise RefusedError("not_found", f"no route of {name}")
        queues = QueueData(NAME, topic.queues, topic.queues, topic.permission)
        return frame.answer(body=TopicRouteData((queues,), (self._broker_data(),)).encode())

    def _clusters(self, _: RemotingConnection, frame: Frame) -> Frame:
        return frame.answer(body=ClusterInfo({NAME: self._broker_data()}, {"C": (NAME,)}).encode())

    def _bound(self, _: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(QueueHeader, frame.fields)
        try:
            bounds = self.broker.range_of((header.topic, header.queue_id))
        except RefusedError:
            bounds = 0, 0  # as brokers do
        return frame.answer(fields=write_header(OffsetAnswer(bounds[frame.code == RequestCode.GET_MAX_OFFSET])))

    def _offset_at(self, _: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(OffsetByTimeHeader, frame.fields)
        try:
            found = self.broker.offset_at((header.topic, header.queue_id), header.timestamp)
        except RefusedError:
            found = 0
        return frame.answer(fields=write_header(OffsetAnswer(found)))

    # --- offsets ------------------------------------------------------------------------------------------------------

    def _query_offset(self, _: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(GroupQueueHeader, frame.fields)
        found = self.broker.positions(header.consumer_group, header.topic).get(header.queue_id)
        if found is None:
            return frame.answer(AnswerCode.QUERY_NOT_FOUND, "no offset here")
        return frame.answer(fields=write_header(OffsetAnswer(found)))

    def _update_offset(self, connection: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(UpdateOffsetHeader, frame.fields)
        offsets, start = {header.queue_id: header.commit_offset}, self._starts[connection]
        self.broker.commit(header.consumer_group, header.topic, offsets, back=True, incarnation=start)
        return frame.answer()

    def _fetch_offsets(self, _: RemotingConnection, frame: Frame) -> Frame:
        wanted = FetchOffsets.decode(frame.body)
        found = [self.broker.positions(wanted.group, topic).get(queue_id, -1) for topic, queue_id in wanted.queues]
        return frame.answer(body=FetchedOffsets(self.broker.starts, found).encode())

    def _commit_offsets(self, _: RemotingConnection, frame: Frame) -> Frame:
        wanted = CommitGroupOffsets.decode(frame.body)
        for topic in dict.fromkeys(topic for topic, *_ in wanted.offsets):
            offsets = {queue_id: offset for name, queue_id, offset in wanted.offsets if name == topic}
            self.broker.commit(wanted.group, topic, offsets, back=wanted.rewind, incarnation=wanted.incarnation)
        return frame.answer(body=encode_committed(self.broker.starts))

    # --- groups -------------------------------------------------------------------------------------------------------

    def _heartbeat(self, connection: RemotingConnection, frame: Frame) -> Frame:
        data = HeartbeatData.decode(frame.body)
        for one in data.consumer_data_set:
            self.broker.join(one.group_name, data.client_id)
            self._members.setdefault(connection, set()).add((one.group_name, data.client_id))
        return frame.answer()

    def _unregister(self, connection: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(UnregisterClientHeader, frame.fields)
        self.broker.leave(header.consumer_group, header.client_id)
        self._members.get(connection, set()).discard((header.consumer_group, header.client_id))
        return frame.answer()

    def _member_ids(self, _: RemotingConnection, frame: Frame) -> Frame:
        group = read_header(GroupHeader, frame.fields).consumer_group
        return frame.answer(body=ConsumerIdList(tuple(self.broker.members.get(group, ()))).encode())

    def _lock(self, _: RemotingConnection, frame: Frame) -> Frame:
        wanted = LockQueuesBody.decode(frame.body)
        got = self.broker.lock(wanted.client_id, [(one.topic, one.queue_id) for one in wanted.mq_set])
        locked = tuple(MessageQueue(topic, NAME, queue_id) for topic, queue_id in got)
        return frame.answer(body=LockedQueuesBody(locked).encode())

    def _unlock(self, _: RemotingConnection, frame: Frame) -> Frame:
        wanted = LockQueuesBody.decode(frame.body)
        self.broker.unlock(wanted.client_id, [(one.topic, one.queue_id) for one in wanted.mq_set])
        return frame.answer()

    def _send_back(self, _: RemotingConnection, frame: Frame) -> Frame:
        header = read_header(SendBackHeader, frame.fields)
        limit = header.max_reconsume_times
        try:
            is_dead = header.delay_level < 0 or 0 <= limit <= self.broker.tries_of(header.offset)
            self.broker.send_back(header.group, header.offset, dead=is_dead)
        except RefusedError as error:
            code = AnswerCode.TOPIC_NOT_EXIST if self.broker.takes_back == "later" else AnswerCode.SYSTEM_ERROR
            return frame.answer(code, str(error))
        return frame.answer()
