"""What each request to a broker needs, and what a permission that goes while a pull waits means."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf.message import Message as Wire

from dledger.access.rules import parse_rules
from dledger.client.security import ClientSecurity
from dledger.config import AccessConfig, ConnectionLimits
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.access import FREE, METHODS, BrokerAccess
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from rocketstore.types import SCHEDULE_TOPIC
from tests.support.grpc_client import open_channel
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import Harness, failing


class Pending:
    """A pull on a thread of its own."""

    def __init__(self, pull: Callable[[], pb.PullResponse]) -> None:
        self._answers: list[pb.PullResponse] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(pull()))
        self._thread.start()

    def answer(self) -> pb.PullResponse:
        self._thread.join(10)
        return self._answers[0]


def waiting(broker: Harness) -> int:
    """How many pulls wait."""
    return len(broker.broker.pulling.waiting)


ALICE = ClientSecurity(access_key="alice", secret_key="alice-secret")
ROOT = ClientSecurity(access_key="root", secret_key="root-secret")
RULES = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  defaultTopicPerm: {default}
  topicPerms:
  - T=PUB|SUB
  - hidden=DENY
  groupPerms:
  - g=SUB
"""
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED


def harness(default: str = "DENY", *, security: ClientSecurity = ALICE, config: BrokerConfig | None = None) -> Harness:
    topics = (TopicConfig("T", 4, 4), TopicConfig("hidden", 4, 4), TopicConfig(SCHEDULE_TOPIC, 18, 18))
    return Harness(config, *topics, rules=parse_rules(RULES.format(default=default)), security=security)


@pytest.fixture
def broker() -> Iterator[Harness]:
    """A guarded broker with the topics T and hidden, and alice's channel to it."""
    with harness() as made:
        made.call("Status", pb.StatusRequest(), pb.StatusResponse)  # streams cannot learn for whom to sign
        yield made


FORBIDDEN: list[tuple[str, Wire, str]] = [
    ("Pull", pb.PullRequest(topic="hidden"), "alice is not allowed to do this: Pull needs SUB on topic hidden"),
    ("Pull", pb.PullRequest(topic="%RETRY%other"), "Pull needs SUB on topic %RETRY%other"),
    ("LockQueues", pb.LockQueuesRequest(group="other"), "LockQueues needs SUB on group other"),
    ("UnlockQueues", pb.UnlockQueuesRequest(group="other"), "UnlockQueues needs SUB on group other"),
    ("SendBack", pb.SendBackRequest(group="other", topic="T"), "SendBack needs SUB on group other"),
    ("SendBack", pb.SendBackRequest(group="g", topic="hidden"), "SendBack needs SUB on topic hidden"),
    ("Pull", pb.PullRequest(topic="unknown"), "Pull needs SUB on topic unknown"),
    ("Pull", pb.PullRequest(topic="T", group="other"), "Pull needs SUB on group other"),
    ("QueryByKey", pb.QueryByKeyRequest(topic="hidden", key="k"), "QueryByKey needs SUB on topic hidden"),
    ("Newest", pb.NewestRequest(topic="hidden", max_messages=1), "Newest needs SUB on topic hidden"),
    ("QueueRange", pb.QueueRequest(topic="hidden"), "QueueRange needs SUB on topic hidden"),
    ("OffsetByTime", pb.OffsetByTimeRequest(topic="hidden"), "OffsetByTime needs SUB on topic hidden"),
    ("FetchOffsets", pb.FetchOffsetsRequest(group="other"), "FetchOffsets needs SUB on group other"),
    ("CommitOffsets", pb.CommitOffsetsRequest(group="other"), "CommitOffsets needs SUB on group other"),
    (
        "CommitOffsets",
        pb.CommitOffsetsRequest(group="g", offsets=[pb.ConsumerOffset(topic="hidden")]),
        "CommitOffsets needs SUB on topic hidden",
    ),
    ("CommitOffsets", pb.CommitOffsetsRequest(group="other", reset=True), "ResetOffsets needs SUB on group other"),
    ("CommitPosition", pb.CommitPositionRequest(group="other", position=1), "CommitPosition needs SUB on group other"),
    (
        "CommitPosition",
        pb.CommitPositionRequest(group="g", position=1, topics=["T", "hidden"]),
        "CommitPosition needs SUB on topic hidden",
    ),
    ("CommitPosition", pb.CommitPositionRequest(group="g", position=1), "requires an account with admin: true"),
    ("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name="T")), "PutTopic requires an account with admin: true"),
    ("DeleteTopic", pb.DeleteTopicRequest(name="T"), "DeleteTopic requires an account with admin: true"),
    ("Delayed", pb.DelayedRequest(), "Delayed requires an account with admin: true"),
    ("DeleteGroup", pb.DeleteGroupRequest(name="g"), "DeleteGroup requires an account with admin: true"),
]


@pytest.mark.parametrize(("method", "request_", "words"), FORBIDDEN)
def test_what_is_not_named_is_denied(broker: Harness, method: str, request_: Wire, words: str) -> None:
    """Topics, groups, retry topics as groups, offsets, administration; the state is as before."""
    before = dict(broker.state.table), dict(broker.state.committed)

    with failing(DENIED, words) as told:
        broker.call_bytes(method, request_.SerializeToString())

    assert told["dledger-access"] == "denied"
    assert (broker.state.table, broker.state.committed) == before


@pytest.mark.parametrize("topic", sorted(NO_SEND_TOPICS))
def test_the_brokers_own_topics_are_for_administrators(topic: str) -> None:
    """Delayed messages of all topics wait there: a default permission does not open them."""
    with harness("PUB|SUB") as broker, failing(DENIED, "requires an account with admin: true"):
        broker.pull(topic=topic)


def test_an_administrator_may_all_of_it() -> None:
    """And is refused by nothing but the request itself."""
    with harness(security=ROOT) as broker:
        for method, request, _ in FORBIDDEN:
            try:
                broker.call_bytes(method, request.SerializeToString())
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT), error  # noqa: PT017
        assert broker.pull(topic=SCHEDULE_TOPIC).status


