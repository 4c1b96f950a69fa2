"""Transactions over gRPC: half messages, their ends, and members of producer groups who are asked about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import grpc
import pytest

from dledger.access.rules import parse_rules
from dledger.client.security import ClientSecurity
from dledger.config import AccessConfig
from rocketstore.broker.clients import SILENT_S_MAX, HalfCheck
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.codec import SERVICE
from rocketstore.broker_grpc.producer_groups import CHECKS_WAITING_MAX, ProducerLink
from rocketstore.message.record import decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HALF_TOPIC, OP_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.grpc_client import open_channel
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import failing
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.broker_remoting.test_transactions import PREPARED, SOON, beat, end, stored

TIMEOUT_S = 30.0
GROUP = "producers"
BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason="busy")
ALICE = ClientSecurity(access_key="alice", secret_key="alice-secret")
RULES = """\
accounts:
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - T=PUB|SUB
  - read=SUB
- accessKey: other
  secretKey: other-secret
  topicPerms:
  - read=PUB
  - T=SUB
- accessKey: reader
  secretKey: reader-secret
  topicPerms:
  - T=SUB
"""


def half(body: bytes = b"x", queue_id: int = -1, topic: str = "T", group: str = GROUP, **more: str) -> pb.Message:
    properties = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": body.decode()} | more
    return pb.Message(topic=topic, body=body, queue_id=queue_id, properties=properties)


def prepare(broker: RemotingHarness, *messages: pb.Message) -> list[pb.SendResult]:
    results = broker.send(*(messages or (half(),)))
    assert {one.status for one in results} == {"PUT_OK"}, results
    return results


def finish(
    broker: RemotingHarness,
    place: pb.SendResult | pb.TransactionCheck,
    state: str = "COMMIT",
    changes: Mapping[str, object] | None = None,
) -> str:
    """What the broker says to it."""
    wish = {"group": GROUP, "offset": place.offset, "queue_offset": place.queue_offset, "state": state}
    request = pb.EndTransactionRequest(**wish | dict(changes or {}))  # type: ignore[arg-type]
    return broker.call("EndTransaction", request, pb.EndTransactionResponse).result


class Member:
    """One stream."""

    def __init__(self, channel: grpc.Channel, client_id: str, group: str = GROUP) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        multi: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/ProducerMembership", request_serializer=None, response_deserializer=None
        )
        self.call = multi(iter(self._requests.get, None), timeout=TIMEOUT_S)
        self.request = pb.ProducerMembershipRequest(group=group, client_id=client_id)
        self.beat()

    def beat(self, request: pb.ProducerMembershipRequest | None = None) -> None:
        self._requests.put((request or self.request).SerializeToString())

    def heard(self) -> pb.ProducerMembershipResponse:
        """The next answer."""
        return pb.ProducerMembershipResponse.FromString(next(iter(self.call)))

    def asked(self) -> pb.TransactionCheck:
        """The next check."""
        while not (heard := self.heard()).HasField("check"):
            pass
        return heard.check

    def leave(self) -> None:
        self._requests.put(None)


@contextmanager
def member(broker: RemotingHarness, client_id: str = "a", channel: grpc.Channel | None = None) -> Iterator[Member]:
    """One that has joined."""
    one = Member(channel or broker.channel, client_id)
    try:
        assert not one.heard().HasField("check")
        yield one
    finally:
        one.leave()
        one.call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped


def link_of(broker: RemotingHarness) -> ProducerLink:
    """The only member's."""
    (found,) = broker.groups.clients.producers(GROUP)
    assert isinstance(found.link, ProducerLink)
    return found.link


# --- beginning and ending ---------------------------------------------------------------------------------------------


