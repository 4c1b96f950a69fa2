"""Consumer groups over gRPC: members in the same tables as RocketMQ's clients, locks, and messages sent back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import grpc
import pytest

from rocketstore.broker.clients import SILENT_S_MAX
from rocketstore.broker_grpc.codec import SERVICE
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.record import decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.remoting.bodies.clients import ConsumerIdList, LockedQueuesBody, LockQueuesBody
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.codes import RequestCode
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import failing
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

TIMEOUT_S = 30.0


class Member:
    """One stream."""

    def __init__(self, broker: RemotingHarness, client_id: str, *topics: str, group: str = "g") -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        multi: grpc.StreamStreamMultiCallable[bytes, bytes] = broker.channel.stream_stream(
            f"/{SERVICE}/Membership", request_serializer=None, response_deserializer=None
        )
        self.call = multi(iter(self._requests.get, None), timeout=TIMEOUT_S)
        self.request = pb.MembershipRequest(group=group, client_id=client_id)
        self.request.subscriptions.extend(pb.Subscription(topic=one) for one in topics or ("T",))
        self.beat()

    def beat(self, request: pb.MembershipRequest | None = None) -> None:
        self._requests.put((request or self.request).SerializeToString())

    def heard(self) -> list[str]:
        """The next list."""
        return list(pb.MembershipResponse.FromString(next(iter(self.call))).client_ids)

    def hears(self, *client_ids: str) -> None:
        """Wait for this list: several changes may be told as one, and one as two."""
        for _ in range(10):
            if (last := self.heard()) == list(client_ids):
                return
        raise AssertionError(last)

    def leave(self) -> None:
        self._requests.put(None)


@contextmanager
def member(broker: RemotingHarness, client_id: str, *topics: str, group: str = "g") -> Iterator[Member]:
    one = Member(broker, client_id, *topics, group=group)
    try:
        yield one
    finally:
        one.leave()
        one.call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped


def test_a_member_hears_of_every_change(broker: RemotingHarness) -> None:
    """Its own joining, somebody else's, and that one's leaving."""
    with member(broker, "a") as first:
        first.hears("a")
        with member(broker, "b") as second:
            second.hears("a", "b")
            first.hears("a", "b")
        first.hears("a")


def test_members_and_rocketmqs_clients_are_one_group(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Each hears of the other, and both are told the same members."""
    client.subscribe("g", "T", client_id="java")
    with member(broker, "python") as ours:
        ours.hears("java", "python")
        assert client.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED).fields["consumerGroup"] == "g"
        listed = client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
        assert ConsumerIdList.decode(listed.body).consumer_id_list == ("java", "python")
        client.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "java", "consumerGroup": "g"})
        ours.hears("python")


def test_a_member_subscribes_as_rocketmqs_clients_do(broker: RemotingHarness) -> None:
    """With the group's retry topic, which is made; hashes of tags included."""
    with member(broker, "a") as one:
        one.hears("a")
        one.request.subscriptions[0].tag_expression = "A || B"
        one.beat()
        group = broker.groups.clients.consumers("g")
        assert group is not None
        wait_until(lambda: group.subscriptions["T"].tags == ("A", "B"), "the new tags are known")
        assert set(group.subscriptions) == {"T", "%RETRY%g"}
        assert group.subscriptions["T"].codes == (65, 66)
        assert "%RETRY%g" in broker.state.table


def test_a_member_without_heartbeats_is_dropped(broker: RemotingHarness) -> None:
    """As RocketMQ's clients are: its stream ends, and it may join again."""
    with member(broker, "a") as one:
        one.hears("a")
        tables = broker.groups.clients

        def later() -> None:
            tables._now = lambda: 2 * SILENT_S_MAX + 1e9
            broker.groups.hang_up_on_the_silent()

        broker.bridge.post(later)
        with failing(grpc.StatusCode.UNAVAILABLE, "no heartbeat"):
            list(one.call)
        wait_until(lambda: tables.consumers("g") is None, "it is no member")