def test_members_may_move_their_groups_offsets(broker: Harness) -> None:
    """Also back, as a consumer that seeks does."""
    for reset in (False, True):
        offset = pb.ConsumerOffset(topic="T", queue_id=0, offset=5)
        request = pb.CommitOffsetsRequest(group="g", offsets=[offset], reset=reset)
        broker.call("CommitOffsets", request, pb.CommitOffsetsResponse)

    assert broker.state.committed == {("g", "T", 0): 5}


def test_lists_show_what_one_may_use(broker: Harness) -> None:
    """Topics with any permission, groups one is a member of."""
    broker.state.committed = {("g", "T", 0): 1, ("other", "T", 0): 1}

    topics = broker.call("ListTopics", pb.ListTopicsRequest(), pb.ListTopicsResponse).topics
    groups = broker.call("ListGroups", pb.ListGroupsRequest(), pb.ListGroupsResponse).groups

    assert [one.name for one in topics] == ["T"]
    assert list(groups) == ["g"]


def test_a_message_id_opens_no_topic(broker: Harness) -> None:
    """Ids can be made up; the message's own topic counts."""
    ids = {}
    with open_channel(broker.address, ROOT) as root:
        for topic in ("T", "hidden"):
            request = pb.SendRequest(messages=[pb.Message(topic=topic, body=b"x", queue_id=0)])
            answer = root.unary_unary("/rocketstore.v1.BrokerService/Send", None, None)(request.SerializeToString())
            ids[topic] = pb.SendResponse.FromString(answer).results[0].message_id

    found = broker.call("QueryById", pb.QueryByIdRequest(message_id=ids["T"]), pb.RecordsResponse)
    assert len(found.records) == 1
    with failing(DENIED, "QueryById needs SUB on the topic of that message"):
        broker.call("QueryById", pb.QueryByIdRequest(message_id=ids["hidden"]), pb.RecordsResponse)


def test_a_send_is_refused_message_by_message_and_creates_nothing(broker: Harness) -> None:
    """NO_PERMISSION for those, the others are stored; a topic is not made by who may not send to it."""
    results = broker.send(
        pb.Message(topic="T", body=b"1", queue_id=0),
        pb.Message(topic="hidden", body=b"2", queue_id=0),
        pb.Message(topic="new", body=b"3"),
        pb.Message(topic="T", body=b"4", queue_id=-1),
        pb.Message(topic="%RETRY%other", body=b"5", queue_id=0),
    )

    expected = ["PUT_OK", "NO_PERMISSION", "NO_PERMISSION", "PUT_OK", "NO_PERMISSION"]
    assert [one.status for one in results] == expected
    assert [one.outcome for one in results if one.status != "PUT_OK"] == ["not_applied"] * 3
    assert "Send needs PUB on topic hidden" in results[1].reason
    assert "new" not in broker.state.table
    assert len(broker.store.log.records) == 2