def test_a_transaction_is_committed_once_and_as_it_was_sent(broker: RemotingHarness) -> None:
    """Unseen before, then in the queue that the answer named; whatever is said later changes nothing."""
    (place,) = prepare(broker, half(b"one", queue_id=2))
    assert (place.queue_id, stored(broker, "T")) == (2, [])
    assert finish(broker, place) == "ENDED"
    (message,) = stored(broker, "T")
    assert (message.body, message.queue_id, message.sys_flag, message.prepared_offset) == (b"one", 2, 8, place.offset)
    assert message.properties["PGROUP"] == GROUP
    wait_until(lambda: finish(broker, place) == "ENDED_BEFORE", "it has ended")
    assert finish(broker, place, "ROLLBACK") == "ENDED_BEFORE"
    assert (len(stored(broker, "T")), len(stored(broker, OP_TOPIC))) == (1, 1)


def test_what_is_rolled_back_is_never_seen(broker: RemotingHarness) -> None:
    (place,) = prepare(broker)
    assert finish(broker, place, "ROLLBACK") == "ENDED"
    wait_until(lambda: finish(broker, place) == "ENDED_BEFORE", "it has ended")
    assert stored(broker, "T") == []


def test_one_request_may_hold_transactions_and_ordinary_messages(broker: RemotingHarness) -> None:
    """Each is for itself, and the answers name the queues that they are for."""
    ordinary = pb.Message(topic="T", body=b"now", queue_id=1)
    first, now, second = prepare(broker, half(b"first", 3), ordinary, half(b"second", 0))
    assert [one.queue_id for one in (first, now, second)] == [3, 1, 0]
    assert finish(broker, second) == finish(broker, first, "ROLLBACK") == "ENDED"
    assert [one.body for one in stored(broker, "T")] == [b"now", b"second"]


def test_a_numbered_message_that_comes_again_begins_no_second_transaction(broker: RemotingHarness) -> None:
    """The answer says where the first is, so that it can be ended."""
    request = pb.SendRequest(messages=[half(queue_id=1)], producer="p", sequence=0)
    first, again = (broker.call("Send", request, pb.SendResponse).results[0] for _ in range(2))
    assert first == again
    assert len(stored(broker, HALF_TOPIC)) == 1
    assert finish(broker, again) == "ENDED"


def test_unknown_ends_nothing(broker: RemotingHarness) -> None:
    (place,) = prepare(broker)
    assert finish(broker, place, "UNKNOWN") == "OPEN"
    assert finish(broker, place) == "ENDED"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": ""}, "COMMIT, ROLLBACK, UNKNOWN"),
        ({"state": "commit"}, "cannot end with"),
        ({"group": "others"}, "producer group wrong"),
        ({"offset": 1 << 62}, "offset wrong"),
        ({"offset": -1}, "offset wrong"),
        ({"queue_offset": 7}, "prepared transaction message"),
    ],
)
def test_what_does_not_end_a_transaction(broker: RemotingHarness, changes: dict[str, object], words: str) -> None:
    """It is refused, and the transaction stays open."""
    (place,) = prepare(broker)
    wait_until(lambda: broker.broker.storage.transactions.open_count == 1, "it is known")
    with failing(grpc.StatusCode.INVALID_ARGUMENT, words):
        finish(broker, place, changes=changes)
    assert stored(broker, "T") == stored(broker, OP_TOPIC) == []
    assert finish(broker, place) == "ENDED"


def test_an_end_on_its_way_is_not_given_twice(broker: RemotingHarness) -> None:
    """Whoever repeats it meanwhile is told so, and may ask later."""
    (place,) = prepare(broker)
    broker.store.hold_results = True
    unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = broker.channel.unary_unary(
        f"/{SERVICE}/EndTransaction", request_serializer=None, response_deserializer=None
    )
    request = pb.EndTransactionRequest(
        group=GROUP, offset=place.offset, queue_offset=place.queue_offset, state="COMMIT"
    )
    first = unary.future(request.SerializeToString(), timeout=TIMEOUT_S)
    wait_until(lambda: bool(broker.store.held), "the end is on its way")
    assert finish(broker, place, "ROLLBACK") in ("ENDING", "ENDED_BEFORE")
    broker.store.hold_results = False
    broker.store.held.pop()()
    assert pb.EndTransactionResponse.FromString(first.result()).result == "ENDED"


