"""Brokers of real gRPC servers over queues in memory: roles that can be switched, failures that are scripted."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from cluster.local.group import free_ports
from dledger.rpc import options
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.producer_names import MEMORY_KEY
from rocketstore.message.properties import decode_properties
from rocketstore.message.record import encode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import OFFSETS_MAX
from rocketstore.types import BrokerRole

SERVICE: Final = "rocketstore.v1.BrokerService"
NOT_REMEMBERED: Final = pb.SendResult(
    status="PUT_OK", outcome="stored", offset=-1, queue_id=-1, queue_offset=-1, store_timestamp_ms=-1
)
STORE_HOST: Final = HostAddress(b"\x7f\0\0\1", 10911)


@dataclass(frozen=True)
class Refusal:
    """Answer a whole request with this instead of storing it; ``only`` these places of it, the rest is stored."""

    status: str
    outcome: str = "not_applied"
    leader: str = ""
    reason: str = "scripted"
    only: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Break:
    """End the stream, before or after storing the request; ``forgets``: and all producers."""

    stored: bool = False
    forgets: bool = False


@dataclass(frozen=True)
class Garbage:
    """Answer with these bytes."""

    data: bytes = b"\xff\xff\xff\xff"


Script = Refusal | Break | Garbage | None


@dataclass
class FakeQueue:
    """Records by queue offset; those below ``base`` are gone."""

    records: list[bytes] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    base: int = 0

    @property
    def end(self) -> int:
        return len(self.records)


_INCARNATIONS = itertools.count(1)


class FakeBrokers:
    """A group that shares one store: what the master takes, all have at once."""

    def __init__(self, count: int = 1) -> None:
        self.changed = threading.Condition()  # guards everything
        self.topics: dict[str, pb.Topic] = {}
        self.queues: dict[tuple[str, int], FakeQueue] = {}
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.commits: list[pb.CommitOffsetsRequest] = []
        self.registered: set[str] = set()
        """Groups that may have committed nothing yet."""
        self.answers_to_commits = True
        """Whether a commit of offsets, which is stored, is answered."""
        self.log_offset = 0
        self.producers: dict[str, list[pb.SendResult]] = {}
        """By name what each number was answered."""
        self.memory = 0
        """How often the producers were forgotten; 0: they never are."""
        self.producers_max = 4096
        self.remembers_places = True
        """Whether what is stored already is answered with its place."""
        self.term = 1
        self.covered: int | None = None
        """How many names an answer about many topics or groups claims to cover; None: all of them."""
        self.auto_create = 0
        """How many queues a topic gets when a message comes for it; 0: unknown topics are refused."""
        self.nodes = [FakeBroker(self, f"n{number}", port) for number, port in enumerate(free_ports(count))]
        self.nodes[0].role = BrokerRole.SYNC_MASTER
        for node in self.nodes:
            node.start()

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    @property
    def master(self) -> FakeBroker | None:
        return next((node for node in self.nodes if node.role is not BrokerRole.SLAVE), None)

    def elect(self, number: int | None) -> None:
        """This one is the master from now on, or none."""
        with self.changed:
            self.term += 1
            for position, node in enumerate(self.nodes):
                node.role = BrokerRole.SYNC_MASTER if position == number else BrokerRole.SLAVE
                node.term = self.term

    def add_topic(self, name: str, queues: int = 4, permission: int = 6) -> None:
        with self.changed:
            self.topics[name] = pb.Topic(name=name, read_queues=queues, write_queues=queues, permission=permission)

    def put(self, message: Message) -> pb.SendResult:
        """Store one message, as a master does."""
        with self.changed:
            queue = self.queues.setdefault((message.topic, message.queue_id), FakeQueue())
            message.store_timestamp = message.store_timestamp or time.time_ns() // 1_000_000
            message.store_host = STORE_HOST
            message.queue_offset, message.offset = queue.end, self.log_offset
            record = encode_record(message, queue_offset=queue.end, physical_offset=self.log_offset)
            self.log_offset += len(record)
            queue.records.append(record)
            queue.messages.append(message)
            self.changed.notify_all()
            return pb.SendResult(
                status="PUT_OK",
                outcome="stored",
                message_id=offset_message_id(STORE_HOST, message.offset),
                offset=message.offset,
                queue_id=message.queue_id,
                queue_offset=message.queue_offset,
                store_timestamp_ms=message.store_timestamp,
            )

    def lose(self, topic: str, queue_id: int, keep: int) -> None:
        """The end of a queue, in another incarnation, over the connections that there are."""
        with self.changed:
            queue = self.queues[topic, queue_id]
            del queue.records[keep:], queue.messages[keep:]
            for node in self.nodes:
                node.incarnation = next(_INCARNATIONS)

    def bodies(self, topic: str, queue_id: int | None = None) -> list[bytes]:
        """What is stored, queue by queue."""
        with self.changed:
            return [
                message.body
                for (name, number), queue in sorted(self.queues.items())
                if name == topic and queue_id in (None, number)
                for message in queue.messages
            ]

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class FakeBroker:
    """One server."""

    def __init__(self, group: FakeBrokers, node_id: str, port: int) -> None:
        self.group = group
        self.node_id = node_id
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.advertised = self.address
        """Where it says that it is."""
        self.role = BrokerRole.SLAVE
        self.term = 1
        self.sends: deque[Script] = deque()
        """What to do with the next requests of ``SendStream``; None: what is right."""
        self.fail_calls: dict[str, deque[tuple[grpc.StatusCode, str, dict[str, str]]]] = {}
        """By method: what the next calls end with."""
        self.pulls: deque[pb.PullResponse | bytes] = deque()
        """What to answer the next pulls with."""
        self.requests: list[pb.SendRequest] = []
        self.pulled: list[pb.PullRequest] = []
        self.calls: list[str] = []
        self.gate = threading.Event()  # sends, and the unary methods of ``gated``, are answered while it is set
        self.gated: set[str] = set()
        self.gate.set()
        self.waiting = 0
        self.request_bytes_max = 0
        """How much it says that a send may have; 0: nothing."""
        self.hint = True
        """Whether it tells who leads."""
        self.garbled: set[str] = set()
        """Unary methods that answer garbage."""
        self.incarnation = 0
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self.incarnation = next(_INCARNATIONS)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name, request, handler), request.FromString, self._serializer(name)
            )
            for name, (request, handler) in self._handlers().items()
        }
        methods["SendStream"] = grpc.stream_stream_rpc_method_handler(
            self._send_stream, pb.SendRequest.FromString, None
        )
        methods["PullStream"] = grpc.stream_stream_rpc_method_handler(
            self._pull_stream, pb.PullRequest.FromString, None
        )
        methods["Membership"] = grpc.stream_stream_rpc_method_handler(
            self._membership, pb.MembershipRequest.FromString, pb.MembershipResponse.SerializeToString
        )
        self._server = grpc.server(
            ThreadPoolExecutor(64),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        assert self._server.add_insecure_port(self.address) == self.port
        self._server.start()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self.gate.set()
            server.stop(0).wait()

    def _handlers(self) -> dict[str, tuple[Any, Callable[[Any, grpc.ServicerContext], Any]]]:
        return {
            "Producer": (pb.ProducerRequest, self._producer),
            "Pull": (pb.PullRequest, lambda request, _: self._pull(request)),
            "Newest": (pb.NewestRequest, self._newest),
            "QueryById": (pb.QueryByIdRequest, self._query_by_id),
            "QueryByKey": (pb.QueryByKeyRequest, self._query_by_key),
            "QueueRange": (pb.QueueRequest, self._queue_range),
            "TopicRanges": (pb.TopicRangesRequest, self._topic_ranges),
            "OffsetByTime": (pb.OffsetByTimeRequest, self._offset_by_time),
            "CommitOffsets": (pb.CommitOffsetsRequest, self._commit_offsets),
            "CommitPosition": (pb.CommitPositionRequest, self._commit_position),
            "FetchOffsets": (pb.FetchOffsetsRequest, self._fetch_offsets),
            "GroupOffsets": (pb.GroupOffsetsRequest, self._group_offsets),
            "PutTopic": (pb.PutTopicRequest, self._put_topic),
            "DeleteTopic": (pb.DeleteTopicRequest, self._delete_topic),
            "DeleteGroup": (pb.DeleteGroupRequest, self._delete_group),
            "ListTopics": (pb.ListTopicsRequest, lambda *_: pb.ListTopicsResponse(topics=self.group.topics.values())),
            "ListGroups": (pb.ListGroupsRequest, self._list_groups),
            "Status": (pb.StatusRequest, self._status),
        }

    def _unary(
        self, name: str, kind: object, handler: Callable[[Any, grpc.ServicerContext], Any]
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        def serve(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401  # any message
            self.calls.append(name)
            scripted = self.fail_calls.get(name)
            if scripted:
                code, details, told = scripted.popleft()
                context.set_trailing_metadata(tuple(told.items()))
                context.abort(code, details)
            if name in self.gated:
                self.gate.wait()
            with self.group.changed:
                return handler(request, context)

        return serve

    def _serializer(self, name: str) -> Callable[[Any], bytes]:
        return lambda answer: b"\xff\xff" if name in self.garbled else answer.SerializeToString()

    def _membership(
        self, requests: Iterable[pb.MembershipRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.MembershipResponse]:
        """Every member is the only one."""
        scripted = self.fail_calls.get("Membership")
        if scripted:
            code, details, _told = scripted.popleft()
            context.abort(code, details)
        for request in requests:
            yield pb.MembershipResponse(client_ids=[request.client_id])

    # --- sends ------------------------------------------------------------------------------------------------------

    def _send_stream(self, requests: Iterable[pb.SendRequest], context: grpc.ServicerContext) -> Iterator[bytes]:
        scripted = self.fail_calls.get("SendStream")
        if scripted:
            code, details, _ = scripted.popleft()
            context.abort(code, details)
        memory = self.group.memory
        limit = options.limit_metadata(self.request_bytes_max) if self.request_bytes_max else ()
        context.send_initial_metadata(limit + (((MEMORY_KEY, str(memory)),) if memory else ()))
        for request in requests:
            self.requests.append(request)
            self.waiting += 1
            self.gate.wait()
            self.waiting -= 1
            script = self.sends.popleft() if self.sends else None
            if isinstance(script, Break) and not script.stored:
                context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
            if isinstance(script, Garbage):
                yield script.data
                continue
            refusal = script if isinstance(script, Refusal) else None
            results = self._send_all(request, refusal)
            if isinstance(script, Break):
                if script.forgets:
                    self.group.producers.clear()
                    self.group.memory += 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
            yield pb.SendResponse(results=results, request_id=request.request_id).SerializeToString()

    def _send_all(self, request: pb.SendRequest, refusal: Refusal | None) -> list[pb.SendResult]:
        messages, stored = list(enumerate(request.messages)), list[pb.SendResult]()
        with self.group.changed:
            if request.producer:
                refused = [self._refuse(message, place, refusal) for place, message in messages]
                if any(refused):
                    other = pb.SendResult(status="OUT_OF_ORDER_SEQUENCE", outcome="not_applied", reason="another is")
                    return [one or other for one in refused]
                known = self.group.producers.get(request.producer)
                if request.sequence > len(known or ()):
                    status = "UNKNOWN_PRODUCER" if known is None else "OUT_OF_ORDER_SEQUENCE"
                    return [pb.SendResult(status=status, outcome="not_applied", reason="a hole")] * len(messages)
                if known is None and len(self.group.producers) >= self.group.producers_max:
                    return [pb.SendResult(status="TOO_MANY_PRODUCERS", outcome="not_applied")] * len(messages)
                known = self.group.producers.setdefault(request.producer, [])
                stored = known[request.sequence : request.sequence + len(messages)]
                if not self.group.remembers_places:
                    stored = [NOT_REMEMBERED] * len(stored)
                known += (new := [self._send_one(one, place, refusal) for place, one in messages[len(stored) :]])
                return stored + new
            return [self._send_one(message, place, refusal) for place, message in messages]

    def _refuse(self, message: pb.Message, place: int, refusal: Refusal | None) -> pb.SendResult | None:
        """Why the message is not stored, if it is not; its topic is created."""
        group = self.group
        if refusal is not None and (refusal.only is None or place in refusal.only):
            return pb.SendResult(
                status=refusal.status, outcome=refusal.outcome, leader=refusal.leader, reason=refusal.reason
            )
        if self.role is BrokerRole.SLAVE:
            leader = group.master.advertised if group.master and self.hint else ""
            return pb.SendResult(status="SERVICE_NOT_AVAILABLE", outcome="not_applied", leader=leader)
        if message.topic not in group.topics:
            if not group.auto_create:
                return pb.SendResult(status="MESSAGE_ILLEGAL", outcome="not_applied", reason="no such topic")
            group.add_topic(message.topic, group.auto_create)
        return None

    def _producer(self, request: pb.ProducerRequest, context: grpc.ServicerContext) -> pb.ProducerResponse:
        self._needs_master(context)
        return pb.ProducerResponse(next_sequence=len(self.group.producers.get(request.producer, ())))

    def _send_one(self, message: pb.Message, place: int, refusal: Refusal | None) -> pb.SendResult:
        group = self.group
        with group.changed:
            refused = self._refuse(message, place, refusal)
            if refused is not None:
                return refused
            write_queues = group.topics[message.topic].write_queues
            queue_id = message.queue_id if message.queue_id >= 0 else group.log_offset % write_queues
            return group.put(
                Message(
                    message.topic,
                    message.body,
                    queue_id,
                    decode_properties(message.property_string) or dict(message.properties),
                    message.flag,
                    message.sys_flag,
                    message.born_timestamp_ms,
                )
            )

    # --- pulls ------------------------------------------------------------------------------------------------------

    def _pull_stream(self, requests: Iterable[pb.PullRequest], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            scripted = self.fail_calls.get("PullStream")
            if scripted:
                code, details, _ = scripted.popleft()
                context.abort(code, details)
            if refusal := self._unreadable(request):
                context.abort(*refusal)
            if self.pulls:
                answer = self.pulls.popleft()
                yield answer if isinstance(answer, bytes) else answer.SerializeToString()
            else:
                yield self._pull(request, context.is_active).SerializeToString()

    def _unreadable(self, request: pb.PullRequest) -> tuple[grpc.StatusCode, str] | None:
        """Why a topic or a queue may not be read."""
        with self.group.changed:
            topic = self.group.topics.get(request.topic)
            if topic is None:
                return grpc.StatusCode.NOT_FOUND, f"topic {request.topic!r} does not exist"
            if not topic.permission & 4:
                return grpc.StatusCode.PERMISSION_DENIED, f"topic {request.topic} does not allow reads"
            if request.queue_id >= topic.read_queues:
                return grpc.StatusCode.OUT_OF_RANGE, f"there is no queue {request.queue_id}"
            return None

    def _pull(self, request: pb.PullRequest, is_active: Callable[[], bool] = lambda: True) -> pb.PullResponse:
        self.pulled.append(request)
        deadline = time.monotonic() + request.wait_ms / 1000
        with self.group.changed:
            while True:
                answer = self._pull_now(request)
                left = deadline - time.monotonic()
                if answer.count or answer.status not in ("OFFSET_OVERFLOW_ONE", "NO_MESSAGE_IN_QUEUE"):
                    return answer
                if left <= 0 or self._server is None or not is_active():
                    return answer
                self.group.changed.wait(min(left, 0.05))

    def _pull_now(self, request: pb.PullRequest) -> pb.PullResponse:
        queue = self.group.queues.get((request.topic, request.queue_id), FakeQueue())
        offset, end = request.offset, queue.end
        answer = pb.PullResponse(
            min_offset=queue.base, max_offset=end, next_offset=offset, incarnation=self.incarnation
        )
        if not end:
            answer.status, answer.next_offset = "NO_MESSAGE_IN_QUEUE", 0
        elif offset < queue.base:
            answer.status, answer.next_offset = "OFFSET_TOO_SMALL", queue.base
        elif offset == end:
            answer.status = "OFFSET_OVERFLOW_ONE"
        elif offset > end:
            answer.status, answer.next_offset = "OFFSET_OVERFLOW_BADLY", end
        else:
            tags = {tag.strip() for tag in request.tag_expression.split("||")} - {"", "*"}
            chosen: list[bytes] = []
            size = 0
            while offset < end and len(chosen) < request.max_messages and size < (request.max_bytes or 1 << 18):
                if not tags or queue.messages[offset].tags in tags or queue.messages[offset].tags == "COLLIDES":
                    chosen.append(queue.records[offset])
                    size += len(chosen[-1])
                offset += 1
            answer.status = "FOUND" if chosen else "NO_MATCHED_MESSAGE"
            answer.records, answer.count, answer.next_offset = b"".join(chosen), len(chosen), offset
        return answer

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _needs_master(self, context: grpc.ServicerContext) -> None:
        if self.role is BrokerRole.SLAVE:
            leader = self.group.master.advertised if self.group.master and self.hint else ""
            told = (("outcome", "not_applied"), *((("leader", leader),) if leader else ()))
            context.set_trailing_metadata(told)
            context.abort(grpc.StatusCode.UNAVAILABLE, "not the master")

    def _query_by_id(self, request: pb.QueryByIdRequest, context: grpc.ServicerContext) -> pb.RecordsResponse:
        for queue in self.group.queues.values():
            for message, record in zip(queue.messages, queue.records, strict=True):
                if offset_message_id(STORE_HOST, message.offset) == request.message_id:
                    return pb.RecordsResponse(records=[record])
        return context.abort(grpc.StatusCode.NOT_FOUND, f"no message {request.message_id}")

    def _query_by_key(self, request: pb.QueryByKeyRequest, context: grpc.ServicerContext) -> pb.RecordsResponse:
        found = [
            record
            for (topic, _), queue in sorted(self.group.queues.items())
            if topic == request.topic
            for message, record in zip(queue.messages, queue.records, strict=True)
            if request.key in ([message.unique_key] if request.unique else message.keys)
            and request.begin_ms <= message.store_timestamp <= (request.end_ms or 1 << 62)
        ]
        return pb.RecordsResponse(records=found[-request.max_messages :])  # the newest ones, in the order of the log

    def _newest(self, request: pb.NewestRequest, context: grpc.ServicerContext) -> pb.NewestResponse:
        if request.topic not in self.group.topics:
            context.abort(grpc.StatusCode.NOT_FOUND, f"topic {request.topic!r} does not exist")
        queues = [
            self.group.queues.get((request.topic, one), FakeQueue()) for one in range(self._queues_of(request.topic))
        ]
        on = request.oldest_first
        ends = list(request.ends) or [one.base if on else one.end for one in queues]
        left = [
            (message.store_timestamp, -number, message.queue_offset, record)
            for number, queue in enumerate(queues)
            if not request.HasField("queue_id") or number == request.queue_id
            for message, record in zip(queue.messages, queue.records, strict=True)
            if queue.base <= message.queue_offset
            and (message.queue_offset >= ends[number] if on else message.queue_offset < ends[number])
            and request.since_ms <= message.store_timestamp < (request.before_ms or 1 << 62)
        ]
        left.sort(reverse=not on)
        for _, number, offset, _ in left[: request.max_messages]:
            ends[-number] = offset + on
        records = [record for *_, record in left[: request.max_messages]]
        return pb.NewestResponse(records=records, ends=ends, more=len(left) > len(records))

    def _queues_of(self, topic: str) -> int:
        found = self.group.topics[topic]
        return max(found.read_queues, found.write_queues)

    def _queue_range(self, request: pb.QueueRequest, context: grpc.ServicerContext) -> pb.QueueRangeResponse:
        queue = self.group.queues.get((request.topic, request.queue_id), FakeQueue())
        last = queue.messages[-1].store_timestamp if queue.messages else -1
        return pb.QueueRangeResponse(min_offset=queue.base, max_offset=queue.end, last_update_ms=last)

    def _topic_ranges(self, request: pb.TopicRangesRequest, context: grpc.ServicerContext) -> pb.TopicRangesResponse:
        covered = len(request.topics) if self.group.covered is None else self.group.covered
        answer = pb.TopicRangesResponse(covered=covered)
        for name in request.topics[: max(covered, 0)]:
            if name in self.group.topics:
                queues = range(self._queues_of(name))
                ranges = [self._queue_range(pb.QueueRequest(topic=name, queue_id=one), context) for one in queues]
                answer.topics.append(pb.TopicRange(topic=name, queues=ranges))
        return answer

    def _offset_by_time(self, request: pb.OffsetByTimeRequest, context: grpc.ServicerContext) -> pb.OffsetResponse:
        queue = self.group.queues.get((request.topic, request.queue_id), FakeQueue())
        stored = (place for place, one in enumerate(queue.messages) if one.store_timestamp >= request.timestamp_ms)
        return pb.OffsetResponse(offset=next(stored, queue.end))

    def _commit_offsets(self, request: pb.CommitOffsetsRequest, context: grpc.ServicerContext) -> Any:  # noqa: ANN401
        self._needs_master(context)
        if len(request.offsets) > OFFSETS_MAX:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(request.offsets)} offsets in one change")
        if request.incarnation not in (0, self.incarnation):
            return pb.CommitOffsetsResponse(incarnation=self.incarnation)
        self.group.commits.append(request)
        for one in request.offsets:
            place = (request.group, one.topic, one.queue_id)
            present = -1 if request.reset else self.group.offsets.get(place, -1)
            self.group.offsets[place] = max(one.offset, present)
        if not self.group.answers_to_commits:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
        return pb.CommitOffsetsResponse(incarnation=self.incarnation)

    def _commit_position(
        self, request: pb.CommitPositionRequest, context: grpc.ServicerContext
    ) -> pb.CommitPositionResponse:
        """Every queue's end, whatever place is asked for."""
        self._needs_master(context)
        offsets = [
            pb.ConsumerOffset(topic=topic, queue_id=queue_id, offset=queue.end)
            for (topic, queue_id), queue in self.group.queues.items()
            if not request.topics or topic in request.topics
        ]
        for one in offsets:
            self.group.offsets[request.group, one.topic, one.queue_id] = one.offset
        return pb.CommitPositionResponse(position=request.position, offsets=offsets)

    def _fetch_offsets(self, request: pb.FetchOffsetsRequest, context: grpc.ServicerContext) -> pb.FetchOffsetsResponse:
        return pb.FetchOffsetsResponse(
            offsets=[
                pb.ConsumerOffset(topic=topic, queue_id=queue_id, offset=offset)
                for (group, topic, queue_id), offset in self.group.offsets.items()
                if group == request.group and request.topic in ("", topic)
            ],
            incarnation=self.incarnation,
        )

    def _group_offsets(self, request: pb.GroupOffsetsRequest, context: grpc.ServicerContext) -> pb.GroupOffsetsResponse:
        covered = len(request.groups) if self.group.covered is None else self.group.covered
        answer = pb.GroupOffsetsResponse(covered=covered)
        for name in request.groups[: max(covered, 0)]:
            offsets = self._fetch_offsets(pb.FetchOffsetsRequest(group=name), context).offsets
            answer.groups.append(pb.GroupOffsets(group=name, offsets=offsets))
        return answer

    def _put_topic(self, request: pb.PutTopicRequest, context: grpc.ServicerContext) -> pb.PutTopicResponse:
        self._needs_master(context)
        self.group.topics[request.topic.name] = request.topic
        return pb.PutTopicResponse()

    def _delete_topic(self, request: pb.DeleteTopicRequest, context: grpc.ServicerContext) -> pb.DeleteTopicResponse:
        self._needs_master(context)
        if self.group.topics.pop(request.name, None) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"topic {request.name} does not exist")
        return pb.DeleteTopicResponse()

    def _delete_group(self, request: pb.DeleteGroupRequest, context: grpc.ServicerContext) -> pb.DeleteGroupResponse:
        self._needs_master(context)
        kept = {key: offset for key, offset in self.group.offsets.items() if key[0] != request.name}
        if len(kept) == len(self.group.offsets):
            context.abort(grpc.StatusCode.NOT_FOUND, f"group {request.name} does not exist")
        self.group.offsets = kept
        return pb.DeleteGroupResponse()

    def _list_groups(self, request: pb.ListGroupsRequest, context: grpc.ServicerContext) -> pb.ListGroupsResponse:
        return pb.ListGroupsResponse(
            groups=sorted({*self.group.registered, *(group for group, _, _ in self.group.offsets)})
        )

    def _status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        group = self.group
        is_master = self.role is not BrokerRole.SLAVE
        leader = self if is_master else group.master if self.hint else None
        return pb.StatusResponse(
            cluster="DefaultCluster",
            broker_name="RaftNode00",
            node_id=self.node_id,
            broker_role=self.role,
            broker_id=0 if is_master else 1 if leader else -1,
            replicated=len(group.nodes) > 1,
            raft_role="LEADER" if is_master else "FOLLOWER",
            term=self.term,
            leader=leader.node_id if leader else "",
            leader_address=leader.advertised if leader else "",
            members={node.node_id: node.advertised for node in group.nodes} if self.hint else {},
            max_offset=group.log_offset,
            end_offset=group.log_offset,
            put_tps=12.5,
            disk_ratio=0.25,
            put_total=sum(queue.end for queue in group.queues.values()),
            earliest_message_ms=-1,
            version="0.1.0",
            runtime={"bootTimestamp": "1700000000000"},
        )


@contextmanager
def fake_brokers(count: int = 1) -> Iterator[FakeBrokers]:
    """As many as wanted; the first is the master."""
    group = FakeBrokers(count)
    try:
        yield group
    finally:
        group.stop()