def test_members_are_told_to_go_elsewhere_when_the_broker_stops(broker: RemotingHarness) -> None:
    """With the master's address, as for every other request."""
    with member(broker, "a") as one:
        one.hears("a")
        broker.bridge.post(broker.service.stop_waiting)
        with failing(grpc.StatusCode.UNAVAILABLE, "stopping") as told:
            list(one.call)
        assert told["leader"] == broker.view.leader_address


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pb.MembershipRequest(group="other", client_id="a"), "one member of one group"),
        (pb.MembershipRequest(group="g", client_id="b"), "one member of one group"),
        (pb.MembershipRequest(group="bad name", client_id="a"), "group 'bad name'"),
        (pb.MembershipRequest(group="g", client_id=" "), "client id"),
        (pb.MembershipRequest(group="g", client_id="a" * 256), "client id"),
        (pb.MembershipRequest(group="g", client_id="a", subscriptions=[pb.Subscription()]), "topic ''"),
        (
            pb.MembershipRequest(
                group="g", client_id="a", subscriptions=[pb.Subscription(topic="T", tag_expression="|| ||")]
            ),
            "tag expression",
        ),
        (
            pb.MembershipRequest(group="g", client_id="a", subscriptions=[pb.Subscription(topic="T")] * 1025),
            "subscriptions",
        ),
    ],
)
def test_a_strange_heartbeat_ends_the_stream(broker: RemotingHarness, change: pb.MembershipRequest, words: str) -> None:
    """And only that one; the member is none any more."""
    with member(broker, "other") as other:
        other.hears("other")
        _end_by(broker, change, words)
        other.hears("other")


def _end_by(broker: RemotingHarness, change: pb.MembershipRequest, words: str) -> None:
    with member(broker, "a") as one:
        one.hears("other", "a")
        one.beat(change)
        with failing(grpc.StatusCode.INVALID_ARGUMENT, words):
            list(one.call)


def test_a_queue_is_locked_for_one_member_of_any_kind(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Locks are shared with RocketMQ's clients, and only the master has any."""

    def lock(who: str) -> list[int]:
        queues = [pb.GroupQueue(topic="T", queue_id=one) for one in (0, 1)]
        request = pb.LockQueuesRequest(group="g", client_id=who, queues=queues)
        return [one.queue_id for one in broker.call("LockQueues", request, pb.LockQueuesResponse).queues]

    taken = LockQueuesBody("java", "g", (MessageQueue("T", broker.config.name, 1),)).encode()
    assert LockedQueuesBody.decode(client.ask(RequestCode.LOCK_BATCH_MQ, None, taken).body).locked
    assert lock("python") == [0]
    assert lock("another") == []
    unlock = pb.UnlockQueuesRequest(group="g", client_id="python", queues=[pb.GroupQueue(topic="T")])
    broker.call("UnlockQueues", unlock, pb.UnlockQueuesResponse)
    assert lock("another") == [0]
    broker.become(BrokerRole.SLAVE)
    with failing(grpc.StatusCode.UNAVAILABLE, "ask the master") as told:
        lock("another")
    assert told == {"outcome": "not_applied", "leader": broker.view.leader_address}


def test_a_message_sent_back_comes_again_and_is_dead_in_the_end(broker: RemotingHarness) -> None:
    """Later each time, up to the group's limit or the request's; a message of another topic is not to be had."""
    (sent,) = broker.send(pb.Message(topic="T", body=b"x", queue_id=1))
    _, offset = parse_offset_message_id(sent.message_id)

    def back(**changes: object) -> tuple[str, str | None, int]:
        wish = {"group": "g", "topic": "T", "offset": offset, "retries_max": -1} | changes
        broker.call("SendBack", pb.SendBackRequest(**wish), pb.SendBackResponse)  # type: ignore[arg-type]
        stored = decode_record(broker.store.log.records[-1].record)
        return stored.topic, stored.properties.get("DELAY"), stored.reconsume_times

    assert back() == ("%RETRY%g", "3", 1)
    assert back(delay_level=7) == ("%RETRY%g", "7", 1)
    assert back(retries_max=0) == ("%DLQ%g", None, 1)
    assert back(delay_level=-1) == ("%DLQ%g", None, 1)
    with failing(grpc.StatusCode.NOT_FOUND, "no message of topic hidden"):
        back(topic="hidden")
    with failing(grpc.StatusCode.NOT_FOUND):
        back(offset=offset + 1)
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "delay level"):
        back(delay_level=-2)
    broker.become(BrokerRole.SLAVE)
    with failing(grpc.StatusCode.UNAVAILABLE, "ask the master") as told:
        back()
    assert told == {"outcome": "not_applied", "leader": broker.view.leader_address}