def test_an_end_that_the_log_refused_may_be_repeated(broker: RemotingHarness) -> None:
    """The outcome says that nothing was done."""
    (place,) = prepare(broker)
    broker.store.refusals.append(BUSY)
    with failing(grpc.StatusCode.UNAVAILABLE, "busy") as told:
        finish(broker, place)
    assert told["outcome"] == "not_applied"
    broker.broker.storage.transactions.step()
    assert finish(broker, place) == "ENDED"


def test_a_slave_begins_and_ends_none(broker: RemotingHarness) -> None:
    """It names the master."""
    (place,) = prepare(broker)
    broker.become(BrokerRole.SLAVE)
    with failing(grpc.StatusCode.UNAVAILABLE, "ask the master") as told:
        finish(broker, place)
    assert told == {"outcome": "not_applied", "leader": broker.view.leader_address}
    assert broker.send(half())[0].status == "SERVICE_NOT_AVAILABLE"
    assert stored(broker, OP_TOPIC) == []


def test_a_master_that_is_none_any_more_ends_none(broker: RemotingHarness) -> None:
    """Its transactions have stopped, though its role still says otherwise."""
    (place,) = prepare(broker)
    broker.broker.storage.transactions.stop()
    with failing(grpc.StatusCode.UNAVAILABLE, "does not know yet") as told:
        finish(broker, place)
    assert told["outcome"] == "not_applied"
    assert broker.send(half())[0].status == "SERVICE_NOT_AVAILABLE"


def test_a_half_message_must_do_as_what_it_will_be(broker: RemotingHarness) -> None:
    """Its topic, its queue, its size; it is neither delayed nor of no group, nor already one."""
    wrong = [
        half(topic=HALF_TOPIC), half(topic="SELF_TEST_TOPIC"), half(queue_id=4), half(DELAY="1"), half(group=""),
        half(long="x" * 32_740), half(KEYS=" ".join(map(str, range(2000)))),
        pb.Message(topic="T", body=b"x", sys_flag=4, property_string=b"KEYS\x01k"),
    ]  # fmt: skip
    results = broker.send(*wrong)
    assert {one.status for one in results} == {"MESSAGE_ILLEGAL"}, results
    assert broker.store.log.records == []


def test_transactions_may_be_refused() -> None:
    with RemotingHarness(replace(BrokerConfig(), reject_transaction_message=True)) as broker:
        (result,) = broker.send(half())
        assert (result.status, "rejectTransactionMessage" in result.reason) == ("NO_PERMISSION", True)


def test_a_group_may_have_so_many_open_and_all_together_so_many() -> None:
    """Counted from the moment they are sent, also within one request; an end makes room."""
    share = AccessConfig(account_share_percent=50)
    with RemotingHarness(replace(BrokerConfig(), transactions_open_max=6, access=share)) as broker:
        results = broker.send(*(half(b"%d" % at) for at in range(5)))
        assert [one.status for one in results] == ["PUT_OK"] * 3 + ["OS_PAGECACHE_BUSY"] * 2
        assert "account_share_percent" in results[-1].reason
        prepare(broker, *(half(group="second") for _ in range(3)))
        assert "transactions_open_max" in broker.send(half(group="third"))[0].reason
        assert finish(broker, results[0], "ROLLBACK") == "ENDED"
        wait_until(lambda: broker.send(half())[0].status == "PUT_OK", "there is room")


def test_what_is_answered_is_no_longer_on_its_way(broker: RemotingHarness) -> None:
    """Also what was refused, or stored by an earlier request."""
    request = pb.SendRequest(messages=[half()], producer="p", sequence=0)
    for _ in range(2):
        broker.call("Send", request, pb.SendResponse)
    broker.store.refusals.append(BUSY)
    assert broker.send(half())[0].status == "OS_PAGECACHE_BUSY"
    gap = pb.SendRequest(messages=[half(), half(topic="no/such")], producer="p", sequence=1)
    broker.call("Send", gap, pb.SendResponse)
    assert not broker.broker.sending._halves._on_their_way