def test_a_permission_that_goes_while_a_pull_waits_hands_nothing_out(broker: Harness) -> None:
    """The message that ends the wait is not alice's any more."""
    refused: list[grpc.RpcError] = []

    def pull() -> pb.PullResponse:
        try:
            return broker.pull(wait_ms=9000)
        except grpc.RpcError as error:
            refused.append(error)
            return pb.PullResponse()

    pending = Pending(pull)
    wait_until(lambda: waiting(broker) == 1, "the pull waits")
    guard = broker.guard
    assert guard is not None
    text = RULES.format(default="DENY").replace("- T=PUB|SUB", "- T=PUB")
    broker.bridge.post(lambda: guard.apply(parse_rules(text)))
    wait_until(lambda: guard.rules.accounts["alice"].topic("T") == 1, "the new rules are in force")

    assert broker.send(pb.Message(topic="T", body=b"x", queue_id=0))[0].status == "PUT_OK"

    assert pending.answer() == pb.PullResponse()
    assert refused[0].code() is DENIED


def test_a_stream_of_a_revoked_key_is_ended_while_it_waits(broker: Harness) -> None:
    """Without waiting for its next request."""
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    call = broker.stream("PullStream", iter(requests.get, None))
    requests.put(pb.PullRequest(topic="T", wait_ms=60_000).SerializeToString())
    wait_until(lambda: waiting(broker) == 1, "the pull waits")
    guard = broker.guard
    assert guard is not None
    text = RULES.format(default="DENY").replace("alice-secret", "another-secret")

    broker.bridge.post(lambda: guard.apply(parse_rules(text)))

    with failing(DENIED, "closed the stream of alice: access key revoked"):
        list(call)
    requests.put(None)
    with failing(UNKNOWN, "unknown access key"):
        broker.pull()


@pytest.mark.parametrize(
    ("group", "topic", "words"),
    [("other", "T", "Membership needs SUB on group other"), ("g", "hidden", "Membership needs SUB on topic hidden")],
)
def test_a_member_may_read_what_it_subscribes(broker: Harness, group: str, topic: str, words: str) -> None:
    """And must be allowed to use the group."""
    request = pb.MembershipRequest(group=group, client_id="a", subscriptions=[pb.Subscription(topic=topic)])
    with failing(DENIED, words):
        list(broker.stream("Membership", iter([request.SerializeToString()])))


def test_a_method_that_nobody_thought_of_is_denied(broker: Harness) -> None:
    """Whoever adds one says what it needs."""
    guard = broker.guard
    assert guard is not None
    access = BrokerAccess(guard)
    methods = {one.name for one in pb.DESCRIPTOR.services_by_name["BrokerService"].methods}
    hot = {"Send", "SendStream", "Pull", "PullStream", "EndTransaction"}

    assert methods - hot == set(METHODS) | set(access._filters) | set(access._narrowings) | FREE


def test_a_slow_call_is_ended_and_a_pull_may_wait_longer() -> None:
    """``call_ms_max`` for calls; ``pull_wait_ms_max`` comes on top for those that ask to wait."""
    config = BrokerConfig(limits=ConnectionLimits(call_ms_max=300))
    with harness(security=ROOT, config=config) as broker:
        broker.state.held = []
        with failing(grpc.StatusCode.DEADLINE_EXCEEDED, "call_ms_max"):
            broker.call("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name="slow")), pb.PutTopicResponse)

        pending = Pending(lambda: broker.pull(wait_ms=900))
        assert pending.answer().status == "NO_MATCHED_LOGIC_QUEUE"


def test_an_account_cannot_have_everything_pending() -> None:
    """Half of what may wait: its stream is not read on, its calls are refused as busy; others are taken."""
    config = BrokerConfig(send_pending_messages_max=8, access=AccessConfig(account_share_percent=50))
    request = pb.SendRequest(messages=[pb.Message(topic="T", body=b"x", queue_id=0)])
    with harness(config=config) as broker, open_channel(broker.address, ROOT) as root:
        send = root.unary_unary("/rocketstore.v1.BrokerService/Send", None, None)
        send(request.SerializeToString())
        broker.call("Status", pb.StatusRequest(), pb.StatusResponse)
        broker.store.hold_results = True

        answers = broker.stream("SendStream", iter([request.SerializeToString()] * 10))
        wait_until(lambda: len(broker.store.log.records) == 1 + 4, "its share is pending")
        refused = broker.send(request.messages[0])[0]
        others = send.future(request.SerializeToString(), timeout=10)
        wait_until(lambda: len(broker.store.log.records) == 1 + 5, "somebody else's is taken")
        broker.store.release_results()

        assert (refused.status, refused.outcome) == ("OS_PAGECACHE_BUSY", "not_applied")
        assert "a connection of alice has 4 entries" in refused.reason
        assert pb.SendResponse.FromString(others.result(10)).results[0].status == "PUT_OK"
        assert sum(len(pb.SendResponse.FromString(one).results) for one in answers) == 10