# --- members and checks -----------------------------------------------------------------------------------------------


def test_a_member_is_asked_and_another_may_answer() -> None:
    """With the message as it was sent, and how often the group was asked."""
    with RemotingHarness(SOON) as broker, member(broker) as one:
        (place,) = prepare(broker, half(b"asked", queue_id=1))
        check = one.asked()
        assert (check.offset, check.queue_offset) == (place.offset, place.queue_offset)
        record = decode_record(check.record)
        assert (record.topic, record.queue_id, record.body) == ("T", 1, b"asked")
        assert record.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert decode_record(one.asked().record).properties["TRANSACTION_CHECK_TIMES"] == "2"
        assert finish(broker, check) == "ENDED"
        assert [message.body for message in stored(broker, "T")] == [b"asked"]


def test_members_of_all_kinds_take_turns() -> None:
    """RocketMQ's producers and ours, in one group."""
    with RemotingHarness(SOON) as broker, broker.dial() as java, member(broker) as python:
        beat(java, GROUP)
        (ours,) = prepare(broker, half(b"ours"))
        theirs = java.send(properties=PREPARED)
        for _ in range(2):
            assert java.request(RequestCode.CHECK_TRANSACTION_STATE)
            assert python.asked()
        assert finish(broker, ours) == "ENDED"
        assert end(java, theirs, 8).code == 0


def test_a_check_goes_to_who_reads(broker: RemotingHarness) -> None:
    """A member that reads nothing gets a bounded number; the room they take is free again when it is gone."""
    with member(broker):
        link = link_of(broker)
        check = HalfCheck("T", bytes(1000), 1, 2, "", "")
        room = broker.broker.shares.quotas.root

        async def tell() -> tuple[int, bool]:
            taken = 0
            while link.check_half(check):
                taken += 1
            return taken, room.answer_bytes > 1000 * taken

        assert broker.bridge.run(tell()) == (CHECKS_WAITING_MAX, True)
    wait_until(lambda: not list(broker.groups.clients.producers(GROUP)), "it is no member")
    wait_until(lambda: not room.answer_bytes, "its room is free")
    assert not link.check_half(check)


def test_a_check_larger_than_the_room_goes_to_another_member() -> None:
    """``answer_bytes_max``, as for every answer."""
    limits = replace(BrokerConfig().limits, answer_bytes_max=1 << 20)
    with RemotingHarness(replace(BrokerConfig(), limits=limits)) as broker, member(broker):
        link = link_of(broker)
        check = HalfCheck("T", bytes(200_000), 1, 2, "", "")

        async def tell() -> int:
            return sum(link.check_half(check) for _ in range(8))

        assert broker.bridge.run(tell()) < 6


def test_a_member_without_heartbeats_is_dropped(broker: RemotingHarness) -> None:
    with member(broker) as one:
        tables = broker.groups.clients

        def later() -> None:
            tables._now = lambda: 2 * SILENT_S_MAX + 1e9
            broker.groups.hang_up_on_the_silent()

        broker.bridge.post(later)
        with failing(grpc.StatusCode.UNAVAILABLE, "no heartbeat"):
            list(one.call)
        wait_until(lambda: GROUP not in tables.producer_groups(), "it is no member")


def test_members_are_told_to_go_elsewhere_when_the_broker_stops(broker: RemotingHarness) -> None:
    with member(broker) as one:
        broker.bridge.post(broker.service.stop_waiting)
        with failing(grpc.StatusCode.UNAVAILABLE, "stopping") as told:
            list(one.call)
        assert told["leader"] == broker.view.leader_address


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pb.ProducerMembershipRequest(group="other", client_id="a"), "one member of one group"),
        (pb.ProducerMembershipRequest(group=GROUP, client_id="b"), "one member of one group"),
        (pb.ProducerMembershipRequest(group="bad name", client_id="a"), "group 'bad name'"),
        (pb.ProducerMembershipRequest(group="", client_id="a"), "group ''"),
        (pb.ProducerMembershipRequest(group=GROUP, client_id=""), "client id"),
        (pb.ProducerMembershipRequest(group=GROUP, client_id="a" * 256), "client id"),
    ],
)
def test_a_strange_heartbeat_ends_the_stream(
    broker: RemotingHarness, change: pb.ProducerMembershipRequest, words: str
) -> None:
    """And only that one."""
    with member(broker, "other") as other:
        with member(broker) as one:
            one.beat(change)
            with failing(grpc.StatusCode.INVALID_ARGUMENT, words):
                list(one.call)
        other.beat()
        assert not other.heard().HasField("check")


def test_a_client_may_have_so_many_streams() -> None:
    """``streams_max``, whatever other kinds of streams it has."""
    with RemotingHarness(BrokerConfig(streams_max=1)) as broker, member(broker):
        second = Member(broker.channel, "b")
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "producer membership streams"):
            second.heard()


def test_members_are_shown_to_administrators(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Beside RocketMQ's producers."""
    with member(broker, "python-1"):
        beat(client, GROUP, client_id="java-1")
        shown = client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": GROUP}).body
        assert b"python-1" in shown
        assert b"java-1" in shown


# --- access -----------------------------------------------------------------------------------------------------------


@contextmanager
def guarded() -> Iterator[RemotingHarness]:
    """A broker with access control, and alice's channel to it."""
    topics = (TopicConfig("T", 4, 4), TopicConfig("read", 4, 4))
    with RemotingHarness(SOON, *topics, rules=parse_rules(RULES), security=ALICE) as broker:
        broker.call("Status", pb.StatusRequest(), pb.StatusResponse)  # streams cannot learn for whom to sign
        yield broker


@contextmanager
def channel_of(broker: RemotingHarness, name: str) -> Iterator[grpc.Channel]:
    """Another account's."""
    security = ClientSecurity(access_key=name, secret_key=f"{name}-secret")
    channel = open_channel(broker.address, security)
    status: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        f"/{SERVICE}/Status", request_serializer=None, response_deserializer=None
    )
    try:
        status(b"", timeout=TIMEOUT_S)
        yield channel
    finally:
        channel.close()


def test_a_half_message_needs_pub_on_its_topic() -> None:
    """Though it is stored in another one; those beside it are stored."""
    with guarded() as broker:
        denied, allowed = broker.send(half(topic="read"), half())
        assert (denied.status, allowed.status) == ("NO_PERMISSION", "PUT_OK")
        assert "PUB on topic read" in denied.reason
        assert [one.properties["REAL_TOPIC"] for one in stored(broker, HALF_TOPIC)] == ["T"]


def test_an_end_needs_pub_on_the_topic_of_the_message() -> None:
    """And does not tell which topic that is, whatever group the request names."""
    with guarded() as broker, channel_of(broker, "reader") as theirs:
        (place,) = prepare(broker)
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = theirs.unary_unary(
            f"/{SERVICE}/EndTransaction", request_serializer=None, response_deserializer=None
        )
        request = pb.EndTransactionRequest(
            group=GROUP, offset=place.offset, queue_offset=place.queue_offset, state="ROLLBACK"
        )
        with failing(grpc.StatusCode.PERMISSION_DENIED, "PUB on the topic of that message"):
            unary(request.SerializeToString(), timeout=TIMEOUT_S)
        with failing(grpc.StatusCode.INVALID_ARGUMENT, "no half message"):
            finish(broker, place, changes={"offset": place.offset + 1})
        assert finish(broker, place) == "ENDED"


def test_only_members_who_may_send_there_are_asked() -> None:
    """A check holds the message: a member of the same group without PUB on its topic must not get it."""
    with (
        guarded() as broker,
        channel_of(broker, "other") as theirs,
        member(broker, "a") as ours,
        member(broker, "b", theirs) as other,
    ):
        prepare(broker)
        assert [ours.asked().queue_offset for _ in range(3)] == [0, 0, 0]
        other.beat()
        assert not other.heard().HasField("check")
